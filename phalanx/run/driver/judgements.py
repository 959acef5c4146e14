"""What judges and log rules find, as the driver's events: soft state, of which only what is found becomes an event.

Alarms of log rules are reported at once, and the same of the same host not again within a minute. What is fatal mostly
comes with the end of a rank: it is kept, gives the failure that follows its class, and becomes part of the report of
what it led to. All of that within one attempt: what was reported in an earlier one has been answered then, and is no
evidence of what comes now.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import msgspec

from phalanx.detect.detection import Detection, named
from phalanx.detect.logs.log_rules import Matcher
from phalanx.run.clock import Now
from phalanx.run.decide.actions import ranks_of
from phalanx.run.decide.events import OF_THE_HOST, Event, Fault, Noticed, SlowHost, SuspectsNamed, TrafficSilent
from phalanx.run.decide.state import State
from phalanx.run.judge.interface_traffic import TrafficConfig, TrafficJudge
from phalanx.run.judge.step_limits import Standing
from phalanx.run.judge.stragglers import SlowConfig, SlowJudge
from phalanx.run.judge.suspects import find_suspects, place_of, waits_of
from phalanx.run.logs.log_lines import left_out
from phalanx.run.messages import Evidence, Finding, Found, Heartbeat, LogLine, RankEvidence, WorkerEnded

# How ranks ended


def class_of(matcher: Matcher, ended: WorkerEnded) -> Fault | None:
    """The class of the fault that ended a rank, by the last of its lines that a rule knows; None: there is none."""
    # From the end: earlier lines may be of errors that the program lived on with.
    for line in reversed([*ended.text.splitlines(), ended.summary]):
        rule = matcher.find(line, "output")
        if rule is not None and rule.severity != "note" and rule.fault != "unknown":
            return rule.fault
    return None


def by_its_end(ended: WorkerEnded) -> Fault:
    """The same, where nothing else shows it, by how the rank ended.

    A Python exception is taken for the program's; the decision needs more than that to blame it.
    """
    return "user" if ended.kind in ("user", "syntax", "raised") else "process"


# Evidence of ranks that hang


def suspects_named(state: State, evidence: Sequence[RankEvidence], at_s: float) -> SuspectsNamed:
    """The ranks that hold up the others, by the evidence."""
    per_host = state.job.workers_per_host
    host_of = {rank: host for place, host in enumerate(state.placement) for rank in ranks_of(place, per_host)}
    found = find_suspects(evidence, host_of)
    # Standing still alone proves nothing. By its state only a process that is stopped or dead is guilty: one that waits
    # in the kernel may do so for a disk that is slow, or for a debugger.
    is_proven = found.by in ("silence", "collective")
    if found.by == "state":
        is_proven = all(one.state in ("T", "Z", "X") for one in evidence if one.rank in found.ranks)
    return SuspectsNamed(
        at_s,
        state.attempt,
        ranks=() if found.is_group else found.ranks,
        why=found.why,
        group="ranks that share a fault" if found.is_group else "",
        group_ranks=found.ranks if found.is_group else (),
        is_proven=is_proven,
        place=place_of(evidence),
        line=found.line,
        waits=tuple(str(wait)[:300] for wait in waits_of(evidence)[:3]),  # the stacks of all are beside the page
    )


def beside_spans(event: SuspectsNamed, by_spans: Detection | None) -> SuspectsNamed:
    """The same, with what the judge of spans found while nothing moved, and whether both name the same ranks."""
    if by_spans is None:
        return event
    ours, theirs = set(event.group_ranks or event.ranks), set(named(by_spans, "ranks"))
    word = "so" if ours == theirs or (theirs and theirs < ours) else "but"
    # Where one of them names nobody, neither is contradicted.
    word = f"{word} " if ours and theirs else ""
    return msgspec.structs.replace(event, by_spans=by_spans, spans_say=f"{word}by spans: {by_spans.sentence}")


@dataclass
class EvidenceGathering:
    """Evidence of one attempt that is being gathered.

    Args:
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


