"""What of a run's telemetry is lost is said: nothing is left out in silence."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.evidence import gather
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import live_spans
from phalanx.telemetry.span_writer import HostWriter
from phalanx.telemetry.spans import Recorder, RingReader
from phalanx.telemetry.summaries import summarize
from phalanx.telemetry.verdict import judge
from phalanx.telemetry.writer_place import WriterSettings
from tests.telemetry.trace_runs import GROUPS, four_ranks, write_run


def record_more_than_a_ring(run: Path, first: int) -> None:
    """A hundred steps into a ring of 32, which is read when all are there."""
    recorder = Recorder.open(run / "rings" / "0.ring", rank=0, records=32)
    for step in range(first, first + 100):
        recorder.record(recorder.type("step"), step * 10, step * 10 + 5, step=step)
    recorder.close()
    writer = HostWriter(run / "rings", run / "telemetry", "h")
    writer.tick()
    writer.close()


def test_spans_that_were_dropped_are_said(tmp_path: Path) -> None:
    record_more_than_a_ring(tmp_path, 1)
    found = summarize(Trace.open(tmp_path))
    assert found["spans_dropped"] == {"h": 68} and found["first_step"] == 69
    assert found["lost"][0].startswith("68 spans: dropped before they were kept (h: 68), so that steps are missing")
    record_more_than_a_ring(tmp_path, 101)  # by a writer that counts from 0 again
    assert Trace.open(tmp_path).lost().dropped == {"h": 136}
    assert any(one.what == "136 spans" and "dropped" in one.how for one in gather(tmp_path).missing)


def test_a_ring_that_fills_quickly_is_read_sooner(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "rings" / "0.ring", rank=0, records=32)
    writer = HostWriter(tmp_path / "rings", tmp_path / "telemetry", "h", WriterSettings(period_s=3600.0))
    ended = threading.Event()
    thread = threading.Thread(target=writer.run, args=(ended,))
    thread.start()
    try:
        deadline_s = time.monotonic() + 60
        for batch in range(1, 4):  # more than the ring holds, and less than it between two looks
            for step in range(20):
                recorder.record(recorder.type("step"), step, step + 1, step=20 * batch + step)
            while live_spans(tmp_path / "telemetry").num_rows < 20 * batch:
                assert time.monotonic() < deadline_s, "it waits for its period"
                time.sleep(0.01)
    finally:
        recorder.close()
        ended.set()
        thread.join()
    assert writer.dropped == 0


def test_a_ring_is_half_full_by_what_was_not_read(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "0.ring", rank=0, records=32)
    reader = RingReader(tmp_path / "0.ring")
    for _ in range(5):  # around the ring twice
        for count in range(17):
            assert reader.is_half_full == (count > 16)
            recorder.record(recorder.type("step"), 1, 2)
        assert reader.is_half_full
        reader.read()


@pytest.mark.campaign(but=("spans-host1-in the middle", "phases-host0-without its head", "steps-host0-cut off"))
@pytest.mark.parametrize("damage", ["cut off", "without its head", "in the middle"])
@pytest.mark.parametrize("host", ["host0", "host1"])
@pytest.mark.parametrize("table", ["spans", "phases", "steps"])
def test_damaged_files_are_left_out_and_named(tmp_path: Path, table: str, host: str, damage: str) -> None:
    write_run(tmp_path, four_ranks(), GROUPS)
    path = next((tmp_path / "telemetry" / table / host).glob("*.parquet"))
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut off": whole[: len(whole) // 2],
            "without its head": whole[-100:],
            "in the middle": whole[:4] + bytes(200) + whole[204:],
        }[damage]
    )
    found = summarize(Trace.open(tmp_path))
    assert found["damaged_files"] == [str(path)] and f"1 file of {table}" in found["lost"][0]
    assert (found["spans"], found["ranks"]) == (108 if table == "spans" else 216, 2 if table == "steps" else 4)
    trace = Trace.open(tmp_path)
    assert len(trace.sql(f"select * from {table}")) > 0 and trace.lost().damaged == {table: (path,)}
    assert any(str(path) in one.how for one in gather(tmp_path).missing)


def test_where_no_step_can_be_read_the_files_are_named(tmp_path: Path) -> None:
    trace = write_run(tmp_path, four_ranks(), GROUPS)
    for path in trace.folder.glob("steps/*/*.parquet"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"2 files of steps: damaged or cut off, left out: .*host0"):
        summarize(trace)


@pytest.mark.parametrize("hosts", [("host0",), ("host0", "host1")])
def test_sums_that_are_gone_while_spans_are_there_are_said(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    trace = write_run(tmp_path, four_ranks(), GROUPS)
    for host in hosts:
        shutil.rmtree(trace.folder / "steps" / host)
    assert trace.lost().without_steps == hosts
    said = f"sums of all steps of {', '.join(hosts)}: telemetry/steps is not there, though spans were recorded"
    if len(hosts) == 1:
        assert summarize(trace)["lost"][0].startswith(said)
        return
    with pytest.raises(UserError, match=f"no step can be read; {said}"):
        summarize(trace)
    (reason,) = judge(gather(tmp_path)).abstains
    assert reason.startswith(f"no step can be read: {said}")


def test_of_a_whole_run_nothing_is_said(tmp_path: Path) -> None:
    trace = write_run(tmp_path, four_ranks(), GROUPS)
    assert not trace.lost() and summarize(trace)["lost"] == []


def test_a_line_that_is_too_long_is_named_with_its_cure(tmp_path: Path) -> None:
    write_run(tmp_path / "run", four_ranks(2))
    (tmp_path / "run" / "metrics.jsonl").write_text("x" * (40 << 20) + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl has a line of more than 16777216 bytes; take the line out"):
        Trace.open(tmp_path / "run").mfu()
