"""The keeper process. It is nobody's child, and ends by itself.

How it ends: every rank that began has said `finish`; nobody has been connected for its time to live; it is told to
(`phalanx.checkpoint.keeper.keeper_start.end_keeper`); or SIGKILL. Other signals are for the ranks, and it ignores them.
What destroys it against its will: the end of a Slurm step or of a batch job (its control group is killed), the deletion
of its pod, and the host's memory running out.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import platform
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.keeper.keeper_server import KeeperServer, KeeperServices
from phalanx.checkpoint.keeper.snapshot_slots import MemoryVault
from phalanx.checkpoint.keeper.snapshot_stages import LatePersister, LateReplicas, Replicas
from phalanx.checkpoint.keeper_contract import Persister, Replicated
from phalanx.core.fault_points import Points, points_from_environment
from phalanx.ipc.processes import STOP_SIGNALS, give_way, name_process

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
    cores = len(os.sched_getaffinity(0))
    examiners = max(1, min(cores // _CORES_PER_EXAMINER, _MAX_EXAMINERS))
    door = _Door(address, listener)
    services = KeeperServices(
        replicas=lambda vault, notify: LateReplicas(lambda: _replicas(vault, notify, points)),
        persister=_persister,
        give_way=lambda: give_way(_NICE),  # not before: ranks wait for a keeper that is asked for memory
    )
    server = KeeperServer(listener, services, ttl_s, door.is_wanted, points, examiners)
    os.write(ready_fd, b"r")
    os.close(ready_fd)
    threading.Thread(target=importlib.import_module, args=(_PERSISTER,), daemon=True).start()
    try:
        server.run()
    finally:
        door.close()


class _Door:
    """The address, which is given up only when nobody is about to come in."""

    def __init__(self, address: Path, listener: socket.socket) -> None:
        self._address = address
        self._listener = listener
        self._inode = address.stat().st_ino
        self._lock = os.open(lock_of(address), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def is_wanted(self) -> bool:
        """Whether somebody looks for a keeper here at this moment; if not, the address is given up."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        if select.select([self._listener], [], [], 0)[0]:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            return True
        self.close()
        return False

    def close(self) -> None:
        """Give up the address, if it is still this keeper's."""
        with suppress(OSError):
            if self._address.stat().st_ino == self._inode:
                self._address.unlink()
        self._listener.close()


def lock_of(address: Path) -> Path:
    """Whoever holds it (flock) may start a keeper at `address`, or end one."""
    return address.with_name(f"{address.name}.lock")


def _persister() -> Persister:
    def make() -> Persister:
        from phalanx.checkpoint.persist.persister_process import PersisterProcess  # when there is something to persist

        return PersisterProcess()

    return LatePersister(make)


def _replicas(vault: MemoryVault, notify: Callable[[Replicated], None], points: Points) -> Replicas:
    from phalanx.checkpoint.replicas.replica_routes import network  # when there is another host
    from phalanx.checkpoint.replicas.replica_service import ReplicaService

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return ReplicaService(vault, notify, network=network(2, os.environ), host=host_name(), points=points, report=report)


def host_name() -> str:
    """Of this host, or of what plays one: where ``PHALANX_KEEPER`` sets an address, that belongs to it."""
    address = os.environ.get("PHALANX_KEEPER", "")
    return f"{platform.node()}:{address}" if address else platform.node()
