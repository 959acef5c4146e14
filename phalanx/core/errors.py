"""The one exception type that reaches a user: what is wrong, where, and what to do about it."""

from __future__ import annotations

from typing import Any

_ABSENT: Any = object()


class UserError(ValueError):
    """Bad input from a person, reported in one line with its cure and without a traceback.

    Args:
        problem: what is wrong, without a full stop.
        cure: what the person should do, in the imperative.
        field: the dotted config key or the path it is about, when there is one.
        value: the offending value, shown with ``repr``.
    """

    def __init__(self, problem: str, *, cure: str, field: str | None = None, value: Any = _ABSENT) -> None:
        self.problem = problem
        self.cure = cure
        self.field = field
        where = "" if field is None else field
        if value is not _ABSENT:
            where = f"{where} = {value!r}" if where else repr(value)
        super().__init__(f"{where}: {problem}; {cure}" if where else f"{problem}; {cure}")


def not_permitted(place: object) -> UserError:
    """The error where this user may not read a file or a folder."""
    cure = "ask its owner for it (chmod -R g+rX, and a group that you share), or run this as a user who may"
    return UserError(f"{place} cannot be read (permission denied)", cure=cure)
