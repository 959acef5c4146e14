"""Loops of somebody else that pause: real ones that hang or evaluate, and looks at real processes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import detect_hang_page
import pytest
from support.own_loop import paused_loop
from support.settled import until_at_rest, until_in_loop

from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.hangs.hang_judge import HangContext, HangPolicy, judge_hang
from phalanx.detect.hangs.python_stacks import Frame, waits_in_program
from phalanx.detect.hangs.rank_motion import RankMotion, look_at_ranks, motion_as_kept, weighed_by_processes
from phalanx.detect.hangs.rank_places import RankPlaces
from phalanx.detect.hangs.span_hangs import judge_run
from phalanx.detect.hangs.stack_dumps import py_spy_program
from phalanx.telemetry.collective_spans import CollectiveSpan, types_of
from phalanx.telemetry.spans import Recorder
from phalanx.telemetry.unfinished_spans import RankAtRest, Unfinished
from phalanx.telemetry.writer_place import WriterPlace

BLOCKS = list(detect_hang_page.BLOCK.finditer(detect_hang_page.PAGE.read_text()))
HANGS, GETS_ON = RankMotion(False, "did not move, in hang (a/b.py:3)"), RankMotion(True, "computes")
CANNOT_TELL = RankMotion(None, "computes, and whether it gets on cannot be seen; allow ptrace (SYS_PTRACE)")


def can_look() -> bool:
    """Whether py-spy may look at a process that is no child of it."""
    program = py_spy_program()
    if program is None:
        return False
    with subprocess.Popen(["sleep", "20"]) as other:
        done = subprocess.run([program, "dump", "--pid", str(other.pid)], capture_output=True, text=True, check=False)
        other.kill()
    return "ermission" not in done.stderr


LOOKS = pytest.mark.skipif(not can_look(), reason="py-spy may not look at processes here")


# Real loops


def test_the_page_shows_a_hang_and_a_healthy_pause() -> None:
    assert [found["case"] for found in BLOCKS] == ["hang", "evaluates"]
    assert "Rank 1 (host h0, data 1) never entered all-reduce 9 of group data-0; 3 others wait." in BLOCKS[0]["text"]
    assert "Nothing wrong was found" in BLOCKS[1]["text"]


@pytest.mark.campaign
@LOOKS
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["case"])
def test_a_real_loop_is_judged_as_the_page_shows(block: Mapping[str, str]) -> None:
    now = detect_hang_page.loop_output(block["case"], int(block["ranks"]))
    compare = detect_hang_page.comparable
    assert compare(now) == compare(block["text"]), "write it again: python benchmarks/detect_hang_page.py"


@LOOKS
def test_a_loop_that_records_no_collectives_and_saves_for_long_is_well(tmp_path: Path) -> None:
    with paused_loop(tmp_path / "run", "saves", plain=True, still_s=3.0):
        verdict = judge_run(tmp_path / "run", HangPolicy(least_wait_s=2.5))
    assert verdict.exit_status == 0 and "rank 1 is in step 5" in verdict.sentence and "gets on" in verdict.sentence


@pytest.mark.skipif(not (detect_hang_page.TRACES / "flight-recorder").exists(), reason="the dumps are not at hand")
def test_the_page_shows_what_is_said_of_dumps() -> None:
    text = detect_hang_page.PAGE.read_text()
    assert detect_hang_page.page_of_dumps(text) == text, "write it again: python benchmarks/detect_hang_page.py"


# Verdicts of what looks have shown


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run of two ranks: the first waits in the third all-reduce of a group, the second is in its step."""
    (tmp_path / "telemetry").mkdir()
    rings = WriterPlace.of(tmp_path).rings
    recorders = [Recorder.open(rings / f"{rank}.ring", rank=rank) for rank in (0, 1)]
    now_ns = time.monotonic_ns() - 70_000_000_000
    for recorder in recorders:
        recorder.clock_ns = itertools.count(now_ns, 1000).__next__
        step, types = recorder.type("step"), types_of(recorder, "all-reduce", "data", (0, 1))
        recorder.step = 7
        for number in range(3):
            at_ns = now_ns - 2_000_000
            recorder.enter(step, at_ns)
            recorder.record(step, at_ns, at_ns + 1_000_000)
            if number < 2:
                with CollectiveSpan(recorder, types, 0, -1, -1):
                    pass
        recorder.span(step).__enter__()
    CollectiveSpan(recorders[0], types_of(recorders[0], "all-reduce", "data", (0, 1)), 0, -1, -1).__enter__()
    yield tmp_path
    for path in rings.glob("*"):
        path.unlink()
    rings.rmdir()


