"""Killing all that is held, but for what is spared, until nothing of it is left. Linux, torch-free."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress

from phalanx.core.process_table import read_process
from phalanx.run.executor.reaping.tree import send, until_gone
from phalanx.run.executor.reaping.ways import Way

_LOOK_S = 0.05


def until_killed(strike: Callable[[], set[int]], within_s: float) -> tuple[set[int], set[int]]:
    """Call `strike` until it finds nobody any more, or the time is over.

    Args:
        strike: kills all that it finds and returns them; see `strike`.

    Returns:
        Who was killed, and who of them has not gone: the kernel does not let go of it, or it is not ours to kill.
    """
    until_s = time.monotonic() + within_s
    killed: set[int] = set()
    while victims := strike():
        killed |= victims
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return killed, victims
        until_gone(victims, min(_LOOK_S, left_s))
    return killed, set()


def strike(way: Way, spared: Callable[[Set[int]], Set[int]], own: Set[int]) -> set[int]:
    """Kill once all that is held and not spared, while it holds still; returns them.

    Args:
        spared: which of these, all that is held, shall live.
        own: see `Way.members`.
    """
    with way.frozen(own) as members:  # even if none is seen: what forks and ends all the time is not, unless it stands
        safe = spared(members) & members
        victims = members - safe
        if victims and not way.kill_rest(safe):
            _kill_each(victims)
    return victims


def _kill_each(pids: Set[int]) -> None:
    for pid in pids:
        process = read_process(pid)
        if process is not None:
            with suppress(PermissionError):
                send(process, signal.SIGKILL)
