"""What a check of a host found. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

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
