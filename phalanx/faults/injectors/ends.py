"""Ways in which a process ends. Torch-free."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

from phalanx.faults.agenda import Order
from phalanx.faults.injectors.base import Act, RefusedError, Surroundings

# As libraries word them: what is raised must be what a real run would show.
ERRORS: Mapping[str, tuple[type[Exception], str]] = {
    "RuntimeError": (RuntimeError, "DataLoader worker (pid 21733) is killed by signal: Killed. "),
    "ValueError": (
        ValueError,
        "Expected more than 1 value per channel when training, got input size torch.Size([1, 64])",
    ),
    "KeyError": (KeyError, "labels"),
    "IndexError": (IndexError, "index 50257 is out of bounds for dimension 0 with size 50257"),
    "OSError": (OSError, "[Errno 5] Input/output error"),
    "TypeError": (TypeError, "unsupported operand type(s) for +: 'NoneType' and 'Tensor'"),
}


def exception(order: Order, around: Surroundings) -> Act:
    """Raise ``error`` (a name of `ERRORS`; the first) with ``text`` (as libraries word it)."""
    name = str(order.settings.get("error", "RuntimeError"))
    if name not in ERRORS:
        raise RefusedError(f"error = {name!r} is not known: write one of {', '.join(ERRORS)}")
    kind, text = ERRORS[name]
    error = kind(order.settings.get("text", text))

    def act() -> None:
        raise error

    return act


def leave(order: Order, around: Surroundings) -> Act:
    """``sys.exit(status)`` (1)."""
    status = int(order.settings.get("status", 1))

    def act() -> None:
        sys.exit(status)

    return act


def send_signal(order: Order, around: Surroundings) -> Act:
    """Send this process the signal ``name`` (SIGKILL)."""
    name = str(order.settings.get("name", "SIGKILL"))
    if name not in signal.Signals.__members__:
        raise RefusedError(f"name = {name!r} is no signal")
    number = signal.Signals[name]

    def act() -> None:
        os.kill(os.getpid(), number)

    return act


def segfault(order: Order, around: Surroundings) -> Act:
    """Read address 0."""
    read = ctypes.string_at

    def act() -> None:
        read(0)

    return act


def abort(order: Order, around: Surroundings) -> Act:
    """``abort()`` of the C library."""

    def act() -> None:
        os.abort()

    return act
