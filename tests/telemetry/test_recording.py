"""Spans of a loop of somebody else: real ranks record, the host's process writes, queries answer."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import phalanx.telemetry
import phalanx.telemetry.current_recording
from phalanx.core.errors import UserError
from phalanx.telemetry import Trace, record_spans
from phalanx.telemetry.rank_states import rank_states
from phalanx.telemetry.recording import Recording
from phalanx.telemetry.run_list import read_run, records_spans
from phalanx.telemetry.run_status import run_status
from phalanx.telemetry.span_store import live_spans
from phalanx.telemetry.span_writer import HostWriter
from phalanx.telemetry.spans import Recorder
from phalanx.telemetry.writer_place import LOCK, LOG, PROGRAM, WriterPlace, WriterSettings
from phalanx.telemetry.writer_process import clear_left

_SCRIPT = """
import os, sys, torch, warnings
from phalanx.telemetry import record_spans
from phalanx.telemetry.writer_place import WriterSettings

warnings.simplefilter("error")  # nothing that is recorded makes torch warn
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
spans = record_spans(sys.argv[1], settings=WriterSettings(period_s=0.05))
spans.attach(model, "net")
tokens = torch.arange(16)[None]
for step in range(1, 6):
    with spans.step(step):
        with spans.span("batch", kind="data"):
            batch = tokens.clone()
        loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        loss.backward()
        with spans.span("update", kind="optimizer"), torch.no_grad():  # torch's own optimizers import for seconds
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
spans.close()
"""

_DIES = """
import os, sys
from phalanx.telemetry import record_spans
from phalanx.telemetry.writer_place import WriterSettings

spans = record_spans(sys.argv[1], settings=WriterSettings(period_s=0.05))
for step in range(1, 6):
    with spans.step(step):
        pass
if os.environ.get("DIES"):
    os._exit(7)
spans.close()
"""

_WAITS = """
import sys
from phalanx.telemetry import record_spans

