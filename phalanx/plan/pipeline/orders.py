"""The lists of actions of `phalanx.parallel.pipeline.schedules` as arrays, for any number of rounds. Torch-free.

An action is a code, ``part * stages + stage``, and a micro-batch. Rounds are runs of micro-batches that go through a
rank's chunks together; from one round to the next, all lists repeat but for the first and the last few.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import make_table, placement_of

Indices: TypeAlias = NDArray[np.int64]

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
"""Parts of a code. A backward pass is whole, or for the input only where weights come apart."""


@dataclass(frozen=True, eq=False)
class Orders:
    """What every pipeline rank does, in order.

    Attributes:
        rank_of: the rank of each stage.
        codes: of all actions, by rank and place.
        micro_batch: likewise.
    """

    ranks: int
    chunks: int
    micro_batches: int
    splits: bool
    rank_of: Indices
    codes: Indices
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
    """Micro-batches of a round, after which the lists of `schedule` repeat.

    Raises:
        UserError: the numbers do not fit one another.
    """
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
        codes = _one_v(rank, ranks, made)
        order = np.argsort(codes, kind="stable")
        batch = np.empty_like(codes)
        batch[order] = np.tile(np.arange(made), len(codes) // made)
        rows.append((codes[batch < micro_batches], batch[batch < micro_batches]))
    return np.array([codes for codes, _ in rows]), np.array([batches for _, batches in rows])


def _one_v(rank: int, ranks: int, micro_batches: int) -> Indices:
    stages = 2 * ranks
    near = [part * stages + rank for part in (FORWARD, BACKWARD, WEIGHTS)]
    far = [part * stages + stages - 1 - rank for part in (FORWARD, BACKWARD, WEIGHTS)]
    after = ranks - rank
    both = micro_batches - (2 * ranks - 1 - rank)  # rounds that still have a forward pass of the near stage
    codes = near[:1] * (2 * after - 1) + [far[0], near[0]] * rank + far * after
    codes += (near + far) * both + (near[1:] + far) * (micro_batches - ranks - both)
    codes += [near[1], far[1]] * rank + near[1:] * after
    missing = [micro_batches - codes.count(code) for code in (far[2], near[2])]
    return np.array(codes + far[2:] * missing[0] + near[2:] * missing[1])
