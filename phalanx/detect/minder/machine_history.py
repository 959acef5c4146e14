"""How far each machine is from the others in one metric, now and since when: sample by sample, or many at once.

Embeddings of windows (`window_encoder.py`) are compared at each moment with the median of the machine's group, which
a third of faulty machines cannot move far. Beyond the paper, what is left is compared with the machine's own habit,
since a machine that has always drawn 5 % more power is not faulty, and is measured in the healthy spread over time
rather than over machines: a z-score over N machines cannot exceed sqrt(N - 1), and several faulty machines hide each
other in it. It is averaged over a few seconds, and over a minute, in which small differences rise above the noise.

A block of samples and the same samples one by one give the same result (tested): stored data are judged as the online
form would have judged them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.job_state import ForetoldOffsets, JobState
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.onset_estimate import BEFORE_S, LEAD_S, peers_of, refine_onset
from phalanx.detect.minder.window_encoder import WINDOW, Floats, WindowEncoder

_BLOCK = 256
"""Windows whose embeddings are held at once."""

HABIT_SHARE = 0.5
"""Of a machine's habitual distance from the others, that changes of load may add: offsets scale with the load."""


LOW = 0.6
"""Score from which a machine begins to differ, if it comes to 1."""

_CLEAR = 0.4
"""Of the usual score of a fault, that its first sample shows."""

_ENOUGH = 16
"""Machines of a group whose spread is its own."""

_USUAL_OF_MEAN = 1.3
"""What a newcomer's distance from the others usually does not exceed, over its mean."""

_SURE = 10
"""Samples that are nearly all high after the first one of a fault."""

_REFINED = 64
"""Machines that differ at once, up to which the onset of each is found by its samples."""

_FAR = np.array([[6.0], [2.0]], np.float32)
"""Differences count up to so many thresholds, in the short average and in the long one."""


@dataclass(frozen=True)
class MetricNumbers:
    """What was learnt from healthy data about one metric.

    Attributes:
        encoder: of its windows.
        floors: healthy spread of the distance averaged over a few seconds and over half a minute; no job's counts as
            less.
        thresholds: of the three ratios (`MetricHistory.ratios`), by number of machines.
    """

    encoder: WindowEncoder
    floors: tuple[float, float]
    thresholds: tuple[tuple[int, float, float, float], ...]

    def thresholds_for(self, machines: int) -> NDArray[np.float32]:
        """Between the numbers of machines that it was calibrated for, by the logarithm: [3, 1]."""
        counts, *columns = zip(*self.thresholds, strict=True)
        at = np.log(max(machines, 1))
        return np.array([[np.interp(at, np.log(counts), column)] for column in columns], np.float32)


@dataclass(frozen=True)
class Alarm:
    """A machine that has differed for the time of continuity.

    Attributes:
        machine: its index.
        since: sample in which it began to, estimated.
        at: sample after which it was clear.
        score: its median since then, in thresholds.
        share: of the samples since then in which it was above the threshold.
        others: the same of machines that differed then too and began about then: index, since, score.
    """

    machine: int
    since: int
    at: int
    score: float
    share: float
    others: tuple[tuple[int, int, float], ...] = ()