spans = record_spans(sys.argv[1], environ={})
print(1, flush=True)
sys.stdin.read()
"""


def start(script: str, run: Path, rank: int, **environ: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), **environ}
    return subprocess.Popen([sys.executable, "-c", script, str(run)], env=environment)


def recording_of(run: Path) -> Recording:
    """A rank that is not the first of its host: no process is started to write what it records."""
    return record_spans(run, environ={"RANK": "1", "LOCAL_RANK": "1"})


def written(run: Path, recording: Recording) -> Trace:
    """All that was recorded, written here and now."""
    recording.close(waits=False)
    writer = HostWriter(recording._place.rings, run / "telemetry", "h")
    writer.tick()
    writer.close()
    return Trace.open(run)


def test_two_ranks_of_a_plain_loop_are_seen(tmp_path: Path) -> None:
    ranks = [start(_SCRIPT, tmp_path, rank) for rank in (1, 0)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    trace = Trace.open(tmp_path)
    counts = trace.sql("select rank, kind, name, count(*) n from spans group by all order by all").to_pylist()
    kinds = [("backward", "net"), ("data", "batch"), ("forward", "net"), ("optimizer", "update"), ("step", "")]
    assert [(row["rank"], row["kind"], row["name"], row["n"]) for row in counts] == [
        (rank, kind, name, 5) for rank in (0, 1) for kind, name in kinds
    ]
    inside = trace.sql(
        "select count(*) n from spans a join spans b using (rank, step) where b.kind = 'step'"
        " and (a.start_ns < b.start_ns or a.end_ns > b.end_ns)"
    )
    assert inside.to_pylist() == [{"n": 0}]  # everything lies within its step


def test_a_rank_that_dies_leaves_its_spans(tmp_path: Path) -> None:
    assert start(_DIES, tmp_path, 0, DIES="1").wait(120) == 7
    # Its writer lives on, sees that the rank is gone, and ends; a recording of the same run waits for that.
    recording = record_spans(tmp_path, environ={"RANK": "1"}, settings=WriterSettings(period_s=0.05))
    recording.close()
    steps = Trace.open(tmp_path).sql("select count(*) n from all_spans where kind = 'step' and rank = 0")
    assert steps.to_pylist() == [{"n": 5}]
    wait_until(lambda: read_run(tmp_path).state != "running")  # the writer has done
    row = read_run(tmp_path)
    assert row.state == "died" and row.why.startswith("the process of rank 0 ended without a word (")
    assert start(_DIES, tmp_path, 0).wait(120) == 0  # once more, of the same attempt
    assert read_run(tmp_path).state == "finished"
    assert not rank_states(Trace.open(tmp_path), time.time_ns(), is_running=False).wrong


def test_what_killed_runs_left_in_memory_is_cleared(tmp_path: Path) -> None:
    long_ago = (time.time() - 3600,) * 2
    for name in ("left", "held", "ring", "young", "said", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()
        (tmp_path / name / LOG).touch()
    (tmp_path / "ring" / "0.ring").touch()
    (tmp_path / "said" / LOG).write_text("a traceback\n")
    (tmp_path / "bare").mkdir()
    for folder in tmp_path.iterdir():
        if folder.name != "young":
            os.utime(folder, long_ago)
    with (tmp_path / "held" / LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        clear_left(tmp_path, tmp_path / "own")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["held", "own", "ring", "said", "young"]
    os.utime(tmp_path / "said" / LOG, (time.time() - 2 * 86_400,) * 2)
    clear_left(tmp_path, tmp_path / "own")
    assert not (tmp_path / "said").exists() and not (tmp_path / "held").exists()


def test_a_kind_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    recording = recording_of(tmp_path)
    with pytest.raises(UserError, match="is not a kind of span"):
        recording.span("x", kind="forwards")  # type: ignore[arg-type]
    with recording.step(1):
        recording.close(waits=False)
    recording.close(waits=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes", 2**70), ("bytes", -1), ("bytes", 1.5), ("peer", 2**40), ("peer", "a"), ("micro_batch", 2**20)],
)
@pytest.mark.parametrize("group", [None, "data"])
def test_a_number_that_no_span_can_hold_is_refused(tmp_path: Path, field: str, value: object, group: object) -> None:
    recording = recording_of(tmp_path)
    try:
        with pytest.raises(UserError, match="is not kept of a span") as caught:
            recording.span("x", group=group, **{field: value})  # type: ignore[arg-type]
        assert field in str(caught.value) and "whole number" in str(caught.value)
        with pytest.raises(UserError, match="not the name of a span"):
            recording.span(3)  # type: ignore[arg-type]
    finally:
        recording.close(waits=False)


@pytest.mark.parametrize("step", [2.5, "a", -1, 2**70, None])
def test_a_step_that_is_no_number_is_refused(tmp_path: Path, step: object) -> None:
    recording = recording_of(tmp_path)
    try:
        with pytest.raises(UserError, match="is not kept of a span"), recording.step(step):  # type: ignore[arg-type]
            pass
    finally:
        recording.close(waits=False)


def test_what_is_computed_between_two_steps_belongs_to_none(tmp_path: Path) -> None:
    recording = recording_of(tmp_path)
    model = torch.nn.Linear(2, 2)
    recording.attach(model)
    model(torch.ones(1, 2))
    with recording.step(1):
        model(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="of the loop"), recording.step(2):
        raise RuntimeError("of the loop")
    for _ in range(3):  # an evaluation
        model(torch.ones(1, 2))
    trace = written(tmp_path, recording)
    rows = trace.sql("select step, count(*) n from all_spans where kind = 'forward' group by all")
    assert {tuple(row.values()) for row in rows.to_pylist()} == {(-1, 4), (1, 1)}


def test_a_module_that_is_attached_again_is_recorded_once(tmp_path: Path) -> None:
    recording = recording_of(tmp_path)
    model = torch.nn.Linear(2, 2)
    recording.attach(model, "before")
    recording.attach(model, "after", chunk=2)
    with recording.step(1):
        model(torch.ones(1, 2)).sum().backward()
    trace = written(tmp_path, recording)
    rows = trace.sql("select kind, name, chunk from spans where kind <> 'step' order by kind")
    assert [tuple(row.values()) for row in rows.to_pylist()] == [("backward", "after", 2), ("forward", "after", 2)]


def test_how_far_a_loop_without_figures_is_is_known_by_its_spans(tmp_path: Path) -> None:
    recording = recording_of(tmp_path)
    writer = HostWriter(recording._place.rings, tmp_path / "telemetry", "h")
    kind = recording.recorder.type("step")
    for step in range(1, 60):
        recording.recorder.record(kind, step * 10**9, step * 10**9 + (10**9 if step < 9 else 25 * 10**7), step=step)
    writer.tick()  # they lie in a stream now
    for row in (read_run(tmp_path), run_status(tmp_path)):
        assert (row.step, row.step_s, row.total_steps) == (59, 0.25, None)
    with recording.step(60):  # under way
        recording.recorder.record(recording.recorder.type("forward"), 1, 2)
        writer.tick()
        assert read_run(tmp_path).step == 59
    writer.close()  # they are Parquet now
    trace = written(tmp_path, recording)
    found = read_run(tmp_path)
    assert (found.state, found.step) == ("finished", 60) and found.step_s == pytest.approx(0.25)
    assert abs(found.written - time.time()) < 600 and not list((trace.folder / "live").glob("*.arrows"))
    for path in trace.folder.glob("steps/*/*.parquet"):
        path.write_bytes(b"PAR1")
    assert read_run(tmp_path).step is None


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="spans cannot be recorded"):
        record_spans(tmp_path / "file", environ={})


def test_spans_of_a_module_are_recorded_where_something_records_and_else_cost_nothing(tmp_path: Path) -> None:
    with phalanx.telemetry.span("forward", chunk=3) as before:
        assert before is None  # nobody records
    phalanx.telemetry.attach(torch.nn.Linear(2, 2))
    recording = recording_of(tmp_path)
    model = torch.nn.Linear(2, 2)
    phalanx.telemetry.attach(model, "layer", chunk=1)
    with recording.step(1):
        with phalanx.telemetry.span("forward", chunk=3, micro_batch=2):
            model(torch.ones(1, 2)).sum().backward()
        with phalanx.telemetry.span("shuffle"), phalanx.telemetry.span("read", kind="data"):
            pass
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(phalanx.telemetry.current_recording.CURRENT.get()))
    thread.start()
    thread.join()
    assert seen == [None]  # a thread has a context of its own
    trace = written(tmp_path, recording)
    with phalanx.telemetry.span("forward") as after:
        assert after is None
    found = trace.sql("select kind, name, chunk, micro_batch m from spans order by kind, name, chunk")
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        ("backward", "layer", 1, -1),
        ("data", "read", -1, -1),
        ("forward", "forward", 3, 2),
        ("forward", "layer", 1, -1),
        ("step", "", -1, -1),
        ("user", "shuffle", -1, -1),
    ]


def test_a_backward_pass_is_one_span_however_many_outputs_a_module_has(tmp_path: Path) -> None:
    class Two(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return {"logits": y, "hidden": y.tanh(), "mask": x > 0}

    recording = recording_of(tmp_path)
    model = Two(3, 2)
    recording.attach(model)
    for step in (1, 2):
        with recording.step(step):
            found = model(torch.ones(4, 3))
            (found["logits"].sum() + found["hidden"].sum()).backward()
            with torch.no_grad():
                model(torch.ones(4, 3))
    trace = written(tmp_path, recording)
    rows = trace.sql("select step, kind, count(*) n from spans where kind <> 'step' group by all")
    assert {tuple(row.values()) for row in rows.to_pylist()} == {
        (1, "forward", 2), (1, "backward", 1), (2, "forward", 2), (2, "backward", 1),
    }  # fmt: skip


def test_a_writer_that_is_killed_is_missed_once_and_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.telemetry.recording._FIRST_LOOK_S", 0.0)
    monkeypatch.setattr("phalanx.telemetry.recording._LOOK_S", 0.0)
    recording = record_spans(tmp_path, environ={}, settings=WriterSettings(period_s=0.05))
    with recording.step(1):
        pass
    place = WriterPlace.of(tmp_path)
    wait_until(lambda: any((tmp_path / "telemetry" / "live").glob("*.arrows")))
    assert recording.look_after_writer() == ""
    (pid,) = writers_of(place)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not place.is_written)
    with recording.step(2):
        pass
    assert "the process that writes spans has ended" in recording.look_after_writer()
    wait_until(lambda: place.is_written)
    assert recording.look_after_writer() == ""  # said once
    recording.close()
    assert Trace.open(tmp_path).step_times()["step"].to_pylist() == [1, 2]
    counted = Trace.open(tmp_path).sql("select step, count(*) n from all_spans group by step order by step")
    assert [row["n"] for row in counted.to_pylist()] == [1, 1]
    assert not place.rings.exists() or not any(place.rings.glob("*.ring"))


def test_spans_wait_in_memory_for_room_on_a_full_disk_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = WriterPlace(tmp_path / "rings", tmp_path / "telemetry", "h")
    recorder = Recorder.open(place.rings / "0.ring", rank=0)
    recorder.record(recorder.type("step"), 1, 2, step=1)
    writer = HostWriter(place.rings, place.folder, place.host)
    with monkeypatch.context() as patch:
        fill_disk(patch)
        assert writer.tick() == 1
        writer.close_part()
    assert place.state() == {"dropped": 0, "problem": "spans cannot be written (No space left on device)"}
    recorder.record(recorder.type("step"), 3, 4, step=2)
    recorder.close()
    assert writer.tick() == 1
    writer.close()  # there is room again
    trace = Trace.open(tmp_path)
    assert trace.step_times()["step"].to_pylist() == [1, 2]
    counted = trace.sql("select step, sum(step_ns) as ns from steps group by step order by step")
    assert [row["ns"] for row in counted.to_pylist()] == [1, 1]
    dropped = trace.sql("select max(value) n from counters where name = 'spans_dropped_total'")
    assert dropped.to_pylist() == [{"n": 0.0}] and not trace.lost()


@pytest.mark.parametrize("settings", [WriterSettings(), WriterSettings(part_rows=1)], ids=["at the end", "too many"])
def test_a_disk_that_stays_full_loses_spans_and_that_is_said_even_where_it_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: WriterSettings
) -> None:
    place = WriterPlace(tmp_path / "rings", tmp_path / "telemetry", "h")
    recorder = Recorder.open(place.rings / "0.ring", rank=0)
    recorder.record(recorder.type("step"), 1, 2, step=1)
    recorder.close()
    writer = HostWriter(place.rings, place.folder, place.host, settings)

    def begun(folder: Path, host: str, count: int) -> None:
        (folder / "dropped").mkdir()
        (folder / "dropped" / f"{host}.jsonl").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        fill_disk(patch)
        patch.setattr("phalanx.telemetry.span_writer.note_dropped", begun)
        assert writer.tick() == (settings.part_rows > 1)
        writer.close_part(is_last=True)
    assert place.state()["dropped"] == 1
    lost = Trace.open(tmp_path).lost()
    assert lost.unknown == ("h",) and "spans of h, nobody knows how many: dropped" in lost.sentences[0]
    # What came into the stream before the disk was full is still there.
    assert live_spans(place.folder)["step"].to_pylist() == [1]
    writer.close()
    assert Trace.open(tmp_path).lost().dropped == {"h": 1}


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """The disk of the writer takes what is in the kernel's memory and nothing more."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr("phalanx.telemetry.span_writer.write_part", full)
    patch.setattr("phalanx.telemetry.span_writer.os.fdatasync", full)


