"""Options of a back end, whatever they are. Torch-free."""

from __future__ import annotations

from typing import Generic, TypeVar

from phalanx.core.config import Config, validate
from phalanx.run.config import RunConfig

C = TypeVar("C", bound=Config)


class _Options(Config, Generic[C]):
    backend_options: C


class _Run(Config, Generic[C]):
    run: _Options[C]


def options_of(kind: type[C], config: RunConfig) -> C:
    """Those that a job gives, as `kind`; mistakes are told by their whole name, such as ``run.backend_options.time``.

    Raises:
        UserError: one is missing, unknown or wrong.
    """
    return validate(_Run[kind], {"run": {"backend_options": config.backend_options}}).run.backend_options  # type: ignore[valid-type]
