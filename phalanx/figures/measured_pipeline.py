"""How a step of a pipeline really ran, out of its spans, and how its schedule would have run with even passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import pyarrow as pa
import pyarrow.compute as pc

from phalanx.figures.pipeline import NAMES
from phalanx.parallel.pipeline.schedules import Action, Kind, Table
from phalanx.parallel.pipeline.timeline import Lengths, Timed, Timeline, simulate

_BACKWARD: Mapping[str, Kind] = {"input": "I", "weights": "W"}


def measured_timeline(spans: pa.Table, table: Table, ranks: Sequence[int]) -> Timeline:
    """A step as its spans say that it ran, in seconds since the first forward pass.

    Args:
        spans: of one step (`phalanx.telemetry.span_store.SPANS`), by one clock: ``forward`` and ``backward`` with chunk
            and micro-batch; a backward span named ``input`` or ``weights`` is one half of it.
        table: the schedule that was to run.
        ranks: of the job, one for each pipeline rank, in order: those of one pipeline group.
    """
    kept = spans.filter(
        pc.and_(
            pc.is_in(spans["kind"].cast(pa.string()), pa.array(["forward", "backward"])),
            pc.and_(
                pc.is_in(spans["rank"], pa.array(list(ranks), spans["rank"].type)),
                pc.greater_equal(spans["micro_batch"], 0),
            ),
        )
    ).select(["rank", "kind", "name", "chunk", "micro_batch", "start_ns", "end_ns"])
    place = {rank: number for number, rank in enumerate(ranks)}
    rows: list[list[Timed]] = [[] for _ in ranks]
    origin_ns = min(kept["start_ns"].to_pylist(), default=0)
    for one in kept.to_pylist():
        pipeline_rank = place[one["rank"]]
        stage = table.placement.stages_of(pipeline_rank)[max(one["chunk"], 0)]
        kind: Kind = "F" if one["kind"] == "forward" else _BACKWARD.get(one["name"].split(" ")[0], "B")
        action = Action(stage, kind, one["micro_batch"])
        rows[pipeline_rank].append(
            Timed(action, (one["start_ns"] - origin_ns) / 1e9, (one["end_ns"] - origin_ns) / 1e9)
        )
    return Timeline(table, tuple(tuple(sorted(row, key=lambda timed: timed.begin)) for row in rows))


def replayed(measured: Timeline) -> Timeline:
    """The planned schedule, were each pass as long as the median of its kind and stage was, and sending free.

    Beside it one sees what was lost by uneven passes and by waiting for messages.

    Raises:
        ValueError: a kind of pass of the schedule was not measured at all.
    """
    by_stage, by_kind = defaultdict(list), defaultdict(list)
    for action, begin, end in (timed for row in measured.ranks for timed in row):
        by_stage[action.stage, action.kind].append(end - begin)
        by_kind[action.kind].append(end - begin)
    missing = {action.kind for row in measured.table.actions for action in row} - by_kind.keys()
    if missing:
        raise ValueError(f"not measured: {', '.join(NAMES[kind] for kind in sorted(missing))}")
    medians = {key: median(lengths) for key, lengths in by_stage.items()}
    usual = {kind: median(lengths) for kind, lengths in by_kind.items()}
    return simulate(
        measured.table, Lengths(lambda action: medians.get((action.stage, action.kind), usual[action.kind]))
    )
