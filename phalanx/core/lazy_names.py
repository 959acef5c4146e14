"""Public names of a package that are imported when they are first asked for, so that the package itself stays light.

Most packages here hold modules that must not need torch, and importing any of them runs the package's ``__init__``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of `package`.

    Args:
        package: its name.
        modules: full name of each module -> the names that are taken from it; none may be called like a module of the
            package itself.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name]), name)

    return get, lambda: sorted(places)