# Log rules

AGAIN_S = 60.0
"""The same rule is not reported again of the same host within this time."""

BEFORE_S = 30.0
"""Seconds before the end of a rank in which a finding may be its cause."""

_KEPT_PER_HOST = 32
_KEPT_S = 900.0
_PER_REPORT = 24
"""Findings in one report, at most: of thousands of ranks the first are enough."""

_FAULTS = get_args(Fault)


class _Kept(NamedTuple):
    at_s: float
    host: str
    finding: Finding
    is_kernel: bool
    is_fatal: bool


class Findings:
    """What log rules have found lately, of all hosts of a job."""

    def __init__(self) -> None:
        self._by_host: dict[str, deque[_Kept]] = {}
        self._reported_s: dict[tuple[str, str], float] = {}
        self._attempt = 0
        self._report = 0
        self._in_report = 0

    def begin(self, attempt: int) -> None:
        """An attempt begins."""
        self._attempt = attempt
        self._by_host.clear()
        self._reported_s.clear()

    def take(self, host: str, found: Found, report: int, now: Now) -> list[Event]:
        """New ones of a host; `report`: number of the incident that is open, 0: none."""
        events: list[Event] = []
        for finding in found.findings:
            # A host without ranks does not know of the attempt, and what its kernel reports counts all the same.
            if finding.severity == "note" or (finding.rank >= 0 and found.attempt < self._attempt):
                continue
            kept = _Kept(now.monotonic_s, host, finding, finding.rank < 0, finding.severity == "fatal")
            self._by_host.setdefault(host, deque(maxlen=_KEPT_PER_HOST)).append(kept)
            if self._is_to_report(kept, report):
                events.append(_event(kept, now))
        return events

    def led_to(self, report: int, within_s: float, now: Now) -> list[Event]:
        """Fatal findings of the last `within_s` before this report began, the kernels' first; [] if done before."""
        if report == self._report:
            return []
        self._report, self._in_report = report, 0
        since_s = now.monotonic_s - min(within_s, _KEPT_S)
        every = (kept for mine in self._by_host.values() for kept in mine if kept.is_fatal and kept.at_s >= since_s)
        # A device that is lost shows in many ranks; the kernel's report of it is the cause, so it comes first.
        # Half of the room, since what is found while the report is open belongs to it too.
        first = sorted(every, key=lambda kept: (not kept.is_kernel, kept.at_s))[: _PER_REPORT // 2]
        self._in_report = len(first)
        return [_event(kept, now) for kept in first]

    def fault_of(self, host: str, ended: WorkerEnded, by_rules: Fault | None, now: Now) -> Fault | None:
        """The class of what ended a rank; None: nothing shows it.

        Args:
            by_rules: from the rank's own last lines; None: no rule knows them.
        """
        if by_rules in OF_THE_HOST:
            return by_rules
        recent = [kept for kept in self._by_host.get(host, ()) if kept.at_s >= now.monotonic_s - BEFORE_S]
        kernel = [kept for kept in recent if kept.is_kernel]
        own = [kept for kept in recent if kept.finding.rank == ended.rank]
        # A device that is lost makes a program fail in many ways, so the kernel's report goes before the rank's.
        worst = [kept for kept in kernel if kept.is_fatal and kept.finding.fault in OF_THE_HOST]
        return _newest(worst) or by_rules or _newest([k for k in own if k.is_fatal]) or _newest(kernel) or _newest(own)

    def forget(self, host: str) -> None:
        """It is gone."""
        self._by_host.pop(host, None)

    def _is_to_report(self, kept: _Kept, report: int) -> bool:
        key = (kept.host, kept.finding.rule)
        if kept.is_fatal and not kept.is_kernel and not report:
            return False  # the end of the rank will show it
        if kept.at_s - self._reported_s.get(key, -AGAIN_S) < AGAIN_S:
            return False
        if report and report == self._report:
            if self._in_report >= _PER_REPORT and not (kept.is_kernel and kept.is_fatal):
                return False
            self._in_report += 1
        if len(self._reported_s) > 10_000:
            self._reported_s = {one: at_s for one, at_s in self._reported_s.items() if kept.at_s - at_s < AGAIN_S}
        self._reported_s[key] = kept.at_s
        return True


def _newest(kept: list[_Kept]) -> Fault | None:
    faults = [one.finding.fault for one in kept if one.finding.fault in _FAULTS]
    return faults[-1] if faults else None  # type: ignore[return-value]


def _event(kept: _Kept, now: Now) -> Noticed:
    found = kept.finding
    fault: Fault | None = found.fault if found.fault in _FAULTS else None  # type: ignore[assignment]
    return Noticed(now.unix_s, kept.host, found.rule, found.line[:500], found.rank, fault, kept.is_fatal)


# Lines of ranks

LINES_PER_S = 500
"""Of all ranks together; what is more stays in the files of the hosts. Those of the first rank's host always pass."""

SHOWN_WHOLE_HOSTS = 64
"""Of so few hosts all passes that they send, which `phalanx.run.logs.log_lines` bounds."""


class LineBudget:
    """Lets `per_s` lines a second through, evenly, and at most a second's at once; counts the others.

    Ten thousand hosts write more than anybody reads.

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
        # Below zero too: a host's lines pass together, and what they took too much is missing from the next.
        self._left -= count
        return True

    def left_out(self, rank: int) -> list[LogLine]:
        """A line under the name of this rank about those that have not passed since the last call."""
        if not self._left_out or rank == 0:
            return []
        count, self._left_out = self._left_out, 0
        return [LogLine(rank, f"{left_out(count)} of their ranks")]


# Hosts of an attempt compared with each other

SETTLING_S = 10.0
"""From the first reports on, until it is known how many steps go into one heartbeat."""

SLOW_AGAIN_S = 600.0
"""The same host is not called slow, and less traffic is not reported, again within this time."""

SILENT_AGAIN_S = 60.0
"""Silence is reported again if nothing was decided."""

_LATE_ROUNDS = 2
"""Rounds by which another host is further when a round is over: heartbeats come up to one apart."""


@dataclass(frozen=True)
class PeersConfig:
    """How hosts are compared."""

    slow: SlowConfig = field(default_factory=SlowConfig)
    traffic: TrafficConfig = field(default_factory=TrafficConfig)
    heartbeat_s: float = 1.0


class Peers:
    """The hosts of one attempt, compared by own time per step and by the bytes of their training interfaces.

    Args:
        machines: of its hosts, such as the identity of the boot; hosts on one machine show no traffic.
    """

    def __init__(self, attempt: int, machines: Mapping[str, str], config: PeersConfig, now: Now) -> None:
        self._attempt, self._machines, self._config = attempt, machines, config.traffic
        self._slow = SlowWatch(attempt, list(machines), config.slow, config.heartbeat_s)
        has_traffic = len(set(machines.values())) > 1
        self._traffic = TrafficJudge(machines, now.monotonic_s, config.traffic) if has_traffic else None
        self._reported_s: dict[str, float] = {}
        self._next_s = -math.inf

    def on_heartbeat(self, host: str, beat: Heartbeat, now: Now) -> None:
        """What one host reports."""
        if beat.attempt == self._attempt and host in self._machines:
            self._slow.on_heartbeat(host, beat, now)
            if beat.carried_bytes >= 0 and self._traffic is not None:
                self._traffic.observe(host, beat.carried_bytes, now.monotonic_s)

    def look(self, standing: Standing, is_paused: bool, now: Now) -> list[Event]:
        """What has been found; traffic is judged once a second at most."""
        found = self._slow.look(now)
        if self._traffic is None or now.monotonic_s < self._next_s:
            return found
        self._next_s = now.monotonic_s + 1.0
        traffic = self._traffic.judge(now.monotonic_s, standing.quiet_s, standing.usual_s, is_paused)
        # One alert is enough; silence without steps may have been ignored while no host was heard of: it comes again.
        again_s = {"decline": SLOW_AGAIN_S, "quiet": SLOW_AGAIN_S, "silent": SILENT_AGAIN_S}.get(traffic.kind)
        if again_s is None or now.monotonic_s - self._reported_s.get(traffic.kind, -math.inf) < again_s:
            return found
        self._reported_s[traffic.kind] = now.monotonic_s
        is_total = traffic.kind != "decline"
        silent_s = max(self._config.silence_s, self._config.silence_steps * (standing.usual_s or 0.0))
        seconds = silent_s if is_total or traffic.share is None else 2 * self._config.window_s
        is_silent = traffic.kind == "silent"
        return [*found, TrafficSilent(now.unix_s, self._attempt, traffic.hosts, seconds, is_total, is_silent)]


class SlowWatch:
    """Own times of the hosts of one attempt, from heartbeats.

    Where several steps go into a heartbeat it carries the median over them, and they are one *round*; else a round is
    a step. Blocks of the judge are as many rounds as its number of steps needs.
    """

    def __init__(self, attempt: int, hosts: Sequence[str], config: SlowConfig, heartbeat_s: float) -> None:
        self._attempt, self._hosts, self._config, self._heartbeat_s = attempt, hosts, config, heartbeat_s
        self._rows: dict[int, dict[str, float]] = {}
        self._done = self._newest = -1
        self._first: tuple[float, int] | None = None
        self._judge: SlowJudge | None = None
        self._per_round = 1
        self._reported_s: dict[str, float] = {}

    def on_heartbeat(self, host: str, beat: Heartbeat, now: Now) -> None:
        """What the ranks of one host report."""
        longest_s, steps = beat.busy_s, beat.steps_here
        if longest_s <= 0 or steps <= 0:  # a script that does not report it
            return
        if self._judge is None:
            self._settle(steps, now)
            return
        number = steps // self._per_round
        if number > self._done:
            row = self._rows.get(number)
            if row is None:
                row = self._rows[number] = {}
                self._newest = max(self._newest, number)
            row[host] = longest_s

    def look(self, now: Now) -> list[Event]:
        """Hosts that have been found slow; called about once a heartbeat."""
        judge, found = self._judge, list[Event]()
        if judge is None:
            return found
        for number in sorted(self._rows):
            if number > self._newest - _LATE_ROUNDS and len(self._rows[number]) < len(self._hosts):
                break
            self._done = number
            for slow in judge.observe(number, self._rows.pop(number)):
                if now.monotonic_s - self._reported_s.get(slow.name, -math.inf) >= SLOW_AGAIN_S:
                    self._reported_s[slow.name] = now.monotonic_s
                    since = slow.since_step * self._per_round
                    why = f"by its own time, since about step {since} of this attempt"
                    found.append(SlowHost(now.unix_s, self._attempt, slow.name, round(slow.ratio, 3), why, since))
        return found

    def _settle(self, steps: int, now: Now) -> None:
        """Learn how many steps go into one heartbeat."""
        if self._first is None:
            self._first = (now.monotonic_s, steps)
            return
        elapsed_s = now.monotonic_s - self._first[0]
        if elapsed_s < min(SETTLING_S, 10 * self._heartbeat_s) or steps <= self._first[1]:
            return
        per_s = (steps - self._first[1]) / elapsed_s
        self._per_round = max(1, round(per_s * self._heartbeat_s))
        config = self._config
        rounds = math.ceil(config.block_steps / self._per_round)
        per_steps = max(config.per_steps // self._per_round, rounds)
        config = config.model_copy(update={"block_steps": rounds, "per_steps": per_steps})
        self._judge = SlowJudge(self._hosts, config=config)
        self._done = self._newest = steps // self._per_round
