"""What the launcher, its template process and the ranks say to each other, over private sockets. Torch-free.

They are sent pickled by `multiprocessing.connection`: both ends are processes of one program, over sockets that nobody
else can open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.launch.cores import Share
from phalanx.launch.environment import Worker
from phalanx.launch.failures import Failure


@dataclass(frozen=True)
class RankSpec:
    """Everything that makes one rank out of a fork of the template, or out of a new Python.

    Attributes:
        worker: who it is; its `listen_fd` is open in the template under this number.
        share: its cores and threads.
        output_fd: where its stdout and stderr go; None: where the launcher's go.
        target, arguments: ``module:function``, called with the worker and then `arguments`.
        environ: its environment variables.
        path, argv: `sys.path` and `sys.argv`; of a template that stays, `path` is what stands before its own.
        speaks: whether `target` gets, after the worker, a function that sends a message to the launcher.
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


@dataclass(frozen=True)
class Send:
    """To the template: send a signal to the ranks, those that still run."""

    ranks: Sequence[int]
    signal: int


@dataclass(frozen=True)
class Ready:
    """From the template: all is imported.

    Attributes:
        fork_refused: why the ranks cannot be forked; None where they can.
    """

    fork_refused: str | None


@dataclass(frozen=True)
class Broken:
    """From the template: something could not be imported; nothing was started."""

    failure: Failure


@dataclass(frozen=True)
class Returned:
    """From a rank: its target returned, or raised SystemExit, with this exit status.

    Attributes:
        threads: names of those that keep its process alive for now.
    """

    rank: int
    status: int
    threads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exited:
    """From the template: the process of a rank is gone.

    Attributes:
        code: as subprocess has it, negative for a signal.
        is_killed: the template has killed it, and nobody else had before.
    """

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
        modules: that must be there.
        learnt: that may be there, if that does no harm; see `phalanx.launch.learning`.
        path_entry, argv: as the script will have them.
        bytecode: folder for bytecode that Python would not keep; None: there is none.
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
    """To the template: kill all processes of an attempt at once, and say when none is left."""

    attempt: int


@dataclass(frozen=True)
class Of:
    """From the template: what is said of a rank of an attempt."""

    attempt: int
    word: Failure | Returned | Exited | Learnt


@dataclass(frozen=True)
class Over:
    """From the template: all processes of an attempt have ended and are reaped, their process groups too."""

    attempt: int
