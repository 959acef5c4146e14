"""The judge of machines as samples come in: who has become faulty, by which metric, and since when.

    minder = OnlineMinder(machines, metrics, policy, numbers)
    for samples in source:                # [metrics, machines, samples], normalised
        for found in minder.add(samples):
            ...

At each sample metrics are tried in the order that a decision tree learnt (`benchmarks/calibrate_minder.py`): the
first that names a machine is the guilty one, others are evidence. Stored data pass through the same object, in larger
pieces.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.job_work import TWICE, JobWork
from phalanx.detect.minder.machine_groups import machine_groups
from phalanx.detect.minder.machine_history import Alarm, MetricHistory
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.minder_weights import MinderNumbers
from phalanx.detect.minder.vanished_metrics import VanishedMetrics
from phalanx.detect.minder.window_encoder import WINDOW, Floats

PIECE = 64
"""Samples that are judged at once, where more are given; and after which is asked whether habits still hold."""

_MOST = 0.8
"""Of the largest score, from which on a machine differs about most."""

_FEW_BLAMED = 4
"""Machines that one incident may blame in any job, where no third of them differs."""

_FEW = 200_000
"""Windows for which threads cost more than they bring."""


@dataclass(frozen=True)
class FaultyMachines:
    """One incident: a machine, or several at once.

    Attributes:
        machines: indices of those that are to blame, the clearest first.
        metric: by which they were found; empty: only by what vanished.
        since: sample in which it began.
        at: sample after which it was clear.
        score: in thresholds; 0: only by what vanished.
        share: of the samples since then in which the score was above the threshold.
        affected: machines that began to differ a little later or less, and are not blamed.
        agreeing: other metrics by which the first machine differs.
        vanished: metrics that the first machine no longer delivers.
        number: of the incident.
        follows: whether the number is that of an earlier one: its machine is part of that, or shows what began there.
    """

    machines: tuple[int, ...]
    metric: str
    since: int
    at: int
    score: float
    share: float
    affected: tuple[int, ...]
    agreeing: tuple[str, ...]
    vanished: tuple[str, ...]
    number: int = 0
    follows: bool = False


class OnlineMinder:
    """Judges the machines of one job.

    Attributes:
        metrics: that are compared, in order.
        seen: samples so far.
        found: all incidents so far, without those that follow from another.
    """

    def __init__(
        self,
        machines: int,
        metrics: Sequence[str],
        policy: MinderPolicy,
        numbers: MinderNumbers,
        period_s: float = 1.0,
    ) -> None:
        """For samples of these metrics.

        Args:
            metrics: names of the rows of what `add` is given; more than are compared may be given.
        """
        self._given = tuple(metrics)
        self._policy, self._period_s = policy, period_s
        order = policy.metrics or numbers.order
        self.metrics = tuple(one for one in order if one in self._given and one in numbers.metrics)
        self._machines = machines
        self.histories = {one: MetricHistory(numbers.metrics[one], machines, policy, period_s) for one in self.metrics}
        self._vanished = VanishedMetrics(len(self._given), machines, max(1, round(policy.vanished_s / period_s)))
        learnt = max(2, round(policy.settle_s / period_s))
        self._settles = WINDOW - 1 + learnt
        self._work = JobWork(self._given, learnt)
        self._told = dict.fromkeys(self.metrics, 0)
        self._blamed: dict[int, tuple[int, int]] = {}  # since when, and in which incident
        self._begun: list[tuple[str, int, int]] = []
        self._incidents = 0
        self._threads = policy.threads or len(os.sched_getaffinity(0))
        self.seen = 0
        self.found: list[FaultyMachines] = []

    def add(self, values: Floats) -> list[FaultyMachines]:
        """Judge more samples: [metrics, machines, samples], between 0 and 1, NaN where nothing was measured.

        Returns:
            incidents that have become clear by them. Those that follow from one that blamed nobody (`incident_weight`)
            may be the faults.
        """
        news: list[FaultyMachines] = []
        start = 0
        with ThreadPoolExecutor(self._threads) as threads:
            while start < values.shape[2]:
                end = min(start + PIECE - self.seen % PIECE, values.shape[2])
                if self.seen < self._settles:  # all metrics are to be known when groups are made
                    end = min(end, start + self._settles - self.seen)
                news += self._add_piece(values[:, :, start:end], threads)
                start = end
        self.found += [one for one in news if not one.follows]
        return news

    def _add_piece(self, values: Floats, threads: ThreadPoolExecutor) -> list[FaultyMachines]:
        def judge(metric: str) -> None:
            self.histories[metric].add(values[self._given.index(metric)])

        if values[0].size < _FEW / len(self._given):
            for metric in self.metrics:
                judge(metric)
        else:
            list(threads.map(judge, self.metrics))
        self.seen += values.shape[2]
        self._work.add(values)
        if self.seen == self._settles:
            self._begin()
        elif self.seen > self._settles and self.seen % PIECE == 0:
            self._begin_again()
        lost = self._vanished.add(values)
        return [*self._from_alarms(), *self._from_vanished([int(one) for one in lost])]

    def _begin(self) -> None:
        """Habits are known: who is like whom?"""
        known = [history.habits_so_far() for history in self.histories.values()]
        groups = (
            machine_groups(np.concatenate([habit / max(spread, 1e-6) for habit, spread in known])) if known else None
        )
        for history in self.histories.values():
            history.begin(groups)
        self._work.learn()

    def _begin_again(self) -> None:
        """Where the job does something else, and more, since as long as habits are learnt: of the time since then.

        Habits of a minute of which half was a restart are of no state at all: then it does twice as much.
        """
        has_new_state = any(one.has_new_state for one in self.histories.values())
        if self._work.is_more() and (has_new_state or self._work.is_more(TWICE)):
            for history in self.histories.values():
                history.forget_habits()
            self._begin()

    def _from_alarms(self) -> list[FaultyMachines]:
        """Incidents by metrics that alarmed: who did first, and of one sample in order."""
        new: list[tuple[int, int, str, Alarm]] = []
        for place, metric in enumerate(self.metrics):
            alarms = self.histories[metric].alarms
            new += [(alarm.at, place, metric, alarm) for alarm in alarms[self._told[metric] :]]
            self._told[metric] = len(alarms)
        found = []
        for _, _, metric, alarm in sorted(new, key=lambda one: one[:2]):
            follows = self._followed(metric, alarm)
            incident = self._incident(metric, alarm, follows)
            if incident is None:
                continue
            found.append(incident)
            if follows is None:
                self._begun.append((metric, incident.since, incident.number))
        return found

    def _followed(self, metric: str, alarm: Alarm) -> int | None:
        """The incident that an alarm belongs to: its machine does, or it shows less than a machine that does."""
        known = self._known(alarm.machine, alarm.since)
        if known is None:
            known = self._spread_from(metric, alarm.since)
        for one, since, score in alarm.others if known is None else ():
            if known is None and score >= alarm.score:
                known = self._known(one, since)
        return known

    def _spread_from(self, metric: str, since: int) -> int | None:
        """The incident by this metric that began shortly before: what comes after it follows from it."""
        spread = self._policy.spread_s / self._period_s
        near = (number for one, began, number in self._begun if one == metric and began <= since <= began + spread)
        return next(near, None)

    def _incident(self, metric: str, alarm: Alarm, follows: int | None) -> FaultyMachines | None:
        """Who of those that began to differ together is to blame; None: so many that it is a part of the job."""
        new = [one for one in alarm.others if self._known(one[0], one[1]) is None]
        both = [(alarm.machine, alarm.since, alarm.score), *new]
        strongest = max(score for _, _, score in both)
        at_once = round(self._policy.at_once_s / self._period_s)
        # Of those that differ about most, who was first; onsets of small differences are not known that well.
        first = min(since for _, since, score in both if score >= _MOST * strongest)
        blamed = [one for one in both if abs(one[1] - first) <= at_once and one[2] >= self._policy.alike * strongest]
        if len(blamed) > max(_FEW_BLAMED, self._policy.most_blamed * self._machines):
            return None
        blamed.sort(key=lambda one: -one[2])
        lasted_s = (alarm.at - blamed[0][1] + 1) * self._period_s
        if alarm.machine not in (one for one, _, _ in blamed) and lasted_s < self._policy.continuity_s:
            return None  # who is to blame has not differed for long enough, and will be told by its own alarm
        machines = tuple(machine for machine, _, _ in blamed)
        affected = tuple(machine for machine, _, _ in both if machine not in machines)
        number = self._number(follows)
        for machine in (alarm.machine, *machines, *affected):
            self._blamed[machine] = (alarm.at, number)
        since = min(since for _, since, _ in blamed)
        agreeing, vanished = self._evidence(machines[0], since, metric)
        return FaultyMachines(
            machines, metric, since, alarm.at, alarm.score, alarm.share, affected, agreeing, vanished,
            number, follows is not None,
        )  # fmt: skip

    def _number(self, follows: int | None) -> int:
        """Of an incident: its own, or that of the one it follows from."""
        if follows is not None:
            return follows
        self._incidents += 1
        return self._incidents - 1

    def _from_vanished(self, machines: list[int]) -> list[FaultyMachines]:
        """Incidents of machines that no longer deliver metrics; those of the same moment are one."""
        found: list[FaultyMachines] = []
        since_of = {}
        for machine in machines:
            lacking = self._vanished.lacking[:, machine]
            since_of[machine] = int(self._vanished.since[lacking, machine].min())
        waiting = sorted(machines, key=since_of.__getitem__)
        while waiting:
            since = since_of[waiting[0]]
            follows = self._known(waiting[0], since)
            at_once = since + self._policy.at_once_s / self._period_s
            together = [one for one in waiting if since_of[one] <= at_once and self._known(one, since) == follows]
            waiting = [one for one in waiting if one not in together]
            is_collector = len(together) > max(1.0, self._policy.most_at_once * self._machines)
            number = self._number(follows)
            for machine in together:
                self._blamed[machine] = (self.seen, number)
            if is_collector:
                continue  # what is between them and the collector
            agreeing, vanished = self._evidence(together[0], since, "", self._vanished.lacking[:, together[0]])
            at = since + round(self._policy.vanished_s / self._period_s) - 1
            found.append(
                FaultyMachines(
                    tuple(together), "", since, at, 0.0, 1.0, (), agreeing, vanished, number, follows is not None
                )
            )
        return found

    def _known(self, machine: int, since: int) -> int | None:
        """The incident that was told already, to which belongs what the machine shows."""
        at, number = self._blamed.get(machine, (-1, -1))
        memory = self._policy.memory_s / self._period_s
        return number if machine in self._blamed and since <= at + memory else None

    def _evidence(
        self, machine: int, since: int, metric: str, lacked: NDArray[np.bool_] | None = None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Other metrics by which it differs since about then, and those that it lacks.

        Args:
            lacked: metrics whose gap has been told of now, which may be over by the newest sample.
        """
        together = self._policy.together_s / self._period_s
        agreeing = tuple(
            one
            for one, history in self.histories.items()
            if one != metric
            and history.started[machine] >= 0
            and abs(int(history.started[machine]) - since) <= 2 * together
            and history.mean_score(machine) > 0.75
        )
        last = self._vanished.last[:, machine]
        least = max(round(self._policy.fill_s / self._period_s), 30)
        lacking = (last >= 0) & (self.seen - 1 - last >= least) & (last + 1 >= since - together)
        if lacked is not None:
            lacking |= lacked
        return agreeing, tuple(name for name, is_so in zip(self._given, lacking, strict=True) if is_so)
