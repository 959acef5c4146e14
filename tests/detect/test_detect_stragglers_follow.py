"""Stragglers of a run that goes on: every span once, whatever its file becomes, and verdicts as they change."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from support.straggler_traces import BEGIN_NS, MadeUpJob, make_spans, write_made_up_run

from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.detect.stragglers.straggler_judge import StragglerPolicy
from phalanx.detect.stragglers.straggler_run import judge_run
from phalanx.detect.stragglers.straggler_watch import StragglerWatch, follow_run
from phalanx.telemetry.span_store import SPANS, write_part
from phalanx.telemetry.span_tail import LiveStream, SpanTail, clock_offsets_ns

JOB = MadeUpJob(columns=4, stages=2, slow={5: (1.3, 24)})


def grown(job: MadeUpJob, steps: int, pieces: int) -> list[pa.Table]:
    """Spans of a run, in pieces of so many steps."""
    begin_ns, found = BEGIN_NS, []
    for piece in range(pieces):
        spans = make_spans(job, first_step=1 + piece * steps, begin_ns=begin_ns, steps=steps)
        begin_ns = pc.max(spans["end_ns"]).as_py() + 10**6
        found.append(spans)
    return found


def test_the_verdict_changes_when_a_rank_becomes_slow_and_says_since_when(tmp_path: Path) -> None:
    pieces = grown(JOB, 10, 5)
    write_made_up_run(tmp_path, JOB, pieces[0])
    watch = StragglerWatch(tmp_path)
    changes = {}
    for number, spans in enumerate(pieces[1:], 2):
        changes[number] = watch.look()
        write_made_up_run(tmp_path, JOB, spans, number)
    changes[6] = watch.look()
    assert [number for number, change in changes.items() if change] == [4]
    change = changes[4]
    assert change is not None and change.step == 30 and change.verdict.blamed_ranks == (5,)
    assert abs((change.found[0].since.step or 0) - 24) <= 1
    assert "since step 2" in change.sentence and change.gone == ()
    assert watch.look() is None  # nothing is new
    # what was followed is what the whole run says
    whole, followed = judge_run(tmp_path), watch.verdict
    assert followed.looked_at == whole.looked_at
    assert followed.detections[0].since == whole.detections[0].since
    assert followed.detections[0].figures["lost_share"] == pytest.approx(
        whole.detections[0].figures["lost_share"], rel=0.05
    )


def test_what_is_over_is_said(tmp_path: Path) -> None:
    ill, well = MadeUpJob(columns=4, stages=2, slow={5: (1.3, 1)}), MadeUpJob(columns=4, stages=2)
    write_made_up_run(tmp_path, ill, make_spans(ill, steps=10))
    watch = StragglerWatch(tmp_path)
    first = watch.look()
    later = make_spans(well, first_step=11, begin_ns=BEGIN_NS + 10**12, steps=20)
    write_made_up_run(tmp_path, well, later, 2)
    second = watch.look()
    assert first is not None and first.found[0].what == "slow rank"
    assert second is not None and second.found == () and "over: rank 5" in second.sentence


def test_memory_is_bounded_by_the_window_and_the_steps_under_way(tmp_path: Path) -> None:
    policy = StragglerPolicy(most_steps=12)
    pieces = grown(JOB, 10, 4)
    write_made_up_run(tmp_path, JOB, pieces[0])
    watch = StragglerWatch(tmp_path, policy)
    for number, spans in enumerate(pieces[1:], 2):
        watch.look()
        assert watch._tail.kept_rows == 0
        write_made_up_run(tmp_path, JOB, spans, number)
    watch.look()
    assert watch.verdict.looked_at == "12 steps of 8 ranks, steps 29 to 40"


def test_a_new_attempt_begins_anew(tmp_path: Path) -> None:
    write_made_up_run(tmp_path, JOB, make_spans(JOB, steps=20))
    watch = StragglerWatch(tmp_path)
    watch.look()
    again = make_spans(JOB, first_step=11, begin_ns=BEGIN_NS + 10**12, steps=8)
    again = again.set_column(1, SPANS.field("attempt"), pa.array([1] * len(again), pa.int32()))
    write_part(tmp_path / "telemetry", "spans", "h0", again, 1, 9)
    watch.look()
    assert watch.verdict.looked_at == "8 steps of 8 ranks, steps 11 to 18"


def stream(path: Path, tables: list[pa.Table]) -> bytes:
    """The bytes of a stream of these; texts of later tables may be new, so that dictionaries come again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, SPANS) as writer:
        for table in tables:
            for batch in table.combine_chunks().to_batches():
                writer.write_batch(batch)
    return path.read_bytes()


