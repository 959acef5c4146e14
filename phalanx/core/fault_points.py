"""Named points in the code at which a fault can be injected from outside; in a normal run each does nothing.

Code that must survive faults takes a `Points` and calls ``points.reach("checkpoint.before-rename", step=12)`` where a
process may die. A test (or a fault campaign) passes `Points` with an action for some names: kill this process, raise an
error, wait. Nothing is global, so two runs in one process cannot disturb each other.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from phalanx.core.errors import UserError

Action = Callable[..., None]

FAULTS = "PHALANX_FAULTS"
"""Environment variable: ``name[:n] …``, the points at which a process kills itself (SIGKILL) the n-th time (1)."""


class Points:
    """Actions by the name of the point at which they happen.

    An action is called with the keyword details given to `reach`; whatever it raises is raised at the point. Names that
    no code reaches are never called.
    """

    __slots__ = ("_actions",)

    def __init__(self, actions: Mapping[str, Action] | None = None) -> None:
        self._actions = dict(actions or {})

    def reach(self, name: str, **details: Any) -> None:
        """Execution stands at `name`; costs one dictionary look-up where no action waits for it."""
        action = self._actions.get(name)
        if action is not None:
            action(**details)


NO_POINTS = Points()
"""For the default of a parameter: nothing happens anywhere."""


def points_from_environment(environment: Mapping[str, str] = os.environ) -> Points:
    """What `FAULTS` asks for; for the mains of processes that are started by others.

    Raises:
        UserError: it is not written as above.
    """
    actions: dict[str, Action] = {}
    for word in environment.get(FAULTS, "").split():
        name, _, number = word.partition(":")
        if not name or not (number or "1").isdecimal() or int(number or 1) < 1:
            raise UserError("is no fault point", cure="write name or name:n, n from 1", field=FAULTS, value=word)
        actions[name] = partial(_kill, itertools.count(1), int(number or 1))
    return Points(actions)


def _kill(times: Iterator[int], number: int, **details: Any) -> None:
    if next(times) == number:  # next() of a counter is one step of the interpreter, whatever thread calls it
        os.kill(os.getpid(), signal.SIGKILL)
