"""Spans from a rank's ring to tables: nothing blocks, nothing is lost uncounted, and a kill costs nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.telemetry.alike_ranks import groups_of
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import SPANS, Names, live_spans, parts, span_batch, sums
from phalanx.telemetry.span_writer import HostWriter, incidents, note_incident
from phalanx.telemetry.spans import RECORD_DTYPE, Recorder, RingReader, SpanType
from phalanx.telemetry.writer_place import WriterSettings


def records_of(reader: RingReader) -> list[tuple[int, int]]:
    state = reader.read()
    return [(int(one["start_ns"]), int(one["step"])) for one in state.records]


def test_what_is_recorded_is_read_once_and_in_order(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "0.ring", rank=5, attempt=2)
    forward = recorder.type("forward", "layers", chunk=1)
    assert recorder.type("forward", "layers", chunk=1) is forward
    gather = recorder.type("collective", "all_gather", group="shard", ranks=(4, 5))
    reader = RingReader(tmp_path / "0.ring")
    recorder.step = 7
    recorder.record(forward, 10, 20, micro_batch=3)
    recorder.record(gather, 30, 50, num_bytes=99, peer=4, step=8)
    state = reader.read()
    assert (reader.rank, reader.attempt, reader.pid) == (5, 2, os.getpid())
    assert state.records[["start_ns", "end_ns", "step", "micro_batch", "peer", "bytes"]].tolist() == [
        (10, 20, 7, 3, -1, 0),
        (30, 50, 8, -1, 4, 99),
    ]
    assert [reader.types()[number] for number in state.records["type"]] == [forward, gather]
    assert len(reader.read().records) == 0 and not state.is_closed
    with pytest.raises(ZeroDivisionError), recorder.span(forward):
        _ = 1 // 0
    recorder.close()
    last = reader.read()
    assert len(last.records) == 1 and last.is_closed and last.dropped == 0


@pytest.mark.parametrize("value", [40_000, -2, "a", 1.5, None])
def test_a_number_that_no_record_holds_is_refused_before_it_is_in_the_ring(value: object, tmp_path: Path) -> None:
    """What the writer could not write down would end it for all ranks of its host."""
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    with pytest.raises(UserError, match="is not kept of a span") as refused:
        recorder.type("forward", chunk=value)  # type: ignore[arg-type]
    assert refused.value.field == "chunk"
    for begin in (recorder.span, recorder.begin):
        with pytest.raises(UserError, match="is not kept of a span"):
            begin(recorder.type("forward"), micro_batch=value)  # type: ignore[arg-type]
    with recorder.span(recorder.type("forward", chunk=32_767), micro_batch=32_767):
        pass
    assert len(RingReader(tmp_path / "0.ring").read().records) == 1


def test_a_name_for_each_span_does_not_end_a_loop(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "rings/0.ring", rank=0)
    for number in range(33_000):
        recorder.record(recorder.type("user", f"number {number}"), number, number + 1)
    recorder.close()
    writer = HostWriter(tmp_path / "rings", tmp_path / "telemetry", "h")
    assert writer.tick() == 33_000
    writer.close_part()
    found = Trace.open(tmp_path).sql("select name, count(*) n from all_spans group by name order by n desc limit 2")
    assert found["name"][0].as_py() == "not described"


def test_what_ends_after_the_recording_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    with recorder.span(recorder.type("step")):
        recorder.close()
        recorder.close()


@given(batches=st.lists(st.integers(0, 70), max_size=12))
def test_a_ring_that_is_lapped_counts_what_was_dropped(
    batches: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("ring") / "0.ring"
    recorder = Recorder.open(path, rank=0, records=32)
    kind, reader = recorder.type("step"), RingReader(path)
    recorded = taken = dropped = 0
    for count in batches:
        for _ in range(count):
            recorder.record(kind, recorded, recorded)
            recorded += 1
        state = reader.read()
        expected = list(range(recorded - len(state.records), recorded))
        assert state.records["start_ns"].tolist() == expected
        taken, dropped = taken + len(state.records), dropped + state.dropped
        assert taken + dropped == recorded and len(state.records) <= 32


def test_threads_record_at_once_and_none_is_lost(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    kind, reader = recorder.type("user"), RingReader(tmp_path / "0.ring")

    def record(thread: int) -> None:
        for number in range(2000):
            recorder.record(kind, thread, number)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen = 0
    while any(thread.is_alive() for thread in threads):
        seen += len(reader.read().records)
    state = reader.read()
    assert seen + len(state.records) == 8000 and state.dropped == 0


def test_a_number_whose_record_never_comes_holds_nobody_up(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    kind, reader = recorder.type("step"), RingReader(tmp_path / "0.ring")
    recorder.record(kind, 1, 2)
    next(recorder._next)  # a thread that was killed between its number and its record
    recorder.record(kind, 3, 4)
    assert records_of(reader) == [(1, 0)]
    state = reader.read()
    assert state.records["start_ns"].tolist() == [3] and state.dropped == 1


_KILLED = """
import sys, os, signal
from pathlib import Path
from phalanx.telemetry.spans import Recorder
recorder = Recorder.open(Path(sys.argv[1]), rank=3)
kind = recorder.type("forward", "chunk 0", chunk=0)
for step in range(1, 101):
    recorder.step = step
    recorder.record(kind, step, step + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    ring = tmp_path / "rings" / "3.ring"
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(ring)], check=False)
    assert killed.returncode == -signal.SIGKILL
    writer = HostWriter(tmp_path / "rings", tmp_path / "telemetry", "h")
    assert (writer.tick() == 100 and not ring.exists()) or writer.tick() == 0
    assert writer.is_idle and writer.dropped == 0
    writer.close_part()
    rows = Trace.open(tmp_path).sql("select count(*) n, min(rank) r, max(step) s from all_spans").to_pylist()
    assert rows == [{"n": 100, "r": 3, "s": 100}]


