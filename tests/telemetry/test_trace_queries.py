"""Questions about a run give what its spans hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.run_tables import TABLES, VIEWS
from phalanx.telemetry.span_store import sums
from phalanx.telemetry.span_writer import HostWriter, note_incident
from phalanx.telemetry.spans import Recorder
from tests.telemetry.trace_runs import GROUPS, MS, four_ranks, span, table, write_run


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    metrics = [
        {
            "kind": "step",
            "step": step,
            "loss": 4.0 - step,
            "mfu": 0.5 - step / 100,
            "tokens_per_s": 10.0,
            "step_s": 0.19,
        }
        for step in range(6)
    ]
    return write_run(
        tmp_path_factory.mktemp("run"), four_ranks(), GROUPS, [*metrics, {"kind": "checkpoint", "step": 3}]
    )


def only(table: Any) -> dict[str, Any]:
    (row,) = table.to_pylist()
    return row


def test_the_parts_of_a_step_add_up_to_the_step(trace: Trace) -> None:
    found = only(trace.step_breakdown())
    expected = {"data": 5, "forward": 20, "backward": 40, "wait": 105, "optimizer": 10, "snapshot": 0, "other": 10}
    for kind, ms in expected.items():
        assert found[f"{kind}_s"] == pytest.approx(ms / 1e3), kind
    assert found["step_s"] == pytest.approx(0.19) and found["rank_steps"] == 24
    assert sum(found[f"{kind}_s"] for kind in expected) == pytest.approx(found["step_s"], rel=1e-9)
    for row in trace.between_spans().to_pylist():
        assert row["between_s"] == pytest.approx(0.010) and row["twice_s"] == pytest.approx(0.0, abs=1e-9)


def test_what_lies_inside_a_part_counts_once() -> None:
    rows = [
        span(0, 0, "step", 0, 100),
        span(0, 0, "wait", 12, 15),  # in the order in which they end
        span(0, 0, "wait", 20, 28),
        span(0, 0, "forward", 10, 40),
        span(0, 0, "wait", 41, 44),  # between two of them
        span(0, 0, "forward", 50, 60),  # computed again, for a backward
        span(0, 0, "wait", 55, 56),
        span(0, 0, "backward", 45, 90),
        span(1, 0, "forward", 0, 100),  # of another rank, at the same time
    ]
    _, steps = sums(table(rows))
    first, second = steps.to_pylist()
    assert (first["forward_ns"], first["backward_ns"], first["wait_ns"]) == (28 * MS, 35 * MS, 15 * MS)
    assert first["step_ns"] == 100 * MS
    assert second["forward_ns"] == 100 * MS
    assert sums(table(reversed(rows)))[1].sort_by("rank").to_pylist() == [first, second]


def test_parts_that_overlap_are_told_apart_from_time_between_spans(tmp_path: Path) -> None:
    rows = [span(0, 0, "step", 0, 100), span(0, 0, "forward", 10, 50), span(0, 0, "backward", 40, 80)]
    found = only(write_run(tmp_path, rows).between_spans())
    assert found["parts_s"] == pytest.approx(0.080)
    assert found["between_s"] == pytest.approx(0.030)
    assert found["twice_s"] == pytest.approx(0.010)


def test_exposed_communication_by_group_adds_up_to_the_wait(trace: Trace) -> None:
    rows = {row["group"]: row for row in trace.exposed_communication().to_pylist()}
    assert rows.keys() == {"pipeline", "shard"}
    assert rows["pipeline"]["exposed_s"] == pytest.approx(0.004)
    assert rows["shard"]["exposed_s"] == pytest.approx(0.101) and rows["shard"]["bytes_per_step"] == 8192
    assert sum(row["exposed_s"] for row in rows.values()) == pytest.approx(only(trace.step_breakdown())["wait_s"])
    assert rows["shard"]["share_of_step"] == pytest.approx(101 / 190)


def test_each_type_of_span_has_its_times(trace: Trace) -> None:
    rows = {(row["kind"], row["name"]): row for row in trace.phase_times().to_pylist()}
    forward = rows["forward", ""]
    assert forward["ranks"] == 4 and forward["spans_per_step"] == 1.0 and forward["gb_per_s"] is None
    assert forward["per_step_s"] == forward["mean_s"] == forward["longest_s"] == pytest.approx(0.020)
    assert rows["collective", "send activations"]["gb_per_s"] == pytest.approx(4096 / (4 * MS))
    assert rows["collective", "send activations"]["spans_per_step"] == 0.5


def test_the_bubble_of_a_stage_is_its_wait_for_other_stages(trace: Trace) -> None:
    rows = trace.pipeline_bubble().to_pylist()
    assert [(row["stage"], row["ranks"]) for row in rows] == [(0, 2), (1, 2)]
    assert rows[0]["bubble"] == pytest.approx(4 / 190) and rows[0]["compute_s"] == pytest.approx(0.060)


def test_figures_of_steps_are_joined_with_spans(trace: Trace) -> None:
    rows = trace.mfu(1, 4).to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["mfu"] == pytest.approx(0.49) and rows[0]["loss"] == 3.0
    assert rows[0]["not_compute_s"] == pytest.approx(0.130)
    assert rows[0]["end_ns"] == 1000 * 10**9 + 390 * MS


def test_data_wait_and_step_times(trace: Trace) -> None:
    assert len(trace.data_wait()) == len(trace.step_times()) == 6
    row = trace.data_wait().to_pylist()[0]
    assert row["mean_s"] == row["longest_s"] == pytest.approx(0.005) and row["share_of_step"] == pytest.approx(5 / 190)
    assert {row["rank"]: row["forward_s"] for row in trace.rank_averages(2, 3).to_pylist()} == pytest.approx(
        dict.fromkeys(range(4), 0.020)
    )


def test_launch_skew_is_over_the_members_of_a_group(tmp_path: Path) -> None:
    rows = four_ranks(2, slow={1: 1.5})
    trace = write_run(tmp_path, rows, GROUPS)
    skew = trace.launch_skew().to_pylist()
    assert {(row["step"], tuple(row["ranks"])) for row in skew} == {(s, r) for s in (0, 1) for r in ((0, 1), (2, 3))}
    by_ranks = {tuple(row["ranks"]): row for row in skew}
    late = by_ranks[0, 1]
    assert late["skew_s"] == pytest.approx(0.030) and (late["first_rank"], late["last_rank"]) == (0, 1)
    assert late["together_s"] == pytest.approx(0.170 - 0.099) and late["error_s"] == 0.0  # one host, one clock
    assert by_ranks[2, 3]["skew_s"] == 0.0
    worst = trace.skew_by_step(0, 0).to_pylist()
    assert [(row["group"], row["collectives"], row["largest_s"]) for row in worst] == [
        ("shard", 2, pytest.approx(0.030))
    ]


def test_the_nth_collective_of_a_name_is_the_same_on_all_members(tmp_path: Path) -> None:
    rows = []
    for rank, late_ms in ((0, 0.0), (1, 2.0)):
        rows.append(span(rank, 0, "step", 0, 100))
        for at in (10.0, 30.0, 50.0):
            gather = {"name": "all_gather", "group": "shard"}
            rows.append(span(rank, 0, "collective", at + late_ms * at / 10, at + 8 + late_ms * at / 10, **gather))
    skew = write_run(tmp_path, rows, {"shard": [[0, 1]]}).launch_skew().to_pylist()
    assert [row["skew_s"] for row in skew] == pytest.approx([0.002, 0.006, 0.010])
    assert [row["occurrence"] for row in skew] == [1, 2, 3]


def test_a_send_has_its_receive(trace: Trace) -> None:
    rows = trace.transfers().to_pylist()
    assert len(rows) == 12
    assert {(row["from_rank"], row["to_rank"], row["name"]) for row in rows} == {
        (0, 2, "activations"),
        (1, 3, "activations"),
    }
    assert all(row["bytes"] == 4096 and row["micro_batch"] == 0 for row in rows)


def test_names_of_transfers_may_say_the_peer(tmp_path: Path) -> None:
    rows = [span(rank, 0, "step", 0, 100) for rank in (0, 1)]
    for number, at in enumerate((10.0, 20.0)):  # both ways at once, twice
        for rank in (0, 1):
            pair = {"group": "pipeline", "peer": 1 - rank, "bytes": 100 * (number + 1)}
            rows.append(span(rank, 0, "collective", at, at + 5, name=f"send to rank {1 - rank}", **pair))
            rows.append(span(rank, 0, "collective", at, at + 6, name=f"receive from rank {1 - rank}", **pair))
    found = write_run(tmp_path, rows).transfers().to_pylist()
    assert sorted((row["from_rank"], row["to_rank"], row["occurrence"], row["bytes"]) for row in found) == [
        (0, 1, 1, 100),
        (0, 1, 2, 200),
        (1, 0, 1, 100),
        (1, 0, 2, 200),
    ]


def test_clocks_of_hosts_are_aligned_between_estimates(tmp_path: Path) -> None:
    rows = four_ranks(4)
    trace = write_run(tmp_path, rows, {"pipeline": [[0, 2], [1, 3]]})
    clocks = tmp_path / "telemetry" / "clocks"
    clocks.mkdir()
    begin_ns = 1000 * 10**9
    lines = [
        {"host": "host1", "at_ns": begin_ns, "offset_ns": 10 * MS, "error_ns": 5000},
        {"host": "host1", "at_ns": begin_ns + 400 * MS, "offset_ns": 14 * MS, "error_ns": 7000},
        {"host": "host0", "at_ns": begin_ns, "offset_ns": 0, "error_ns": 0},
    ]
    (clocks / "host1.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"host": "ho')
    found = (
        trace.connect()
        .sql(
            "select a.start_ns - s.start_ns as moved, a.end_ns - a.start_ns as length, a.error_ns, a.step"
            " from spans s join aligned_spans a using (rank, step, kind) where rank = 2 and kind = 'step' order by step"
        )
        .fetchall()
    )
    # the drift between two estimates is spread evenly; the last one holds on
    assert [-row[0] / MS for row in found] == pytest.approx([10, 12, 14, 14])
    # 190 ms of a clock that gains 1 % are 188.1
    assert [row[1] / MS for row in found] == pytest.approx([188.1, 188.1, 190, 190])
    assert [row[2] for row in found] == pytest.approx([5000, 6001, 7000, 7001], abs=1)
    first = trace.transfers().to_pylist()[0]
    assert first["error_ns"] == pytest.approx(5000 + 125, abs=1)
    unmoved = trace.connect().sql("select count(*) from aligned_spans a join spans using (rank, step, kind, start_ns)")
    assert unmoved.fetchall()[0][0] >= len([row for row in rows if row["rank"] < 2])


def test_an_incident_is_at_the_step_that_was_under_way(trace: Trace, tmp_path: Path) -> None:
    trace = write_run(tmp_path, four_ranks())
    assert trace.incidents().to_pylist() == []
    note_incident(trace.folder, "stall", 1000 * 10**9 + 450 * MS, rank=3)
    note_incident(trace.folder, "before", 5)
    note_incident(trace.folder, "not_finite", 10**19 // 2, step=4)
    first, second, third = trace.incidents().to_pylist()
    assert (third["kind"], third["step"]) == ("not_finite", 4)  # it names the step itself
    assert (first["kind"], first["step"]) == ("before", None)
    assert (second["kind"], second["step"]) == ("stall", 2) and json.loads(second["details"])["rank"] == 3


def test_what_was_done_again_counts_as_the_later_attempt_did_it(tmp_path: Path) -> None:
    again = [row | {"attempt": 1} for row in four_ranks(6, slow=dict.fromkeys(range(4), 1.2)) if row["step"] >= 4]
    trace = write_run(tmp_path, [*four_ranks(6), *again])
    times = {row["step"]: row["forward_s"] for step in range(6) for row in _per_step(trace, step)}
    assert times == pytest.approx({0: 0.02, 1: 0.02, 2: 0.02, 3: 0.02, 4: 0.024, 5: 0.024})


def _per_step(trace: Trace, step: int) -> list[dict[str, Any]]:
    return [only(trace.step_breakdown(step, step)) | {"step": step}]


def test_a_timeline_has_chosen_ranks_and_groups(trace: Trace) -> None:
    rows = trace.timeline(2, 2, ranks=[1, 3], groups=["pipeline"]).to_pylist()
    assert {row["rank"] for row in rows} == {1, 3} and {row["step"] for row in rows} == {2}
    assert {row["group"] for row in rows} == {"", "pipeline"}
    assert [row["start_ns"] for row in rows] == sorted(row["start_ns"] for row in rows)


def test_members_of_groups_have_places_and_stages(trace: Trace) -> None:
    rows = {
        (row["rank"], row["group"]): (row["ranks"], row["place"], row["stage"]) for row in trace.groups().to_pylist()
    }
    assert rows[2, "pipeline"] == ([0, 2], 1, 1) and rows[2, "shard"] == ([2, 3], 0, 1)


@pytest.mark.parametrize("table", [*TABLES, *VIEWS])
def test_sql_may_ask_every_table(trace: Trace, table: str) -> None:
    assert only(trace.sql(f"select count(*) as n from {table}"))["n"] >= 0


@pytest.mark.parametrize(
    "query",
    [
        "drop view spans",
        "copy spans to '/tmp/phalanx-trace-copy.csv'",
        "select 1; select 2",
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/hostname')",
        "attach '/tmp/phalanx-trace.db'",
        "selec",
        "set memory_limit = '100GB'",
    ],
)
def test_sql_only_reads_the_run(trace: Trace, query: str) -> None:
    with pytest.raises(UserError):
        trace.sql(query)


def test_a_folder_without_telemetry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no telemetry"):
        Trace.open(tmp_path)


def test_what_a_writer_has_closed_and_what_is_still_live_are_one_run(tmp_path: Path) -> None:
    recorders = [Recorder.open(tmp_path / "rings" / f"{rank}.ring", rank=rank) for rank in range(2)]
    writer = HostWriter(tmp_path / "rings", tmp_path / "run" / "telemetry", "host")

    def train(steps: range) -> None:
        for step in steps:
            for rank, recorder in enumerate(recorders):
                recorder.step = step
                reduce = recorder.type("collective", "all_reduce", group="tensor", ranks=(0, 1))
                send, receive = (
                    recorder.type("collective", name, group="pipeline", ranks=(0, 1)) for name in ("send", "receive")
                )
                with recorder.span(recorder.type("step")), recorder.span(recorder.type("forward", chunk=0)):
                    recorder.record(reduce, recorder.clock_ns(), recorder.clock_ns(), num_bytes=8)
                    recorder.record(send, recorder.clock_ns(), recorder.clock_ns(), peer=1 - rank)
                    recorder.record(receive, recorder.clock_ns(), recorder.clock_ns(), peer=1 - rank)

    train(range(3))
    writer.tick()
    writer.close_part()
    train(range(3, 5))
    writer.tick()
    trace = Trace.open(tmp_path / "run")
    assert trace.hosts == ["host"] and trace.step_times()["step"].to_pylist() == [0, 1, 2, 3, 4]
    assert len(trace.transfers()) == 5 * 2 and len(trace.launch_skew()) == 5
    assert trace.groups()["ranks"].to_pylist() == [[0, 1]] * 4
    writer.close_part()
    assert len(trace.transfers()) == 5 * 2


def test_many_questions_at_once_outlive_files_that_are_merged_meanwhile(tmp_path: Path) -> None:
    trace = write_run(tmp_path, four_ranks(), GROUPS).shared()
    before = trace.rank_averages()
    for path in trace.folder.glob("steps/*/*.parquet"):
        path.rename(path.with_stem(f"{path.stem}0"))
    assert trace.rank_averages() == before
    for path in trace.folder.glob("steps/host0/*.parquet"):
        path.write_bytes(b"PAR1")
    assert trace.rank_averages()["rank"].to_pylist() == [2, 3]
