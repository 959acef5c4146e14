"""Job traces of ByteDance's straggler study (arXiv 2505.05713, github.com/ByteDance-Seed/StragglerAnalysis).

A row is one operator of one worker in one step: ``dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc,
mb_id, gmc``. Times are seconds since the beginning of the step, the same for all workers, so that steps are laid one
after the other here. A worker is all tensor-parallel ranks of a place; it is named by the first of them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq

from phalanx.telemetry.spans import NONE, Kind
from phalanx.telemetry.trace_imports.rows import ImportedRank, ImportedSpan

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc")

_KINDS: dict[str, Kind] = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "optimizer": "optimizer",
    "optimizer-clip-main-grad": "optimizer",
    "gc": "user",
}
_GROUPS = {
    "forward-send": "pipeline",
    "forward-recv": "pipeline",
    "backward-send": "pipeline",
    "backward-recv": "pipeline",
    "params-all-gather": "shard",
    "grads-reduce-scatter": "shard",
    "layernorm-grads-all-reduce": "tensor",
    "embedding-grads-all-reduce": "embedding",
}
_TO_NEXT = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}


def is_bytedance_trace(path: Path) -> bool:
    """Whether it is a Parquet file with such rows."""
    if path.suffix != ".parquet":
        return False
    return set(COLUMNS) <= set(pq.read_schema(path).names)


def read_bytedance_trace(path: Path) -> dict[int, ImportedRank]:
    """All workers of a job, by rank.

    Steps keep their numbers; the first begins at Unix time 0, since the trace does not say when it was.
    """
    rows = pq.read_table(path, columns=list(COLUMNS)).to_pylist()
    place = {row["rank"]: (row["dp_rank"], row["stage"]) for row in rows}
    rank_at = {at: rank for rank, at in place.items()}
    stages = 1 + max(stage for _, stage in place.values())
    ranks = {rank: ImportedRank(f"dp{dp}-stage{stage}") for rank, (dp, stage) in place.items()}
    for rank, (dp, stage) in place.items():
        column = tuple(rank_at[dp, one] for one in range(stages) if (dp, one) in rank_at)
        ranks[rank].groups = {
            "pipeline": column,
            "shard": tuple(rank_at[at] for at in sorted(rank_at) if at[1] == stage),
        }
        if stage in (0, stages - 1) and stages > 1:
            ranks[rank].groups["embedding"] = (column[0], column[-1])

    begins_ns = _begins_ns(rows)
    extent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows:
        rank, step, optype = row["rank"], row["step"], row["optype"]
        start_ns = begins_ns[step] + round(row["start_ts"] * 1e9)
        end_ns = start_ns + round(row["duration"] * 1e9)
        extent[rank, step] += (start_ns, end_ns)
        dp, stage = place[rank]
        peer = rank_at.get((dp, (stage + _TO_NEXT[optype]) % stages), NONE) if optype in _TO_NEXT else NONE
        ranks[rank].spans.append(
            ImportedSpan(
                step,
                _KINDS.get(optype, "collective" if optype in _GROUPS else "user"),
                optype,
                start_ns,
                end_ns,
                _GROUPS.get(optype, ""),
                chunk=row["mc"],
                micro_batch=row["seq_id"],
                peer=peer,
            )
        )
    for (rank, step), times_ns in extent.items():
        ranks[rank].spans.append(ImportedSpan(step, "step", "", begins_ns[step], max(times_ns)))
    return ranks


def _begins_ns(rows: list[dict[str, float]]) -> dict[int, int]:
    """When each step began, one after the other."""
    lengths_ns: dict[int, int] = defaultdict(int)
    for row in rows:
        end_ns = round((row["start_ts"] + row["duration"]) * 1e9)
        lengths_ns[int(row["step"])] = max(lengths_ns[int(row["step"])], end_ns)
    begins_ns, at_ns = {}, 0
    for step in sorted(lengths_ns):
        begins_ns[step] = at_ns
        at_ns += lengths_ns[step]
    return begins_ns
