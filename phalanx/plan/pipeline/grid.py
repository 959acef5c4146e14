"""The actions of a pipeline schedule as arrays: their order on each rank, and rows of what can be done side by side.

`Orders` holds the lists of `phalanx.parallel.pipeline.schedules` for any number of rounds. An action is a code,
``part * stages + stage``, and a micro-batch. Rounds are runs of micro-batches that go through a rank's chunks together;
from one round to the next, all lists repeat but for the first and the last few.

`Grid` puts all actions into rows as if each took equally long. A row has a cell for each rank, and what a cell needs is
in rows above, so rows are worked out from top to bottom and each in one go. Once a pipeline is full the rows repeat
with every round, so that only one round of them is kept.

`held_by_all` counts the passes that each rank holds at a time, which its memory depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import make_table, placement_of

Indices: TypeAlias = NDArray[np.int64]


_NEVER = 1 << 40


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows, as flat cells, rank by rank. They follow a few rows before them, their window."""

    # The cell that each waits for, counted from the window's first; where it waits for no message, the one above it.
    sources: Indices
    codes: Indices  # the action in each cell, as in `Orders`; where there is none, one past the last code
    messages: Indices  # the boundary between stages that the message crosses; where there is none, one past the last

    @cached_property
    def listed(self) -> list[int]:
        """`sources` as a list."""
        return list(map(int, self.sources))


@dataclass(frozen=True, eq=False)
class Grid:
    """The rows of a step."""

    orders: Orders
    window: int  # cells before a repetition that it needs, and the tail too
    head: Rows  # from the first row, after a window of one row; all of them where there is no `repeat`
    repeat: Rows | None  # those of one round, which come again and again; None in a step so short that nothing repeats
    tail: Rows  # from after the last repetition to the last row; empty where there is no `repeat`
    first_forward: Indices  # cells of the head, flat by rank and chunk: where the first micro-batch's pass ends
    last_backward: Indices  # cells of the tail (without one, of the head), by rank and chunk: where the last one's does
    ends: Indices  # likewise, by rank: where its last action does
    in_flight: Indices  # as in `StepTime`

    @cached_property
    def late(self) -> Indices:
        """Cells of the tail, or without one of the head: `last_backward`, flat, then `ends`."""
        return np.concatenate([self.last_backward.ravel(), self.ends])


def make_grid(schedule: Schedule, ranks: int, chunks: int, micro_batches: int) -> tuple[Grid, int]:
    """The rows of a step, and how often those of `Grid.repeat` come in it."""
    per_round = round_length(schedule, ranks, chunks, micro_batches)
    rounds = micro_batches // per_round
    enough = _enough_rounds(schedule, ranks)
    return _make_grid(schedule, ranks, chunks, per_round, min(rounds, enough)), max(0, rounds - enough + 1)


def make_few(ranks: int, micro_batches: int) -> Grid:
    """The rows of 1F1B with fewer micro-batches than ranks."""
    return _make_grid("1f1b", ranks, 1, 1, micro_batches)


def _enough_rounds(schedule: Schedule, ranks: int) -> int:
    """The fewest rounds in which a pipeline fills, does one that can come again, and drains."""
    return {"1f1b": ranks + 2, "zbv": 2 * ranks + 1}.get(schedule, 3)


