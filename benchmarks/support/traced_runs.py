"""Run folders with telemetry of which everything is known: a small job with a slow rank, and one of 12,288 ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from phalanx.core.layout import Layout
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.timeline import Lengths, simulate
from phalanx.run.incidents.incident_pages import store
from phalanx.run.incidents.report import AnyFact, Decided, Incident, IncidentOutcome, Lost, Seen, Took
from phalanx.telemetry.counters import COUNTERS
from phalanx.telemetry.span_store import PARQUET, SPANS, STEPS, sums, write_part
from phalanx.telemetry.span_writer import note_incident
from phalanx.telemetry.spans import KINDS

MS = 1_000_000
BEGIN_NS = 1_760_000_000 * 10**9
LAYOUT = Layout(pipeline=2, shard=2, tensor=2)
"""Ranks 0 to 3 are the first stage, 4 to 7 the second; two to a host."""
MICRO_BATCHES = 4
STEP_MS = 480.0
_NONE = {"attempt": 0, "name": "", "group": "", "chunk": -1, "micro_batch": -1, "peer": -1, "bytes": 0}


def host_of(rank: int) -> str:
    """Two ranks to a host."""
    return f"node-{rank // 2}"


def traced_run(
    folder: Path,
    *,
    steps: int = 12,
    slow: Mapping[int, float] | None = None,
    ends: Mapping[int, int] | None = None,
    began_ns: int = BEGIN_NS,
    layout: Layout = LAYOUT,
) -> Path:
    """A run as training and the hosts' writers leave it.

    Args:
        slow: factors of forward and backward by rank; None: rank 5 takes 1.4 times as long.
        ends: the step after whose batch a rank does nothing any more; its peers wait in that step.
        began_ns: Unix time of the first step.
    """
    slow = {5: 1.4} if slow is None else slow
    telemetry = folder / "telemetry"
    rows = [
        row
        for step in range(1, steps + 1)
        for row in _step(layout, step, began_ns + round((step - 1) * STEP_MS * MS), slow, ends or {})
    ]
    for number, host in enumerate(sorted({row["host"] for row in rows})):
        own = pa.Table.from_pylist([row for row in rows if row["host"] == host], schema=SPANS)
        own = own.sort_by([("rank", "ascending"), ("start_ns", "ascending")])
        for name, part in zip(("spans", "phases", "steps"), (own, *sums(own)), strict=True):
            write_part(telemetry, name, host, part, 0, number)
        write_part(telemetry, "counters", host, _counters(host, number, began_ns, steps), 0, 90 + number)
    _write_groups(telemetry, layout)
    _write_run_files(folder, layout, steps, began_ns, 2 * steps if ends else steps)
    slow_rank = max(slow, key=lambda rank: slow[rank], default=None)
    if slow_rank is not None:
        at_ns = began_ns + round(7.5 * STEP_MS * MS)
        note_incident(telemetry, "slow rank", at_ns, rank=slow_rank, host=host_of(slow_rank), excess=0.4)
    return folder


def _step(
    layout: Layout, step: int, begin_ns: int, slow: Mapping[int, float], ends: Mapping[int, int]
) -> list[dict[str, Any]]:
    """One step of 1F1B: passes with a wait of tensor ranks in each, messages between stages, reduction, update."""
    table = make_table("1f1b", layout.pipeline, 1, MICRO_BATCHES)
    is_stuck = any(last <= step for last in ends.values())
    rows: list[dict[str, Any]] = []
    for column in range(layout.world_size // layout.pipeline):
        members = [stage * (layout.world_size // layout.pipeline) + column for stage in range(layout.pipeline)]
        ran = simulate(
            table,
            Lengths(
                lambda action: (
                    (22.0 if action.kind == "F" else 41.0) * slow.get(members[action.stage], 1.0)  # noqa: B023
                    + 0.4 * ((step * 7 + members[action.stage]) % 3)  # noqa: B023
                ),
                send=2.0,
            ),
        )
        for rank, timed in zip(members, ran.ranks, strict=True):
            rows += _of_rank(layout, rank, step, begin_ns, timed, members, is_stuck, ends)
    return rows


def _of_rank(
    layout: Layout,
    rank: int,
    step: int,
    begin_ns: int,
    timed: Sequence[Any],
    members: Sequence[int],
    is_stuck: bool,
    ends: Mapping[int, int],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(kind: str, start_ms: float, end_ms: float, **more: Any) -> None:
        times = {"start_ns": begin_ns + round(start_ms * MS), "end_ns": begin_ns + round(end_ms * MS)}
        rows.append(_NONE | {"host": host_of(rank), "rank": rank, "step": step, "kind": kind} | times | more)

    if any(last < step for last in ends.values()):
        return []
    add("data", 0.0, 3.0)
    if ends.get(rank) == step:
        return rows
    at, done_ms = 3.0, 3.0
    stage = members.index(rank)
    for action, begin, end in timed:
        if is_stuck and begin > 60:
            return rows
        begin, end = at + begin, at + end
        if begin - done_ms > 0.5:
            add("wait", done_ms, begin, name="activations", group="pipeline", micro_batch=action.micro_batch)
        what = "activations" if action.kind == "F" else "gradients"
        message = {"group": "pipeline", "micro_batch": action.micro_batch, "bytes": 8 << 20}
        before = stage - 1 if action.kind == "F" else stage + 1
        after = stage + 1 if action.kind == "F" else stage - 1
        if 0 <= before < len(members):
            add("collective", begin - 2.0, begin, name=f"recv {what}", peer=members[before], **message)
        add("forward" if action.kind == "F" else "backward", begin, end, chunk=0, micro_batch=action.micro_batch)
        add("collective", end - 3.0, end - 1.0, name="all_gather", group="tensor", bytes=4 << 20)
        add("wait", end - 2.0, end - 1.0, name="all_gather", group="tensor")
        if 0 <= after < len(members):
            add("collective", end, end + 2.0, name=f"send {what}", peer=members[after], **message)
        done_ms = end
    if is_stuck:
        return rows
    add("collective", done_ms, 430.0, name="reduce_scatter", group="shard", bytes=64 << 20)
    add("wait", done_ms, 430.0, name="reduce_scatter", group="shard")
    add("optimizer", 430.0, 452.0, name="AdamW")
    if step % 5 == 0:
        add("snapshot", 452.0, 466.0)
    add("step", 0.0, 470.0)
    return rows


def _write_groups(telemetry: Path, layout: Layout) -> None:
    (telemetry / "groups").mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"rank": rank, "attempt": 0, "group": axis, "ranks": members})
        for axis in ("pipeline", "shard", "tensor")
        for members in layout.groups([axis])  # type: ignore[list-item]
        for rank in members
        if len(members) > 1
    ]
    (telemetry / "groups" / "node-0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (telemetry / "clocks").mkdir(exist_ok=True)
    clock = {"host": "node-1", "at_ns": BEGIN_NS, "offset_ns": 40_000.0, "error_ns": 25_000.0}
    (telemetry / "clocks" / "node-1.jsonl").write_text(json.dumps(clock) + "\n")


def _counters(host: str, number: int, began_ns: int, steps: int) -> pa.Table:
    seconds = int(steps * STEP_MS / 1e3) + 2
    rows = []
    for second in range(seconds):
        end_ns = began_ns + second * 10**9
        wave = float(np.sin(second / 3 + number))
        of_host = {
            "cpu_utilisation_ratio": 0.55 + 0.1 * wave,
            "memory_used_bytes": 41e9 + 1e8 * second,
            "memory_available_bytes": 23e9 - 1e8 * second,
            "network_receive_bytes_total": 3e9 * second,
            "network_transmit_bytes_total": 2.8e9 * second,
            "network_errors_total": 0.0,
            "temperature_celsius": 61.0 + 2 * wave,
        }
        rows += [(host, 0, end_ns, -1, name, value) for name, value in of_host.items()]
        for gpu in (0, 1):
            of_gpu = {
                "gpu_utilisation_ratio": 0.93 + 0.03 * wave,
                "gpu_temperature_celsius": 68.0 + 14 * (number == 2 and gpu == 1) + wave,
                "gpu_power_watts": 610.0 + 20 * wave,
                "gpu_memory_used_bytes": 62e9,
                "gpu_sm_clock_hertz": 1.98e9 - 0.5e9 * (number == 2 and gpu == 1),
            }
            rows += [(host, 0, end_ns, gpu, name, value) for name, value in of_gpu.items()]
    return pa.Table.from_pylist([dict(zip(COUNTERS.names, row, strict=True)) for row in rows], schema=COUNTERS)


def _write_run_files(folder: Path, layout: Layout, steps: int, began_ns: int, wanted: int = 0) -> None:
    parallel = {"pipeline": layout.pipeline, "shard": layout.shard, "tensor": layout.tensor, "schedule": "1f1b"}
    config = {"parallel": parallel, "train": {"steps": wanted or steps, "global_batch": 8, "micro_batch": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    lines: list[dict[str, Any]] = [{"kind": "start", "step": 0, "time": began_ns / 1e9}]
    for step in range(1, steps + 1):
        figures = {"loss": 4.0 - 0.1 * step, "grad_norm": 1.0, "tokens": 8192 * step, "tokens_per_s": 17_000.0}
        end_s = (began_ns + step * STEP_MS * MS) / 1e9
        lines.append({"kind": "step", "step": step, **figures, "step_s": 0.47, "mfu": 0.41, "time": end_s})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "prediction.json").write_text(json.dumps(prediction(layout)))


def prediction(layout: Layout = LAYOUT) -> dict[str, Any]:
    """What a run keeps of its prediction, as `phalanx.train.reports.prediction_check.comparison` makes it."""
    parts = [
        ("compute/layers/forward", 0.088),
        ("compute/layers/backward", 0.164),
        ("pipeline/bubble", 0.063),
        ("tensor/exposed", 0.011),
        ("data/tail", 0.024),
        ("optimizer", 0.021),
        ("loader", 0.001),
    ]
    step_s = sum(seconds for _, seconds in parts)
    kinds = {"parameters": 6e9, "gradients": 6e9, "optimizer": 12e9, "activations": 20e9, "workspace": 2e9}
    kinds |= {"loss_head": 1e9, "communication": 1e9, "fragmentation": 1e9}
    grouped = {"passes_s": 0.252, "waiting_s": 0.098, "optimizer_s": 0.021, "loader_s": 0.001}
    measured = {"passes_s": 0.27, "waiting_s": 0.16, "optimizer_s": 0.022, "loader_s": 0.003, "between_steps_s": 0.01}
    return {
        "version": 1,
        "expected": {
            "source": "phalanx plan, cluster h100",
            "step_s": step_s,
            "parts": grouped,
            "memory_bytes": 49e9,
            "layout": str(layout),
            "micro_batch": 1,
            "interval_s": [0.33, 0.44],
        },
        "measured": {
            "first": 6,
            "last": 12,
            "step_s": 0.47,
            "parts": measured,
            "memory_bytes": 51e9,
            "with_libraries": False,
        },
        "step_difference_ratio": 0.47 / step_s - 1,
        "memory_difference_ratio": 51 / 49 - 1,
        "most_off": "waiting",
        "misfit": "",
        "prediction": {
            "cluster": "h100",
            "device": "H100 SXM",
            "devices": layout.world_size,
            "step_s": step_s,
            "step_interval_s": [0.33, 0.44],
            "tokens_per_s": 22_000.0,
            "mfu_ratio": 0.52,
            "device_memory_bytes": 80e9,
            "parts": [
                {"path": path, "seconds": seconds, "mark": "derived", "source": "roofline of the device"}
                for path, seconds in parts
            ],
            "hidden": [{"path": "data/overlapped", "seconds": 0.03, "mark": "derived", "source": "bandwidth"}],
            "memory": [
                {"pipeline_rank": rank, **{f"{kind}_bytes": size for kind, size in kinds.items()}, "total_bytes": 49e9}
                for rank in range(layout.pipeline)
            ],
            "notes": ["the loader was measured on one core"],
        },
    }


def large_run(
    folder: Path, *, ranks: int = 12_288, steps: int = 100, spans_of: Sequence[int] = (), slow: Sequence[int] = (4711,)
) -> Path:
    """A run of very many ranks as sums by rank and step; eight ranks to a host, and spans of the last step of some.

    Args:
        spans_of: steps whose spans are there as well, about 24 for each rank.
        slow: ranks whose passes take 1.3 times as long.
    """
    layout = Layout(pipeline=8, shard=ranks // 64, tensor=8)
    telemetry, per_host = folder / "telemetry", 8
    random = np.random.default_rng(0)
    for first in range(0, ranks, per_host):
        host, number = f"gpu-{first // per_host:04d}", first // per_host
        rank = np.repeat(np.arange(first, first + per_host), steps)
        step = np.tile(np.arange(1, steps + 1), per_host)
        factor = np.where(np.isin(rank, slow), 1.3, 1.0) * random.normal(1.0, 0.01, len(rank))
        ns = {kind: np.zeros(len(rank), np.int64) for kind in KINDS}
        ns["forward"] = (600 * MS * factor).astype(np.int64)
        ns["backward"] = (1200 * MS * factor).astype(np.int64)
        ns["data"] = np.full(len(rank), 4 * MS)
        ns["optimizer"] = np.full(len(rank), 60 * MS)
        ns["step"] = np.full(len(rank), 3000 * MS)
        ns["wait"] = ns["step"] - ns["forward"] - ns["backward"] - ns["data"] - ns["optimizer"] - 20 * MS
        end_ns = BEGIN_NS + step * 3000 * MS
        names = pa.array(np.full(len(rank), host)).dictionary_encode()
        columns = [names, np.zeros(len(rank), np.int32), rank.astype(np.int32), step, end_ns, *ns.values()]
        table = pa.Table.from_arrays(
            [column if isinstance(column, pa.Array) else pa.array(column) for column in columns], schema=STEPS
        )
        _write(telemetry, "steps", host, table, steps, number)
        _write(telemetry, "counters", host, _counters(host, number, BEGIN_NS, 4), 0, number)
        if len(spans_of):
            rows = [
                row
                for one in range(first, first + per_host)
                for at in spans_of
                for row in _large_spans(host, one, at, ranks // 8, one in slow)
            ]
            _write(telemetry, "spans", host, pa.Table.from_pylist(rows, schema=SPANS), max(spans_of), number)
    (telemetry / "groups").mkdir()
    with (telemetry / "groups" / "gpu-0000.jsonl").open("w") as file:
        for axis in ("pipeline", "shard", "tensor"):
            for members in layout.groups([axis]):  # type: ignore[list-item]
                for one in members:
                    line = {"rank": one, "attempt": 0, "group": axis, "ranks": members}
                    if axis != "shard" or one in members[:1]:  # a line of 192 numbers for each rank is 10 MB
                        file.write(json.dumps(line) + "\n")
    _write_run_files(folder, layout, steps, BEGIN_NS)
    return folder


def _large_spans(host: str, rank: int, step: int, per_stage: int, is_slow: bool) -> list[dict[str, Any]]:
    base_ns = BEGIN_NS + (step - 1) * 3000 * MS
    own = _NONE | {"host": host, "rank": rank, "step": step}
    rows = [own | {"kind": "step", "start_ns": base_ns, "end_ns": base_ns + 3000 * MS}]
    at = base_ns + rank // per_stage * 40 * MS
    for micro_batch in range(8):
        for kind, length_ms in (("forward", 75), ("backward", 150)):
            end = at + round(length_ms * (1.3 if is_slow else 1.0) * MS)
            rows.append(own | {"kind": kind, "chunk": 0, "micro_batch": micro_batch, "start_ns": at, "end_ns": end})
            at = end + 2 * MS
    rows.append(own | {"kind": "optimizer", "start_ns": base_ns + 2900 * MS, "end_ns": base_ns + 2960 * MS})
    return rows


def _write(telemetry: Path, table: str, host: str, rows: pa.Table, last_step: int, number: int) -> None:
    path = telemetry / table / host / f"a0-s1-s{last_step}-t0-t0-{number}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, **PARQUET)


def add_reports(folder: Path, began_ns: int = BEGIN_NS) -> None:
    """Two incident reports of a driver in a run's folder: one that recovered, with evidence, one that is open."""
    at_s = began_ns / 1e9 + 2.0
    seen = Seen(unix_s=at_s, by="executor", what="killed by SIGKILL", host="node-3", rank=6, step=5, is_own=True)
    done: list[AnyFact] = [
        seen,
        Decided(unix_s=at_s + 0.2, what="restart in place", why="its host is well"),
        Took(unix_s=at_s, phase="detect", seconds=0.8),
        Took(unix_s=at_s + 0.8, phase="stop", seconds=1.1),
        Took(unix_s=at_s + 1.9, phase="start", seconds=6.5),
        Lost(unix_s=at_s + 9, from_step=5, to_step=4, seconds=70.0),
        IncidentOutcome(unix_s=at_s + 9, result="recovered", summary="rank 6 was killed; <b>restarted</b> in place"),
    ]
    first = Incident(number=1, job="job", attempt=1, facts=done, evidence=["rank-6.txt"])
    store(folder, first)
    (folder / "incidents" / "0001").mkdir()
    (folder / "incidents" / "0001" / "rank-6.txt").write_text("the last lines of <rank> 6\n")
    (folder / "incidents" / "0001" / "secret.txt").write_text("nobody named it\n")
    later = Seen(unix_s=at_s + 20, by="driver", what="not heard of for 5 s", host="node-1")
    store(folder, Incident(number=2, job="job", attempt=2, facts=[later]))
