"""What a session does at each step: due, taken by all or none, put off, lost and found again."""

from __future__ import annotations

import json
import struct
import threading

import pytest
import torch
from session_helpers import AskingPeers, Loop, asking_ranks

from phalanx.core.errors import UserError


def test_snapshots_are_taken_when_due_with_what_is_true_then() -> None:
    loop = Loop(every_steps=3)
    loop.watch()
    for step in range(1, 8):
        loop.step(step, stepped=step != 6, metrics={"loss": step / 2})
    assert loop.steps == loop.persisted == [3, 6]
    (first, memory), (second, _) = loop.keeper.took
    assert struct.unpack_from("5f", memory) == (3.0,) * 5
    assert json.loads(first.state) == {"progress": 3}
    assert (first.stepped, second.stepped, second.metrics) == (True, False, {"loss": 3.0})
    assert loop.keeper.said == [("begin", (4, 1)), ("lease", (67, True, 2)), ("resume_from", (-1, 0))]


def test_the_state_of_a_generator_is_that_of_the_step() -> None:
    loop = Loop(every_steps=1)
    loop.watch()
    for step in (1, 2):
        loop.tensors["rng"] = torch.full((3,), step, dtype=torch.uint8)  # another tensor each time
        loop.step(step)
    assert [memory[64:] for _, memory in loop.keeper.took] == [b"\1\1\1", b"\2\2\2"]


def test_what_cannot_be_taken_stays_due_and_is_counted() -> None:
    loop = Loop(every_steps=4)
    loop.watch()
    for step in range(1, 17):
        loop.keeper.holds = {"committed"} if step in range(5, 10) or step in range(12, 16) else set()
        loop.step(step)
    assert loop.steps == [4, 10, 12, 16]
    loop.session.events()
    loop = Loop(every_steps=2)
    loop.watch()
    for step in range(1, 13):
        loop.keeper.holds = {"committed"} if step in range(3, 9) else set()
        loop.step(step)
    events = loop.session.events()
    assert [event.step for event in events] == loop.steps == [2, 9, 10, 12]
    assert [event.put_off for event in events] == [0, 5, 0, 0]
    assert [event.skipped for event in events] == [0, 2, 0, 0]


def test_snapshots_go_on_in_memory_while_one_is_persisted() -> None:
    loop = Loop(every_steps=4, memory_every_steps=1)
    loop.watch()
    for step in range(1, 11):
        loop.keeper.holds = {"durable"} if step in range(4, 10) else set()
        loop.step(step)
    assert loop.steps == list(range(1, 11))
    assert loop.persisted == [4, 10]


def test_nothing_is_asked_where_nothing_is_due() -> None:
    class Counting(AskingPeers):
        asked: list[int] = []  # noqa: RUF012

        def ask_highest(self, value: int):  # type: ignore[no-untyped-def]
            self.asked.append(value)
            return super().ask_highest(value)

    def body(peers: AskingPeers) -> None:
        peers.__class__ = Counting
        loop = Loop(peers, every_steps=5)
        loop.watch()
        for step in range(1, 11):
            loop.step(step)

    asking_ranks(2, body)
    assert Counting.asked == [0] * 4


def test_all_ranks_or_none() -> None:
    def body(peers: AskingPeers) -> list[int]:
        loop = Loop(peers, every_steps=1)
        loop.tensors[f"model.of_rank_{peers.rank}"] = torch.ones(2)
        loop.watch()
        for step in range(1, 10):
            peers.barrier()
            loop.keeper.holds = {"committed"} if step % 3 == peers.rank else set()
            loop.step(step)
        return loop.steps

    one, other = asking_ranks(2, body)
    assert one == other
    assert 0 < len(one) < 9


def test_a_rank_that_writes_nothing_takes_part_only_in_words() -> None:
    def body(peers: AskingPeers) -> Loop:
        loop = Loop(peers)
        loop.watch()  # whole tensors: rank 0 writes them
        for step in range(1, 6):
            loop.step(step, ending=step == 5)
        return loop

    one, other = asking_ranks(2, body)
    assert one.steps == [2, 4, 5]
    assert other.steps == []
    assert [what for what, _ in other.keeper.said] == ["begin"]


def test_seconds_are_those_of_rank_0() -> None:
    def body(peers: AskingPeers) -> tuple[list[int], list[int]]:
        loop = Loop(peers, every_steps=0, every_s=3.0, memory_every_steps=2)
        loop.tensors[f"model.of_rank_{peers.rank}"] = torch.ones(2)
        loop.watch()
        for step in range(1, 12):
            loop.clock_s += 1.0 if peers.rank == 0 else 100.0
            loop.step(step)
        return loop.steps, loop.persisted

    one, other = asking_ranks(2, body)
    assert one == other
    assert one[1] == [4, 7, 10]  # the clock begins to run at step 1
    assert one[0] == [2, 4, 6, 7, 8, 10]