@lru_cache(maxsize=64)
def _make_grid(schedule: Schedule, ranks: int, chunks: int, per_round: int, rounds: int) -> Grid:
    orders = make_orders(schedule, ranks, chunks, per_round, rounds)
    places = _sources(orders)
    rows = _rows(places)
    cells = _cells(orders, places, rows)
    height = int(rows.max()) + 1
    first = after = height
    window = 1
    if rounds == _enough_rounds(schedule, ranks):
        period = orders.codes.shape[1] // rounds
        first, window = _repeated(cells, ranks, period, int(rows[orders.micro_batch == 0].max()) + 1)
        after = first + period
    cell = rows * ranks + np.arange(ranks)[:, None]
    final = cell - (after * ranks if after > first else 0)
    # Micro-batches that every chunk holds when its rank holds most, by rank and chunk.
    part, stage = np.divmod(orders.codes, orders.stages)
    change = np.where(part == FORWARD, 1, np.where(part == orders.last_part, -1, 0))
    fullest = change.cumsum(axis=1).argmax(axis=1)
    until = np.arange(change.shape[1]) <= fullest[:, None]
    held = np.zeros(orders.stages, np.int64)
    np.add.at(held, stage, change * until)
    in_flight = held[orders.stages_of]
    in_flight.setflags(write=False)  # all steps of this grid share it
    return Grid(
        orders=orders,
        window=window * ranks,
        head=_cut(cells, ranks, 0, first, 1),
        repeat=_cut(cells, ranks, first, after, window) if after > first else None,
        tail=_cut(cells, ranks, after, height, window),
        first_forward=_find(orders, cell, FORWARD, 0).ravel(),
        last_backward=_find(orders, final, orders.last_part, orders.micro_batches - 1),
        ends=final[:, -1],
        in_flight=in_flight,
    )


def _sources(orders: Orders) -> Indices:
    """The action of another rank that each needs, as rank x actions of a rank + place; -1: none. By rank and place."""
    ranks, actions = orders.codes.shape
    where = np.empty((3 * orders.stages, orders.micro_batches), np.int64)
    rank, place = np.ogrid[:ranks, :actions]
    where[orders.codes, orders.micro_batch] = rank * actions + place
    part, stage = np.divmod(orders.codes, orders.stages)
    other = stage + np.where(part == FORWARD, -1, 1)
    inside = np.clip(other, 0, orders.stages - 1)
    comes = (part != WEIGHTS) & (other == inside) & (orders.rank_of[inside] != rank)
    return np.where(comes, where[part * orders.stages + inside, orders.micro_batch], -1)