def test_the_process_of_a_host_ends_by_itself_when_all_ranks_have_closed(tmp_path: Path) -> None:
    rings, folder = tmp_path / "rings", tmp_path / "telemetry"
    recorders = [Recorder.open(rings / f"{rank}.ring", rank=rank) for rank in (0, 1)]
    command = [sys.executable, "-m", "phalanx.telemetry.writer_process", "--rings", str(rings), "--folder", str(folder)]
    process = subprocess.Popen([*command, "--host", "h", "--settings", '{"period_s": 0.05}'])
    for recorder in recorders:
        step = recorder.type("step")
        group = recorder.type("collective", "all_reduce", group="replicate", ranks=(0, 1))
        for number in range(1, 11):
            recorder.record(group, 10 * number, 10 * number + 4, step=number, num_bytes=8)
            recorder.record(step, 10 * number, 10 * number + 9, step=number)
        recorder.close()
    assert process.wait(60) == 0
    assert list(rings.glob("*.ring")) == [] and not list((folder / "live").glob("*"))
    assert groups_of(folder) == [{"group": "replicate", "ranks": [0, 1]}]
    trace = Trace.open(tmp_path)
    assert trace.hosts == ["h"]
    assert trace.rank_averages().select(["rank", "steps", "step_s", "collective_s"]).to_pylist() == [
        {"rank": rank, "steps": 10, "step_s": 9e-9, "collective_s": 4e-9} for rank in (0, 1)
    ]
    assert trace.rank_averages(3, 4)["steps"].to_pylist() == [2, 2]
    names = trace.sql("select distinct name from counters")["name"].to_pylist()
    assert "memory_available_bytes" in names


