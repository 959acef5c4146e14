"""What a rank sends and receives in a step, derived from the tables of both sides. Torch-free.

Everything between two ranks in one direction goes over one channel, in the order in which the sender's table makes it;
the receiver takes it in that order, whatever it needs first. So both sides agree without a word, and a communicator
that keeps order (NCCL's) is never asked for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.parallel.pipeline.tables import Action, Placement, Table


class Message(NamedTuple):
    """An activation or a gradient on its way from one stage to the next.

    Attributes:
        stage: the one that needs it.
        gradient: whether it is the gradient of what `stage` put out, or else the activation that `stage` takes in.
        sender: pipeline rank.
        receiver: pipeline rank; the same as `sender` where nothing travels.
        order: place among all messages from `sender` to `receiver` in a step.
    """

    stage: int
    gradient: bool
    micro_batch: int
    sender: int
    receiver: int
    order: int

    @property
    def source(self) -> int:
        """The stage that makes it."""
        return self.stage + 1 if self.gradient else self.stage - 1

    @property
    def content(self) -> str:
        """In words."""
        return "gradients" if self.gradient else "activations"


@dataclass(frozen=True)
class Step:
    """One action of a rank with all communication around it.

    Attributes:
        post: messages whose receives are started before the action: what it needs itself, and a look ahead.
        need: the message it takes in; None: it needs none.
        confirmed: messages sent earlier which have surely arrived once `need` has, as its sender had used them before.
        give: the message it makes; None: nobody needs its result.
    """

    action: Action
    post: tuple[Message, ...]
    need: Message | None
    confirmed: tuple[Message, ...]
    give: Message | None


def route(table: Table, rank: int, look_ahead: int) -> list[Step]:
    """The steps of pipeline rank `rank`.

    Args:
        look_ahead: receives that are started before their turn, beyond that of the action itself; a channel's order
            may make it one more.
    """
    given = _given(table, rank)
    incoming = {peer: [m for m in _given(table, peer).values() if m.receiver == rank] for peer in _peers(table, rank)}
    coming = {_key(m): m for messages in incoming.values() for m in messages}
    coming |= {_key(m): m for m in given.values() if m.receiver == rank}
    needs = [None if action.kind == "W" else coming.get(_need(action)) for action in table.actions[rank]]
    posts = _posts(needs, incoming, look_ahead)
    confirmed = _confirmations(table, rank, needs, given)
    return [
        Step(action, posts[index], needs[index], confirmed[index], given.get(action))
        for index, action in enumerate(table.actions[rank])
    ]


def channels(placement: Placement) -> list[tuple[int, int]]:
    """All (sender, receiver) between which anything travels, in the order in which to open them.

    A total order, so that ranks that open theirs one after the other, each waiting for the peer, never wait in a
    circle; disjoint pairs come first and second, so that the waiting is short.
    """
    pairs = set()
    for stage in range(placement.stages - 1):
        here, there = placement.rank_of(stage), placement.rank_of(stage + 1)
        pairs |= {(here, there), (there, here)} if here != there else set()
    return sorted(pairs, key=lambda pair: (abs(pair[0] - pair[1]) > 1, min(pair) % 2, min(pair), max(pair), pair))


_Key = tuple[int, bool, int]
"""Stage that needs it, whether it is a gradient, micro-batch."""


def _key(message: Message) -> _Key:
    return message.stage, message.gradient, message.micro_batch


def _need(action: Action) -> _Key:
    """What a pass takes in, if there is a stage that makes it."""
    return action.stage, action.kind != "F", action.micro_batch


def _given(table: Table, rank: int) -> dict[Action, Message]:
    """What the actions of `rank` make for other stages, in order."""
    rank_of, stages = table.placement.rank_of, table.placement.stages
    sent: dict[int, int] = {}
    given = {}
    for action in table.actions[rank]:
        stage = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "W" or not 0 <= stage < stages:
            continue
        receiver = rank_of(stage)
        order = sent.get(receiver, 0)
        sent[receiver] = order + 1
        given[action] = Message(stage, action.kind != "F", action.micro_batch, rank, receiver, order)
    return given


def _peers(table: Table, rank: int) -> list[int]:
    return sorted({sender for sender, receiver in channels(table.placement) if receiver == rank})


def _posts(
    needs: Sequence[Message | None], incoming: Mapping[int, Sequence[Message]], look_ahead: int
) -> list[tuple[Message, ...]]:
    """For every action, the receives to start before it: those of the next `look_ahead` needs too, in channel order."""
    arriving = [need for need in needs if need is not None and need.sender != need.receiver]
    started = dict.fromkeys(incoming, 0)
    posts, taken = [], 0
    for need in needs:
        taken += need is not None and need.sender != need.receiver
        post: list[Message] = []
        for message in arriving[: taken + look_ahead][max(taken - 1, 0) :]:
            begin = started[message.sender]
            post += incoming[message.sender][begin : message.order + 1]
            started[message.sender] = max(begin, message.order + 1)
        posts.append(tuple(post))
    return posts


def _confirmations(
    table: Table, rank: int, needs: Sequence[Message | None], given: Mapping[Action, Message]
) -> list[tuple[Message, ...]]:
    """For every action, what its need's arrival says to have arrived: all that its sender had used before making it."""
    under_way: dict[int, list[tuple[int, Message]]] = {}
    made: dict[int, dict[Message, int]] = {}
    for peer in _peers(table, rank):
        places = {action: at for at, action in enumerate(table.actions[peer]) if action.kind != "W"}
        made[peer] = {message: places[action] for action, message in _given(table, peer).items()}
        used = {_need(action): at for action, at in places.items()}
        sent = [(used[_key(message)], message) for message in given.values() if message.receiver == peer]
        under_way[peer] = sorted(sent, reverse=True)
    confirmed: list[tuple[Message, ...]] = []
    for need in needs:
        done = []
        if need is not None and need.sender != rank:
            rest, at = under_way[need.sender], made[need.sender][need]
            while rest and rest[-1][0] <= at:
                done.append(rest.pop()[1])
        confirmed.append(tuple(done))
    return confirmed
