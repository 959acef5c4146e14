"""The back ends by their names. Torch-free."""

from __future__ import annotations

import importlib
from typing import cast

from phalanx.core.errors import UserError
from phalanx.run.backends.base import Backend, Ordered

BACKENDS = {"local": "phalanx.run.backends.local"}
"""Each a module with ``make(ordered: Ordered) -> Backend``, imported where it is chosen."""


def make_backend(ordered: Ordered) -> Backend:
    """The one that the job names.

    Raises:
        UserError: there is none of this name, or its options are wrong.
    """
    name = ordered.config.backend
    if name not in BACKENDS:
        cure = f"give one of {', '.join(BACKENDS)}"
        raise UserError("there is no such back end", cure=cure, field="run.backend", value=name)
    return cast(Backend, importlib.import_module(BACKENDS[name]).make(ordered))
