"""Other tools' traces become runs, and our questions find in them what is known of them."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.perfetto import export_timeline
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.slow_ranks import find_slow_ranks
from phalanx.telemetry.trace_imports.importing import import_traces
from phalanx.telemetry.trace_imports.rows import uncovered, union
from tests.telemetry.trace_runs import SHARED

JOB, KINETO, FLIGHT = SHARED / "straggler-analysis", SHARED / "kineto", SHARED / "flight-recorder"
needs_job = pytest.mark.skipif(not JOB.exists(), reason="the job trace of ByteDance is not at hand")
needs_kineto = pytest.mark.skipif(not KINETO.exists(), reason="real Kineto traces are not at hand")
needs_flight = pytest.mark.skipif(not FLIGHT.exists(), reason="real flight records are not at hand")


def imported(run: Path, *sources: Path) -> Trace:
    import_traces(sources, run)
    return Trace.open(run)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return imported(tmp_path_factory.mktemp("job") / "run", JOB / "trace-AR.parquet")


@needs_job
def test_the_published_guilty_worker_comes_back(job: Trace) -> None:
    """Stage 0, data-parallel rank 0: forward 0.546 s against 0.218 s of the others."""
    found = find_slow_ranks(job)
    assert [(row["rank"], row["host"], row["stage"]) for row in found.slow] == [(0, "dp0-stage0", 0)]
    assert found.slow[0]["slow_share"] == 1.0 and found.slow[0]["excess"] > 1.0
    medians = job.sql(
        "select rank = 0 as guilty, round(median(end_ns - start_ns) / 1e9, 3) as s from spans"
        " where kind = 'forward' and rank in (select rank from stages where stage = 0) group by guilty order by guilty"
    )
    assert medians.to_pylist() == [{"guilty": False, "s": 0.218}, {"guilty": True, "s": 0.546}]


@needs_job
def test_parts_of_its_steps_add_up_within_a_hundredth(job: Trace) -> None:
    for row in job.between_spans().to_pylist():
        assert abs(row["parts_s"] + row["between_s"] - row["step_s"]) < 0.01 * row["step_s"]
    (breakdown,) = job.step_breakdown().to_pylist()
    exposed = sum(row["exposed_s"] for row in job.exposed_communication().to_pylist())
    assert exposed == pytest.approx(breakdown["wait_s"], rel=0.01)
    assert breakdown["other_s"] >= 0


@pytest.mark.campaign
@needs_job
def test_its_timeline_is_equal_in_order_to_the_published_one(job: Trace, tmp_path: Path) -> None:
    """It draws communication from when the last of its ranks has begun it, which is what our launch skew says."""
    export_timeline(job, tmp_path / "t.json.gz")
    published = {
        # five lanes for each rank; what a worker does the n-th time in a step has the number n
        (one["tid"] // 5, one["args"]["step"], one["name"], one["args"]["seq_id"]): one
        for one in _slices(JOB / "timeline-AR.json.gz")
    }
    ends: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    pause_us: dict[int, list[float]] = defaultdict(list)
    for one in _slices(tmp_path / "t.json.gz"):
        if one["cat"] in ("step", "wait"):
            continue
        rank, step, name = one["pid"], one["args"]["step"], one["name"].removeprefix(f"{one['cat']} ")
        other = published.pop((rank, step, name, one["args"]["micro_batch"]))
        ends[rank, step].append((one["ts"] + one["dur"], other["ts"] + other["dur"]))
        pause_us[step].append(ends[rank, step][-1][1] - ends[rank, step][-1][0])
        if one["cat"] in ("forward", "backward"):
            assert other["dur"] == pytest.approx(one["dur"], abs=0.01)
    assert not published and sum(map(len, ends.values())) == 117_216 and len(ends) == 16 * 44
    for spans in ends.values():
        in_our_order = [at_us for _, at_us in sorted(spans)]
        assert all(later >= earlier - 0.01 for earlier, later in pairwise(in_our_order))
    for step in pause_us.values():  # steps are laid out one after the other there too, with other pauses
        assert max(step) - min(step) < 0.01


@needs_job
def test_its_collectives_begin_when_the_last_rank_does_as_published(job: Trace) -> None:
    published = {
        (one["tid"] // 5, one["name"]): one["dur"] * 1e-6
        for one in _slices(JOB / "timeline-AR.json.gz")
        if one["args"]["step"] == 16 and one["name"] in ("params-all-gather", "grads-reduce-scatter")
    }
    launches = [one for one in job.launch_skew(16, 16).to_pylist() if one["name"] != "embedding-grads-all-reduce"]
    for one in launches:
        longest_s = max(published[rank, one["name"]] for rank in one["ranks"])
        assert one["together_s"] == pytest.approx(longest_s, abs=5e-6)  # times are floats of 4 bytes
    assert len(launches) == 2 * 4


def _slices(path: Path) -> list[dict[str, Any]]:
    timeline = json.loads(gzip.decompress(path.read_bytes()))
    events = timeline["traceEvents"] if isinstance(timeline, dict) else timeline
    return [one for one in events if one["ph"] == "X"]


@needs_job
def test_every_transfer_of_the_job_has_both_ends(job: Trace) -> None:
    transfers = job.transfers(16, 16).to_pylist()
    assert len(transfers) == 2 * 32 * 3 * 4
    stages = {row["rank"]: row["stage"] for row in job.groups().to_pylist()}
    for one in transfers:
        step = stages[one["to_rank"]] - stages[one["from_rank"]]
        assert step == (1 if one["name"] == "forward" else -1)
        assert one["receive_end_ns"] > one["send_start_ns"]


@needs_kineto
def test_a_real_kineto_trace_is_read(tmp_path: Path) -> None:
    trace = imported(tmp_path / "run", KINETO / "nccl_data.json.gz")
    assert [row["step"] for row in trace.step_times().to_pylist()] == [4, 5, 6]
    rows = {(row["kind"], row["name"]): row for row in trace.phase_times().to_pylist()}
    reduce = rows["collective", "all_reduce"]
    assert reduce["group"] == "default_pg" and reduce["spans_per_step"] == 5.0 and reduce["bytes_per_step"] > 1e8
    assert rows["backward", ""]["per_step_s"] > rows["forward", ""]["per_step_s"] > 0
    assert rows["optimizer", ""]["per_step_s"] > 0
    (between,) = trace.between_spans().to_pylist()
    assert abs(between["parts_s"] + between["between_s"] - between["step_s"]) < 0.01 * between["step_s"]
    assert trace.groups().to_pylist()[0]["ranks"] == [0, 1]


@needs_kineto
def test_ranks_of_one_job_share_a_run(tmp_path: Path) -> None:
    trace = imported(tmp_path / "run", KINETO / "sampled_rank-0.json.gz", KINETO / "sampled_rank-1.json.gz")
    assert trace.rank_averages()["rank"].to_pylist() == [0, 1]
    assert all(row["forward_s"] > 0 and row["wait_s"] > 0 for row in trace.rank_averages().to_pylist())


@needs_flight
@pytest.mark.parametrize("incident", ["gpu_error_1st", "lock_gil_1st"])
def test_real_flight_records_are_read(tmp_path: Path, incident: str) -> None:
    trace = imported(tmp_path / "run", FLIGHT / incident)
    ranks = trace.rank_averages()["rank"].to_pylist()
    # ranks 9 and 14 held Python's lock: their dumps have no entries
    assert ranks == [rank for rank in range(16) if incident == "gpu_error_1st" or rank not in (9, 14)]
    open_ = trace.sql("select count(distinct rank) as n from spans where kind = 'user' and name like 'not ended: %'")
    assert open_.to_pylist()[0]["n"] > 8
    groups = {(row["rank"], row["group"]): row for row in trace.groups().to_pylist()}
    assert any(group == "pipeline" for _, group in groups)
    members = {tuple(row["ranks"]) for row in trace.launch_skew().to_pylist()}
    assert all(len(ranks) > 1 for ranks in members)


def cpu_trace(rank: int) -> dict[str, Any]:
    """Of a CPU: two steps; no kernels, so operators and annotations speak."""

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur, "args": args}

    events = []
    for step in (3, 4):
        at = 10_000.0 * step
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, 10_000),
            event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 500),
            event("cpu_op", "aten::linear", at + 1000, 2000),
            event("cpu_op", "aten::addmm", at + 1100, 1800),
            event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 3000, 4000, tid=2),
            event("user_annotation", "gloo:all_reduce", at + 6000, 2000, tid=3),
            event("user_annotation", "Optimizer.step#AdamW.step", at + 8500, 1000),
            event("cpu_op", "aten::mul", at + 8600, 800),
        ]
    return {"distributedInfo": {"rank": rank}, "baseTimeNanoseconds": 10**18, "traceEvents": events}


def test_without_kernels_operators_take_their_place(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"worker{rank}.pt.trace.json").write_text(json.dumps(cpu_trace(rank)))
    trace = imported(tmp_path / "run", tmp_path / "worker0.pt.trace.json", tmp_path / "worker1.pt.trace.json")
    (row,) = trace.step_breakdown(3, 3).to_pylist()
    found = {kind: round(row[f"{kind}_s"] * 1e6) for kind in ("data", "forward", "backward", "optimizer", "wait")}
    assert found == {"data": 500, "forward": 2000, "backward": 4000, "optimizer": 800, "wait": 1000}
    assert row["step_s"] == pytest.approx(0.01) and row["rank_steps"] == 2
    assert trace.step_times()["end_ns"].to_pylist()[1] == 10**18 + 50_000_000


def flight_dump(rank: int, started: bool = True) -> dict[str, Any]:
    """Two collectives of a group of four; the ring of an odd rank has forgotten the first. The last has not ended."""
    entries = [
        {
            "record_id": number,
            "process_group": ("7", "mesh_tp"),
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "time_created_ns": 10**18 + number * 10**6 + rank * 1000,
            "time_discovered_started_ns": 10**18 + number * 10**6 + rank * 1000 + 5 if started else None,
            "time_discovered_completed_ns": 10**18 + number * 10**6 + 400_000 if started and number < 3 else None,
            "input_sizes": [[8, 4]],
            "input_dtypes": ["BFloat16"],
            "state": "completed" if number < 3 else "scheduled",
        }
        for number in range(1 + rank % 2, 4)
    ]
    config = {"7": {"name": "7", "desc": "mesh_tp", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "pg_config": config, "entries": entries}


@pytest.mark.parametrize("as_text", [False, True])
def test_rings_that_hold_other_parts_of_the_past_are_joined_by_number(tmp_path: Path, as_text: bool) -> None:
    for rank in range(4):
        record = flight_dump(rank)
        content = json.dumps(record).encode() if as_text else pickle.dumps(record, protocol=2)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
    trace = imported(tmp_path / "run", *sorted(tmp_path.glob("nccl*")))
    skew = {row["micro_batch"]: row for row in trace.launch_skew().to_pylist()}
    assert {number: row["ranks_seen"] for number, row in skew.items()} == {1: 2, 2: 4, 3: 4}
    assert skew[2]["skew_s"] == pytest.approx(3e-6) and skew[2]["last_rank"] == 3 and skew[2]["ranks"] == [0, 1, 2, 3]
    assert skew[2]["group"] == "tensor" and skew[2]["bytes"] == 64
    hung = trace.sql("select distinct name from spans where kind = 'user'").to_pylist()
    assert hung == [{"name": "not ended: all_reduce tensor"}]


def test_a_dump_that_is_no_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dump_0").write_bytes(pickle.dumps({"entries": [Path]}, protocol=2))
    with pytest.raises(UserError, match="not a dump of a flight recorder"):
        import_traces([tmp_path / "dump_0"], tmp_path / "run")


INSPECTED = {
    "header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1},
    "metadata": {"dump_timestamp_us": 1748030377748202, "hostname": "node-a", "pid": 1},
    "coll_perf": {
        "coll": "ReduceScatter",
        "coll_sn": 1407,
        "coll_msg_size_bytes": 17179869184,
        "coll_exec_time_us": 61974,
        "coll_busbw_gbs": 485.119099,
    },
}


def test_nccl_inspector_files_are_read(tmp_path: Path) -> None:
    verbose = json.loads(json.dumps(INSPECTED))
    verbose["header"]["rank"] = 3
    verbose["coll_perf"]["event_trace_ts"] = {
        "kernel_events": [{"channel_id": 0, "kernel_start_ts": 1748030377686000, "kernel_stop_ts": 1748030377748000}]
    }
    other = json.loads(json.dumps(INSPECTED))
    other["header"] |= {"n_ranks": 2, "rank": 0, "id": "0x1"}
    (tmp_path / "a.log").write_text(json.dumps(INSPECTED) + "\n" + json.dumps(other) + "\n{torn")
    (tmp_path / "b.log").write_text(json.dumps(verbose, indent=2))
    assert import_traces([tmp_path / "a.log", tmp_path / "b.log"], tmp_path / "run")[:2] == ("nccl-inspector", 2)
    trace = Trace.open(tmp_path / "run")
    rows = trace.sql("select * from spans where kind = 'collective' order by rank").to_pylist()
    assert [(row["rank"], row["host"], row["name"]) for row in rows] == [
        (2, "node-a", "reduce_scatter"),
        (3, "node-a", "reduce_scatter"),
    ]
    assert rows[0]["end_ns"] == 1748030377748202_000 and rows[0]["end_ns"] - rows[0]["start_ns"] == 61_974_000
    assert rows[1]["end_ns"] == 1748030377748000_000 and rows[1]["bytes"] == 17179869184


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.bin", b"\x00\x01", "no format"),
        ("a.json", b"{torn", "cannot be read as JSON"),
        ("a.json.gz", b"\x1f\x8b torn", "cannot be read as JSON"),
        ("a.json", json.dumps({"traceEvents": []}).encode(), "no spans were found"),
        ("dump", pickle.dumps({"entries": []}, protocol=2), "does not say its rank"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=problem):
        import_traces([tmp_path / name], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change",
    [{"pid": None, "ts": "x"}, {"args": [1]}, {"name": 5}, {"ts": float("inf")}, {"cat": "kernel", "tid": {}}],
)
def test_a_strange_event_is_refused_in_words(tmp_path: Path, change: dict[str, Any]) -> None:
    trace = cpu_trace(0)
    trace["traceEvents"][5] |= change
    (tmp_path / "t.json").write_text(json.dumps(trace))
    try:
        import_traces([tmp_path / "t.json"], tmp_path / "run")
    except UserError as error:
        assert "no whole traces of kineto" in str(error)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("host", ["../../outside", "/etc", "", ".hidden", "a b/c", "x" * 300])
def test_a_name_of_a_host_stays_within_the_run(tmp_path: Path, host: str) -> None:
    own = json.loads(json.dumps(INSPECTED))
    own["metadata"]["hostname"] = host
    (tmp_path / "a.log").write_text(json.dumps(own))
    trace = imported(tmp_path / "run", tmp_path / "a.log")
    assert len(trace.hosts) == 1 and len(list((tmp_path / "run/telemetry/spans").iterdir())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "run"]


def test_a_run_is_never_mixed_with_another(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text(json.dumps(cpu_trace(0)))
    with pytest.raises(UserError, match="second trace of rank 0"):
        import_traces([tmp_path / "one.json", tmp_path / "two.json"], tmp_path / "run")
    import_traces([tmp_path / "one.json"], tmp_path / "run")
    with pytest.raises(UserError, match="telemetry already"):
        import_traces([tmp_path / "one.json"], tmp_path / "run")
    with pytest.raises(UserError, match="is not there"):
        import_traces([tmp_path / "none"], tmp_path / "other")


@pytest.mark.parametrize(
    ("intervals", "busy", "expected"),
    [
        ([(0, 10)], [], [(0, 0, 10)]),
        ([(0, 10)], [(2, 4), (6, 7)], [(0, 0, 2), (0, 4, 6), (0, 7, 10)]),
        ([(0, 10)], [(-5, 3), (8, 20)], [(0, 3, 8)]),
        ([(0, 10), (5, 12), (6, 8)], [], [(0, 0, 10), (1, 10, 12)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 0, 5), (1, 25, 30)]),
        ([(0, 10), (4, 30)], [(2, 20)], [(0, 0, 2), (1, 20, 30)]),
        ([(3, 3)], [], []),
    ],
)
def test_what_nothing_covers(intervals: list[Any], busy: list[Any], expected: list[Any]) -> None:
    assert list(uncovered(intervals, busy)) == expected


def test_intervals_that_touch_become_one() -> None:
    assert union([(5, 9), (0, 3), (3, 4), (8, 10)]) == [(0, 4), (5, 10)]
    assert union([(5, 9), (0, 3)], gap_ns=2) == [(0, 9)]
