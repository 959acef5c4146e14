"""Named points in the code at which a fault can be injected from outside; in a normal run each does nothing.

Code that must survive faults takes a `Points` and calls ``points.reach("checkpoint.before-rename", step=12)`` where a
process may die. A test (or a fault campaign) passes `Points` with an action for some names: kill this process, raise an
error, wait. Nothing is global, so two runs in one process cannot disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Action = Callable[..., None]


class Points:
    """Actions by the name of the point at which they happen.

    Args:
        actions: name of a point -> function called with the keyword details given to `reach`. Whatever it raises is
            raised at the point. Names that no code reaches are never called.
    """

    __slots__ = ("_actions",)

    def __init__(self, actions: Mapping[str, Action] | None = None) -> None:
        self._actions = dict(actions or {})

    def reach(self, name: str, **details: Any) -> None:
        """Say that execution stands at `name`; costs one dictionary look-up where no action waits for it."""
        action = self._actions.get(name)
        if action is not None:
            action(**details)


NO_POINTS = Points()
"""For the default of a parameter: nothing happens anywhere."""
