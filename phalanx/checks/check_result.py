"""What a check of a host found.

What a check is: a name, a function of the host, and what the runner has to know about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.checks.check_host import Host

Outcome = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """One check, one verdict; the fields are those of `phalanx.run.messages.CheckOutcome`.

    Attributes:
        outcome: ``fail`` says that the host is not fit; ``skip`` that there was nothing to test, or no way to.
        reason: in one line; also of a pass, where there is something to say.
        value, unit: what was measured; None: nothing that is one number.
        threshold: what the value was held against; None: no threshold is known, and the value is shown only.
        threshold_source: where the threshold comes from.
        action: what a person, or the driver, had better do about a failure.
        bad_peers: address of a peer -> what is bad between it and this host; either end may be at fault.
        peer_rates: address of a peer -> bytes per second to and from it, of the slower direction.
    """

    name: str
    outcome: Outcome
    reason: str = ""
    value: float | None = None
    unit: str = ""
    threshold: float | None = None
    threshold_source: str = ""
    action: str = ""
    bad_peers: dict[str, str] = field(default_factory=dict)
    peer_rates: dict[str, float] = field(default_factory=dict)

    def explained(self, *parts: str) -> CheckResult:
        """The same with another reason: those of `parts` that are not empty."""
        return replace(self, reason="; ".join(filter(None, parts)))


def passed(name: str, reason: str = "", *, value: float | None = None, unit: str = "") -> CheckResult:
    """All is well as far as this check can tell."""
    return CheckResult(name, "pass", reason, value, unit)


def failed(name: str, reason: str, action: str, *, value: float | None = None, unit: str = "") -> CheckResult:
    """The host is not fit, whatever was measured."""
    return CheckResult(name, "fail", reason, value, unit, action=action)


def skipped(name: str, reason: str) -> CheckResult:
    """Nothing here to test, or no way to test it."""
    return CheckResult(name, "skip", reason)


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
