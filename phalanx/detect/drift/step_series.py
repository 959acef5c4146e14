"""What the steps of a run took, step by step and part by part: the tables that drift is judged by.

    series = read_series(Path("runs/night"))
    series.step_s                 # seconds of each step
    series.parts["backward"]      # of them, the mean over ranks of this part
    series.waits["shard"].late_s  # what its members waited for each other, not for bytes

With spans a step's seconds are those of the median rank, and its parts add up to the mean over ranks. Without spans
there are only the figures of ``metrics.jsonl``.

What ranks wait for is split in two: the member of a group that waits least waits for *bytes*; what the others wait
longer than it, they wait for whoever is *late*. So a slower network and ranks that drift apart (MegaScale, 6.3) are
told from each other by sums that are kept for good, without single spans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.detect.drift.metrics_entries import read_entries
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import PARTS

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

OTHER = "outside spans"
OWN = ("data", "forward", "backward", "optimizer", "snapshot", OTHER)
"""Parts in which a rank does something itself; the other one is waiting."""

_MOST_RANK_ROWS = 400_000
_MOST_STEP_S = 1e9  # some thirty years: no step takes longer


@dataclass(frozen=True)
class Waits:
    """Mean seconds over ranks that a group's members waited, by step: for bytes, and for members that were late;
    `skew_s`: from the first member's first launch to the last one's, the mean over groups."""

    bytes_s: Floats
    late_s: Floats
    skew_s: Floats


@dataclass(frozen=True)
class RankParts:
    """Medians over some steps of what each rank took.

    Attributes:
        ranks: their numbers.
        hosts: of each.
        stages: of each; -1: there is no pipeline.
        bounds: first step of each block of steps, in rising order.
        parts: by part of `OWN`: seconds of a step, ranks x blocks; NaN: not known.
    """

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    parts: Mapping[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class StepSeries:
    """Figures of the steps of a run, in rising order; all arrays are as long as `step`.

    Attributes:
        run: its folder, for commands.
        start: how often the run had been started before, at each step.
        step_s: seconds.
        end_unix_s: when it ended; NaN: not known.
        tokens: that it read; NaN: not known.
        mfu: 0 to 1; NaN: not known.
        events: steps at which something happened that takes time and is no trouble, by name: ``evaluation``,
            ``checkpoint``, ``start``.
        parts: mean seconds over ranks by part, `OWN` and ``wait``; empty: there are no spans.
        latest: by part of `OWN`, by how much the rank that was latest took longer for it than the median rank.
        waits: by group (its axes).
        ranks: what each took.
        missing: what is not there, with the cure after a semicolon.
        left_out: steps whose seconds are no number above 0.
        left_out_after: how many of them lie after the newest step that is here.
    """

    run: str
    step: Ints
    start: Ints
    step_s: Floats
    end_unix_s: Floats
    tokens: Floats
    mfu: Floats
    events: Mapping[str, frozenset[int]] = field(default_factory=dict)
    parts: Mapping[str, Floats] = field(default_factory=dict)
    latest: Mapping[str, Floats] = field(default_factory=dict)
    waits: Mapping[str, Waits] = field(default_factory=dict)
    ranks: RankParts = RankParts()
    missing: tuple[str, ...] = ()
    left_out: int = 0
    left_out_after: int = 0

    def __len__(self) -> int:
        return len(self.step)


def read_series(run: Path, most_rank_steps: int = 1 << 22) -> StepSeries:
    """All that the files of a run say of the times of its steps.

    Args:
        most_rank_steps: rows of spans, one for each rank and step, that are read; of longer runs only every so manieth
            step is. Four million take some ten seconds.

    Raises:
        UserError: there are neither spans nor figures of steps.
    """
    figures = _read_figures(run)
    try:
        trace = Trace.open(run)
        every = _stride(trace, most_rank_steps)
        rows = trace.ask(_STEPS, parameters={"every": every}).to_pydict()
    except UserError:
        if figures is None:
            if (run / "metrics.jsonl").exists():
                raise _no_times(run) from None
            raise
        rows, every = {}, 1
    if not rows.get("step"):
        if figures is None:
            raise _no_times(run)
        return figures
    return _with_spans(trace, figures, rows, every, str(run))


def _no_times(run: Path) -> UserError:
    problem = "no step of its metrics.jsonl has a step_s that can be judged, and no step has spans"
    cure = "write seconds as step_s, as phalanx train does, or record spans (docs/trace.md)"
    return UserError(problem, cure=cure, field=str(run))


def _stride(trace: Trace, most: int) -> int:
    """Every so manieth step is read."""
    row = trace.ask("select count(distinct rank) as ranks, count(distinct step) as steps from steps").to_pylist()[0]
    rank_steps = int(row["ranks"] * row["steps"])
    return max(-(-rank_steps // most), 1)


def _read_figures(run: Path) -> StepSeries | None:
    """What ``metrics.jsonl`` says."""
    rows: dict[int, Mapping[str, Any]] = {}
    events: dict[str, set[int]] = {"evaluation": set(), "checkpoint": set(), "start": set()}
    try:
        for entry in read_entries(run):
            kind, step = entry["kind"], entry["step"]
            if kind == "step":
                rows[step] = entry
            elif kind in ("checkpoint", "snapshot"):
                events["checkpoint"].add(step)
            elif kind in events:
                events[kind].add(step)
    except FileNotFoundError:
        return None
    kept = [step for step in sorted(rows) if 0 < _number(rows[step], "step_s") < _MOST_STEP_S]
    if not kept:
        return None
    step = np.array(kept, np.int64)
    tokens = np.array([_number(rows[one], "tokens") for one in kept])
    counted = np.diff(tokens, prepend=0.0 if kept[0] == 1 else math.nan)
    counted[np.diff(step, prepend=step[0] - 1) != 1] = math.nan
    starts = np.array(sorted(events["start"]), np.int64)
    return StepSeries(
        str(run),
        step,
        np.maximum(np.searchsorted(starts, step, side="left") - 1, 0) if len(starts) else np.zeros_like(step),
        np.array([_number(rows[one], "step_s") for one in kept]),
        np.full(len(step), math.nan),
        np.where(counted > 0, counted, math.nan),
        np.array([_number(rows[one], "mfu") for one in kept]),
        {name: frozenset(found) for name, found in events.items()},
        missing=("which part of a step grew, and when; let the ranks record spans (telemetry.spans, docs/trace.md)",),
        left_out=len(rows) - len(kept),
        left_out_after=sum(one > kept[-1] for one in rows),
    )


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


_OTHER_NS = "step_ns - " + " - ".join(f"{kind}_ns" for kind in PARTS)

_EACH = f"""
each as (
    select step, rank, max(attempt) as attempt, max(end_ns) as end_ns, sum(step_ns) as step_ns,
        {", ".join(f"sum({kind}_ns) as {kind}_ns" for kind in PARTS)}
    from steps where step % $every = 0 group by step, rank having sum(step_ns) > 0
)"""

_COLUMNS: dict[str, str] = {**{str(kind): f"{kind}_ns" for kind in PARTS}, OTHER: f"greatest({_OTHER_NS}, 0)"}

_STEPS = f"""
with {_EACH}, named as (
    select step, rank, attempt, end_ns, step_ns, step_ns - wait_ns as own_ns,
        {", ".join(f'{column} as "{name}"' for name, column in _COLUMNS.items())} from each
)
select step, max(attempt) as attempt, max(end_ns) as end_ns, median(step_ns) / 1e9 as step_s,
    {", ".join(f'avg("{name}") / 1e9 as "{name}"' for name in _COLUMNS)},
    {", ".join(f'(arg_max("{name}", own_ns) - median("{name}")) / 1e9 as "latest {name}"' for name in OWN)}
