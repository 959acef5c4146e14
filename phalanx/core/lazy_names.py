"""Public names of a package that are imported when they are first asked for, so that the package itself stays light.

Most packages here hold modules that must not need torch, and importing any of them runs the package's ``__init__``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of `package`, by module: the names that are taken from it.

    None of them may be called like a module of the package itself, unless it is that module.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(places[name])
        return module if places[name] == f"{package}.{name}" else getattr(module, name)

    return get, lambda: sorted(places)


def make_callable(package: str, module: str, function: str) -> None:
    """Make a package callable: it does what `function` of `module` does, which is imported at the first call.

    ``phalanx.train`` is a room, and the import system binds that name to it as soon as anything of the room is
    imported: a function of the same name would be there or not, by the order of imports. It pickles by its name.
    """

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **named: Any) -> Any:
            return getattr(importlib.import_module(module), function)(*args, **named)

        def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
            # Other modules do not pickle; a function does, by its name, as tools that send one elsewhere expect.
            return importlib.import_module, (self.__name__,)

        @property
        def __signature__(self) -> inspect.Signature:  # what `phalanx.train?` shows in a notebook
            return inspect.signature(getattr(importlib.import_module(module), function))

    sys.modules[package].__class__ = CallablePackage
