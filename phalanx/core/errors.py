"""The one exception type that reaches a user: what is wrong, where, and what to do about it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

_ABSENT: Any = object()


class UserError(ValueError):
    """Bad input from a person, reported in one line with its cure and without a traceback.

    Args:
        problem: what is wrong, without a full stop.
        cure: what the person should do, in the imperative.
        field: the dotted config key or the path it is about, when there is one.
        value: the offending value, shown with ``repr``; paths and NumPy's numbers as plain text and numbers.
    """

    def __init__(self, problem: str, *, cure: str, field: str | None = None, value: Any = _ABSENT) -> None:
        self.problem = problem
        self.cure = cure
        self.field = field
        where = "" if field is None else field
        if value is not _ABSENT:
            shown = repr(_plain(value))
            where = f"{where} = {shown}" if where else shown
        super().__init__(f"{where}: {problem}; {cure}" if where else f"{problem}; {cure}")


def _plain(value: Any) -> Any:
    """`value` as it would be written in a config."""
    if isinstance(value, PurePath):
        return str(value)
    if type(value) in (list, tuple, set):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    # Without NumPy, which not all that raise this have loaded.
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def not_permitted(place: object) -> UserError:
    """The error where this user may not read a file or a folder."""
    cure = "ask its owner for it (chmod -R g+rX, and a group that you share), or run this as a user who may"
    return UserError(f"{place} cannot be read (permission denied)", cure=cure)