def test_writers_of_hosts_of_the_same_name_are_both_there_and_what_a_killed_one_left_goes(tmp_path: Path) -> None:
    live = tmp_path / "telemetry" / "live"
    live.mkdir(parents=True)
    (live / "h-1.writer").touch()  # its writer was killed
    places = [WriterPlace(tmp_path / name, tmp_path / "telemetry", "h") for name in ("one", "two")]
    for place in places:
        place.rings.mkdir()
    first, second = (HostWriter(place.rings, place.folder, place.host) for place in places)
    assert [place.state() for place in places] == [{}, {}] and len(list(live.glob("*.writer"))) == 2
    first.close()
    assert records_spans(tmp_path)
    second.close()
    assert not records_spans(tmp_path) and not any(live.iterdir())


def test_a_second_loop_of_the_same_rank_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", _WAITS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout is not None and first.stdout.read(1) == b"1"
    with pytest.raises(UserError, match=f"process {first.pid} records rank 0 of this run already"):
        record_spans(tmp_path, environ={})
    record_spans(tmp_path, environ={"RANK": "1", "LOCAL_RANK": "1"}).close()
    first.kill()
    first.communicate()
    record_spans(tmp_path, environ={}).close()


def test_a_loop_that_records_is_running_between_two_spans(tmp_path: Path) -> None:
    """Also once its live stream has become Parquet, during a long evaluation for instance."""
    recording = record_spans(tmp_path, environ={}, settings=WriterSettings(period_s=0.05, part_s=0.1))
    with recording.step(1):
        pass
    wait_until(lambda: any((tmp_path / "telemetry" / "steps").glob("*/*.parquet")))
    wait_until(lambda: not any((tmp_path / "telemetry" / "live").glob("*.arrows")))
    assert read_run(tmp_path).state == "running"
    recording.close()
    wait_until(lambda: not records_spans(tmp_path))
    assert read_run(tmp_path).state == "finished" and not any((tmp_path / "telemetry" / "live").iterdir())


def writers_of(place: WriterPlace) -> list[int]:
    """The processes that write what is in these rings."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if PROGRAM.encode() in path.read_bytes() and str(place.rings).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)
