"""The keeper process. It is nobody's child, and ends by itself.

How it ends: every rank that began has called `finish`; nobody has been connected for its time to live; `end_keeper` of
`phalanx.checkpoint.keeper.keeper_start`; or SIGKILL. Other signals are for the ranks, and it ignores them.
What destroys it against its will: the end of a Slurm step or of a batch job (its control group is killed), the deletion
of its pod, and the host's memory running out.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.checkpoint.keeper.keeper_server import KeeperServer
from phalanx.checkpoint.keeper.keeper_start import forget, host_name, lock_of
from phalanx.checkpoint.keeper.snapshot_stages import KeeperServices
from phalanx.checkpoint.keeper_contract import Replicated
from phalanx.checkpoint.snapshot_slots import SnapshotMemory
from phalanx.core.fault_points import points_from_environment
from phalanx.ipc.processes import give_way, name_process
from phalanx.ipc.stop_request import STOP_SIGNALS

if TYPE_CHECKING:
    from phalanx.checkpoint.persist.persister_process import PersisterProcess
    from phalanx.checkpoint.replicas.replica_service import ReplicaService

# Those that a terminal or a scheduler sends to every process of a job: the ranks decide what they mean.
_IGNORED = (*STOP_SIGNALS, signal.SIGHUP)

_PERSISTER = "phalanx.checkpoint.persist.persister_process"  # half a second to import; a keeper may never need it
_NICE = 10  # of the keeper's session, its persister included, among others: training goes first
_CORES_PER_EXAMINER = 4
_MAX_EXAMINERS = 8


def main(address: str, listener_fd: int, ready_fd: int, ttl_s: float) -> None:
    """Be the keeper at `address`, where `listener_fd` listens already; ends the process.

    Args:
        ready_fd: a byte is written to it, and it is closed, when the keeper serves.
    """
    status = 1
    try:
        _serve(Path(address), socket.socket(fileno=listener_fd), ready_fd, ttl_s)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


def _serve(address: Path, listener: socket.socket, ready_fd: int, ttl_s: float) -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    name_process("phalanx keeper")
    os.umask(0o077)
    points = points_from_environment(os.environ)
    inode = address.stat().st_ino
    lock = os.open(lock_of(address), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def give_up_address() -> None:
        with suppress(OSError):
            if address.stat().st_ino == inode:  # still this keeper's
                address.unlink()
        listener.close()

    def still_wanted() -> bool:
        """Whether somebody looks for a keeper here at this moment; if not, the address is given up."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        if select.select([listener], [], [], 0)[0]:
            fcntl.flock(lock, fcntl.LOCK_UN)
            return True
        give_up_address()
        return False

    # What these import is not needed before there is another host, or something to persist.
    def make_persister() -> PersisterProcess:
        from phalanx.checkpoint.persist.persister_process import PersisterProcess

        return PersisterProcess()

    def make_replicas(memory: SnapshotMemory, notify: Callable[[Replicated], None]) -> ReplicaService:
        from phalanx.checkpoint.replicas.replica_routes import network
        from phalanx.checkpoint.replicas.replica_service import ReplicaService

        def report(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        net = network(2, os.environ)
        return ReplicaService(memory, notify, network=net, host=host_name(), points=points, report=report)

    services = KeeperServices(
        make_replicas,
        make_persister,
        give_way=lambda: give_way(_NICE),  # not before: ranks wait for a keeper that is asked for memory
    )
    cores = len(os.sched_getaffinity(0))
    examiners = max(1, min(cores // _CORES_PER_EXAMINER, _MAX_EXAMINERS))
    server = KeeperServer(listener, services, ttl_s, still_wanted, points, examiners)
    os.write(ready_fd, b"r")
    os.close(ready_fd)
    threading.Thread(target=importlib.import_module, args=(_PERSISTER,), daemon=True).start()
    try:
        server.run()
    finally:
        give_up_address()
        with suppress(OSError):  # else somebody is about to start another
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not address.exists():
                forget(address)
