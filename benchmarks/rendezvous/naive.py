"""The naive way: every rank calls torch's `new_group` for every group, with a barrier of all ranks at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.layout import Axis, Layout
from rendezvous.proxy import Recording
from rendezvous.scripts import GroupScript
from rendezvous.wire import Kind, Request

_BARRIER = b"store_based_barrier_key:"


def barrier_of(recordings: Sequence[Recording]) -> list[Request]:
    """What real ranks said at one barrier: the rank that came last, which says all that can be said."""
    for recording in recordings:
        for request in recording.requests:
            if request.kind is Kind.SET and _BARRIER in request.keys[0]:
                keys = {request.keys[0], request.keys[0].removesuffix(b":last_worker")}
                return [said for said in recording.requests if keys.intersection(said.keys)]
    raise AssertionError("no rank came last to a barrier")


def scripts(
    layout: Layout, recorded: dict[tuple[Axis, ...], GroupScript], barrier: Sequence[Request]
) -> list[list[Request]]:
    """What every rank says: to connect, at the barrier of the whole job, then for every group of every kind: if it is a
    member, what members say to meet; and what it says at the barrier, the key of which only the last one sets."""
    world = layout.world_size
    said = [list(next(iter(recorded.values())).connect) for _ in range(world)]
    groups = [(script, ranks) for axes, script in recorded.items() for ranks in layout.groups(axes)]
    _meet(said, barrier, b"0", world)
    for number, (script, ranks) in enumerate(groups, 1):
        place = b"/attempt0/default_pg/%d/cpu" % number
        for index, rank in enumerate(ranks):
            said[rank] += script.of(index, place)
        _meet(said, barrier, b"%d" % number, world)
    return said


def _meet(said: list[list[Request]], barrier: Sequence[Request], name: bytes, world: int) -> None:
    old = barrier[0].keys[0]
    new = old.partition(_BARRIER)[0] + _BARRIER + name
    moved = [request.moved(old, new) for request in barrier]
    everyone = world.to_bytes(8, "little")
    moved = [replace(request, only_after=everyone) if request.kind is Kind.SET else request for request in moved]
    for script in said:
        script += moved