def _rows(sources: Indices) -> Indices:
    ranks, actions = sources.shape
    at_once, never = ranks * (actions + 1), ranks * (actions + 1) + 1
    needs = np.full((ranks, actions + 1), never)  # behind a rank's last action stands one that cannot be done
    needs[:, :-1] = np.where(sources < 0, at_once, sources + sources // actions)
    need = needs.ravel().tolist()
    rows = [_NEVER] * len(need) + [-1, _NEVER]
    at = [rank * (actions + 1) for rank in range(ranks)]
    row, left = 0, sources.size
    while left:
        for rank, place in enumerate(at):
            if rows[need[place]] < row:
                rows[place] = row
                at[rank] = place + 1
                left -= 1
        row += 1
    return np.array(rows[:-2]).reshape(ranks, actions + 1)[:, :-1]


def _cells(orders: Orders, sources: Indices, rows: Indices) -> Rows:
    """All cells; sources count from a row of ranks before the first."""
    ranks, stages = orders.ranks, orders.stages
    cell = rows * ranks + np.arange(ranks)[:, None]
    cells = (int(rows.max()) + 1) * ranks
    above = np.arange(cells)
    codes = np.full(cells, 3 * stages)
    codes[cell] = orders.codes
    part, stage = np.divmod(orders.codes, stages)
    messages = np.full(cells, max(stages - 1, 0))
    comes = sources >= 0
    messages[cell[comes]] = np.where(part == FORWARD, stage - 1, stage)[comes]
    above[cell[comes]] = cell.ravel()[sources[comes]] + ranks
    return Rows(above, codes, messages)


def _repeated(rows: Rows, ranks: int, period: int, least: int) -> tuple[int, int]:
    """The first row, from `least` on, of a round that may come again, and how many rows before it and after it matter.

    What needs rows from above such a cut finds the same actions there after every round.
    """
    height = len(rows.codes) // ranks
    codes = rows.codes.reshape(height, ranks)
    reach = np.arange(height) + 1 - rows.sources.reshape(height, ranks).min(axis=1) // ranks  # 1: the row above
    for first in range(least, height - period + 1):
        after = first + period
        window = max((reach[cut:] - np.arange(height - cut)).max(initial=1) for cut in (first, after))
        if window <= first and np.array_equal(codes[first - window : first], codes[after - window : after]):
            return first, int(window)
    raise AssertionError("no round repeats")


def _cut(rows: Rows, ranks: int, begin: int, end: int, window: int) -> Rows:
    cells = slice(begin * ranks, end * ranks)
    return Rows(rows.sources[cells] - (begin + 1 - window) * ranks, rows.codes[cells], rows.messages[cells])


def _find(orders: Orders, cell: Indices, part: int, micro_batch: int) -> Indices:
    chosen = (orders.codes // orders.stages == part) & (orders.micro_batch == micro_batch)
    found = np.empty(orders.stages, np.int64)
    found[orders.codes[chosen] % orders.stages] = cell[chosen]
    return found[orders.stages_of]


FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
"""Parts of a code. A backward pass is whole, or for the input only where weights come apart."""


@dataclass(frozen=True, eq=False)
class Orders:
    """What every pipeline rank does, in order."""

    ranks: int
    chunks: int
    micro_batches: int
    splits: bool
    rank_of: Indices  # the rank of each stage
    codes: Indices  # of all actions, by rank and place
    micro_batch: Indices

    @property
    def stages(self) -> int:
        """Stages in all."""
        return self.ranks * self.chunks

    @cached_property
    def stages_of(self) -> Indices:
        """The stages of each rank, in the order of the model, by rank and chunk."""
        return np.argsort(self.rank_of, kind="stable").reshape(self.ranks, self.chunks)

    @cached_property
    def crosses(self) -> NDArray[np.bool_]:
        """Which boundaries between stages lie between two ranks."""
        return np.not_equal(self.rank_of[1:], self.rank_of[:-1])

    @property
    def last_part(self) -> int:
        """The part after which a micro-batch's gradients are complete."""
        return WEIGHTS if self.splits else BACKWARD


@lru_cache(maxsize=4096)
def round_length(schedule: Schedule, ranks: int, chunks: int, micro_batches: int) -> int:
    """Micro-batches of a round, after which the lists of `schedule` repeat."""
    placement_of(schedule, ranks, chunks)
    rounds = micro_batches // ranks
    if not rounds or (schedule.startswith("interleaved") and micro_batches % rounds):
        make_table(schedule, ranks, chunks, micro_batches)  # raises, with its cure
        raise AssertionError("a table that should not be")
    return micro_batches // rounds if schedule.startswith("interleaved") else 1


def make_orders(schedule: Schedule, ranks: int, chunks: int, per_round: int, rounds: int) -> Orders:
    """The lists of `schedule` for `rounds` rounds of `per_round` micro-batches each."""
    placement = placement_of(schedule, ranks, chunks)
    rank_of = np.array([placement.rank_of(stage) for stage in range(placement.stages)])
    micro_batches = rounds * per_round
    if schedule == "zbv":
        codes, batches = _v_shaped(ranks, micro_batches)
        return Orders(ranks, chunks, micro_batches, True, rank_of, codes, batches)
    splits = schedule == "interleaved_zero_bubble"
    behind = np.arange(ranks - 1, -1, -1)  # ranks after each
    warmup = (chunks - 1) * per_round + (behind if schedule == "1f1b" or splits else 2 * behind)
    codes, batches = _alternating(ranks, chunks, per_round, rounds, warmup, splits=splits)
    return Orders(ranks, chunks, micro_batches, splits, rank_of, codes, batches)


def _alternating(
    ranks: int, chunks: int, per_round: int, rounds: int, warmup: Indices, *, splits: bool
) -> tuple[Indices, Indices]:
    """Forwards that lead by `warmup`, one forward and one backward in turn, the backwards left; by rank and place."""
    total = rounds * per_round * chunks
    turn, chunk, one = np.unravel_index(np.arange(total), (rounds, chunks, per_round))
    batch = turn * per_round + one
    rank, index = np.ogrid[:ranks, :total]
    lead = np.minimum(warmup, total)[:, None]
    places = [
        np.where(index < lead, index, 2 * index - lead),
        np.where(index < total - lead, lead + 2 * index + 1, total + index),
    ]
    if splits:  # weights follow the backward pass that is so many later as the rank's number, the last ones come last
        places[FORWARD] += np.maximum(0, index - lead - rank)
        places[BACKWARD] += np.maximum(0, index - rank)
        later = np.minimum(index + rank, total - 1)
        places.append(np.where(index < total - rank, places[BACKWARD][rank, later] + 1, 2 * total + index))
    stages = ranks * chunks
    codes = np.empty((ranks, total * len(places)), np.int64)
    batches = np.empty_like(codes)
    for part, place in enumerate(places):
        lap = chunk if part == FORWARD else chunks - 1 - chunk
        codes[rank, place] = part * stages + lap * ranks + rank
        batches[rank, place] = batch
    return codes, batches


def _v_shaped(ranks: int, micro_batches: int) -> tuple[Indices, Indices]:
    """As `zbv` runs: made for at least 2 ranks - 1 micro-batches, those too many left out."""
    made = max(2 * ranks - 1, micro_batches)
    rows = []
    for rank in range(ranks):
        stages = 2 * ranks
        near = [part * stages + rank for part in (FORWARD, BACKWARD, WEIGHTS)]
        far = [part * stages + stages - 1 - rank for part in (FORWARD, BACKWARD, WEIGHTS)]
        after = ranks - rank
        both = made - (2 * ranks - 1 - rank)  # rounds that still have a forward pass of the near stage
        codes = near[:1] * (2 * after - 1) + [far[0], near[0]] * rank + far * after
        codes += (near + far) * both + (near[1:] + far) * (made - ranks - both)
        codes += [near[1], far[1]] * rank + near[1:] * after
        missing = [made - codes.count(code) for code in (far[2], near[2])]
        row = np.array(codes + far[2:] * missing[0] + near[2:] * missing[1])
        batch = np.empty_like(row)
        batch[np.argsort(row, kind="stable")] = np.tile(np.arange(made), len(row) // made)
        rows.append((row[batch < micro_batches], batch[batch < micro_batches]))
    return np.array([codes for codes, _ in rows]), np.array([batches for _, batches in rows])


@dataclass(frozen=True, eq=False)
class InFlight:
    """Passes that a rank holds, by moment and chunk: (moments, chunks); or that all ranks do, ranks first."""

    live: Indices  # between forward and backward pass
    waiting: Indices  # whose gradients of activations are made, and those of weights are not


def held(schedule: Schedule, ranks: int, chunks: int, micro_batches: int, rank: int) -> InFlight:
    """What `rank` holds at moments among which the fullest is, whatever its chunks weigh."""
    found = held_by_all(schedule, ranks, chunks, micro_batches)
    return InFlight(found.live[rank], found.waiting[rank])


@lru_cache(maxsize=4096)
def held_by_all(schedule: Schedule, ranks: int, chunks: int, micro_batches: int) -> InFlight:
    """What every rank holds, each at moments of its own among which its fullest is."""
    if schedule == "zbv":
        return _counted(ranks, min(micro_batches, 2 * ranks + 1))
    rank, total, splits = np.arange(ranks)[:, None], chunks * micro_batches, splits_backward(schedule)
    turn_length = length_of_turn(micro_batches, ranks) if chunks > 1 or schedule != "1f1b" else 1
    begun = warmup(schedule, ranks, chunks, micro_batches, rank) + 1
    if schedule == "1f1b":
        turns = np.zeros_like(rank)  # with one chunk, the first turn is as full as any
    else:
        turns = _corners(begun, rank if splits else None, turn_length, total, chunks * turn_length + ranks)
    forwards = _by_chunk(np.minimum(begun + turns, total), chunks, turn_length)
    live, waiting = [], []
    for ended in (0, 1) if splits else (0,):  # after the forward pass of a turn, and after its backward pass
        made = _by_chunk(turns + ended, chunks, turn_length, backward=True)
        live.append(forwards - made)
        late = _by_chunk(weights_done(turns, rank), chunks, turn_length, backward=True) if splits else made
        waiting.append(made - late)
    return InFlight(np.concatenate(live, axis=1), np.concatenate(waiting, axis=1))


def _corners(begun: Indices, late: Indices | None, turn_length: int, total: int, last: int) -> Indices:
    """The turns, by rank, from which on another chunk is counted; between them all numbers change evenly.

    Args:
        begun: forward passes before the end of the first turn's.
        late: turns by which weight gradients are put off; None: they are not.
        last: turn after which the same numbers come again.
    """
    rounds = turn_length * np.arange(last // turn_length + 2)
    corners = [np.broadcast_to(rounds, (len(begun), len(rounds))), rounds - begun % turn_length, total - begun]
    if late is not None:
        corners += [corners[0] - 1, rounds + late]
    return np.clip(np.concatenate(corners, axis=1), 0, min(total - 1, last))


def warmup(schedule: Schedule, ranks: Any, chunks: Any, micro_batches: Any, rank: Any) -> Any:
    """Forward passes that a rank makes before it begins to alternate; arrays too. Not of ``"zbv"``."""
    if schedule == "1f1b":
        return np.minimum(ranks - 1 - rank, micro_batches)
    behind = (1 if splits_backward(schedule) else 2) * (ranks - 1 - rank)
    return np.minimum((chunks - 1) * length_of_turn(micro_batches, ranks) + behind, chunks * micro_batches)


def length_of_turn(micro_batches: Any, ranks: Any) -> Any:
    """Micro-batches that go through a chunk before the next chunk's turn; arrays too."""
    return micro_batches // np.maximum(micro_batches // ranks, 1)


def weights_done(turns: Any, rank: Any) -> Any:
    """Weight gradients that were made before a turn's own, where they are put off; arrays too."""
    return np.maximum(turns - rank, 0)


def passes_by_chunk(
    count: Any, chunks: Any, turn_length: Any, most_chunks: int, *, backward: bool = False
) -> list[Any]:
    """How many of the first `count` passes of a rank are of each of `most_chunks` chunks; arrays too.

    Rounds of `turn_length` micro-batches go through the chunks one after the other, `backward` from the last to the
    first. Of chunks that a rank does not have the numbers mean nothing.
    """
    whole, rest = np.divmod(count, chunks * turn_length)
    done = whole * turn_length
    order = [chunks - 1 - chunk if backward else chunk for chunk in range(most_chunks)]
    return [done + np.minimum(np.maximum(rest - place * turn_length, 0), turn_length) for place in order]


def splits_backward(schedule: Schedule) -> bool:
    """Whether gradients of weights are put off."""
    return schedule in ("interleaved_zero_bubble", "zbv")


def _by_chunk(count: Indices, chunks: int, turn_length: int, backward: bool = False) -> Indices:
    return np.stack(passes_by_chunk(count, chunks, turn_length, chunks, backward=backward), axis=-1)


def _counted(ranks: int, micro_batches: int) -> InFlight:
    """Counted from the actions themselves: those of a V have no short formula."""
    orders = make_orders("zbv", ranks, 2, 1, micro_batches)
    part, stage = np.divmod(orders.codes, orders.stages)
    of_chunk = (stage == orders.stages_of[:, :1])[..., None] == [True, False]  # by rank, place and chunk
    made, late = (part == BACKWARD)[..., None] & of_chunk, (part == WEIGHTS)[..., None] & of_chunk
    live = ((part == FORWARD)[..., None] & of_chunk).cumsum(axis=1) - made.cumsum(axis=1)
    waiting = made.cumsum(axis=1) - late.cumsum(axis=1)
    fullest = [_fullest_moments(moments) for moments in np.concatenate([live, waiting], axis=2)]
    # A rank with fewer moments than others has its last one several times.
    most = max(map(len, fullest))
    both = np.stack([moments[np.minimum(np.arange(most), len(moments) - 1)] for moments in fullest])
    return InFlight(both[..., :2], both[..., 2:])


def _fullest_moments(moments: Indices) -> Indices:
    """Each moment once, and only those that no other holds as much as in every respect."""
    codes = moments @ (int(moments.max()) + 1) ** np.arange(moments.shape[1])
    different = moments[np.unique(codes, return_index=True)[1]]
    as_much = (different[:, None] >= different).all(axis=2)
    fullest: Indices = different[as_much.sum(axis=0) == 1]  # each holds as much as itself
    return fullest
