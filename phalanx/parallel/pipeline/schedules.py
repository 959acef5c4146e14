"""Pipeline schedules as tables: who computes what in which order, and what is sent for it.

A model is cut into `ranks * chunks` stages. A table gives every pipeline rank its list of actions; what must be sent
and received follows from it, and so does how long ranks wait (`phalanx.parallel.pipeline.timeline`).

Schedules:
    1f1b: one chunk per rank; a rank runs only as many forward passes ahead as there are ranks after it
        (PipeDream-flush, arXiv 2006.09503; arXiv 2104.04473, section 2.2.1).
    interleaved_1f1b: several chunks per rank, so that the bubble shrinks by their number (arXiv 2104.04473, 2.2.2).
    interleaved_zero_bubble: backward passes split into input and weight gradients, the latter put off by as many
        backward passes as the rank's index (ZB-H1 of arXiv 2401.10241, with chunks).
    zbv: two chunks per rank laid out as a V, so that the first rank has the first and the last stage
        (arXiv 2401.10241, section 6).

All four are action for action those of torch.distributed.pipelining 2.13, which the tests hold beside them. On every
stage, micro-batches come in ascending order in each kind of action, so the last one is the one that completes it.

*Routes* are derived from the tables of both sides. Everything between two ranks in one direction goes over one channel,
in the order in which the sender's table makes it; the receiver takes it in that order, whatever it needs first. So both
sides agree without a word, and a communicator that keeps order (NCCL's) is never asked for anything else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.core.errors import UserError
from phalanx.parallel.config import Schedule

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; backward for the input only; backward for the weights."""


class Action(NamedTuple):
    """One piece of computing; written as torch writes it, such as ``3F5``."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Placement:
    """Which pipeline rank holds which stages: in a loop (stage modulo ranks), or down and up again as a V."""

    ranks: int
    chunks: int
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        """Stages in all."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and lap % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of `rank`, in the order of the model."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]


@dataclass(frozen=True, eq=False)
class Table:
    """What every rank computes in one step, in order."""

    schedule: Schedule
    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return self.placement.ranks


def placement_of(schedule: Schedule, ranks: int, chunks: int) -> Placement:
    """Where `schedule` puts the stages of `ranks` ranks with `chunks` chunks each.

    Raises:
        UserError: the schedule cannot have so many chunks.
    """
    only = {"1f1b": 1, "zbv": 2}.get(schedule, chunks)
    if chunks != only:
        raise UserError(
            f"the schedule {schedule!r} has {only} chunk{'s' if only > 1 else ''} on each rank",
            cure=f"set parallel.chunks = {only}, or parallel.schedule = 'interleaved_1f1b'",
            field="parallel.chunks",
            value=chunks,
        )
    return Placement(ranks, chunks, v_shaped=schedule == "zbv")


def make_table(schedule: Schedule, ranks: int, chunks: int, micro_batches: int) -> Table:
    """The table of one training step. `UserError`: the numbers do not fit one another."""
    placement = check_table(schedule, ranks, chunks, micro_batches)
    lists = [_rank_actions(schedule, placement, rank, micro_batches) for rank in range(ranks)]
    return Table(schedule, placement, micro_batches, tuple(map(tuple, lists)))