def judged(run: Path, **motion: RankMotion) -> JudgeVerdict:
    def look(pids: Mapping[int, int]) -> Mapping[int, RankMotion]:
        assert sorted(pids) == [1]  # who waits is not looked at
        return {int(name.removeprefix("rank_")): one for name, one in motion.items()}

    return judge_run(run, look=look)


def test_a_rank_that_does_not_move_is_named_with_collective_and_group(run: Path) -> None:
    verdict = judged(run, rank_1=HANGS)
    assert verdict.exit_status == 1 and verdict.blamed_ranks == (1,)
    assert verdict.sentence.endswith("never entered all-reduce 3 of group data; 1 other waits.")
    assert "rank 1 did not move, in hang (a/b.py:3)" in verdict.detections[0].why


def test_a_rank_that_gets_on_is_no_hang(run: Path) -> None:
    verdict = judged(run, rank_1=GETS_ON)
    assert verdict.exit_status == 0 and not verdict.detections
    assert "rank 1 is in step 7 since 70 s, and gets on: computes, while 1 other waits in all-reduce 3" in (
        verdict.sentence
    )
    assert verdict.tables["motion"][0]["moves"] is True


def test_where_it_cannot_be_told_what_is_missing_is_said(run: Path) -> None:
    verdict = judged(run, rank_1=CANNOT_TELL)
    assert verdict.exit_status == 3 and not verdict.blamed_ranks
    assert "if it evaluated, saved or hung: it computes" in verdict.sentence and "allow ptrace" in verdict.sentence


QUEUE = (Frame("Condition.wait", "python3.12/threading.py", "355"), Frame("get", "python3.12/queue.py", "171"))


@pytest.mark.parametrize(
    ("frames", "sleeps", "advice"),
    [
        ((*QUEUE, Frame("pause", "job/train.py", "41")), False, "program"),
        ((Frame("pause", "job/train.py", "41"),), True, "program"),
        ((Frame("pause", "job/train.py", "41"),), False, "check"),  # a lock, a device, a driver: it cannot be told
        ((*QUEUE, Frame("_try_get_data", "data/dataloader.py", "9"), Frame("main", "job/train.py")), False, "check"),
        ((*QUEUE, Frame("Group.barrier", "parallel/group.py", "9"), Frame("main", "job/train.py")), False, "check"),
    ],
)
def test_who_waits_for_its_own_program_makes_no_host_suspect(
    run: Path, frames: tuple[Frame, ...], sleeps: bool, advice: str
) -> None:
    (found,) = judged(run, rank_1=RankMotion(False, "did not move", frames, sleeps)).detections
    assert found.advice == advice and found.sentence.endswith("never entered all-reduce 3 of group data; 1 other waits")
    if advice == "program":
        assert found.confidence <= 0.5 and found.blamed_hosts == () and "phalanx check" not in " ".join(found.then)
        assert "rank 1 waits in its own program, at pause (job/train.py:41)" in found.why[0]
    else:
        assert found.confidence > 0.9


def test_what_is_not_looked_at_is_judged_by_spans(run: Path) -> None:
    assert judged(run).blamed_ranks == (1,)


@pytest.mark.parametrize("kind", ["forward", "data"])
def test_in_a_short_kind_of_span_three_steps_are_odd_enough(run: Path, kind: str) -> None:
    recorder = Recorder.open(WriterPlace.of(run).rings / "1.ring", rank=1)  # in its first step, in this kind
    recorder.clock_ns = lambda: time.monotonic_ns() - 70_000_000_000
    recorder.span(recorder.type(kind)).__enter__()  # type: ignore[arg-type]
    verdict = judged(run, rank_1=CANNOT_TELL)
    assert verdict.blamed_ranks == (1,) and verdict.detections[0].confidence < 0.9
    assert judged(run, rank_1=GETS_ON).exit_status == 0


