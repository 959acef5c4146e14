"""What log rules have said lately: which of it becomes an event, and what it says of a rank that ends. Torch-free.

Alarms are told at once, and the same of the same host not again within a minute. What is fatal mostly comes with the
end of a rank: it is kept, classes the failure that follows, and becomes part of the report of what it led to. All of
that within one attempt: what was said in an earlier one has been answered then, and is no evidence of what comes now.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, get_args

from phalanx.run.decide.events import Event, Fault, Noticed
from phalanx.run.messages import Finding, Found, WorkerEnded
from phalanx.run.now import Now

AGAIN_S = 60.0
"""The same rule is not told again of the same host within this time."""

BEFORE_S = 30.0
"""What was said so long before the end of a rank may be its cause."""

_KEPT_PER_HOST = 32
_KEPT_S = 900.0
_PER_REPORT = 24
"""So many findings at most become part of one report: of thousands of ranks the first tell enough."""

_FAULTS = get_args(Fault)
_OF_THE_HOST = ("host", "network", "storage")


class _Kept(NamedTuple):
    at_s: float
    host: str
    finding: Finding

    @property
    def is_kernel(self) -> bool:
        return self.finding.rank < 0

    @property
    def is_fatal(self) -> bool:
        return self.finding.severity == "fatal"


class Findings:
    """Of all hosts of a job."""

    def __init__(self) -> None:
        self._by_host: dict[str, deque[_Kept]] = {}
        self._told_s: dict[tuple[str, str], float] = {}
        self._attempt = 0
        self._report = 0
        self._in_report = 0

    def begin(self, attempt: int) -> None:
        """An attempt begins."""
        self._attempt = attempt
        self._by_host.clear()
        self._told_s.clear()

    def take(self, host: str, found: Found, report: int, now: Now) -> list[Event]:
        """New ones of a host; `report`: number of the incident that is open, 0: none."""
        events: list[Event] = []
        for finding in found.findings:
            # A host that has no ranks does not know of the attempt, and its kernel speaks all the same.
            if finding.severity == "note" or (finding.rank >= 0 and found.attempt < self._attempt):
                continue
            kept = _Kept(now.monotonic_s, host, finding)
            self._by_host.setdefault(host, deque(maxlen=_KEPT_PER_HOST)).append(kept)
            if self._is_to_tell(kept, report):
                events.append(_event(kept, now))
        return events

    def led_to(self, report: int, within_s: float, now: Now) -> list[Event]:
        """What was fatal within so many seconds before this report began, the kernels' first; [] if told before."""
        if report == self._report:
            return []
        self._report, self._in_report = report, 0
        since_s = now.monotonic_s - min(within_s, _KEPT_S)
        every = (kept for mine in self._by_host.values() for kept in mine if kept.is_fatal and kept.at_s >= since_s)
        first = sorted(every, key=lambda kept: (not kept.is_kernel, kept.at_s))[: _PER_REPORT // 2]
        self._in_report = len(first)
        return [_event(kept, now) for kept in first]

    def fault_of(self, host: str, ended: WorkerEnded, said: Fault | None, now: Now) -> Fault | None:
        """The class of what ended a rank; None: nothing tells.

        Args:
            said: by the rules, from the rank's own last words; None: no rule knows them.
        """
        recent = [kept for kept in self._by_host.get(host, ()) if kept.at_s >= now.monotonic_s - BEFORE_S]
        kernel = [kept for kept in recent if kept.is_kernel]
        own = [kept for kept in recent if kept.finding.rank == ended.rank]
        if said in _OF_THE_HOST:
            return said
        # A device that is lost makes a program fail in many ways, so the kernel's word goes before the rank's.
        worst = [kept for kept in kernel if kept.is_fatal and kept.finding.fault in _OF_THE_HOST]
        return _newest(worst) or said or _newest([k for k in own if k.is_fatal]) or _newest(kernel) or _newest(own)

    def forget(self, host: str) -> None:
        """It is gone."""
        self._by_host.pop(host, None)

    def _is_to_tell(self, kept: _Kept, report: int) -> bool:
        finding, key = kept.finding, (kept.host, kept.finding.rule)
        if kept.is_fatal and not kept.is_kernel and not report:
            return False  # the rank will tell by its end
        if kept.at_s - self._told_s.get(key, -AGAIN_S) < AGAIN_S:
            return False
        if report and report == self._report:
            if self._in_report >= _PER_REPORT and not (kept.is_kernel and finding.severity == "fatal"):
                return False
            self._in_report += 1
        if len(self._told_s) > 10_000:
            self._told_s = {one: at_s for one, at_s in self._told_s.items() if kept.at_s - at_s < AGAIN_S}
        self._told_s[key] = kept.at_s
        return True


def _newest(kept: list[_Kept]) -> Fault | None:
    faults = [one.finding.fault for one in kept if one.finding.fault in _FAULTS]
    return faults[-1] if faults else None  # type: ignore[return-value]


def _event(kept: _Kept, now: Now) -> Noticed:
    found = kept.finding
    fault: Fault | None = found.fault if found.fault in _FAULTS else None  # type: ignore[assignment]
    return Noticed(now.unix_s, kept.host, found.rule, found.line[:500], found.rank, fault, kept.is_fatal)