from named group by step order by step
"""

_WAITS = """
with waited as (
    select step, rank, "group"::varchar as "group", sum(total_ns) as ns from phases where kind = 'wait'
    and step % $every = 0 group by step, rank, "group"
), launched as (
    select step, rank, "group"::varchar as "group", min(first_start_ns) as at_ns from phases
    where kind = 'collective' and step % $every = 0 group by step, rank, "group"
), members as (
    select p.step, p."group", g.ranks[1] as first_rank, len(g.ranks) as size, p.rank,
        coalesce(w.ns, 0) as ns, l.at_ns
    from (select step, rank, "group" from waited union select step, rank, "group" from launched) p
    join groups g on p.rank = g.rank and p."group" = g."group"
    left join waited w on p.step = w.step and p.rank = w.rank and p."group" = w."group"
    left join launched l on p.step = l.step and p.rank = l.rank and p."group" = l."group"
), each as (
    select step, "group", first_rank, any_value(size) as size, count(*) as seen, sum(ns) as total_ns,
        min(ns) as least_ns, max(at_ns) - min(at_ns) as skew_ns
    from members group by step, "group", first_rank having count(*) > 1
)
select step, "group", sum(least_ns * seen) / 1e9 as bytes_s, sum(total_ns - least_ns * seen) / 1e9 as late_s,
    avg(skew_ns) / 1e9 as skew_s
