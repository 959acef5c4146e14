"""The order in which chains of collectives go on, on networks of every speed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ranks import ThreadGroups, run_ranks
from torch import Tensor
from zero_runs import Job, backwards, batch, make_chunk

from phalanx.core.layout import Layout
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.group import Work
from phalanx.parallel.zero.bucket import Bucket
from phalanx.parallel.zero.reductions import Reductions


class Network:
    """Collectives that are done when the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done: set[str] = set()

    def chain(self, *names: str) -> Iterator[Work]:
        for name in names:
            self.log.append(f"start {name}")
            yield Work([Handle(self, name)])
            self.log.append(f"took {name}")


class Handle:
    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name

    def wait(self) -> Any:
        self.network.log.append(f"wait {self.name}")

    def is_completed(self) -> bool:
        return self.name in self.network.done


def test_polling_goes_on_with_what_is_done_and_never_out_of_order() -> None:
    network, reductions = Network(), Reductions()
    reductions.start(network.chain("a1", "a2"))
    reductions.start(network.chain("b1", "b2"))
    network.done |= {"b1", "b2"}
    reductions.advance()
    assert network.log == ["start a1", "start b1"]  # b is done, but a2 must be started before b2
    network.done.add("a1")
    reductions.advance()
    assert network.log[2:] == ["wait a1", "took a1", "start a2"]
    reductions.finish()
    assert network.log[5:] == ["wait a2", "took a2", "wait b1", "took b1", "start b2", "wait b2", "took b2"]


class Lane:
    """A lane that writes down what happens in it."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.inside, self.marks = log, False, 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.log.append("enter")
        self.inside = True
        yield
        self.inside = False
        self.log.append("leave")

    def mark(self) -> Callable[[], None]:
        number = self.marks
        self.marks += 1
        return lambda: self.log.append(f"join {number}")


def test_in_a_lane_a_chain_is_given_as_a_whole_and_memory_is_kept_until_it_is_joined() -> None:
    network = Network()
    reductions = Reductions(Lane(network.log))
    reductions.start(network.chain("a1", "a2"), lambda: network.log.append("release a"))
    whole = ["enter", "start a1", "wait a1", "took a1", "start a2", "wait a2", "took a2", "leave"]
    assert network.log == whole  # the handles' waits are those of the lane: nothing is asked whether it is done
    reductions.start(network.chain("b1"), lambda: network.log.append("release b"))
    reductions.advance()
    after = network.log[len(whole) :]
    assert after == ["enter", "start b1", "wait b1", "took b1", "leave"]  # and the stream that computes does not wait
    reductions.finish(leave=1)
    assert network.log[-2:] == ["join 0", "release a"]
    reductions.finish()
    assert network.log[-2:] == ["join 1", "release b"]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_what_a_lane_reads_lives_until_it_is_joined(zero: int, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the stream that computes would be used again by it: gradients are taken out of the lane, and kept."""
    take = Bucket._take_gradients
    lanes: dict[int, Lane] = {}

    def body(groups: ThreadGroups) -> tuple[int, list[Tensor | None]]:
        log: list[str] = []
        lane = lanes[threading.get_ident()] = Lane(log)
        taken: list[weakref.ref[Tensor]] = []
        lane.taken = taken  # type: ignore[attr-defined]
        config = ParallelConfig(replicate=2, shard=2, zero=zero, reduce_dtype=wire, bucket_bytes=20_000)  # type: ignore[arg-type]
        job = Job(micro_batches=2)
        chunk = make_chunk(groups, job.config, config, job)
        chunk._reductions = Reductions(lane)
        chunk.gather()
        index = groups.layout.index(groups.rank, ("replicate", "shard"))
        backwards(chunk.part, [x.chunk(4)[index] for x in batch(0)], job, 50.0, chunk.last_backward)
        chunk.reduce()
        waiting = len(chunk._reductions._chains)
        held = sum(ref() is not None for ref in taken)
        assert waiting > 0 and held >= min(waiting, len(taken))
        chunk.finish()
        return waiting, [p.grad for p in chunk.parameters.values()]

    def noted(bucket: Bucket) -> Tensor:
        whole = take(bucket)
        lane = lanes.get(threading.get_ident())
        if lane is not None:
            assert not lane.inside
            lane.taken.append(weakref.ref(whole))  # type: ignore[attr-defined]
        return whole

    monkeypatch.setattr(Bucket, "_take_gradients", noted)
    layout = Layout(replicate=2, shard=2)
    for _, gradients in run_ranks(layout, body):
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_a_limit_of_what_is_on_its_way() -> None:
    network, reductions = Network(), Reductions()
    for name in "abc":
        reductions.finish(leave=1)
        reductions.start(network.chain(name))
    assert [entry for entry in network.log if entry.startswith("took")] == ["took a"]
    reductions.finish()
    assert network.log[-1] == "took c"
