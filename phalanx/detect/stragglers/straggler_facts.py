"""What steps say about who is slow, as arrays by step: the context of the judge.

Gathered from the spans of some steps at once (`gather_facts`), and put together as more steps come
(`StragglerFacts.joined`), so that a run is followed at the cost of its new steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.stragglers.job_places import Groups, JobPlaces, place_ranks
from phalanx.detect.stragglers.replay import Seconds
from phalanx.detect.stragglers.span_columns import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    FORWARD,
    OPTIMIZER,
    STEP,
    WAIT,
    Numbers,
    SpanColumns,
)
from phalanx.detect.stragglers.step_graph import StepGraph, build_graph
from phalanx.detect.stragglers.what_if import Replayer, WhatIf


@dataclass(frozen=True)
class StragglerFacts:
    """Of T steps of R ranks, which form W workers; NaN: not known.

    Attributes:
        places: who is where.
        what_if: replayed times of the steps.
        end_unix_s: T; when each step ended.
        own_s: T x R; forward and backward without waiting.
        passes: T x R; how many they were, one that is cut into pieces counted once.
        data_s: T x R; waiting for a batch.
        update_s: T x R; updates of parameters, without waiting.
        waited_s: T x R; waiting for others, which nothing hid.
        spread: T; how much passes of one kind differ within a worker and step (relative standard deviation, median of
            workers).
        correlation: T; of forward with backward times of the same micro-batch.
        mw, ms: T; shares of what is lost by the slowest workers, and by the last stage, as the paper counts
            them; NaN where hardly anything is lost.
        unordered: steps that were left out, since their spans contradict each other.
        meets: whether ranks are known to meet: a collective of a group, a message, or a wait was recorded.
        has_strays: whether collectives were recorded of which no group is known.
        is_whole: whether all spans were kept: ranks of which fewer passes were recorded did fewer.
    """

    places: JobPlaces
    what_if: WhatIf
    end_unix_s: Seconds
    own_s: Seconds
    passes: Seconds
    data_s: Seconds
    update_s: Seconds
    waited_s: Seconds
    spread: Seconds
    correlation: Seconds
    mw: Seconds
    ms: Seconds
    unordered: int = 0
    meets: bool = True
    has_strays: bool = False
    is_whole: bool = False

    @property
    def steps(self) -> Numbers:
        """Their numbers."""
        return self.what_if.steps

    def joined(self, later: StragglerFacts, most_steps: int) -> StragglerFacts:
        """With later steps, of which at most so many are kept; where ranks or workers changed, only these."""
        if not self.places.same_as(later.places):
            return later
        own, other = _aligned(self.what_if, later.what_if)

        def both(name: str, one: Any, two: Any) -> Any:
            return np.concatenate([getattr(one, name), getattr(two, name)])[-most_steps:]

        by_step: dict[str, Any] = {name: both(name, self, later) for name in _BY_STEP}
        replayed: dict[str, Any] = {one.name: both(one.name, own, other) for one in fields(WhatIf)[:-1]}
        unordered = self.unordered + later.unordered
        known: dict[str, Any] = {name: getattr(self, name) or getattr(later, name) for name in ("meets", "has_strays")}
        known["is_whole"] = self.is_whole and later.is_whole
        return replace(self, what_if=replace(own, **replayed), **by_step, **known, unordered=unordered)

    def since(self, first: int) -> StragglerFacts:
        """From the step of that place on."""
        cut: dict[str, Any] = {field.name: getattr(self.what_if, field.name)[first:] for field in fields(WhatIf)[:-1]}
        own: dict[str, Any] = {name: getattr(self, name)[first:] for name in _BY_STEP}
        return replace(self, what_if=replace(self.what_if, **cut), **own)


_LEAST_PAIRS = 8
_WORTH_A_REPLAY = 0.02
_LEAST_LOST = 0.005  # of a step: of less, shares are noise over noise

_BY_STEP = ("end_unix_s", "own_s", "passes", "data_s", "update_s", "waited_s", "spread", "correlation", "mw", "ms")


def gather_facts(
    spans: SpanColumns, groups: Groups, places: JobPlaces | None = None, *, is_whole: bool = False
) -> StragglerFacts:
    """Facts of the steps that spans are of; steps in which a rank has no spans count for the others.

    Args:
        places: of the ranks; None: as the spans of these steps say.
        is_whole: whether all spans were kept.

    Raises:
        UserError: the times of spans contradict each other in every step.
    """
    places = places or place_ranks(spans.hosts, groups, spans.lockstep)
    graph = build_graph(spans, places)
    spans = spans.at(np.isin(spans.step, graph.steps))
    step = np.searchsorted(graph.steps, spans.step)
    at = places.places_of(spans.rank)
    length = (spans.end_ns - spans.start_ns) / 1e9
    is_pass = np.isin(spans.kind, (FORWARD, BACKWARD))

    def summed(rows: NDArray[np.bool_], values: Seconds) -> Seconds:
        cells = step[rows] * len(places.ranks) + at[rows]
        sums = np.bincount(cells, values[rows], len(graph.steps) * len(places.ranks)).astype(np.float64)
        return sums.reshape(len(graph.steps), -1)

    passes = summed(is_pass & (spans.piece <= 1), np.ones(len(spans)))
    own = summed(is_pass, length - spans.waited_ns / 1e9)
    replayer = Replayer(graph, places)
    excess = _excess_of_workers(own, passes, places)
    slowest = [int(one) for one in np.argsort(-excess, kind="stable")]
    what_if = replayer.what_if(slowest, [one for one in slowest if excess[one] > _WORTH_A_REPLAY])
    # of these steps together, since the paper takes means first
    replayed_s, ideal_s = float(what_if.replayed_s.mean()), float(what_if.ideal_s.mean())
    is_lost = replayed_s - ideal_s > _LEAST_LOST * replayed_s
    mw, ms = (
        np.full(len(graph.steps), one.rem if is_lost else np.nan) for one in replayer.published_contributions(what_if)
    )
    is_met = (spans.kind == WAIT) | ((spans.kind == COLLECTIVE) & ((spans.peer >= 0) | _has_group(spans, places)))
    spread, correlation = _uneven(graph, places)
    end_ns = np.full(len(graph.steps), np.iinfo(np.int64).min)
    np.maximum.at(end_ns, step, np.where(spans.kind == STEP, spans.end_ns, spans.start_ns))
    return StragglerFacts(
        places,
        what_if,
        end_ns / 1e9,
        np.where(passes > 0, own, np.nan),
        passes,
        summed(spans.kind == DATA, length),
        summed(spans.kind == OPTIMIZER, length - spans.waited_ns / 1e9),
        summed(spans.kind == WAIT, length),
        spread,
        correlation,
        mw,
        ms,
        graph.unordered,
        bool(is_met.any()),
        bool(((spans.kind == COLLECTIVE) & ~is_met).any()),
        is_whole,
    )


def _has_group(spans: SpanColumns, places: JobPlaces) -> NDArray[np.bool_]:
    known = np.array([group in places.groups for _, group in spans.labels] or [False])
    found: NDArray[np.bool_] = known[spans.label]
    return found


def _excess_of_workers(own: Seconds, passes: Seconds, places: JobPlaces) -> Seconds:
    """By how much the slowest rank of each worker computes longer than the others of its stage, as a share."""
    excess = np.zeros(places.workers)
    # of the later half of the steps, so that a rank that became slow lately is seen
    late = own[len(own) // 2 :]
    counts = np.maximum((passes[len(own) // 2 :] > 0).sum(axis=0), 1)
    means = late.sum(axis=0) / counts
    for stage in range(places.stages):
        ranks = np.flatnonzero(places.stage == stage)
        usual = np.sort(means[ranks])[(len(ranks) - 1) // 2] if len(ranks) else 0.0
        if usual > 0:
            np.maximum.at(excess, places.worker[ranks], means[ranks] / usual - 1)
    return excess


def _uneven(graph: StepGraph, places: JobPlaces) -> tuple[Seconds, Seconds]:
    """Spread of passes, and correlation of forward and backward of the same micro-batch, by step."""
    operations, count = graph.operations, len(graph.steps)
    is_pass = np.isin(operations.kind, (FORWARD, BACKWARD)) & operations.is_whole
    rows = np.flatnonzero(is_pass & (operations.duration_s > 0))
    spread, correlation = np.full(count, np.nan), np.full(count, np.nan)
    if not len(rows):
        return spread, correlation
    logs = np.log(operations.duration_s[rows])
    # what is common to an operation of a worker (its chunk, in all steps) is no unevenness
    chunk = operations.chunk[rows] + 1
    alike = (operations.alike[rows] * places.workers + operations.worker[rows]) * (int(chunk.max()) + 1) + chunk
    _, number = np.unique(alike, return_inverse=True)
    number = number.reshape(-1)
    logs = logs - (np.bincount(number, logs) / np.bincount(number))[number]
    lane = operations.step[rows] * places.workers + operations.worker[rows]
    cells = count * places.workers
    counts = np.bincount(lane, minlength=cells)
    mean = np.bincount(lane, logs, cells) / np.maximum(counts, 1)
    variance = np.bincount(lane, (logs - mean[lane]) ** 2, cells) / np.maximum(counts - 1, 1)
    deviation = np.sqrt(np.where(counts > 2, variance, np.nan)).reshape(count, -1)
    for at in range(count):
        known = deviation[at][~np.isnan(deviation[at])]
        spread[at] = np.median(known) if len(known) else np.nan
    found = _pairs(operations.kind[rows], lane, chunk, operations.micro_batch[rows], logs)
    step = operations.step[rows][found[2]]
    for one in range(count):
        x, y = found[0][step == one], found[1][step == one]
        if len(x) >= _LEAST_PAIRS and x.std() > 0 and y.std() > 0:
            correlation[one] = np.corrcoef(x, y)[0, 1]
    return spread, correlation


def _pairs(
    kind: Numbers, lane: Numbers, chunk: Numbers, micro_batch: Numbers, logs: Seconds
) -> tuple[Seconds, Seconds, NDArray[np.intp]]:
    """Times of forward and of backward passes of the same micro-batch, and the places of the former."""
    key = (lane * (int(chunk.max()) + 1) + chunk) * (int(micro_batch.max()) + 2) + micro_batch + 1
    forward, backward = np.flatnonzero(kind == FORWARD), np.flatnonzero(kind == BACKWARD)
    _, ours, theirs = np.intersect1d(key[forward], key[backward], return_indices=True)
    return logs[forward[ours]], logs[backward[theirs]], forward[ours]


def _aligned(one: WhatIf, other: WhatIf) -> tuple[WhatIf, WhatIf]:
    """Both with the same operations, in the same order."""
    if one.operations == other.operations:
        return one, other
    names = tuple(dict.fromkeys((*one.operations, *other.operations)))
    return _with_operations(one, names), _with_operations(other, names)


def _with_operations(what_if: WhatIf, names: Sequence[str]) -> WhatIf:
    columns = np.repeat(what_if.ideal_s[:, None], len(names), axis=1)  # what is not there costs nothing
    for at, name in enumerate(what_if.operations):
        columns[:, names.index(name)] = what_if.by_operation_s[:, at]
    return replace(what_if, by_operation_s=columns, operations=tuple(names))
