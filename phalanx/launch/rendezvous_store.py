"""The rendezvous store of an attempt of somebody else's script: a process of its own beside the ranks.

torch's ``env://`` takes no open socket, so a store that rank 0 serves (TORCHELASTIC_USE_AGENT_STORE=False) could lose
its port to another program before the script gets that far, and it ends with rank 0, in a moment when the others may
still be asked what they wait for. With TORCHELASTIC_USE_AGENT_STORE=True, which is what torchrun sets too, every rank
is a client, also when a rank is a wrapper that starts Python again. So the executor opens a socket that listens, and
the template forks a process that serves the store on it: there is one per attempt, it is always fresh, and clients may
connect before it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from phalanx.ipc.processes import name_process
from phalanx.launch.cores import Share
from phalanx.launch.environment import Worker
from phalanx.launch.launch_messages import RankSpec

STORE_RANK = -1  # of the process of the store, among the ranks
STORE_MODULE = "phalanx.parallel.rendezvous"  # what it needs, by name: this room does not import torch
_BACKLOG = 4096


def open_store_socket(address: str) -> socket.socket:
    """A socket that listens on a free port of one address of this host, IPv4 or IPv6.

    What reaches the store can read and change all that ranks exchange there, so it is never opened at all addresses:
    these raise ValueError, and those that this host has not OSError.
    """
    if not address or ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ValueError(f"a store listens at one address, not at {address!r}")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def store_spec(listener: socket.socket, world_size: int, environ: Mapping[str, str]) -> RankSpec:
    """The process that serves the store on `listener`, which is the caller's to close once that has been started."""
    host, port = listener.getsockname()[:2]
    worker = Worker(
        rank=STORE_RANK,
        local_rank=STORE_RANK,
        world_size=world_size,
        local_world_size=0,
        host=host,
        port=port,
        launcher="torchrun",
        hosts_store=True,
        listen_fd=listener.fileno(),
    )
    target = "phalanx.launch.rendezvous_store:serve_store"
    return RankSpec(worker, Share(None, 1), None, target, (), dict(environ), [], [])


def serve_store(worker: Worker) -> NoReturn:
    """Serve the store until this process is killed."""
    name_process("phalanx store")
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):  # meant for ranks
        signal.signal(number, signal.SIG_IGN)
    stores = importlib.import_module(STORE_MODULE)
    stores.look_names_up_in_files_only()
    store = stores.open_store(
        worker.host, worker.port, 0, worker.world_size, is_host=True, listen_fd=worker.listen_fd, timeout_s=60.0
    )
    with contextlib.suppress(KeyboardInterrupt):
        while store is not None:
            signal.pause()
    sys.stdout.flush()
    os._exit(0)
