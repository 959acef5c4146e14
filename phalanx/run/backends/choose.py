"""The back ends by their names. Torch-free."""

from __future__ import annotations

import importlib
from typing import cast

from phalanx.core.errors import UserError
from phalanx.run.backends.base import Backend, Ordered
from phalanx.run.config import RunConfig

BACKENDS = {
    "local": "phalanx.run.backends.local",
    "slurm": "phalanx.run.backends.slurm.backend",
    "kubernetes": "phalanx.run.backends.kubernetes.backend",
}
"""Each a module with ``make(ordered: Ordered) -> Backend`` and ``check(config: RunConfig) -> object``, which refuses
what `make` would; imported where it is chosen."""

ELSEWHERE = {
    "slurm": "phalanx.run.backends.slurm.submit",
    "kubernetes": "phalanx.run.backends.kubernetes.submit",
}
"""Whose driver may have to run somewhere else: each a module with ``submit(config: RunConfig) -> int | None``."""


SETTLING = {"slurm": "phalanx.run.backends.slurm.settling"}
"""Who knows better than a default: each a module with ``settle(config: RunConfig) -> RunConfig``."""


def settle(config: RunConfig) -> RunConfig:
    """The job as its driver shall have it, with what only the back end can know where the job says nothing.

    Raises:
        UserError: it cannot be found out.
    """
    module = SETTLING.get(config.backend)
    return config if module is None else cast(RunConfig, importlib.import_module(module).settle(config))


def submit_job(config: RunConfig) -> int | None:
    """Have the driver started where the back end wants it, and return an exit status; None: it is to run here.

    Raises:
        UserError: there is no such back end, an option is wrong, or the driver cannot be started there.
    """
    _see_name(config.backend)
    module = ELSEWHERE.get(config.backend)
    return None if module is None else cast("int | None", importlib.import_module(module).submit(config))


def make_backend(ordered: Ordered) -> Backend:
    """The one that the job names.

    Raises:
        UserError: there is none of this name, or its options are wrong.
    """
    name = ordered.config.backend
    _see_name(name)
    return cast(Backend, importlib.import_module(BACKENDS[name]).make(ordered))


def check_backend(config: RunConfig) -> None:
    """See that it could be made, without making anything.

    Raises:
        UserError: as `make_backend`, as far as it is known by now.
    """
    _see_name(config.backend)
    importlib.import_module(BACKENDS[config.backend]).check(config)


def _see_name(name: str) -> None:
    if name not in BACKENDS:
        cure = f"give one of {', '.join(BACKENDS)}"
        raise UserError("there is no such back end", cure=cure, field="run.backend", value=name)
