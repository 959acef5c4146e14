"""How many forward passes of each of its chunks a pipeline rank holds, at the moments when it holds most. Torch-free.

A pass is held from its forward pass to its backward pass; where schedules split the backward pass, what its weight
gradients need is held until they are made. The numbers are those of `phalanx.parallel.pipeline.schedules`, counted from
the order of actions in closed form: after a warm-up of w forward passes one forward and one backward pass take turns,
so that the i-th turn begins with w + 1 + i forward passes and i backward passes done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.config import Schedule
from phalanx.plan.pipeline.orders import BACKWARD, FORWARD, WEIGHTS, make_orders

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Held:
    """Passes that a rank holds, by moment and chunk: (moments, chunks); or that all ranks do, ranks first.

    Attributes:
        live: between forward and backward pass.
        waiting: whose gradients of activations are made, and those of weights are not.
    """

    live: Counts
    waiting: Counts


def held(schedule: Schedule, ranks: int, chunks: int, micro_batches: int, rank: int) -> Held:
    """What `rank` holds at moments among which the fullest is, whatever its chunks weigh."""
    found = held_by_all(schedule, ranks, chunks, micro_batches)
    return Held(found.live[rank], found.waiting[rank])


@lru_cache(maxsize=4096)
def held_by_all(schedule: Schedule, ranks: int, chunks: int, micro_batches: int) -> Held:
    """What every rank holds, each at moments of its own among which its fullest is."""
    if schedule == "zbv":
        return _counted(ranks, min(micro_batches, 2 * ranks + 1))
    rank, total, splits = np.arange(ranks)[:, None], chunks * micro_batches, _splits(schedule)
    turn_length = round_length(micro_batches, ranks) if chunks > 1 or schedule != "1f1b" else 1
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
    return Held(np.concatenate(live, axis=1), np.concatenate(waiting, axis=1))


def _corners(begun: Counts, late: Counts | None, turn_length: int, total: int, last: int) -> Counts:
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
    behind = (1 if _splits(schedule) else 2) * (ranks - 1 - rank)
    return np.minimum((chunks - 1) * round_length(micro_batches, ranks) + behind, chunks * micro_batches)


def round_length(micro_batches: Any, ranks: Any) -> Any:
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


def _splits(schedule: Schedule) -> bool:
    return schedule in ("interleaved_zero_bubble", "zbv")


def _by_chunk(count: Counts, chunks: int, turn_length: int, backward: bool = False) -> Counts:
    return np.stack(passes_by_chunk(count, chunks, turn_length, chunks, backward=backward), axis=-1)


def _counted(ranks: int, micro_batches: int) -> Held:
    """Counted from the actions themselves: those of a V have no short formula."""
    orders = make_orders("zbv", ranks, 2, 1, micro_batches)
    part, stage = np.divmod(orders.codes, orders.stages)
    of_chunk = (stage == orders.stages_of[:, :1])[..., None] == [True, False]  # by rank, place and chunk
    made, late = (part == BACKWARD)[..., None] & of_chunk, (part == WEIGHTS)[..., None] & of_chunk
    live = ((part == FORWARD)[..., None] & of_chunk).cumsum(axis=1) - made.cumsum(axis=1)
    waiting = made.cumsum(axis=1) - late.cumsum(axis=1)
    fullest = [_fullest(moments) for moments in np.concatenate([live, waiting], axis=2)]
    # A rank with fewer moments than others has its last one several times.
    most = max(map(len, fullest))
    both = np.stack([moments[np.minimum(np.arange(most), len(moments) - 1)] for moments in fullest])
    return Held(both[..., :2], both[..., 2:])


def _fullest(moments: Counts) -> Counts:
    """Each moment once, and only those that no other holds as much as in every respect."""
    codes = moments @ (int(moments.max()) + 1) ** np.arange(moments.shape[1])
    different = moments[np.unique(codes, return_index=True)[1]]
    as_much = (different[:, None] >= different).all(axis=2)
    fullest: Counts = different[as_much.sum(axis=0) == 1]  # each holds as much as itself
    return fullest
