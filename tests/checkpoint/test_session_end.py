"""The last checkpoint of a run, and replicas."""

from __future__ import annotations

import itertools

import pytest
import torch
from session_helpers import AskingPeers, FakeKeeper, Loop, asking_ranks

from phalanx.checkpoint.keeper_contract import KeeperLostError, SnapshotProgress, Stage
from phalanx.core.errors import UserError


def test_the_last_step_becomes_durable() -> None:
    loop = Loop(every_steps=0)
    loop.watch()
    loop.step(1)
    loop.step(2, ending=True)
    [(taken, _)] = loop.keeper.took
    assert (taken.step, taken.persist, taken.hurry) == (2, True, True)
    assert [event.name for event in loop.session.events()] == ["step-00000002"]


def test_it_says_why_it_is_not_durable_on_all_ranks() -> None:
    def body(peers: AskingPeers) -> str:
        loop = Loop(peers, every_steps=1)
        loop.tensors[f"model.of_rank_{peers.rank}"] = torch.ones(2)
        loop.watch()
        loop.step(1)
        loop.step(2)
        loop.keeper.problems = {"durable": "/disk is full"} if peers.rank == 1 else {}
        with pytest.raises(UserError) as caught:
            loop.step(3, ending=True)
        return str(caught.value)

    for told in asking_ranks(2, body):
        assert told.startswith(
            "/dev/null/nowhere: the last checkpoint (step 3) is not durable, the newest that is durable is step-"
        )
        assert "rank 1: /disk is full; " in told


@pytest.mark.parametrize("stage, words", [("committed", "is still being written"), ("durable", "still being written")])
def test_waiting_is_bounded(stage: Stage, words: str) -> None:
    loop = Loop(every_steps=1, final_timeout_s=0.05)
    loop.watch()
    loop.keeper.holds = {stage}
    loop.step(1)
    with pytest.raises(UserError, match=words) as caught:
        loop.step(2, ending=True)
    assert "none became durable" in str(caught.value)


def test_without_memory_nobody_waits() -> None:
    def body(peers: AskingPeers) -> str:
        loop = Loop(peers, every_steps=1, final_timeout_s=600.0)
        loop.tensors[f"model.of_rank_{peers.rank}"] = torch.ones(2)
        loop.watch()
        if peers.rank == 1:
            loop.keeper.refuse_memory("12 GB are not free")
        loop.step(1)
        with pytest.raises(UserError) as caught:
            loop.step(2, ending=True)
        return str(caught.value)

    for told in asking_ranks(2, body):
        assert "rank 1 has no memory for snapshots on its host: 12 GB are not free" in told


def test_it_is_taken_again_where_the_keeper_is_lost_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(every_steps=0)
    loop.watch()

    def lose(keeper: FakeKeeper, step: int, stage: Stage, timeout_s: float) -> list[SnapshotProgress]:
        if keeper is loop.keepers[0]:
            keeper.is_lost = True
            raise KeeperLostError("it was killed")
        return real(keeper, step, stage, timeout_s)

    real = FakeKeeper.wait
    monkeypatch.setattr(FakeKeeper, "wait", lose)
    loop.step(1, ending=True)
    assert [len(keeper.took) for keeper in loop.keepers] == [1, 1]


def told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper whose word has been heard does not say it again: who waits for it then waits for ever."""
    real = FakeKeeper.wait

    def wait(keeper: FakeKeeper, step: int, stage: Stage, timeout_s: float) -> list[SnapshotProgress]:
        told = real(keeper, step, stage, timeout_s)
        if not any((one.step, one.stage) == (step, stage) for one in told):
            raise TimeoutError
        return told

    monkeypatch.setattr(FakeKeeper, "wait", wait)


def test_a_last_step_that_is_durable_already_is_neither_taken_nor_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a foreign loop is closed some time after its last step."""
    told_once(monkeypatch)
    loop = Loop(every_steps=2)
    loop.watch()
    loop.step(1)
    loop.step(2, metrics={"validation_loss": 2.0})
    assert [event.name for event in loop.session.events()] == ["step-00000002"]
    loop.session.after_step(2, lambda: None, ending=True)
    [(taken, _)] = loop.keeper.took
    assert taken.metrics == {"validation_loss": 2.0}  # an end knows none


def test_a_last_step_that_is_on_its_way_is_waited_for() -> None:
    loop = Loop(every_steps=2)
    loop.watch()
    loop.keeper.holds = {"durable"}
    loop.step(1)
    loop.step(2)
    assert loop.session.events() == []
    loop.keeper.holds = set()
    loop.session.after_step(2, lambda: None, ending=True)
    assert [event.name for event in loop.session.events()] == ["step-00000002"] and loop.steps == [2]