@pytest.mark.campaign(but=("False",))
@pytest.mark.parametrize("has_kept_place", [True, False])
def test_a_stream_that_a_killed_writer_left_is_read_and_taken_over(has_kept_place: bool, tmp_path: Path) -> None:
    rings, folder = tmp_path / "rings", tmp_path / "telemetry"
    recorder = Recorder.open(rings / "0.ring", rank=0)
    step = recorder.type("step")
    recorder.record(step, 1, 2, step=1)
    script = (
        "import sys, os; from pathlib import Path; from phalanx.telemetry.span_writer import HostWriter\n"
        f"HostWriter(Path({str(rings)!r}), Path({str(folder)!r}), 'h').tick(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    (live,) = (folder / "live").glob("*.arrows")
    with live.open("ab") as file:
        file.write(b"\xff\xff\xff\xff\x10\x00")  # the batch in which it was killed
    (place,) = (path for path in rings.iterdir() if path.suffix != ".ring")
    if not has_kept_place:
        place.unlink()  # as if it was killed between the stream and its place in the ring
    assert live_spans(folder).num_rows == 1
    writer = HostWriter(rings, folder, "h")
    assert not live.exists() and [part.first_step for part in parts(folder, "spans")] == [1]
    recorder.record(step, 3, 4, step=2)
    recorder.close()
    assert writer.tick() == 1 and writer.is_idle  # what the killed one had taken is not taken twice
    writer.close_part()
    assert Trace.open(tmp_path).step_times()["step"].to_pylist() == [1, 2]
    assert not list(rings.iterdir())


def test_another_ring_of_the_same_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    """As after the machine has started anew, where containers number their processes alike."""
    rings, folder = tmp_path / "rings", tmp_path / "telemetry"
    recorder = Recorder.open(rings / "0.ring", rank=0)
    step = recorder.type("step")
    for number in (1, 2, 3):
        recorder.record(step, number * 10, number * 10 + 5, step=number)
    writer = HostWriter(rings, folder, "h")
    writer.tick()
    (live,) = (folder / "live").glob("*.arrows")
    stream = live.read_bytes()
    writer.close_part()
    for path in (*rings.iterdir(), *parts(folder, "spans")):
        getattr(path, "path", path).unlink()
    live.write_bytes(stream)
    second = Recorder.open(rings / "0.ring", rank=0)
    second.record(second.type("step"), 100, 105, step=4)
    writer = HostWriter(rings, folder, "h")
    assert writer.tick() == 1
    writer.close_part()
    assert sorted(part.first_step for part in parts(folder, "spans")) == [1, 4]


def test_what_has_become_parquet_and_lies_in_a_stream_still_counts_once(tmp_path: Path) -> None:
    rings, folder = tmp_path / "rings", tmp_path / "telemetry"
    recorder = Recorder.open(rings / "0.ring", rank=0)
    recorder.record(recorder.type("step"), 1, 11, step=1)
    writer = HostWriter(rings, folder, "h")
    writer.tick()
    (live,) = (folder / "live").glob("*.arrows")
    stream = live.read_bytes()
    writer.close_part()
    (part,) = parts(folder, "spans")
    total = "select (select count(*) from spans) n, (select sum(step_ns) from steps) ns"
    live.write_bytes(stream)  # as it is for a moment
    assert Trace.open(tmp_path).sql(total).to_pylist() == [{"n": 1, "ns": 10}]
    part.path.rename(tmp_path / "not there yet")  # and before that
    assert Trace.open(tmp_path).sql(total).to_pylist() == [{"n": 1, "ns": 10}]
    recorder.close()
    HostWriter(rings, folder, "h")
    assert Trace.open(tmp_path).sql("select count(*) n from spans").to_pylist() == [{"n": 1}]


def rows(count: int, steps: int = 10, ranks: int = 2, start_ns: int = 10**18) -> pa.Table:
    records = np.zeros(count, RECORD_DTYPE)
    records["step"], records["type"] = np.arange(count) % steps, np.arange(count) % 3
    records["start_ns"] = np.arange(count) * 100
    records["end_ns"] = records["start_ns"] + np.arange(count) % 7
    records["bytes"] = 5
    types = [SpanType(0, "forward", "a"), SpanType(1, "backward", "a", chunk=1), SpanType(2, "wait", "b", "shard")]
    names = Names()
    batches = [
        span_batch(records, types, names, host="h", rank=rank, attempt=0, unix_offset_ns=start_ns)
        for rank in range(ranks)
    ]
    return pa.Table.from_batches(batches, schema=SPANS)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_sums_are_those_of_arrow(count: int) -> None:
    spans = rows(count)
    phases, steps = sums(spans)
    length = pa.array(spans["end_ns"].to_numpy() - spans["start_ns"].to_numpy())
    keys = ["rank", "step", "kind", "name", "group", "chunk"]
    spans = spans.unify_dictionaries().combine_chunks()
    plain = spans.append_column("length", length).group_by(keys).aggregate([("length", "sum"), ("bytes", "sum")])
    found = {tuple(row[key] for key in keys): (row["total_ns"], row["bytes"]) for row in phases.to_pylist()}
    assert found == {
        tuple(row[key] for key in keys): (row["length_sum"], row["bytes_sum"]) for row in plain.to_pylist()
    }
    by_step = steps.group_by(["rank", "step"]).aggregate([("forward_ns", "sum"), ("wait_ns", "sum")])
    assert sum(by_step["forward_ns_sum"].to_pylist()) == sum(
        row["total_ns"] for row in phases.to_pylist() if row["kind"] == "forward"
    )
    assert steps.num_rows == len({(row["rank"], row["step"]) for row in spans.to_pylist()})


def test_old_spans_go_and_those_around_an_incident_stay(tmp_path: Path) -> None:
    folder, now_s = tmp_path / "telemetry", [10_000.0]
    settings = WriterSettings(part_s=0.0, detail_s=100.0, around_s=10.0)
    writer = HostWriter(tmp_path / "rings", folder, "h", settings, clock_s=lambda: now_s[0])
    for at_s in (1000, 5000, 9990):
        table = rows(30, start_ns=at_s * 10**9)
        writer._keep_spans(table, at_s)
    note_incident(folder, "nan", 5005 * 10**9, step=3)
    assert incidents(folder) == [5005e3]
    writer.tick()
    assert sorted(part.from_ms // 1000 for part in parts(folder, "spans")) == [5000, 9990]
    for name in ("phases", "steps"):  # sums are kept for good, in one file
        (part,) = parts(folder, name)
        assert part.from_ms // 1000 == 1000 and part.to_ms // 1000 >= 9990


@pytest.mark.parametrize(
    "query",
    [
        "drop view spans",
        "select * from read_csv('/etc/passwd')",
        "copy spans to 'out.csv'",
        "select 1; select 2",
        "select nothing from spans",
        "no sql",
    ],
)
def test_a_query_only_reads_the_tables(tmp_path: Path, query: str) -> None:
    writer = HostWriter(tmp_path / "rings", tmp_path / "telemetry", "h")
    writer._keep_spans(rows(30), 1)
    with pytest.raises(UserError):
        Trace.open(tmp_path).sql(query)


def test_what_a_later_attempt_did_again_counts_once(tmp_path: Path) -> None:
    writer = HostWriter(tmp_path / "rings", tmp_path / "telemetry", "h")
    for attempt, steps in ((0, (1, 2, 3)), (1, (3, 4))):
        recorder = Recorder.open(tmp_path / "rings" / "0.ring", rank=0, attempt=attempt)
        for step in steps:
            recorder.record(recorder.type("step"), step, step + 10 + attempt, step=step)
        recorder.close()
        writer.tick()
    writer.close_part()
    times = Trace.open(tmp_path).step_times()
    assert times["step"].to_pylist() == [1, 2, 3, 4]
    assert [round(one * 1e9) for one in times["slowest_s"].to_pylist()] == [10, 10, 11, 11]


def test_parquet_is_small(tmp_path: Path) -> None:
    writer = HostWriter(tmp_path / "rings", tmp_path / "telemetry", "h")
    writer._keep_spans(rows(20_000, steps=200), 1)
    (part,) = parts(tmp_path / "telemetry", "spans")
    assert pq.read_metadata(part.path).num_rows == 40_000
    assert part.path.stat().st_size < 40_000 * 12


def test_no_telemetry_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no telemetry"):
        Trace.open(tmp_path)