def check_table(schedule: Schedule, ranks: int, chunks: int, micro_batches: int) -> Placement:
    """Check that there is such a table, without making it. `UserError`: the numbers do not fit one another."""
    placement = placement_of(schedule, ranks, chunks)
    if micro_batches < ranks:
        raise UserError(
            f"{micro_batches} micro-batch{'es' * (micro_batches != 1)} cannot keep {ranks} pipeline ranks busy",
            cure=f"have at least {ranks} micro-batches on each data-parallel rank: lower train.micro_batch or raise "
            f"train.global_batch, or set parallel.pipeline to at most {max(micro_batches, 1)}",
            field="parallel.pipeline",
            value=ranks,
        )
    if schedule.startswith("interleaved") and micro_batches % (micro_batches // ranks):
        # The nearest counts below and above that are equal rounds of at least `ranks` micro-batches.
        below = next(n for n in range(micro_batches, ranks - 1, -1) if n % (n // ranks) == 0)
        above = next(n for n in itertools.count(micro_batches) if n % (n // ranks) == 0)
        raise UserError(
            f"{micro_batches} micro-batches are not {micro_batches // ranks} equal rounds over {ranks} pipeline ranks",
            cure=f"have {below} or {above} micro-batches on each data-parallel rank: change "
            "train.global_batch or train.micro_batch, or set parallel.schedule = '1f1b'",
            field="parallel.schedule",
            value=schedule,
        )
    return placement


def _rank_actions(schedule: Schedule, placement: Placement, rank: int, micro_batches: int) -> list[Action]:
    ranks = placement.ranks
    if schedule == "1f1b":  # as torch's `Schedule1F1B` runs
        forwards, backwards = ([Action(rank, kind, m) for m in range(micro_batches)] for kind in ("F", "B"))
        return list(_alternate(forwards, backwards, warmup=ranks - 1 - rank))
    if schedule == "zbv":
        # As torch's `ScheduleZBVZeroBubble`: made for at least 2 ranks - 1 micro-batches, those too many left out.
        actions = _full_v(rank, ranks, max(2 * ranks - 1, micro_batches))
        return [action for action in actions if action.micro_batch < micro_batches]
    return _interleaved(rank, placement, micro_batches, split=schedule == "interleaved_zero_bubble")


def forward_table(schedule: Schedule, ranks: int, chunks: int, micro_batches: int) -> Table:
    """The table of a pass without gradients (evaluation), over the stages as `schedule` places them; any count fits.

    Depth first: in rounds of as many micro-batches as there are ranks, each round through all chunks.

    Raises:
        UserError: the schedule cannot have so many chunks.
    """
    placement = placement_of(schedule, ranks, chunks)
    rounds = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    lists = [
        tuple(Action(stage, "F", m) for turn in rounds for stage in placement.stages_of(rank) for m in turn)
        for rank in range(ranks)
    ]
    return Table(schedule, placement, micro_batches, tuple(lists))


def _interleaved(rank: int, placement: Placement, micro_batches: int, *, split: bool) -> list[Action]:
    """As torch's `_get_1f1b_rank_ops`: rounds of micro-batches go through the rank's chunks one after the other."""
    ranks, chunks = placement.ranks, placement.chunks
    per_round = micro_batches // (micro_batches // ranks)
    rounds = [range(first, first + per_round) for first in range(0, micro_batches, per_round)]
    stages = placement.stages_of(rank)
    forwards = [Action(stage, "F", m) for turn in rounds for stage in stages for m in turn]
    backward: Kind = "I" if split else "B"
    backwards = [Action(stage, backward, m) for turn in rounds for stage in reversed(stages) for m in turn]
    # Forward passes ahead of the first backward pass: two for each rank behind, or one where backward passes are split.
    warmup = (chunks - 1) * per_round + (1 if split else 2) * (ranks - 1 - rank)
    return list(_alternate(forwards, backwards, min(warmup, len(forwards)), weights_after=rank if split else None))


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int, weights_after: int | None = None
) -> Iterator[Action]:
    """`warmup` forwards, then one forward and one backward as long as there are forwards, then the backwards left.

    Weight gradients follow their backward pass by `weights_after` others; None: they are in it.
    """
    yield from forwards[:warmup]
    weights = [action._replace(kind="W") for action in backwards]
    done = 0
    for index, backward in enumerate(backwards):
        yield from forwards[warmup + index : warmup + index + 1]
        yield backward
        if weights_after is not None and index >= weights_after:
            yield weights[done]
            done += 1
    if weights_after is not None:
        yield from weights[done:]


def _full_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    near, far = rank, 2 * ranks - 1 - rank
    counts: Counter[tuple[int, Kind]] = Counter()

    def run(stage: int, kinds: str) -> Iterator[Action]:
        for kind in kinds:
            counts[stage, kind] += 1  # type: ignore[index]
            yield Action(stage, kind, counts[stage, kind] - 1)  # type: ignore[arg-type, index]

    yield from run(near, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        yield from run(far, "F")
        yield from run(near, "F")
    for _ in range(ranks - rank):
        yield from run(far, "FIW")
    while counts[far, "F"] < micro_batches:
        yield from run(near, "FIW" if counts[near, "F"] < micro_batches else "IW")
        yield from run(far, "FIW")
    for _ in range(rank):
        yield from run(near, "I")
        yield from run(far, "I")
    for _ in range(ranks - rank):
        yield from run(near, "IW")
    yield from run(far, "W" * (micro_batches - counts[far, "W"]))
    yield from run(near, "W" * (micro_batches - counts[near, "W"]))


class Message(NamedTuple):
    """An activation or a gradient on its way from one stage to the next."""

    stage: int  # the one that needs it
    gradient: bool  # whether it is the gradient of what `stage` put out, or else the activation that `stage` takes in
    micro_batch: int
    # sender, receiver: pipeline ranks; the same where nothing travels
    sender: int
    receiver: int
    order: int  # place among all messages from `sender` to `receiver` in a step

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
    """One action of a rank with all communication around it."""

    action: Action
    # messages whose receives are started before the action: what it needs itself, and a look ahead
    post: tuple[Message, ...]
    need: Message | None  # the message it takes in; None: it needs none
    # messages sent earlier which have surely arrived once `need` has, as its sender had used them before
    confirmed: tuple[Message, ...]
    give: Message | None  # the message it makes; None: no stage needs its result


def route(table: Table, rank: int, look_ahead: int) -> list[Step]:
    """The steps of pipeline rank `rank`, which starts `look_ahead` receives (or one more) before their turn."""
    given = _given(table, rank)
    incoming = {peer: [m for m in _given(table, peer).values() if m.receiver == rank] for peer in _peers(table, rank)}
    coming = {_key(m): m for messages in incoming.values() for m in messages}
    coming |= {_key(m): m for m in given.values() if m.receiver == rank}
    needs = [None if action.kind == "W" else coming.get(_need(action)) for action in table.actions[rank]]
    posts, confirmed = _posts(needs, incoming, look_ahead), _confirmations(table, rank, needs, given)
    return [
        Step(action, post, need, done, given.get(action))
        for action, post, need, done in zip(table.actions[rank], posts, needs, confirmed, strict=True)
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
        # A channel keeps its order: where a need comes behind messages of later needs, those are received as well.
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
    # A message that arrives was made by an action of its sender; whatever that had taken in before it is there.
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
