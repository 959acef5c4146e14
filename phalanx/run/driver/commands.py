"""What the driver's actions are in messages to executors. A pure function, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from phalanx.run import messages
from phalanx.run.decide import actions
from phalanx.run.decide.actions import Action, ranks_of


class Command(NamedTuple):
    """A message, and to whom."""

    host: str
    message: messages.FromDriver


def commands(
    action: Action, addresses: Mapping[str, str], peers: Mapping[str, str] = MappingProxyType({})
) -> list[Command]:
    """The messages that perform an action; none where it is the back end's alone, the judge's or for people.

    Args:
        addresses: of hosts, as workers of other hosts reach them; that of the host with the store is among them.
        peers: ``host:port`` where a host serves measurements of the network; empty: nowhere.
    """
    match action:
        case actions.OpenStore():
            return [Command(action.host, messages.OpenStore(action.attempt))]
        case actions.Start():
            return _starts(action, addresses)
        case actions.Stop():
            return [Command(host, messages.Stop(action.attempt, action.grace_s)) for host in action.hosts]
        case actions.Evict() | actions.Release():
            return [Command(action.host, messages.End(action.why))]
        case actions.Check():
            serving = [address for peer in action.peers if (address := peers.get(peer))]
            return [Command(action.host, messages.Check(action.number, action.kind, serving))]
        case _:
            return []


def _starts(action: actions.Start, addresses: Mapping[str, str]) -> list[Command]:
    places = {host: place for place, host in enumerate(action.placement)}
    return [Command(host, _start(action, places[host], addresses)) for host in action.hosts]


def _start(action: actions.Start, place: int, addresses: Mapping[str, str]) -> messages.Start:
    return messages.Start(
        attempt=action.attempt,
        ranks=list(ranks_of(place, action.workers_per_host)),
        world_size=len(action.placement) * action.workers_per_host,
        group_rank=place,
        hosts=len(action.placement),
        store_host=addresses[action.placement[0]],
        store_port=action.store_port,
        restarts=action.restarts,
    )