class MetricHistory:
    """The state of one metric of all machines.

    Attributes:
        score: [machines], now, in thresholds; NaN: nothing is known.
        ratios: [3, machines], what thresholds are for: the distance from the machine's habit, averaged over a few
            seconds and over half a minute, in healthy spreads; and Minder's own similarity, the distance from the
            others in the spread over machines at that moment, in the machine's usual one.
        started: [machines], the sample from which the machine has differed; -1: it does not.
        alarms: so far, the oldest first.
        seen: samples so far.
        judges: whether it does, or still learns habits.
    """

    def __init__(self, numbers: MetricNumbers, machines: int, policy: MinderPolicy, period_s: float = 1.0) -> None:
        self._numbers, self._policy = numbers, policy
        hidden = numbers.encoder.hidden
        self._thresholds = numbers.thresholds_for(machines) / np.float32(policy.sensitivity)
        self._gap, self._fill, self._together = (
            round(seconds / period_s) for seconds in (policy.gap_s, policy.fill_s, policy.together_s)
        )
        self._settle = max(2, round(policy.settle_s / period_s))
        self._memory = max(2.0, policy.memory_s / period_s)
        taus = np.array([policy.smoothing_s, policy.long_smoothing_s]) / period_s
        self._rates = np.minimum(1, 1 / taus).astype(np.float32)
        self._most = policy.most_at_once * machines
        self._continuity = max(1, round(policy.continuity_s / period_s))
        self.groups: NDArray[np.int64] | None = None
        self._members: list[NDArray[np.int64]] = []
        self.judges = False
        self.seen = self._windows = 0
        self._tail = np.empty((machines, 0), np.float32)
        self._last, self._age = np.full(machines, np.nan, np.float32), np.zeros(machines, np.int64)
        self._settling: list[Floats] = []
        self.habit = np.zeros((hidden, machines), np.float32)
        self._smooth = np.zeros((2, hidden, machines), np.float32)
        self._floors = np.array(numbers.floors, np.float32)[:, None]
        self._spread, self._own = self._floors.copy(), np.zeros((2, machines), np.float32)
        self._settled_for = np.zeros(machines, np.int64)
        self.score = np.full(machines, np.nan, np.float32)
        self.ratios = np.zeros((3, machines), np.float32)
        self._apart = np.zeros((hidden, machines), np.float32)
        self._usual = np.ones(machines, np.float32)
        self._apart_spread = np.full(machines, numbers.floors[0], np.float32)
        self._state = JobState(hidden, machines, float(self._rates[1]), self._memory)
        self._foretold = ForetoldOffsets(hidden, machines, period_s)
        self._changed_for = 0
        self._judged_from = self._settle + WINDOW - 1
        self.started = np.full(machines, -1, np.int64)
        self._last_low = np.full(machines, -(1 << 40), np.int64)
        self._hits = np.zeros(machines, np.int64)
        self._total = np.zeros(machines, np.float32)
        self._recent = np.zeros((self._continuity + max(self._settle, 2 * self._gap), machines), np.float32)
        before = round((LEAD_S + BEFORE_S) / period_s)
        self._samples = np.full((len(self._recent) + before, machines), np.nan, np.float32)
        self._early = min(round(LEAD_S / period_s), self._continuity // 4)
        self._not_before = np.zeros(machines, np.int64)
        self._period_s = period_s
        self._allowed = np.ones((2, machines), np.float32)
        self._alarmed = np.zeros(machines, bool)
        self.alarms: list[Alarm] = []

    def add(self, samples: Floats) -> None:
        """Judge more samples: [machines, samples], between 0 and 1; NaN where nothing was measured."""
        filled = np.concatenate([self._tail, self._filled(samples)], axis=1)
        self._tail = filled[:, -(WINDOW - 1) :].copy()
        self.seen += samples.shape[1]
        for start in range(0, filled.shape[1] - WINDOW + 1, _BLOCK):
            block = filled[:, start : start + _BLOCK + WINDOW - 1]
            found = np.ascontiguousarray(self._numbers.encoder.embed(block).transpose(0, 2, 1))
            centre = np.broadcast_to(self._centre(found), found.shape)
            if self.judges:
                found -= centre
            by_sample = np.ascontiguousarray(block[:, WINDOW - 1 :].T)
            for at in range(found.shape[1]):
                self._windows += 1
                self._samples[self._now % len(self._samples)] = by_sample[at]
                if self.judges:
                    has_changed = self._state.follow(centre[:, at])
                    is_most = 2 * np.count_nonzero(has_changed) > len(has_changed)
                    self._changed_for = self._changed_for + 1 if is_most else 0
                    self._judge(found[:, at], has_changed)
                else:
                    self._settling.append(found[:, at])

    def habits_so_far(self) -> tuple[Floats, float]:
        """Of the time before it judges: median distance of each machine from all, [hidden, machines]; their spread."""
        settled = np.stack(self._settling, axis=-1)
        settled = settled - median_of_known(settled.transpose(0, 2, 1)).transpose(0, 2, 1)
        habit = np.nan_to_num(median_of_known(settled))
        away = np.nan_to_num(settled - habit)
        return habit[..., 0], float(np.sqrt(np.median(np.einsum("hmw,hmw->mw", away, away))))

    def begin(self, groups: NDArray[np.int64] | None) -> None:
        """Judge from now on, each machine within its group, by the habits that were seen so far."""
        self.groups, self.judges = groups, True
        if groups is not None:
            self._members = [np.flatnonzero(groups == one) for one in np.unique(groups)]
        settled = np.stack(self._settling, axis=1)
        known = ~np.isnan(settled[0])
        # Who was hardly there has no habit yet: it is learnt of its first samples.
        self._settled_for = np.where(2 * known.sum(axis=0) >= len(known), self._settle, 0)
        centre = np.broadcast_to(self._centre(settled), settled.shape)
        self._learn_habits((settled - centre).transpose(1, 0, 2))
        self._state.learn(np.nan_to_num(centre).transpose(1, 0, 2))
        self._settling = []

    @property
    def has_new_state(self) -> bool:
        """Whether most groups have done something else for as long as habits are learnt."""
        return self._changed_for >= self._settle

    def forget_habits(self) -> None:
        """Learn them of the newest samples instead; nobody differs any more, until `begin` is called."""
        self.judges, self.groups, self._members = False, None, []
        rows = np.arange(self._now - self._settle - WINDOW + 2, self._now + 1) % len(self._samples)
        found = self._numbers.encoder.embed(np.ascontiguousarray(self._samples[rows].T))
        self._settling = list(np.ascontiguousarray(found.transpose(2, 0, 1)))
        self._changed_for, self._judged_from = 0, self._now + 1
        self._apart[:] = 0
        self._run_again()

    def _run_again(self) -> None:
        """Forget since when machines differ."""
        self.started[:] = -1
        self._last_low[:] = -(1 << 40)
        for runs in (self._hits, self._total, self._alarmed, self._not_before):
            runs[:] = 0

    def mean_score(self, machine: int) -> float:
        """Since the machine has differed, in thresholds; 0: it does not."""
        started = int(self.started[machine])
        return 0.0 if started < 0 else float(self._total[machine]) / (self._now - started + 1)

    def _filled(self, samples: Floats) -> Floats:
        """The last value in place of a missing one, for a while."""
        missing = np.isnan(samples)
        count = samples.shape[1]
        if not missing.any() and not self._age.any():
            self._last = samples[:, -1].copy()
            return samples
        place = np.where(missing, -1, np.arange(count))
        np.maximum.accumulate(place, axis=1, out=place)
        before = place < 0
        age = np.where(before, self._age[:, None] + np.arange(1, count + 1), np.arange(count) - place)
        filled = np.where(before, self._last[:, None], np.take_along_axis(samples, np.maximum(place, 0), axis=1))
        filled[age > self._fill] = np.nan
        self._age = age[:, -1]
        newest = np.take_along_axis(samples, np.maximum(place[:, -1:], 0), axis=1)[:, 0]
        self._last = np.where(place[:, -1] >= 0, newest, self._last)
        return filled

    def _centre(self, found: Floats) -> Floats:
        """Median over the machines of each one's group, in the shape of `found`: [hidden, windows, machines]."""
        if self.groups is None:
            return median_of_known(found)
        centre = np.empty_like(found)
        for members in self._members:
            centre[:, :, members] = median_of_known(found[:, :, members])
        return centre

    def _judge(self, found: Floats, has_changed: NDArray[np.bool_]) -> None:
        """One window: [hidden, machines], less the centre."""
        unknown = np.isnan(found[0])
        some_unknown = unknown.any()
        change = found - self.habit
        if some_unknown:
            change[:, unknown] = self._smooth[0][:, unknown]
        # What is very far off counts as far off: else a burst would be remembered for minutes after its end.
        far = np.sqrt(np.einsum("hm,hm->m", change, change))
        held = np.minimum(1, _FAR * self._thresholds[:2] * self._allowed / np.maximum(far, 1e-9))
        self._smooth += self._rates[:, None, None] * (change * held[:, None] - self._smooth)
        distance = np.sqrt(np.einsum("rhm,rhm->rm", self._smooth, self._smooth))
        habit = np.einsum("hm,hm->m", self.habit, self.habit)
        allowed = np.sqrt(np.maximum(self._own, self._spread) ** 2 + np.float32(HABIT_SHARE**2) * habit)
        self._allowed = allowed
        self.ratios = np.concatenate([distance / allowed, self._similarity(found, unknown)[None]])
        shares = self.ratios / self._thresholds
        of_habit = shares[:2].max(axis=0)
        # In another state offsets have other sizes. Who is within the spread of the others at this moment is like them,
        # and who always differed so much is no news; but who is not where its habit would have it differs.
        in_new_state = np.maximum(np.minimum(of_habit, shares[2]), self._unforetold(has_changed))
        score = np.where(has_changed, in_new_state, np.maximum(of_habit, shares[2]))
        if some_unknown:
            score[unknown] = 0
        is_new = (self._settled_for < self._settle) & ~unknown
        has_new = is_new.any()
        if has_new:
            score[is_new] = 0
        differs = self._count_runs(score)
        if some_unknown:
            score[unknown] = np.nan
        self.score = score
        # Habits are not learnt from machines that differ.
        rate = np.float32(1 / min(self._windows, self._memory)) * ~(differs | unknown)
        if has_new:
            self._settled_for += is_new
            rate = np.where(is_new, 1 / np.maximum(self._settled_for, 1), rate).astype(np.float32)
        self.habit += rate * change
        usual, own = np.minimum(self._ratio_apart, 3 * self._usual), np.minimum(distance, 3 * allowed)
        if has_new:
            usual = np.where(is_new, _USUAL_OF_MEAN * self._ratio_apart, usual)
            own = np.where(is_new, distance, own)
        self._usual += rate * (usual - self._usual)
        self._own += rate * (own - self._own)
        typical = middle(distance)
        np.maximum(self._floors, self._spread + (typical - self._spread) / np.float32(self._memory), out=self._spread)

    def _similarity(self, found: Floats, unknown: NDArray[np.bool_]) -> Floats:
        """The third ratio: whatever the job does now, who is unlike the others by more than it usually is?"""
        change = np.where(unknown, self._apart, found)
        far = np.sqrt(np.einsum("hm,hm->m", change, change))
        most = _FAR[0] * self._thresholds[2] * self._apart_spread * np.maximum(self._usual, 1)
        change = change * np.minimum(1, most / np.maximum(far, 1e-9))
        self._apart += self._rates[0] * (change - self._apart)
        distance = np.sqrt(np.einsum("hm,hm->m", self._apart, self._apart))
        self._apart_spread = self._spread_within(distance)
        self._ratio_apart = distance / self._apart_spread
        similarity: Floats = self._ratio_apart / np.maximum(self._usual, 1)
        return similarity

    def _unforetold(self, has_changed: NDArray[np.bool_]) -> Floats | float:
        """How far from what habits foretell in the job's new state, in thresholds; 0: it is in none."""
        distance = self._foretold.distance(self._apart, self.habit, has_changed, self.groups)
        if distance is None:
            return 0.0
        unforetold: Floats = distance / (self._spread_within(distance) * self._thresholds[2])
        limited: Floats = np.minimum(unforetold, _FAR[0])
        return limited

    def _spread_within(self, distance: Floats) -> Floats:
        """Median distance within each one's group: generations have spreads of their own."""
        spread = np.full_like(distance, middle(distance))
        of_all = spread[0]
        for members in self._members:
            own = middle(distance[members])[0]
            # The median of a few says little: it may add to the spread, not take away from it.
            spread[members] = own if len(members) >= _ENOUGH else max(own, of_all)
        limited: Floats = np.maximum(spread, self._floors[0, 0])
        return limited

    def _learn_habits(self, settled: Floats) -> None:
        """From [windows, hidden, machines]: medians, which a short event does not move."""
        self.habit = np.nan_to_num(median_of_known(settled.transpose(1, 2, 0))[..., 0])
        change = np.nan_to_num(settled - self.habit)
        smooth = np.zeros_like(self._smooth)
        distances = []
        for one in change:
            smooth += self._rates[:, None, None] * (one - smooth)
            distances.append(np.sqrt(np.einsum("rhm,rhm->rm", smooth, smooth)))
        self._smooth = smooth
        self._own = np.median(np.stack(distances), axis=0)
        self._spread = np.maximum(self._floors, np.median(self._own, axis=1, keepdims=True))
        self._allowed = np.maximum(self._own, self._spread)
        usual = []
        for one in np.nan_to_num(settled):
            self._apart += self._rates[0] * (one - self._apart)
            apart = np.sqrt(np.einsum("hm,hm->m", self._apart, self._apart))
            self._apart_spread = self._spread_within(apart)
            usual.append(apart / self._apart_spread)
        self._usual = np.quantile(np.stack(usual), 0.9, axis=0).astype(np.float32)

    def _count_runs(self, score: Floats) -> NDArray[np.bool_]:
        """Since when each differs; returns who does."""
        now = self._now
        self._recent[now % len(self._recent)] = score
        np.putmask(self._last_low, score > LOW, now)
        differs = now - self._last_low <= self._gap
        np.putmask(self.started, differs & (self.started < 0), now)
        np.putmask(self.started, ~differs, -1)
        high = score > 1
        self._hits += high
        self._hits *= differs
        self._total += score
        self._total *= differs
        self._alarmed &= differs
        self._not_before *= differs
        lasted = now - self.started + 1
        often = differs & (self._hits >= self._policy.share * lasted)
        # Scores cross their thresholds late: the onset may be so early that the time is over already.
        due = often & high & ~self._alarmed & (lasted >= self._continuity - self._early) & (now >= self._not_before)
        if due.any() and np.count_nonzero(often) <= self._most:
            for machine in np.flatnonzero(due):
                self._raise_alarm(int(machine), often)
        # Half a threshold for long is a new habit, not a fault.
        found: NDArray[np.bool_] = differs & ~((lasted > self._settle) & (2 * self._hits < self._policy.share * lasted))
        return found

    def _raise_alarm(self, machine: int, differing: NDArray[np.bool_]) -> None:
        """If the time of continuity is over, from where the machine clearly began to differ."""
        since, score, share = self._onset(machine, differing)
        if share < self._policy.share:
            return
        if self._now - since + 1 < self._continuity:
            self._not_before[machine] = since + self._continuity - 1
            return
        self._alarmed[machine] = True
        is_few = bool(np.count_nonzero(differing) <= _REFINED)
        others = [
            (int(one), *self._onset(int(one), differing, is_refined=is_few)[:2])
            for one in np.flatnonzero(differing)
            if one != machine
        ]
        near = tuple(one for one in others if abs(one[1] - since) <= self._together)
        self.alarms.append(Alarm(machine, since, self._now, score, share, near))

    def _onset(
        self, machine: int, differing: NDArray[np.bool_], *, is_refined: bool = True
    ) -> tuple[int, float, float]:
        """When it began to differ as it does now; the middle of its score since, and how often that was high."""
        count = min(self._now - int(self.started[machine]) + 1, len(self._recent))
        scores = self._recent[np.arange(self._now - count + 1, self._now + 1) % len(self._recent), machine]
        usual = float(np.median(scores[-self._continuity // 2 :]))
        is_high = scores > max(LOW, usual * _CLEAR)
        # A sample of noise before the onset is no part of it.
        ahead = np.concatenate([np.cumsum(is_high[::-1])[::-1], np.zeros(_SURE, int)])
        begins = np.flatnonzero(is_high & (ahead[:count] - ahead[_SURE : count + _SURE] >= 0.8 * _SURE))
        breaks = np.flatnonzero(np.diff(begins) > 2 * self._gap)
        first = 0 if not len(begins) else int(begins[breaks[-1] + 1] if len(breaks) else begins[0])
        since = self._now - count + 1 + first
        if is_refined:
            since = self._refined(machine, since, differing)
        return since, float(np.median(scores[first:])), float((scores[first:] > 1).mean())

    def _refined(self, machine: int, since: int, differing: NDArray[np.bool_]) -> int:
        """The onset by the samples themselves, which know of no smoothing."""
        like = ~differing if self.groups is None else ~differing & (self.groups == self.groups[machine])
        peers = peers_of(machine, like)
        if len(peers) < 2:
            return since
        count = min(self._now + 2 - WINDOW, len(self._samples))
        first = self._now - count + 1
        rows = np.arange(first, self._now + 1) % len(self._samples)
        centre = median_of_known(self._samples[np.ix_(rows, peers)])[:, 0]
        refined = first + refine_onset(self._samples[rows, machine] - centre, since - first, self._period_s)
        return max(refined, min(since, self._judged_from))  # what came before was learnt, not judged

    @property
    def _now(self) -> int:
        """Index of the newest sample that was judged, from 0."""
        return self._windows + WINDOW - 2


def middle(values: Floats) -> Floats:
    """Median over the last axis, which stays; numpy's own takes several times as long."""
    half = values.shape[-1] // 2
    ordered = values.copy()
    ordered.partition(half)  # of one place: numpy takes seven times as long for two
    above = ordered[..., half : half + 1]
    if values.shape[-1] % 2:
        return above
    both: Floats = (ordered[..., :half].max(axis=-1, keepdims=True) + above) / np.float32(2)
    return both


def median_of_known(values: Floats) -> Floats:
    """Median over the last axis, of what is not NaN; that axis stays, with length 1."""
    if not np.isnan(values).any():
        return middle(values)
    ordered = np.sort(values, axis=-1)  # NaN last
    known = np.sum(~np.isnan(values), axis=-1, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum((known - 1) // 2, 0), axis=-1)
    high = np.take_along_axis(ordered, np.minimum(known // 2, values.shape[-1] - 1), axis=-1)
    return ((low + high) / 2).astype(np.float32)
