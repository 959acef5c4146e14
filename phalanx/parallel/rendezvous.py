"""Rendezvous: the store where ranks meet, held by one process, and what a rank that gives up writes there.

torch's `TCPStore` served by libuv: one thread that never waits for a client (MegaScale 3.5 replaced the blocking server
by Redis for this), in the process of the host. Opening it is not a barrier: a client goes on as soon as the server
answers.

One thing does hold that thread up: for every client that connects it asks for the name of the client's address. A name
name server that loses one question stops the store for five seconds (seen after 48 to 140 clients). So the store
listens on IPv4 where it can (torch's own socket shows IPv4 clients under IPv6 addresses, which are in no /etc/hosts),
and a process that does nothing but serve the store should call `look_names_up_in_files_only` first.

The first rank to give up writes why to the store: no collective can be trusted to end any more. Where a rank is gone,
gloo ends the waiting of others at once, NCCL never. So until the first step is done, in which memory runs out if it
does, each rank also looks now and then whether another has given up.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
        port: 0 with `is_host` takes a free one.
        rank, world_size: for the error.
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
        reason = str(error).strip().splitlines()[0]
        if is_host:
            problem, cure = "cannot serve the store there", "choose a port that is free, or 0"
        else:
            problem = "gets no answer from the store"
            cure = (
                "check that the process of rank 0 runs, and that its host and port (MASTER_ADDR, MASTER_PORT) are "
                "reachable from this host"
            )
        problem = f"rank {rank} of {world_size} {problem} ({reason})"
        raise UserError(problem, cure=cure, field="store", value=f"{host}:{port}") from error
    return PrefixStore(f"attempt{attempt}", store)


def look_names_up_in_files_only() -> bool:
    """From now on this process asks /etc/hosts and no name server; False where the C library cannot (glibc can)."""
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    return configure is not None and configure(b"hosts", b"files") == 0


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen on the address of `host`, or on all where that is not an address of this machine; None: unknown."""
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


_WHY, _HEARD, _CAUSE = "abort/why", "abort/heard", "abort/cause"
# Of 12,288 ranks one or two thousand questions a second reach the store: far fewer than it can answer.
_LOOK_S = 5.0
_GRACE_S = 5.0
_STATUS = 2  # as of every UserError


class Abort:
    """How one rank that gives up ends the others."""

    def __init__(
        self,
        store: Store | None,  # of the run's attempt; None: there is no other rank
        rank: int = 0,
        size: int = 1,
        *,
        serves: bool = False,  # whether the store ends with this process
        look_s: float = _LOOK_S,  # between two looks whether another has given up
        # that a rank has to end by itself then, and that one which serves the store waits for the others
        grace_s: float = _GRACE_S,
    ) -> None:
        self._store, self._rank, self._size, self._serves = store, rank, size, serves
        self._look_s, self._grace_s = look_s, grace_s
        self._is_first = False
        self._why: UserError | None = None
        self._once = threading.Lock()

    def announce(self, error: UserError) -> None:
        """Write why this rank ends, for all others to read; the first reason stays, and who comes later hears it."""
        if self._store is None:
            return
        # With its rank, for all may say the same, and only one of them is first.
        text = json.dumps([self._rank, str(error).removesuffix(f"; {error.cure}"), error.cure])
        with suppress(RuntimeError):  # who has served the store may be gone
            self._is_first = self._store.compare_set(_WHY, "", text).decode() == text
        self.announced()

    def announced(self) -> UserError | None:
        """Why another rank has ended, if one has announced it."""
        if self._store is None or self._is_first:
            return None
        with self._once, suppress(RuntimeError):  # who has served the store may be gone
            if self._why is None and self._store.check([_WHY]):
                _, problem, cure = json.loads(self._store.get(_WHY))
                self._why = UserError(problem, cure=cure)
                self._store.add(_HEARD, 1)
        return self._why

    def cause(self, own: str = "") -> tuple[int, str] | None:
        """The rank that failed first, and in what words; None: nobody has said so, or who served the store is gone.

        Args:
            own: what this rank says before it closes its connections, if it failed by itself; it counts if it is first.
        """
        if self._store is None:
            return None
        with suppress(RuntimeError):
            if own:
                found = self._store.compare_set(_CAUSE, "", json.dumps([self._rank, own]))
            elif self._store.check([_CAUSE]):
                found = self._store.get(_CAUSE)
            else:
                return None
            rank, words = json.loads(found)
            return rank, words
        return None

    def linger(self) -> None:
        """Serve the store until all have read why the ranks end, for some seconds at most."""
        if self._store is None or not self._serves or not (self._is_first or self._why):
            return
        until_s = time.monotonic() + self._grace_s
        while time.monotonic() < until_s and self._store.add(_HEARD, 0) < self._size - 1:
            time.sleep(0.05)

    @contextmanager
    def watched(self, is_over: Callable[[], bool]) -> Iterator[None]:
        """Within it this process ends soon after another has given up, even while it waits where nothing wakes it.

        No more is looked once `is_over` returns True.
        """
        if self._store is None:
            yield
            return
        left = threading.Event()
        thread = threading.Thread(target=self._look, args=(is_over, left), name="phalanx-abort", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()

    def _look(self, is_over: Callable[[], bool], left: threading.Event) -> None:
        while not left.wait(self._look_s) and not is_over():
            why = self.announced()
            if why is not None and not left.wait(self._grace_s):
                sys.stderr.write(f"rank {self._rank} ends with another: error: {why}\n")
                sys.stderr.flush()
                os._exit(_STATUS)
