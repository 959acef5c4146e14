"""Actions of the driver as messages to executors."""

from __future__ import annotations

import typing

import msgspec

from phalanx.run import messages
from phalanx.run.decide import actions
from phalanx.run.driver.hosts import commands

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}

PEERS = {"b": "10.0.0.2:4001", "c": "10.0.0.3:4002"}


def made(action: actions.Action) -> list[tuple[str, messages.FromDriver]]:
    return [tuple(command) for command in commands(action, ADDRESSES, PEERS)]  # type: ignore[misc]


def test_each_host_is_told_its_ranks_and_where_all_meet() -> None:
    start = actions.Start(5, ("c", "a"), ("b", "a", "c"), 2, 2950, 4)
    told = dict(made(start))
    assert list(told) == ["c", "a"]
    here = told["c"]
    assert isinstance(here, messages.Start)
    assert (here.attempt, here.ranks, here.world_size, here.group_rank, here.hosts) == (5, [4, 5], 6, 2, 3)
    assert (here.store_host, here.store_port, here.restarts, here.environment) == ("10.0.0.2", 2950, 4, {})
    assert typing.cast(messages.Start, told["a"]).ranks == [2, 3]


def test_every_other_order() -> None:
    assert made(actions.OpenStore(3, "b")) == [("b", messages.OpenStore(3))]
    assert made(actions.Stop(3, ("a",), 1.5)) == [("a", messages.Stop(3, 1.5))]
    assert made(actions.Evict("a", "bad")) == made(actions.Release("a", "bad")) == [("a", messages.End("bad"))]
    check = actions.Check("a", 7, "full", ("b", "never met"))
    assert made(check) == [("a", messages.Check(7, "full", ["10.0.0.2:4001"]))]
    assert commands(check, ADDRESSES) == [("a", messages.Check(7, "full", []))]


def test_what_is_not_for_executors_gives_no_message() -> None:
    others: list[actions.Action] = [actions.AskForHosts(2), actions.Gather(3, ("a",))]
    others += [actions.Alert("info", "text"), actions.Finish(0, "done")]
    assert [made(action) for action in others] == [[]] * len(others)


def test_every_message_survives_the_wire() -> None:
    decoder = msgspec.msgpack.Decoder(messages.FromDriver)
    for action in (actions.Start(5, ("c",), ("c",), 2, 2950, 4), actions.Stop(3, ("a",)), actions.OpenStore(1, "a")):
        for _, message in made(action):
            assert decoder.decode(msgspec.msgpack.encode(message)) == message
