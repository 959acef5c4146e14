"""What the launcher, its template process and the ranks say to each other, over private sockets. Torch-free.

They are sent pickled by `multiprocessing.connection`: both ends are processes of one program, over sockets that nobody
else can open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        path, argv: `sys.path` and `sys.argv`.
    """

    worker: Worker
    share: Share
    output_fd: int | None
    target: str
    arguments: Sequence[Any]
    environ: Mapping[str, str]
    path: Sequence[str]
    argv: Sequence[str]


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
    """From a rank: its target returned, or raised SystemExit, with this exit status."""

    rank: int
    status: int


@dataclass(frozen=True)
class Exited:
    """From the template: the process of a rank is gone; `code` as subprocess has it, negative for a signal."""

    rank: int
    time_ns: int
    code: int
