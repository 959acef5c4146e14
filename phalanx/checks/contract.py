"""What a check is: a name, a function of the host, and what the runner has to know about it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult

Level = Literal["passive", "quick", "full"]
LEVELS: tuple[Level, ...] = ("passive", "quick", "full")

Resource = Literal["cpu", "memory", "disk", "gpu"]


@dataclass(frozen=True)
class Check:
    """One self-test of a host.

    Attributes:
        name: as it is shown and given to ``--only``.
        summary: what it tests, in one line.
        level: the smallest set that it belongs to; each set contains the smaller ones.
        run: the test; a module-level function, so that another process can find it.
        limit_s: after so many seconds without an answer it has failed.
        isolated: run it in a process of its own: it may hang in the kernel, crash, or load large libraries.
        uses: what it keeps busy; two checks that share one never run at the same time.
    """

    name: str
    summary: str
    level: Level
    run: Callable[[Host], CheckResult]
    limit_s: float = 5.0
    isolated: bool = False
    uses: frozenset[Resource] = frozenset()
