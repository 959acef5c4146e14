"""Stragglers of a run that goes on: what is new is read, replayed and judged, and what changes is reported.

    watch = StragglerWatch(Path("runs/big"))
    while ...:
        for change in watch.look():
            print(change.sentence)

A look costs what its new steps cost. What is kept are numbers of each rank and step for the newest `policy.most_steps`
steps (about 60 bytes each), and the spans of steps that are not whole yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from phalanx.core.errors import UserError
from phalanx.detect.detection import Detection, JudgeVerdict
from phalanx.detect.stragglers.job_places import Groups, JobPlaces, place_ranks, read_groups
from phalanx.detect.stragglers.span_columns import BACKWARD, FORWARD, SpanColumns
from phalanx.detect.stragglers.straggler_facts import StragglerFacts, gather_facts
from phalanx.detect.stragglers.straggler_judge import JUDGE, StragglerPolicy, judge_stragglers
from phalanx.telemetry.lost_telemetry import dropped_spans, unnoted_hosts
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_tail import SpanTail, clock_offsets_ns

_AT_ONCE_SPANS = 2_000_000  # of one replay: a run that is far ahead is read in pieces


@dataclass(frozen=True)
class StragglerChange:
    """A verdict that changed.

    Attributes:
        step: the newest that was looked at.
        found: what is wrong now and was not before.
        gone: what was wrong before and is not any more.
        verdict: the whole of it.
    """

    step: int
    found: tuple[Detection, ...]
    gone: tuple[Detection, ...]
    verdict: JudgeVerdict

    @property
    def sentence(self) -> str:
        """One line for people."""
        parts = [f"{one.sentence}{f', since {since}' if (since := str(one.since)) else ''}" for one in self.found]
        parts += [f"over: {one.sentence}" for one in self.gone]
        return f"step {self.step}: " + "; ".join(parts)


class StragglerWatch:
    """The judge beside a run.

    Raises:
        UserError: no telemetry is there yet.
    """

    def __init__(self, run: Path, policy: StragglerPolicy | None = None) -> None:
        self._policy = policy or StragglerPolicy()
        self._trace = Trace.open(run)
        self._tail = SpanTail(self._trace.folder, most_steps=self._policy.most_steps)
        self._attempt = -1
        self._facts: StragglerFacts | None = None
        self._places: JobPlaces | None = None
        self._hosts: dict[int, str] = {}
        self._lockstep: frozenset[str] = frozenset()
        self._groups: Groups = ()
        self._known: dict[str, Detection] = {}
        self.verdict = JudgeVerdict(JUDGE, (), ("no step has ended yet; look again later",))
        """As of the last look."""

    def look(self) -> StragglerChange | None:
        """Read and judge what is new; None: nothing changed."""
        spans = self._tail.new_steps()
        if spans is None:
            return None
        if self._tail.attempt != self._attempt:  # places, steps and hosts may be others
            self._attempt, self._facts, self._places, self._hosts = self._tail.attempt, None, None, {}
            self._groups = read_groups(self._trace)
        is_new = False
        for columns in self._pieces(spans):
            is_new |= self._add(columns)
        if not is_new or self._facts is None:
            return None
        self.verdict = judge_stragglers(self._facts, self._policy)
        return self._change(int(self._facts.steps[-1]))

    def _pieces(self, spans: pa.Table) -> Iterator[SpanColumns]:
        offsets = clock_offsets_ns(self._trace.folder)
        steps = spans["step"].to_numpy()
        distinct, counts = np.unique(steps, return_counts=True)
        piece = np.cumsum(counts) // _AT_ONCE_SPANS
        for one in np.unique(piece):
            low, high = distinct[piece == one][[0, -1]]
            part = spans if piece[-1] == 0 else spans.filter(pa.array((steps >= low) & (steps <= high)))
            yield _shifted(SpanColumns.of(part), offsets)

    def _add(self, columns: SpanColumns) -> bool:
        if not len(columns) or not np.isin(columns.kind, (FORWARD, BACKWARD)).any():
            return False
        known = (self._hosts.keys() >= columns.hosts.keys()) and columns.lockstep <= self._lockstep
        self._hosts |= columns.hosts
        self._lockstep |= columns.lockstep
        if self._places is None or not known:
            self._places = place_ranks(self._hosts, self._groups, self._lockstep)
        try:
            facts = gather_facts(columns, self._groups, self._places, is_whole=self._is_whole())
        except UserError:  # steps whose spans contradict each other say nothing
            return False
        self._facts = facts if self._facts is None else self._facts.joined(facts, self._policy.most_steps)
        return True

    def _is_whole(self) -> bool:
        return not dropped_spans(self._trace.folder) and not unnoted_hosts(self._trace.folder)

    def _change(self, step: int) -> StragglerChange | None:
        now = {_key(one): one for one in self.verdict.detections}
        found = tuple(one for key, one in now.items() if key not in self._known)
        gone = tuple(one for key, one in self._known.items() if key not in now)
        self._known = now
        return StragglerChange(step, found, gone, self.verdict) if found or gone else None


def follow_run(
    run: Path,
    policy: StragglerPolicy | None = None,
    *,
    every_s: float = 5.0,
    is_over: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[StragglerChange]:
    """Changes of the verdict on a run, as they come, until it is over.

    Args:
        every_s: seconds between two looks.
        is_over: asked before each look; after the last one, what is left is judged.
    """
    watch = StragglerWatch(run, policy)
    while True:
        is_last = is_over()
        if (change := watch.look()) is not None:
            yield change
        if is_last:
            return
        sleep(every_s)


def _key(found: Detection) -> str:
    """What stays the same while a thing goes on; its figures do not."""
    who = ";".join(f"{one.kind} {one.name}" for one in found.who)
    return f"{found.what}:{who}:{found.advice}"


def _shifted(columns: SpanColumns, offsets_ns: dict[str, int]) -> SpanColumns:
    """By one clock."""
    if not offsets_ns or not len(columns):
        return columns
    ranks = np.array(sorted(columns.hosts), np.int64)
    of_rank = np.array([offsets_ns.get(columns.hosts[int(rank)], 0) for rank in ranks], np.int64)
    shift = of_rank[np.searchsorted(ranks, columns.rank)]
    np.subtract(columns.start_ns, shift, out=columns.start_ns)
    np.subtract(columns.end_ns, shift, out=columns.end_ns)
    return columns