def test_a_last_step_that_did_not_become_durable_is_taken_again() -> None:
    loop = Loop(every_steps=2)
    loop.watch()
    loop.keeper.problems = {"durable": "the disk was full"}
    loop.step(1)
    loop.step(2)
    assert [event.problem for event in loop.session.events()] == ["the disk was full"]
    loop.keeper.problems = {}
    loop.session.after_step(2, lambda: None, ending=True)
    assert [event.name for event in loop.session.events()] == ["step-00000002"] and loop.steps == [2, 2]


def test_a_last_step_whose_keeper_was_replaced_is_not_asked_of_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank of two: the other, for which all went well, takes it again too."""
    told_once(monkeypatch)

    def body(peers: AskingPeers) -> Loop:
        loop = Loop(peers, every_steps=2)
        loop.tensors[f"model.of_rank_{peers.rank}"] = torch.ones(2)
        loop.watch()
        loop.keeper.holds = {"durable"} if peers.rank == 1 else set()
        loop.step(1)
        loop.step(2)
        if peers.rank == 1:
            loop.keeper.is_lost = True
            loop.session.events()
            assert loop.again.wait(60)
        loop.session.after_step(2, lambda: None, ending=True)
        return loop

    one, other = asking_ranks(2, body)
    assert one.persisted == [2, 2] and [len(keeper.took) for keeper in other.keepers] == [1, 1]


def test_each_can_be_waited_for() -> None:
    loop = Loop(every_steps=2, wait=True)
    loop.watch()
    for step in range(1, 5):
        loop.step(step)
        assert not loop.keeper.persisting
    loop.keeper.problems = {"durable": "no"}
    loop.step(5)
    loop.step(6)  # told, not raised
    assert loop.lines == ["snapshot of step 6: not durable: no"]


def test_where_each_is_waited_for_none_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the memory for it is not made yet nor where the snapshot before it is still being examined."""
    loop = Loop(every_steps=3, memory_every_steps=2, wait=True)
    loop.watch()
    looks, poll = itertools.count(1), FakeKeeper.poll

    def looked(keeper: FakeKeeper) -> list[SnapshotProgress]:
        if next(looks) > 9:
            keeper.holds = set()
        return poll(keeper)

    monkeypatch.setattr(FakeKeeper, "poll", looked)
    loop.keeper.holds = {"committed"}
    for step in range(1, 7):
        loop.step(step)
    assert loop.steps == [2, 3, 4, 6] and loop.persisted == [3, 6]
    assert [event.put_off for event in loop.session.events()] == [0] * 4
    assert loop.lines == []


def test_a_lost_keeper_is_not_waited_for_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(loop: Loop) -> FakeKeeper:
        if loop.keepers:
            raise KeeperLostError("there is none any more")
        loop.keepers.append(FakeKeeper())
        return loop.keeper

    monkeypatch.setattr(Loop, "_connect", connect)
    loop = Loop(every_steps=2, wait=True, final_timeout_s=1e6)
    loop.watch()
    loop.step(1)
    loop.keeper.is_lost = True
    loop.step(2)
    assert loop.persisted == []
    loop.session.finish(clean=False)


def test_replicas_go_to_the_other_host_and_to_its_next_keeper() -> None:
    def body(peers: AskingPeers) -> Loop:
        loop = Loop(peers, ("a", "b"), every_steps=1)
        loop.tensors[f"model.of_rank_{peers.rank}"] = torch.ones(2)
        loop.watch()
        for step in range(1, 4):
            loop.step(step)
        if peers.rank == 1:
            loop.keeper.is_lost = True
        loop.step(4)
        if peers.rank == 1:
            assert loop.again.wait(60)
        peers.barrier()
        for step in range(5, 9):
            loop.step(step)
        loop.session.events()
        return loop

    one, other = asking_ranks(2, body)
    assert one.steps[-2:] == other.steps[-2:] == [7, 8]
    assert [peer for what, peer in one.keepers[0].said if what == "replicate_to"] == ["b", "b", "b"]
    assert other.keeper.said[-1] == ("replicate_to", "a")
    assert one.lines[0].startswith("replicas: the rack of")


def test_a_loop_that_only_calls_after_each_step() -> None:
    def body(peers: AskingPeers) -> list[int]:
        loop = Loop(peers, every_steps=2)
        loop.tensors[f"model.of_rank_{peers.rank}"] = torch.ones(2)
        loop.watch()
        for step in range(1, 6):
            loop.session.after_step(step, lambda: None, ending=step == 5)
        return loop.steps

    assert asking_ranks(2, body) == [[2, 4, 5]] * 2