def test_a_stream_is_read_once_whatever_is_torn(tmp_path: Path) -> None:
    tables = grown(JOB, 2, 3)
    content = stream(tmp_path / "whole.arrows", tables)
    path = tmp_path / "live" / "h0-1.arrows"
    path.parent.mkdir()
    path.write_bytes(b"")
    live, found = LiveStream(path), []
    for end in [0, 7, 300, *range(5_000, len(content), 20_011), len(content), len(content)]:
        path.write_bytes(content[:end])
        found += live.new_batches()
    read = pa.Table.from_batches(found, schema=SPANS) if found else None
    assert read is not None
    assert read.to_pylist() == pa.concat_tables(tables).to_pylist()


def test_a_stream_that_becomes_a_part_counts_once(tmp_path: Path) -> None:
    telemetry = tmp_path / "telemetry"
    tables = grown(JOB, 4, 3)
    half = tables[1].filter(pc.less(tables[1]["rank"], 4))  # the others have not been read out yet
    stream(telemetry / "live" / "h0-7.arrows", [tables[0], half])
    tail = SpanTail(telemetry)
    first = tail.new_steps()
    assert first is not None and sorted(set(first["step"].to_pylist())) == [1, 2, 3, 4]
    assert tail.kept_rows == len(half)
    whole = pa.concat_tables(tables).unify_dictionaries()
    write_part(telemetry, "spans", "h0", whole, 0, 7)
    (telemetry / "live" / "h0-7.arrows").unlink()
    second = tail.new_steps()
    assert second is not None and len(first) + len(second) == len(whole)
    assert tail.kept_rows == 0 and tail.new_steps() is None


def test_a_rank_that_says_nothing_holds_up_steps_for_a_while_only(tmp_path: Path) -> None:
    spans = make_spans(JOB, steps=40)
    silent = spans.filter(pc.or_(pc.not_equal(spans["rank"], 3), pc.less_equal(spans["step"], 2)))
    write_part(tmp_path / "telemetry", "spans", "h0", silent, 0, 1)
    found = SpanTail(tmp_path / "telemetry").new_steps()
    assert found is not None and max(found["step"].to_pylist()) == 20


def test_following_ends_with_the_run_and_reads_what_is_left(tmp_path: Path) -> None:
    pieces, slept = grown(JOB, 20, 2), []
    write_made_up_run(tmp_path, JOB, pieces[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        write_made_up_run(tmp_path, JOB, pieces[1], 2)

    changes = list(follow_run(tmp_path, every_s=2.0, is_over=lambda: bool(slept), sleep=sleep))
    assert slept == [2.0] and [change.verdict.blamed_ranks for change in changes] == [(5,)]


def test_clocks_are_the_newest_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "clocks").mkdir()
    lines = [json.dumps({"host": "a", "offset_ns": at}) for at in (5, 9)]
    (tmp_path / "clocks" / "a.jsonl").write_text("\n".join([*lines, '{"host": "a", "off']))
    assert clock_offsets_ns(tmp_path) == {"a": 9}


def test_the_command_prints_one_line_first_and_its_status_says_what_was_found(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "slow", JOB, make_spans(JOB, steps=40))
    well = MadeUpJob(columns=4, stages=2)
    write_made_up_run(tmp_path / "well", well, make_spans(well, steps=10))
    slow = CliRunner().invoke(group, ["detect", "stragglers", str(tmp_path / "slow"), "--workers"])
    assert slow.exit_code == 1 and slow.output.startswith("Rank 5 (host h0, stage 1) computes 2")
    assert "stage 1" in slow.output and "slow workers" in slow.output
    healthy = CliRunner().invoke(group, ["detect", "stragglers", str(tmp_path / "well")])
    assert healthy.exit_code == 0 and healthy.output.startswith("Nothing wrong was found (10 steps of 8 ranks")
    few = CliRunner().invoke(group, ["detect", "stragglers", str(tmp_path / "well"), "--steps", "2:4"])
    assert few.exit_code == 3
    as_json = CliRunner().invoke(group, ["detect", "stragglers", str(tmp_path / "slow"), "--json"])
    verdict = json.loads(as_json.output)
    assert as_json.exit_code == 1 and verdict["detections"][0]["who"][0]["ranks"] == [5]
    assert {"workers", "lost", "what_if"} <= verdict["tables"].keys()
    backwards = CliRunner().invoke(group, ["detect", "stragglers", str(tmp_path / "well"), "--steps", "9:3"])
    assert backwards.exit_code == 2 and "ends before it begins" in backwards.output
    absent = CliRunner().invoke(group, ["detect", "stragglers", str(tmp_path / "none")])
    assert isinstance(absent.exception, UserError) and "no telemetry" in str(absent.exception)


def test_the_command_follows_until_the_run_is_over(tmp_path: Path) -> None:
    write_made_up_run(tmp_path, JOB, make_spans(JOB, steps=40))
    found = CliRunner().invoke(group, ["detect", "stragglers", str(tmp_path), "--follow", "--json"])
    assert found.exit_code == 0, found.output
    (line,) = found.output.splitlines()
    assert json.loads(line)["found"][0]["what"] == "slow rank"