from each group by step, "group" order by "group", step
"""
"""Of a rank in several groups of the same axes there is one: each rank is in one group of an axis."""


def _with_spans(
    trace: Trace, figures: StepSeries | None, rows: Mapping[str, list[Any]], every: int, run: str
) -> StepSeries:
    step = np.array(rows["step"], np.int64)
    events = {} if figures is None else dict(figures.events)
    missing = [] if figures is not None else ["tokens and MFU; give a run with metrics.jsonl"]
    missing += [f"{what}; {how}" for what, how in trace.lost().lines()]
    ranks = _read_ranks(trace, step, every)
    parts = {name: _floats(rows[name]) for name in (*OWN, "wait")}
    if not (parts["forward"].any() or parts["backward"].any()):
        missing.append("which part of a step grew; record forward and backward passes (docs/trace.md)")
    count = max(len(ranks.ranks), 1)
    waits = _read_waits(trace, step, count, every)
    if count > 1 and not waits:
        missing.append(
            "waiting by group; only the groups of `phalanx train` record it, spans of your own loop have none"
        )
    return StepSeries(
        run,
        step,
        np.array(rows["attempt"], np.int64),
        _floats(rows["step_s"]),
        _floats(rows["end_ns"]) / 1e9,
        _placed(step, figures, "tokens"),
        _placed(step, figures, "mfu"),
        events,
        parts,
        {name: _floats(rows[f"latest {name}"]) for name in OWN},
        waits,
        ranks,
        tuple(missing),
    )


def _floats(column: list[Any]) -> Floats:
    return np.array([math.nan if one is None else one for one in column], np.float64)


def _placed(step: Ints, figures: StepSeries | None, name: str) -> Floats:
    """A column of the figures at these steps."""
    found = np.full(len(step), math.nan)
    if figures is not None:
        _, here, there = np.intersect1d(step, figures.step, return_indices=True)
        found[here] = getattr(figures, name)[there]
    return found


def _read_waits(trace: Trace, step: Ints, ranks: int, every: int) -> dict[str, Waits]:
    rows = trace.ask(_WAITS, parameters={"every": every}).to_pydict()
    groups, waited = np.array(rows["group"], object), np.array(rows["step"], np.int64)
    found = {}
    for group in dict.fromkeys(rows["group"]):
        # A run that goes on has steps by now that it had not when `step` was read.
        chosen = np.flatnonzero((groups == group) & np.isin(waited, step))
        place = np.searchsorted(step, waited[chosen])
        columns = []
        for name, divisor in (("bytes_s", ranks), ("late_s", ranks), ("skew_s", 1)):
            column = np.full(len(step), math.nan)
            column[place] = _floats(rows[name])[chosen] / divisor
            columns.append(column)
        found[group] = Waits(*columns)
    return found


def _read_ranks(trace: Trace, step: Ints, every: int) -> RankParts:
    """Blocks of steps are as long as it takes that the table stays small."""
    about = trace.ask(
        "select rank, any_value(host)::varchar as host, any_value(stage) as stage from steps"
        " left join stages using (rank) group by rank order by rank"
    ).to_pydict()
    ranks = about["rank"]
    blocks = int(min(max(_MOST_RANK_ROWS // max(len(ranks), 1), 8), 256, len(step)))
    bounds = step[np.linspace(0, len(step), blocks, endpoint=False).astype(int)]
    names = list(_COLUMNS)
    query = f"""
    with {_EACH}, bounds as (select unnest($bounds)::bigint as bound), placed as (
        select each.*, bound from each asof join bounds on step >= bound
    )
    select rank, bound, {", ".join(f'median({_COLUMNS[name]}) / 1e9 as "{name}"' for name in names)}
    from placed where list_contains($ranks, rank) group by rank, bound
    """
    rows = trace.ask(query, parameters={"bounds": bounds.tolist(), "ranks": ranks, "every": every}).to_pydict()
    row = np.searchsorted(np.array(ranks), np.array(rows["rank"], np.int64))
    column = np.searchsorted(bounds, np.array(rows["bound"], np.int64))
    parts = {}
    for name in OWN:
        parts[name] = np.full((len(ranks), len(bounds)), math.nan)
        parts[name][row, column] = _floats(rows[name])
    stages = tuple(-1 if one is None else int(one) for one in about["stage"])
    return RankParts(tuple(ranks), tuple(about["host"]), stages, tuple(bounds.tolist()), parts)
