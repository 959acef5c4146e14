"""The store where ranks meet: small values by key, asked for by all, held by one process.

torch's `TCPStore` served by libuv: one thread that never waits for a client (MegaScale 3.5 replaced the blocking server
by Redis for this), in the process of whoever is the host. Opening it is not a barrier: a client goes on as soon as the
server answers, whoever else is there.

One thing does hold that thread up: for every client that connects it asks for the name of the client's address. A name
name server that loses one question stops the store for five seconds (seen after 48 to 140 clients). So the store
listens on IPv4 where it can (torch's own socket shows IPv4 clients under IPv6 addresses, which are in no /etc/hosts),
and a process that does nothing but serve the store should call `look_names_up_in_files_only` first.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import logging
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from phalanx.core.errors import UserError

_log = logging.getLogger(__name__)

_BACKLOG = 4096


def open_store(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    *,
    is_host: bool,
    listen_fd: int | None = None,
    timeout_s: float = 300.0,
    attempt: int = 0,
) -> Store:
    """Join the store of one attempt of a run, and serve it if this process is its host.

    Args:
        host: name or address of the process that serves it.
        port: its port; 0 with `is_host` takes a free one (see `port_of`).
        rank: this rank, for the error.
        world_size: ranks in all, for the error.
        is_host: serve it from a thread of this process, for as long as the returned store lives.
        listen_fd: a socket that already listens, to be served with `is_host`; it belongs to the store then, and `port`
            must be the one it is bound to.
        timeout_s: longest wait for the server to answer and for a key to be set, seconds.
        attempt: keys of attempts do not mix, even in one server.

    Raises:
        UserError: nothing answers at `host`:`port`, or it cannot be listened to.
    """
    try:
        if is_host and listen_fd is None and (listener := _listen(host, port)) is not None:
            port = listener.getsockname()[1]
            listen_fd = listener.detach()
        store = TCPStore(
            host,
            port,
            world_size=None,
            is_master=is_host,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
            use_libuv=True,
        )
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise _unreachable(host, port, rank, world_size, is_host, error) from error
    return PrefixStore(f"attempt{attempt}", store)


def port_of(store: Store) -> int:
    """The port of a store of `open_store`."""
    inner = store.underlying_store if isinstance(store, PrefixStore) else store
    assert isinstance(inner, TCPStore)
    return inner.port


def look_names_up_in_files_only() -> bool:
    """From now on this process knows the names in /etc/hosts and asks no name server; for one that serves the store.

    Returns:
        Whether the C library can do so (glibc can).
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    return configure is not None and configure(b"hosts", b"files") == 0


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen on the address of `host`, or on all where that is no address of this machine; None: nobody knows it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    family, _, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
    address = str(place[0])
    if address != host and host != "localhost" and ipaddress.ip_address(address).is_loopback:
        why = f"{host} is {address} on this machine, and another address for others"  # as Debian has it in /etc/hosts
    else:
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        why = f"{host} is no address of this machine"
    _log.warning("%s: the store listens at all addresses that it has", why)
    return socket.create_server(("", port), family=family, backlog=_BACKLOG)


def _unreachable(host: str, port: int, rank: int, world_size: int, is_host: bool, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0]
    if is_host:
        return UserError(
            f"rank {rank} of {world_size} cannot serve the store there ({reason})",
            cure="choose a port that is free, or 0",
            field="store",
            value=f"{host}:{port}",
        )
    return UserError(
        f"rank {rank} of {world_size} gets no answer from the store ({reason})",
        cure="check that the process of rank 0 runs, and that its host and port (MASTER_ADDR, MASTER_PORT) are "
        "reachable from this host",
        field="store",
        value=f"{host}:{port}",
    )
