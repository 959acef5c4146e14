"""The order in which chains of collectives go on, on networks of every speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.parallel.group import Work
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
    network, reductions = Network(), Reductions(polls=True)
    reductions.start(network.chain("a1", "a2"), goes_on=True)
    reductions.start(network.chain("b1", "b2"), goes_on=True)
    network.done |= {"b1", "b2"}
    reductions.advance()
    assert network.log == ["start a1", "start b1"]  # b is done, but a2 must be started before b2
    network.done.add("a1")
    reductions.advance()
    assert network.log[2:] == ["wait a1", "took a1", "start a2"]
    reductions.finish()
    assert network.log[5:] == ["wait a2", "took a2", "wait b1", "took b1", "start b2", "wait b2", "took b2"]


def test_without_polling_the_order_does_not_depend_on_what_is_done() -> None:
    def log(done: set[str]) -> list[str]:
        network, reductions = Network(), Reductions(polls=False)
        network.done = done
        reductions.start(network.chain("a1", "a2"), goes_on=True)
        reductions.advance()
        reductions.start(network.chain("b1"))
        reductions.advance()
        reductions.start(network.chain("c1"))
        reductions.finish()
        return network.log

    log_of_a_slow_network = log(set())
    assert log({"a1", "a2", "b1"}) == log_of_a_slow_network
    starts = [entry for entry in log_of_a_slow_network if entry.startswith("start")]
    assert starts == ["start a1", "start a2", "start b1", "start c1"]
    # What is a single collective is not waited for before the end: the backward pass goes on beside it.
    assert log_of_a_slow_network.index("wait b1") > log_of_a_slow_network.index("start c1")


def test_a_limit_of_what_is_on_its_way() -> None:
    network, reductions = Network(), Reductions(polls=True)
    for name in "abc":
        reductions.finish(leave=1)
        reductions.start(network.chain(name))
    assert [entry for entry in network.log if entry.startswith("took")] == ["took a"]
    reductions.finish()
    assert network.log[-1] == "took c"
