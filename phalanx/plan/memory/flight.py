"""How many forward passes of each of its chunks a pipeline rank holds, at the moments when it holds most. Torch-free.

A pass is held from its forward pass to its backward pass; where schedules split the backward pass, what its weight
gradients need is held until they are made. The numbers are those of `phalanx.parallel.pipeline.tables`, counted from
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
from phalanx.parallel.pipeline.tables import placement_of, rank_actions

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Held:
    """Passes that a rank holds, by moment and chunk: (moments, chunks).

    Attributes:
        live: between forward and backward pass.
        waiting: whose gradients of activations are made, and those of weights are not.
    """

    live: Counts
    waiting: Counts


@lru_cache(maxsize=16_384)
def held(schedule: Schedule, ranks: int, chunks: int, micro_batches: int, rank: int) -> Held:
    """What `rank` holds at moments among which the fullest is, whatever its chunks weigh."""
    if schedule == "zbv":
        return _counted(ranks, min(micro_batches, 2 * ranks + 1), rank)
    total = chunks * micro_batches
    turn_length = round_length(micro_batches, ranks) if chunks > 1 or schedule != "1f1b" else 1
    # After the turn in which every chunk had its first backward passes, the same numbers come again.
    turns = np.arange(min(total, chunks * turn_length + ranks + 1))
    forwards = np.minimum(warmup(schedule, ranks, chunks, micro_batches, rank) + 1 + turns, total)
    live, waiting = [], []
    for begun in (0, 1):  # after the forward pass of a turn, and after its backward pass
        backwards = turns + begun
        weights = weights_done(turns, rank) if _splits(schedule) else backwards
        made = _by_chunk(backwards, chunks, turn_length, backward=True)
        live.append(_by_chunk(forwards, chunks, turn_length) - made)
        waiting.append(made - _by_chunk(weights, chunks, turn_length, backward=True))
    return Held(np.concatenate(live), np.concatenate(waiting))


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


def _counted(ranks: int, micro_batches: int, rank: int) -> Held:
    """Counted from the actions themselves: those of a V have no short formula."""
    placement = placement_of("zbv", ranks, 2)
    chunk_of = {stage: chunk for chunk, stage in enumerate(placement.stages_of(rank))}
    live, waiting = np.zeros(2, int), np.zeros(2, int)
    moments: list[tuple[Counts, Counts]] = []
    for stage, kind, _ in rank_actions("zbv", placement, rank, micro_batches):
        live[chunk_of[stage]] += {"F": 1, "I": -1, "B": -1, "W": 0}[kind]
        waiting[chunk_of[stage]] += {"I": 1, "W": -1}.get(kind, 0)
        moments.append((live.copy(), waiting.copy()))
    return _distinct(np.stack([m[0] for m in moments]), np.stack([m[1] for m in moments]))


def _distinct(live: Counts, waiting: Counts) -> Held:
    """Each moment once, and only those that no other holds as much as in every respect."""
    both = np.unique(np.concatenate([live, waiting], axis=1), axis=0)
    covered = np.array([((both >= row).all(1) & (both > row).any(1)).any() for row in both])
    both = both[~covered]
    half = both.shape[1] // 2
    return Held(both[:, :half], both[:, half:])
