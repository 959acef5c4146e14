"""Runs that stand still, by what their ranks have begun: rings, what writers keep of them, and the verdict."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.hangs.hang_judge import HangPolicy, judge_hang
from phalanx.detect.hangs.span_hangs import context_of, judge_run
from phalanx.telemetry.spans import BEGUN_TYPES, Recorder, RingReader, SpanType
from phalanx.telemetry.unfinished_spans import RankAtRest, StillRings, look_at, ranks_at_rest
from phalanx.telemetry.writer_place import WriterPlace

EVERYONE = (0, 1, 2, 3)


class Town:
    """Ranks of one host, each with a ring; `shard` is a group of all, `tensor` of pairs."""

    def __init__(self, folder: Path, count: int = 4) -> None:
        self.folder = folder
        self.recorders = [Recorder.open(folder / f"{rank}.ring", rank=rank) for rank in range(count)]
        for recorder in self.recorders:
            recorder.step = 7

    def types(self, rank: int, name: str, group: str) -> tuple[SpanType, SpanType]:
        members = EVERYONE if group == "shard" else (rank - rank % 2, rank - rank % 2 + 1)
        recorder = self.recorders[rank]
        kinds = "collective", "wait"
        return tuple(recorder.type(kind, name, group=group, ranks=members) for kind in kinds)  # type: ignore[return-value,arg-type]

    def call(self, rank: int, name: str, group: str, *, ends: bool) -> None:
        """A collective of a rank, as groups note it."""
        recorder, (collective, wait) = self.recorders[rank], self.types(rank, name, group)
        at_ns = recorder.clock_ns()
        number = recorder.enter(collective, at_ns)
        recorder.enter(wait, at_ns, number=number)
        if ends:
            recorder.record(collective, at_ns, recorder.clock_ns())
            recorder.record(wait, at_ns, recorder.clock_ns())

    def inside(self, rank: int, kind: str) -> None:
        self.recorders[rank].span(self.recorders[rank].type(kind), micro_batch=1).__enter__()  # type: ignore[arg-type]

    def look(self) -> list[RankAtRest]:
        return [replace(look_at(RingReader(path), "h0"), state="S") for path in sorted(self.folder.glob("*.ring"))]


def verdict_of(ranks: Sequence[RankAtRest]) -> JudgeVerdict:
    return judge_hang(context_of(ranks))


def named(verdict: JudgeVerdict) -> list[int]:
    return sorted(rank for one in verdict.detections for who in one.who if who.kind == "rank" for rank in who.ranks)


# Rings


def test_a_ring_says_what_has_begun_and_what_is_under_way(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    reader = RingReader(tmp_path / "0.ring")
    forward, step = recorder.type("forward"), recorder.type("step")
    assert reader.begun() == []
    with recorder.span(step):
        for micro_batch in range(3):
            with recorder.span(forward, micro_batch=micro_batch):
                begun = reader.begun()
                assert [(one.type.kind, one.number, one.is_under_way) for one in begun] == [
                    ("step", 1, True),
                    ("forward", micro_batch + 1, True),
                ]
                assert begun[-1].micro_batch == micro_batch
    assert [one.is_under_way for one in reader.begun()] == [False, False]
    assert len(reader.read().records) == 4 and reader.usual_step_ns() > 0


def test_more_types_than_are_kept_do_no_harm(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    for number in range(BEGUN_TYPES + 3):
        with recorder.span(recorder.type("user", f"{number}")):
            pass
    reader = RingReader(tmp_path / "0.ring")
    assert len(reader.begun()) == BEGUN_TYPES and len(reader.read().records) == BEGUN_TYPES + 3


def test_a_ring_of_an_older_version_says_nothing(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "0.ring", rank=0, records=32)
    recorder.enter(recorder.type("step"), 5)
    content = (tmp_path / "0.ring").read_bytes()
    (tmp_path / "old.ring").write_bytes(content[: -32 * BEGUN_TYPES])
    assert RingReader(tmp_path / "old.ring").begun() == []


# Verdicts


def test_the_rank_that_never_entered_a_collective_is_named_with_what_it_is_in(tmp_path: Path) -> None:
    town = Town(tmp_path)
    for rank in EVERYONE:
        town.call(rank, "all_gather", "shard", ends=True)
    for rank in (0, 1, 3):
        town.call(rank, "all_gather", "shard", ends=False)
    town.inside(2, "forward")
    verdict = verdict_of(town.look())
    assert verdict.sentence == "Rank 2 (host h0, shard 2) never entered all-gather 2 of group shard; 3 others wait."
    assert named(verdict) == [2] and verdict.blamed_hosts == ("h0",)
    assert "rank 2 is in forward of micro-batch 1 in step 7 since 0 s" in verdict.detections[0].why


def test_waiting_is_followed_through_groups(tmp_path: Path) -> None:
    """1 waits for 0 in their pair, 2 and 3 for both in the other group."""
    town = Town(tmp_path)
    town.call(1, "all_reduce", "tensor", ends=False)
    for rank in (2, 3):
        town.call(rank, "all_reduce", "tensor", ends=True)
        town.call(rank, "reduce_scatter", "shard", ends=False)
    town.inside(0, "backward")
    verdict = verdict_of(town.look())
    assert named(verdict) == [0] and verdict.detections[0].figures["waiting"] == 3


@pytest.mark.parametrize("order", [(0, 2, 3), (2, 3, 0)])
def test_of_several_that_a_rank_never_entered_the_first_of_a_step_is_named(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    town = Town(tmp_path)
    for rank in EVERYONE:
        town.call(rank, "all-reduce", "tensor", ends=True)
        town.call(rank, "all-reduce", "shard", ends=True)
    for rank in order:  # which pair is the faster one is chance
        town.call(rank, "all-reduce", "tensor", ends=rank >= 2)
        if rank >= 2:
            town.call(rank, "all-reduce", "shard", ends=False)
    verdict = verdict_of(town.look())
    assert verdict.blamed_ranks == (1,)
    assert "never entered all-reduce 2 of group tensor" in verdict.sentence and "3 others wait" in verdict.sentence


def test_a_stage_that_receives_waits_for_the_one_that_has_not_sent(tmp_path: Path) -> None:
    town = Town(tmp_path, 2)
    recorder = town.recorders[1]
    types = [
        recorder.type(kind, "receive activations", group="pipeline", ranks=(0, 1)) for kind in ("collective", "wait")
    ]
    number = recorder.enter(types[0], recorder.clock_ns(), peer=0)
    recorder.enter(types[1], recorder.clock_ns(), peer=0, number=number)
    town.inside(0, "forward")
    verdict = verdict_of(town.look())
    assert named(verdict) == [0] and "transfer from rank 0 to rank 1" in verdict.sentence


@pytest.mark.parametrize("other", ["all_reduce", "reduce_scatter"])
def test_who_went_on_to_another_collective_is_a_mistake_of_the_program(tmp_path: Path, other: str) -> None:
    town = Town(tmp_path)
    for rank in (0, 1, 3):
        town.call(rank, "all_gather", "shard", ends=False)
    town.call(2, other, "shard", ends=False)
    verdict = verdict_of(town.look())
    assert named(verdict) == [2] and verdict.detections[0].advice == "program" and not verdict.blamed_ranks


def test_all_in_one_collective_blame_nobody_unless_a_process_is_stopped(tmp_path: Path) -> None:
    town = Town(tmp_path)
    for rank in EVERYONE:
        town.call(rank, "all_gather", "shard", ends=False)
    verdict = verdict_of(town.look())
    assert verdict.detections and not verdict.blamed_ranks and not named(verdict)
    ranks = [replace(one, state="T") if one.rank == 3 else one for one in town.look()]
    verdict = verdict_of(ranks)
    assert named(verdict) == [3] and "is stopped (SIGSTOP)" in verdict.sentence


@pytest.mark.parametrize("stopped", [(0, 1, 2), EVERYONE])
def test_a_job_most_of_which_is_stopped_is_suspended_and_no_machine_is_at_fault(
    tmp_path: Path, stopped: Sequence[int]
) -> None:
    town = Town(tmp_path)
    town.call(3, "all_gather", "shard", ends=False)
    verdict = verdict_of([replace(one, state="T" if one.rank in stopped else "S") for one in town.look()])
    assert verdict.exit_status == 1 and not named(verdict) and not verdict.blamed_ranks
    which = "all 4 ranks are" if len(stopped) == 4 else "3 of 4 ranks (ranks 0, 1, 2) are"
    assert verdict.sentence == f"The job is suspended: {which} stopped (SIGSTOP)."


def test_one_process_that_is_stopped_is_told(tmp_path: Path) -> None:
    town = Town(tmp_path, 1)
    town.inside(0, "backward")
    verdict = verdict_of([replace(one, state="T") for one in town.look()])
    assert verdict.sentence == "The job is suspended: its rank is stopped (SIGSTOP)."
    dead = verdict_of([replace(one, state="Z") for one in town.look()])
    assert "suspended" not in dead.sentence


def test_a_host_of_which_nothing_is_known_is_suspected(tmp_path: Path) -> None:
    town = Town(tmp_path)
    for rank in (0, 1, 2):
        town.call(rank, "all_gather", "shard", ends=False)
    verdict = verdict_of([one for one in town.look() if one.rank != 3])
    assert named(verdict) == [3] and verdict.detections[0].what == "silent rank"
    assert "left no spans" in verdict.sentence


def test_ranks_of_which_none_waits_are_not_blamed(tmp_path: Path) -> None:
    town = Town(tmp_path)
    for rank in EVERYONE:
        town.call(rank, "all_gather", "shard", ends=True)
        town.inside(rank, "forward")
    assert not named(verdict_of(town.look()))


# Runs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "telemetry").mkdir(parents=True)
    return tmp_path / "run"


def still_town(run: Path) -> Town:
    town = Town(WriterPlace.of(run).rings)
    long_ago_ns = time.monotonic_ns() - 30_000_000_000
    for recorder in town.recorders:
        recorder.clock_ns = lambda: long_ago_ns
    for rank in (0, 1, 2):
        town.call(rank, "all_gather", "shard", ends=False)
    town.inside(3, "data")
    return town


def remove(town: Town) -> None:
    for path in town.folder.glob("*"):
        path.unlink()
    town.folder.rmdir()


def test_a_run_of_this_host_is_judged_by_its_rings(run: Path) -> None:
    town = still_town(run)
    try:
        assert named(judge_run(run)) == [3]
        assert judge_run(run, HangPolicy(least_wait_s=60)).exit_status == 0
        done = CliRunner().invoke(command, ["hang", str(run), "--json"])
        assert done.exit_code == 1 and json.loads(done.output)["detections"][0]["who"][0]["name"] == "3"
    finally:
        remove(town)


def test_what_a_writer_has_kept_is_judged_when_the_ranks_are_gone(run: Path) -> None:
    town = still_town(run)
    now_s = [0.0]
    still = StillRings(run / "telemetry", "h9", lambda: now_s[0])
    readers = [RingReader(path) for path in sorted(town.folder.glob("*.ring"))]
    try:
        still.look(readers)
        assert not (run / "telemetry/still").exists()
        now_s[0] = 60.0
        still.look(readers)
    finally:
        remove(town)
    assert [one.host for one in ranks_at_rest(run)] == ["h9"] * 4
    assert named(judge_run(run)) == [3]


def test_a_host_that_often_stands_still_is_kept_later(run: Path) -> None:
    now_s = [0.0]
    still = StillRings(run / "telemetry", "h9", lambda: now_s[0])
    for now_s[0] in (10.0, 30.0):  # until the first it starts
        still.moved()
    for now_s[0], is_kept in ((65.0, False), (75.0, True)):
        reader_of = still_town(run)
        readers = [RingReader(path) for path in reader_of.folder.glob("*.ring")]
        still.look(readers)
        remove(reader_of)
        assert (run / "telemetry/still").exists() == is_kept


def own_loop(run: Path, *, steps: int = 3, still_s: float = 70.0) -> Town:
    """A loop that somebody wrote, which stands still: rank 1 sleeps in its step, the others are in a collective."""
    town = Town(WriterPlace.of(run).rings, 3)
    now_ns = time.monotonic_ns() - round(still_s * 1e9)
    for rank, recorder in enumerate(town.recorders):
        recorder.clock_ns = lambda: now_ns
        step, meeting = recorder.type("step"), recorder.type("collective", "all-reduce")
        for _ in range(steps):
            at_ns = now_ns - 2_000_000
            recorder.enter(step, at_ns)
            recorder.record(step, at_ns, at_ns + 1_000_000)
        recorder.span(step).__enter__()
        if rank != 1:
            recorder.span(meeting).__enter__()
    return town


def test_a_loop_of_somebody_s_own_that_stands_still_is_no_job_that_is_well(run: Path) -> None:
    town = own_loop(run)
    try:
        verdict = judge_run(run)
    finally:
        remove(town)
    assert verdict.exit_status == 1 and named(verdict) == [1] and not verdict.blamed_ranks
    assert "in step 7 since 70 s, while the 2 others are in collective all-reduce" in verdict.sentence
    assert verdict.detections[0].confidence < 0.7


def test_a_run_that_stands_still_and_in_which_nobody_differs_is_a_hang_of_nobody(run: Path) -> None:
    town = own_loop(run)
    town.recorders[1].span(town.recorders[1].type("collective", "all-reduce")).__enter__()
    try:
        verdict = judge_run(run)
    finally:
        remove(town)
    assert verdict.exit_status == 1 and not named(verdict) and "nobody can be named" in verdict.sentence


def test_a_run_that_has_made_no_step_yet_may_be_starting(run: Path) -> None:
    town = own_loop(run, steps=0)
    try:
        assert judge_run(run).exit_status == 3
    finally:
        remove(town)


def test_a_run_killed_after_it_stood_still_is_judged_as_before(run: Path) -> None:
    """Kept after 3.6 s, which is less than a run that lives is judged after; then its rings say that all are dead."""
    town = own_loop(run, still_s=3.6)
    now_s = [0.0]
    still = StillRings(run / "telemetry", socket.gethostname(), lambda: now_s[0])
    readers = [RingReader(path) for path in sorted(town.folder.glob("*.ring"))]
    for now_s[0] in (2.0, 3.6):  # between these its processes have used no core
        still.look(readers)
    (kept,) = (run / "telemetry/still").glob("*.json")
    before = kept.read_text()
    assert all(one.state != "gone" for one in ranks_at_rest(run))
    for reader in readers:
        reader.pid = 0  # no process has it
    now_s[0] = 90.0
    still.look(readers)
    assert kept.read_text() == before
    remove(town)
    verdict = judge_run(run)
    assert verdict.exit_status == 1 and named(verdict) == [1] and "stood still for 4 s" in verdict.sentence


def test_what_was_kept_goes_when_the_run_goes_on(run: Path) -> None:
    town = own_loop(run)
    now_s = [0.0]
    still = StillRings(run / "telemetry", "h9", lambda: now_s[0])
    now_s[0] = 10.0
    still.look([RingReader(path) for path in sorted(town.folder.glob("*.ring"))])
    remove(town)
    for now_s[0], is_kept in ((12.0, True), (12.1, True), (16.0, False)):  # interrupted ranks end their spans once
        still.moved()
        assert bool(list((run / "telemetry/still").glob("*.json"))) == is_kept


def test_what_was_kept_of_a_hang_that_is_over_says_nothing_of_the_next_one(run: Path) -> None:
    """Steps have been made since, within a second, and then all ranks are killed."""
    town = own_loop(run)
    still = StillRings(run / "telemetry", "h9", lambda: 10.0)
    still._moved_s = 0.0
    readers = [RingReader(path) for path in sorted(town.folder.glob("*.ring"))]
    still.look(readers)
    step = town.recorders[0].type("step")
    for town.recorders[0].step, is_kept in ((8, True), (9, False)):  # an interrupted rank may end the step it is in
        town.recorders[0].enter(step, town.recorders[0].clock_ns())
        still.moved(readers)
        assert bool(list((run / "telemetry/still").glob("*.json"))) == is_kept
    remove(town)


@pytest.mark.parametrize("damage", ["{", "[]", '{"ranks": [{}]}'])
def test_what_was_kept_and_is_damaged_counts_for_nothing(run: Path, damage: str) -> None:
    (run / "telemetry/still").mkdir()
    (run / "telemetry/still/h0-0.json").write_text(damage)
    verdict = judge_run(run)
    assert verdict.exit_status == 3 and "none of its ranks is on this host" in verdict.sentence


def test_a_run_that_goes_on_no_more_is_well(tmp_path: Path) -> None:
    (tmp_path / "telemetry" / "steps").mkdir(parents=True)
    verdict = judge_run(tmp_path)
    assert verdict.exit_status == 0 and verdict.looked_at == "the run goes on no more: finished"
    died = {"kind": "rank died", "rank": 1, "host": "h", "attempt": 0, "at_ns": 5}
    (tmp_path / "telemetry" / "incidents.jsonl").write_text(json.dumps(died) + "\n")
    assert judge_run(tmp_path).exit_status == 3


def test_a_folder_without_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no spans"):
        judge_run(tmp_path)