def test_a_lost_keeper_is_reported_once_and_there_is_another() -> None:
    loop = Loop(every_steps=2)
    loop.watch()
    for step in range(1, 4):
        loop.step(step)
    loop.keeper.is_lost = True
    loop.step(4)
    assert loop.again.wait(60)
    for step in range(5, 9):
        loop.step(step)
    assert len(loop.keepers) == 2
    assert loop.keepers[0].is_closed
    assert loop.keeper.said == [("begin", (4, 1)), ("lease", (67, True, 2)), ("resume_from", (-1, 0))]
    assert loop.steps[0] == 2 and loop.steps[-1] == 8
    assert len([line for line in loop.lines if "is lost (it was killed)" in line]) == 1
    events = loop.session.events()
    assert [event.step for event in events] == loop.steps


def test_a_copy_into_a_lost_keeper_s_memory_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(every_steps=1)
    loop.watch({"model.w": torch.zeros(1 << 20)}, overlap=True)
    go = threading.Event()
    real = threading.Thread.run

    def held_back(thread: threading.Thread) -> None:
        if thread.name == "snapshot":
            assert go.wait(60)
        real(thread)

    monkeypatch.setattr(threading.Thread, "run", held_back)
    loop.step(1)
    loop.keeper.is_lost = True
    loop.session.ask(2)
    assert loop.again.wait(60)
    go.set()
    loop.session.fence()
    loop.session.after_step(2, lambda: None)
    loop.session.finish(clean=False)
    assert [len(keeper.took) for keeper in loop.keepers] == [0, 1]


def test_what_was_under_way_with_a_lost_keeper_is_told() -> None:
    loop = Loop(every_steps=1)
    loop.watch()
    loop.keeper.holds = {"durable"}
    loop.step(1)
    loop.keeper.is_lost = True
    loop.step(2)
    event, *_ = loop.session.events()  # there may be another keeper already
    assert (event.step, event.problem, event.name) == (1, "the keeper of this host was lost", "")


def test_a_leftover_of_an_earlier_attempt_stops() -> None:
    loop = Loop(every_steps=1)
    loop.watch()
    loop.step(1)
    loop.keeper.is_refused = True
    with pytest.raises(UserError, match="a later attempt of this run has begun"):
        loop.step(2)


def test_a_copy_beside_training_is_told_when_it_is_there() -> None:
    loop = Loop(every_steps=1)
    loop.watch({"model.w": torch.zeros(1 << 20), "rng": torch.zeros(3, dtype=torch.uint8)}, overlap=True)
    for step in range(1, 6):
        loop.step(step)
    loop.session.fence()
    for taken, memory in loop.keeper.took:
        assert memory[: 4 << 20] == struct.pack("f", taken.step) * (1 << 20)
    assert loop.steps[0] == 1


def test_events_say_what_it_cost() -> None:
    loop = Loop(every_steps=2)
    loop.watch()
    for step in range(1, 4):
        loop.step(step)
    [event] = loop.session.events()
    assert (event.step, event.name, event.problem) == (2, "step-00000002", "")
    assert event.snapshot_bytes == 67 and event.persist_bytes == 7
    assert event.examine_s == event.persist_s == 0.5
    assert 0 < event.snapshot_s <= event.stall_s
    assert event.figures()["checkpoint/persist_s"] == 0.5
    assert "checkpoint/name" not in event.figures()


def test_problems_are_told() -> None:
    loop = Loop(every_steps=1)
    loop.watch()
    loop.keeper.problems = {"durable": "stale: nothing changed"}
    loop.step(1)
    loop.step(2)
    assert loop.lines == ["snapshot of step 1: not durable: stale: nothing changed"]
    assert loop.session.events()[0].problem == "stale: nothing changed"


def test_tensors_may_become_others() -> None:
    loop = Loop(every_steps=1)
    loop.watch()
    loop.step(1)
    loop.watch({"model.w": torch.zeros(9)})
    loop.step(2)
    assert [len(memory) for _, memory in loop.keeper.took] == [67, 36]


def test_what_the_ranks_agreed_on_does_not_count_for_the_memory_that_came_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when an optimizer gets the state of its first update between the fence and the end of a step."""
    loop = Loop(every_steps=1)
    loop.watch()
    loop.step(1)
    loop.session.ask(2)
    loop.session.fence()
    monkeypatch.setattr(type(loop.keeper), "busy", property(lambda _: True))  # there is no memory yet
    loop.watch({"model.w": torch.zeros(9)})
    loop.session.after_step(2, lambda: None)
    assert loop.steps == [1]
    monkeypatch.undo()
    loop.step(3)
    assert loop.steps == [1, 3]


def test_state_that_json_would_change_is_refused() -> None:
    loop = Loop(every_steps=1)
    loop.watch()
    loop.session.ask(1)
    with pytest.raises(TypeError, match="keys must be strings"):
        loop.session.after_step(1, lambda: {1: 2})


def test_finish() -> None:
    loop = Loop(every_steps=1)
    loop.watch()
    loop.step(1)
    loop.session.finish(clean=True)
    assert loop.keeper.said[-1] == ("finish", None)
    assert loop.keeper.is_closed