@pytest.mark.parametrize(
    ("kind", "share", "moves"),
    [("step", 0.9, None), ("step", 0.0, False), ("step", -1.0, None), ("persist", 0.0, None), ("forward", 0.01, False)],
)
def test_of_another_host_the_share_of_a_core_is_known(kind: str, share: float, moves: bool | None) -> None:
    inside = Unfinished(kind, "", "", (), 100.0, 3, 1, -1, -1, True)
    one = RankAtRest(0, 0, "h1", 5, "S", 170.0, 100.0, 0.5, (inside,), is_kept=True, cpu_share=share)
    assert motion_as_kept(one).moves is moves


# Real processes


def looked_at(code: str, *arguments: str, until: Callable[[int], None]) -> RankMotion:
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"there\n"
            until(process.pid)
            return look_at_ranks({3: process.pid})[3]
        finally:
            process.kill()


THERE = "import os, queue, sys, threading, time\nprint('there', flush=True)\n"


@LOOKS
@pytest.mark.parametrize(
    ("code", "until", "moves"),
    [
        ("lock = threading.Lock()\nlock.acquire()\nlock.acquire()", until_at_rest, False),
        ("time.sleep(1000)", until_at_rest, False),
        ("done = False\nwhile not done:\n    done = time.monotonic() < 0", until_in_loop, False),
        ("def f():\n    while True:\n        now = time.time()\n        if now < 0: break\nf()", until_in_loop, False),
        ("def f():\n    return [hash((n, x)) for x in range(10**9) for n in range(3)]\nf()", until_in_loop, True),
        (
            "with open(sys.argv[1], 'wb') as f:\n    while f.write(bytes(1 << 20)):\n        time.sleep(0.02)",
            until_in_loop,
            True,
        ),
    ],
    ids=["lock", "sleep", "endless", "endless with a time", "one line", "writes"],
)
def test_looks_tell_what_gets_on_from_what_stands_still(
    code: str, until: Callable[[int], None], moves: bool, tmp_path: Path
) -> None:
    motion = looked_at(THERE + code, str(tmp_path / "file"), until=until)
    assert motion.moves is moves, motion
    assert all(isinstance(frame, Frame) for frame in motion.frames)


@LOOKS
@pytest.mark.parametrize("code", ["queue.Queue().get()", "threading.Event().wait()", "time.sleep(1000)"])
def test_real_waits_of_a_program_are_seen(code: str) -> None:
    motion = looked_at(THERE + code, until=until_at_rest)
    assert motion.moves is False and (motion.sleeps or waits_in_program(motion.frames) is not None), motion


def test_nobody_looks_at_itself_nor_at_who_is_gone() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert look_at_ranks({0: os.getpid(), 1: gone.pid}) == {}


# Stacks that were read once


@pytest.mark.parametrize(("motion", "status"), [(GETS_ON, 0), (HANGS, 1), (CANNOT_TELL, 1)])
def test_a_rank_that_is_elsewhere_and_gets_on_is_no_hang(motion: RankMotion, status: int) -> None:
    peers = (Frame("all_reduce", "distributed/distributed_c10d.py", "7"), Frame("main", "job/train.py", "3"))
    stacks = {0: peers, 1: (Frame("read", "job/data.py", "7"),), 2: peers}
    verdict = judge_hang(HangContext(RankPlaces(range(3)), source="stacks", stacks=stacks))
    assert verdict.sentence == "Rank 1 is in read (job/data.py:7); 2 others wait in collectives."
    weighed = weighed_by_processes(verdict, {0: 5, 1: 6, 2: 7}, lambda pids: dict.fromkeys(pids, motion))
    assert weighed.exit_status == status and ("rank 1 gets on" in weighed.sentence) == (status == 0)
