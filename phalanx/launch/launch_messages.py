"""Messages between the launcher, its template process and the ranks, and the socket to a template that stays.

They are pickled: both ends are processes of one program, over sockets that no other program can open.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.ipc.codec import PACKET_BYTES
from phalanx.launch.cores import Share
from phalanx.launch.environment import Worker
from phalanx.launch.rank_failures import Failure


@dataclass(frozen=True)
class RankSpec:
    """Everything that makes one rank out of a fork of the template, or out of a new Python.

    Attributes:
        worker: its `listen_fd` is open in the template under this number.
        output_fd: where its stdout and stderr go; None: where the launcher's go.
        target, arguments: ``module:function``, called with the worker and then `arguments`.
        path, argv: `sys.path` and `sys.argv`; of a template that stays, `path` is what stands before its own.
        speaks: whether `target` gets, after the worker, a function that sends a message to the launcher.
        fresh: of a script, what `phalanx.launch.fresh_rank` is told where a new Python runs it; empty: no script.
    """

    worker: Worker
    share: Share
    output_fd: int | None
    target: str
    arguments: Sequence[Any]
    environ: Mapping[str, str]
    path: Sequence[str]
    argv: Sequence[str]
    speaks: bool = False
    fresh: Sequence[str] = ()


@dataclass(frozen=True)
class Send:
    """To the template: send a signal to the ranks, those that still run."""

    ranks: Sequence[int]
    signal: int


@dataclass(frozen=True)
class Ready:
    """From the template: all is imported; why the ranks cannot be forked, None where they can."""

    fork_refused: str | None


@dataclass(frozen=True)
class Broken:
    """From the template: something could not be imported; nothing was started."""

    failure: Failure


@dataclass(frozen=True)
class Returned:
    """From a rank: its target returned, or raised SystemExit, at `time_ns`; `threads` keep its process alive."""

    rank: int
    status: int
    threads: tuple[str, ...] = ()
    time_ns: float = field(default=math.inf, compare=False)  # on the host's monotonic clock


@dataclass(frozen=True)
class Exited:
    """From the template: the process of a rank is gone, by a signal if `code` is negative; killed by the template?"""

    rank: int
    time_ns: int
    code: int
    is_killed: bool = False


@dataclass(frozen=True)
class Learnt:
    """From a rank: modules that its script has imported, in order, in one or more pieces."""

    rank: int
    modules: Sequence[str]
    is_last: bool


# To and from a template that stays; descriptors travel beside the messages, and are named by their place among them.


@dataclass(frozen=True)
class Prepare:
    """To the template, once: what to import.

    Attributes:
        modules, learnt: that must be there, and that may be if they do no harm (`phalanx.launch.learnt_imports`).
        path_entry, argv: as the script will have them.
        bytecode: folder for bytecode that Python would not keep.
    """

    modules: Sequence[str]
    learnt: Sequence[str]
    path_entry: str
    argv: Sequence[str]
    bytecode: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """From the template: all is imported.

    Attributes:
        fork_refused: why the ranks cannot be forked; None where they can.
        refused: of `Prepare.learnt`, what must not be imported beforehand; this template is spoiled if there is any.
        stamps: of the files that it has imported.
    """

    fork_refused: str | None
    refused: Sequence[str]
    stamps: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Spawn:
    """To the template: start the processes of an attempt. The descriptors of `specs` are places."""

    attempt: int
    specs: Sequence[RankSpec]
    fork: bool


@dataclass(frozen=True)
class Spawned:
    """From the template: they run; or why not, and then none does."""

    attempt: int
    pids: Mapping[int, int]
    problem: str = ""


@dataclass(frozen=True)
class SendTo:
    """To the template: send a signal to ranks of an attempt, those that still run."""

    attempt: int
    ranks: Sequence[int]
    signal: int


@dataclass(frozen=True)
class Kill:
    """To the template: kill all processes of an attempt but `spared` at once, and say when none is left."""

    attempt: int
    spared: Sequence[int] = ()


@dataclass(frozen=True)
class Of:
    """From the template: a report about a rank of an attempt."""

    attempt: int
    report: Failure | Returned | Exited | Learnt


@dataclass(frozen=True)
class Over:
    """From the template: all processes of an attempt have ended and are reaped, their process groups too."""

    attempt: int


_MAX_DESCRIPTORS = 253  # SCM_MAX_FD of Linux
_IN_MEMORY = b"m"  # a pickle of this protocol begins with another byte

QUIET_IMPORTS = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment of templates: NumPy's OpenBLAS starts its threads on import, and torch may look for devices through the
driver: neither is for a process that is to be forked."""


class HungUpError(Exception):
    """The process at the other end has hung up, or takes nothing more."""


class MessageSocket:
    """One end of a Unix socket of kind SOCK_SEQPACKET: whole messages, with descriptors beside them.

    What does not fit into a packet goes into memory that is handed over beside it. If the socket does not block,
    neither does this.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._connection.fileno()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay open here.

        Raises:
            HungUpError: the other end is gone, or has not read for so long that nothing more fits.
        """
        packet = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        memory = -1
        try:
            if len(packet) > PACKET_BYTES:
                memory = os.memfd_create("phalanx message")
                with os.fdopen(os.dup(memory), "wb") as file:
                    file.write(packet)
                packet, descriptors = _IN_MEMORY, [memory, *descriptors]
            socket.send_fds(self._connection, [packet], list(descriptors), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise HungUpError(str(error)) from error
        finally:
            if memory >= 0:
                os.close(memory)

    def receive(self) -> tuple[Any, list[int]]:
        """The next message, and its descriptors, which are then the caller's.

        Raises HungUpError; and BlockingIOError where there is none and this end does not block.
        """
        try:
            try:
                packet, descriptors = self._receive()
            except ConnectionResetError:  # it left without reading all; what it had sent before comes first
                packet, descriptors = self._receive()
        except BlockingIOError:
            raise
        except OSError as error:
            raise HungUpError(str(error)) from error
        if not packet:
            raise HungUpError("it has hung up")
        if packet == _IN_MEMORY:
            memory, *descriptors = descriptors
            with os.fdopen(memory, "rb") as file:
                file.seek(0)
                packet = file.read()
        return pickle.loads(packet), descriptors

    def _receive(self) -> tuple[bytes, list[int]]:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        return socket.recv_fds(self._connection, PACKET_BYTES, _MAX_DESCRIPTORS, flags)[:2]

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
