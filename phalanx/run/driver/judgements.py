"""What judges and log rules say, as the driver's events and as lines for people.

What judges, log rules and lines of ranks say, as the driver's events and as lines for people.

What the judges say, as the driver's events want it.

What log rules have said lately: which of it becomes an event, and what it says of a rank that ends.

Alarms are told at once, and the same of the same host not again within a minute. What is fatal mostly comes with the
end of a rank: it is kept, classes the failure that follows, and becomes part of the report of what it led to. All of
that within one attempt: what was said in an earlier one has been answered then, and is no evidence of what comes now.

A look at ranks that hang: evidence of all hosts put together.

How many lines of ranks people are shown: ten thousand hosts write more than anybody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from phalanx.run.clock import Now
from phalanx.run.decide.actions import ranks_of
from phalanx.run.decide.events import Event, Fault, Noticed, SuspectsNamed
from phalanx.run.decide.state import State
from phalanx.run.judge.log_rules import Matcher
from phalanx.run.judge.suspects import Suspects, find_suspects, place_of, waits_of
from phalanx.run.logs.log_lines import left_out
from phalanx.run.messages import Evidence, Finding, Found, LogLine, RankEvidence, WorkerEnded

_WAITS, _WAIT_CHARACTERS = 3, 300
"""Of what ranks do so much is told; the stacks of all are beside the page."""


def class_of(matcher: Matcher, ended: WorkerEnded) -> Fault | None:
    """The class of the fault that ended a rank, by the last of its lines that a rule knows; None: there is none."""
    for line in reversed([*ended.text.splitlines(), ended.summary]):
        rule = matcher.find(line, "output")
        if rule is not None and rule.severity != "note" and rule.fault != "unknown":
            return rule.fault
    return None


def by_its_end(ended: WorkerEnded) -> Fault:
    """The same, where nothing else tells, by how it ended.

    A Python exception is taken for the program's; the decision needs more than that to blame it.
    """
    return "user" if ended.kind in ("user", "syntax", "raised") else "process"


def suspects_named(state: State, evidence: Sequence[RankEvidence], at_s: float) -> SuspectsNamed:
    """Who holds up the others, by the evidence."""
    per_host = state.job.workers_per_host
    host_of = {rank: host for place, host in enumerate(state.placement) for rank in ranks_of(place, per_host)}
    found = find_suspects(evidence, host_of)
    ranks, members = ((), found.ranks) if found.is_group else (found.ranks, ())
    group = "ranks that share a fault" if found.is_group else ""
    is_proven = _is_proven(found, evidence)
    waits = tuple(str(wait)[:_WAIT_CHARACTERS] for wait in waits_of(evidence)[:_WAITS])
    place = place_of(evidence)
    return SuspectsNamed(at_s, state.attempt, ranks, found.why, group, members, is_proven, place, waits)


def _is_proven(found: Suspects, evidence: Sequence[RankEvidence]) -> bool:
    """Whether more than that they stand still tells against these ranks."""
    if found.by == "state":  # one that waits in the kernel may do so for a disk that is slow, or for a debugger
        return all(one.state in ("T", "Z", "X") for one in evidence if one.rank in found.ranks)
    return found.by in ("silence", "collective")


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


@dataclass
class Look:
    """Evidence of one attempt that is being gathered.

    Args:
        attempt: its number.
        ranks: of each host that was asked.
        began: when it was asked for.
        within_s: how long answers are waited for; what has not come then is silent.
    """

    attempt: int
    ranks: Mapping[str, Sequence[int]]
    began: Now
    within_s: float
    _found: dict[int, RankEvidence] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)

    def add(self, host: str, evidence: Evidence) -> None:
        """The answer of a host; of several the last counts."""
        if evidence.attempt != self.attempt or host not in self.ranks:
            return
        self._answered.add(host)
        mine = set(self.ranks[host])
        self._found.update({one.rank: one for one in evidence.ranks if one.rank in mine})

    def is_over(self, now: Now) -> bool:
        """Whether all have answered, or nobody is waited for any more."""
        return self.left_s(now) <= 0 or all(host in self._answered for host in self.ranks)

    def left_s(self, now: Now) -> float:
        """Seconds for which answers are still waited for."""
        return self.began.monotonic_s + self.within_s - now.monotonic_s

    def evidence(self) -> list[RankEvidence]:
        """What is known of every rank that was asked for: silence is evidence too."""
        ranks = sorted(rank for mine in self.ranks.values() for rank in mine)
        return [self._found.get(rank, RankEvidence(rank, is_silent=True)) for rank in ranks]


LINES_PER_S = 500
"""Of all ranks together; what is more stays in the files of the hosts. Those of the first rank's host always pass."""

SHOWN_WHOLE_HOSTS = 64
"""Of so few hosts all passes that they send, which `phalanx.run.logs.log_lines` bounds."""


class LineBudget:
    """Lets through so many lines a second, evenly over it, and no more than a second's at once; counts the others.

    Args:
        hosts: of the job.
    """

    def __init__(self, hosts: int, per_s: float = LINES_PER_S) -> None:
        self._is_small = hosts <= SHOWN_WHOLE_HOSTS
        self._per_s = self._left = per_s
        self._last_s = 0.0
        self._left_out = 0

    def take(self, count: int, rank: int, now: Now) -> bool:
        """Whether the lines of a host may pass, given its first rank."""
        if self._is_small:
            return True
        self._left = min(self._left + (now.monotonic_s - self._last_s) * self._per_s, self._per_s)
        self._last_s = now.monotonic_s
        if self._left <= 0 and rank != 0:
            self._left_out += count
            return False
        self._left -= count
        return True

    def left_out(self, rank: int) -> list[LogLine]:
        """What is said, under the name of this rank, of lines that have not passed since the last call."""
        if not self._left_out or rank == 0:
            return []
        count, self._left_out = self._left_out, 0
        return [LogLine(rank, f"{left_out(count)} of their ranks")]
