"""What the driver needs of whatever gives it hosts (this machine, Slurm, Kubernetes), and the back ends by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable

from phalanx.core.config import Config, validate
from phalanx.core.errors import UserError
from phalanx.run.config import RunConfig

ExecutorCommand = Callable[[str], Sequence[str]]
"""The command that runs the executor of the host of this name."""


@dataclass(frozen=True)
class BackendSetup:
    """What a back end is made from; the run's folder is absolute, nothing in the executors' environment is secret."""

    config: RunConfig
    folder: Path
    command: ExecutorCommand
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Listener:
    """Where a back end reports what it learns by itself; called in the driver's event loop.

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


C = TypeVar("C", bound=Config)


class _Options(Config, Generic[C]):
    backend_options: C


class _Run(Config, Generic[C]):
    run: _Options[C]


def options_of(kind: type[C], config: RunConfig) -> C:
    """A job's options as `kind`; a UserError names them in full, such as ``run.backend_options.time``."""
    return validate(_Run[kind], {"run": {"backend_options": config.backend_options}}).run.backend_options  # type: ignore[valid-type]


BACKENDS = {
    "local": "phalanx.run.backends.local",
    "slurm": "phalanx.run.backends.slurm.slurm_backend",
    "kubernetes": "phalanx.run.backends.kubernetes.kubernetes_backend",
}
"""Each a module with ``make(setup: BackendSetup) -> Backend`` and ``check(config: RunConfig) -> object``, which refuses
what `make` would; imported where it is chosen."""

ELSEWHERE = {
    "slurm": "phalanx.run.backends.slurm.slurm_submit",
    "kubernetes": "phalanx.run.backends.kubernetes.kubernetes_submit",
}
"""Whose driver may have to run somewhere else: each a module with ``submit(config: RunConfig) -> int | None``."""


def settle(config: RunConfig) -> RunConfig:
    """The job as its driver shall have it, with what only the back end can know where the job says nothing.

    Raises:
        UserError: it cannot be found out.
    """
    if config.backend != "slurm":
        return config
    return cast(RunConfig, importlib.import_module(ELSEWHERE["slurm"]).settle(config))


def submit_job(config: RunConfig) -> int | None:
    """Have the driver started where the back end wants it, and return an exit status; None: it is to run here.

    Raises:
        UserError: there is no such back end, an option is wrong, or the driver cannot be started there.
    """
    _require_known(config.backend)
    module = ELSEWHERE.get(config.backend)
    return None if module is None else cast("int | None", importlib.import_module(module).submit(config))


def make_backend(setup: BackendSetup) -> Backend:
    """The one that the job names. Raises UserError: there is none of this name, or its options are wrong."""
    name = setup.config.backend
    _require_known(name)
    return cast(Backend, importlib.import_module(BACKENDS[name]).make(setup))


def check_backend(config: RunConfig) -> None:
    """See that it could be made, without making anything.

    Raises:
        UserError: as `make_backend`, as far as it is known by now.
    """
    _require_known(config.backend)
    importlib.import_module(BACKENDS[config.backend]).check(config)


def _require_known(name: str) -> None:
    if name not in BACKENDS:
        cure = f"give one of {', '.join(BACKENDS)}"
        raise UserError("there is no such back end", cure=cure, field="run.backend", value=name)


def last_line(path: Path) -> str:
    """The last thing that an executor has written to its stderr, for people."""
    with suppress(OSError):
        lines = path.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return "it said nothing"
