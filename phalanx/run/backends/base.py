"""What the driver needs of whoever gives it hosts: this machine, Slurm, Kubernetes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from phalanx.run.config import RunConfig

ExecutorCommand = Callable[[str], Sequence[str]]
"""The command that runs the executor of the host of this name."""


@dataclass(frozen=True)
class Ordered:
    """What a back end is made from.

    Attributes:
        folder: of the run, absolute.
        command: of an executor.
        environment: of executors; nothing in it is secret.
    """

    config: RunConfig
    folder: Path
    command: ExecutorCommand
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Listener:
    """Where a back end tells what it learns by itself; called in the driver's event loop.

    Attributes:
        gone: name of a host that is certainly gone, or whose executor is, and how that is known.
        time_is_short: in so many seconds the back end ends the job.
    """

    gone: Callable[[str, str], None]
    time_is_short: Callable[[float], None]


class Backend(Protocol):
    """Gives hosts and takes them back. What is asked twice changes nothing more.

    A host is known by its name, which is never used again for another one. Its executor connects to the driver by
    itself; a back end only starts it, and says when it is gone.
    """

    async def begin(self, listener: Listener) -> None:
        """Take over what an earlier driver of this job has started here; nothing, at the first start.

        Raises:
            UserError: the back end cannot be used.
        """
        ...

    async def ask(self, count: int) -> None:
        """So many hosts should still come, all together, those counted that were begun and have not `arrived`.

        Neither is called while the other goes on, and both in the order in which the driver has learnt of it.
        """
        ...

    def arrived(self, host: str) -> None:
        """The executor of `host` has connected."""
        ...

    async def evict(self, host: str, why: str) -> None:
        """End what the job has on `host`, and do not use it again for this job."""
        ...

    async def release(self, host: str, why: str) -> None:
        """End what the job has on `host`; it may come again."""
        ...

    async def leave(self) -> None:
        """The driver ends, the job does not: let go of everything and leave it running."""
        ...

    async def end(self) -> None:
        """The job is over: end every executor, and return when all are gone."""
        ...


@runtime_checkable
class Movable(Protocol):
    """A back end under which the driver may be ended alone, and started again somewhere else."""

    async def goes_on(self) -> bool:
        """The driver's process is being ended from outside: whether the job goes on without it."""
        ...
