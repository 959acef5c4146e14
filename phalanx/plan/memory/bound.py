"""Memory of the fullest rank, for many strategies at once.

Of a pipeline, the first rank has most passes under way and the embedding, the last one the loss head: one of the two is
the fullest wherever stages are alike. Both are taken from the same formulas as `rank_memory`, over arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.memory.rank import Pieces, complete, kinds_of, parts_of, pieces_of, stages_held
from phalanx.plan.pipeline.grid import held, length_of_turn, passes_by_chunk, splits_backward, warmup, weights_done
from phalanx.plan.stages import RankShare
from phalanx.plan.types import Floats, Ints, Job, Strategy, distinct

Bytes = NDArray[np.float64]
Counts = NDArray[np.int64]

_AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert", "micro_batch", "chunks")


def memory_bound(job: Job, strategy: Strategy) -> Bytes:
    """Bytes of the fullest rank of each strategy, as far as the first and the last pipeline rank say.

    Never more than the largest total of `rank_memory`; equal to it where all stages have as many layers of each kind.
    So a search may throw away whatever this says not to fit. Infinite where there are more stages than layers.

    Args:
        strategy: with arrays, which broadcast; the schedule, and all else that is not a number, is the same for all.
    """
    given = np.broadcast_arrays(*(np.atleast_1d(getattr(strategy, axis)) for axis in _AXES))
    axes: dict[str, Any] = dict(zip(_AXES, given, strict=True))
    axes["chunks"] = np.where(axes["pipeline"] > 1, axes["chunks"], 1)
    strategy = replace(strategy, **axes)
    cuts = _cuts(job, strategy)
    found = np.zeros(np.shape(strategy.pipeline))
    piped = strategy.pipeline > 1
    for at_end, alone in ((False, False), (True, False), (False, True)):
        for has_last in (False, True):
            which = np.flatnonzero((cuts.has_last(at_end) == has_last) & (piped != alone))
            if len(which):
                end = _End(at_end, has_last)
                total = _total(job, _some(strategy, which), cuts.layers(at_end)[which], end)
                found[which] = np.maximum(found[which], total)
    return np.where(cuts.too_many, np.inf, found)


@dataclass(frozen=True)
class _End:
    at_end: bool  # the last of its pipeline, or else the first
    has_head: bool  # the loss head is there


@dataclass(frozen=True)
class _Cuts:
    of_each: Counts  # each strategy's place in the tables
    tables: Counts  # (ends, numbers of stages, chunks, kinds): layers of the first and of the last rank
    heads: NDArray[np.bool_]  # (ends, numbers of stages): whether that rank has the loss head
    too_many: NDArray[np.bool_]  # stages than there are layers

    def layers(self, at_end: bool) -> Counts:
        """(strategies, chunks, kinds); chunks that a strategy does not have hold none."""
        found: Counts = self.tables[int(at_end)][self.of_each]
        return found

    def has_last(self, at_end: bool) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.heads[int(at_end)][self.of_each]
        return found


def _some(strategy: Strategy, which: Counts) -> Strategy:
    axes: dict[str, Any] = {axis: getattr(strategy, axis)[which] for axis in _AXES}
    return replace(strategy, **axes)


def _pairs(first: Ints, second: Ints) -> tuple[list[tuple[int, int]], Counts]:
    """The distinct pairs of two arrays, and which of them each element is."""
    base = int(second.max()) + 1
    codes, of_each = np.unique(first * base + second, return_inverse=True)
    return [(int(code) // base, int(code) % base) for code in codes], np.reshape(of_each, -1)


def _cuts(job: Job, strategy: Strategy) -> _Cuts:
    pairs, of_each = _pairs(strategy.pipeline, strategy.chunks)
    kinds = kinds_of(job.model)
    tables = np.zeros((2, len(pairs), int(strategy.chunks.max()), len(kinds)), int)
    heads = np.zeros((2, len(pairs)), bool)
    for index, (ranks, chunks) in enumerate(pairs):
        if ranks * chunks <= job.model.layers:
            one = replace(strategy, pipeline=ranks, chunks=chunks)
            for stage in stages_held(job, one, kinds):
                for end, rank in enumerate((0, ranks - 1)):
                    if stage.rank == rank:
                        tables[end, index, stage.chunk] = stage.layers
                        heads[end, index] |= stage.last
    return _Cuts(of_each, tables, heads, strategy.stages > job.model.layers)


def _total(job: Job, strategy: Strategy, layers: Counts, end: _End) -> Floats:
    """Bytes of one rank of each strategy. `layers`: (strategies, chunks, kinds)."""
    share = RankShare(tuple(layers.sum(axis=1).T), not end.at_end, end.has_head, end.at_end)
    # Who shares state among data-parallel ranks changes nothing of what is kept: one in ten is all that differs.
    axes = [getattr(strategy, axis) for axis in _AXES if axis not in ("replicate", "shard")]
    some, of_each = distinct(np.asarray(strategy.data), *axes)
    activations, passes = _activations(pieces_of(job, _some(strategy, some)), layers[some], end)
    pieces = pieces_of(job, strategy)
    return sum(complete(pieces, parts_of(pieces, share), activations[of_each], passes[of_each]).values())


def _activations(pieces: Pieces, layers: Counts, end: _End) -> tuple[Floats, Ints]:
    """The most of a few moments, of which the fullest is one where all chunks have as many layers; and the most passes
    through the first chunk at a time."""
    strategy = pieces.strategy
    kept, waiting = [], []
    for chunk in range(layers.shape[1]):
        held_layers = list(layers[:, chunk].T)
        size = pieces.activations(held_layers, False)
        if end.has_head:
            with_head = pieces.activations(held_layers, True)
            size = np.where(strategy.chunks - 1 == chunk, with_head, size)
        exists = strategy.chunks > chunk
        kept.append(exists * size)
        waiting.append(exists * pieces.waiting(held_layers) if splits_backward(strategy.schedule) else 0.0)
    most, first_passes = np.zeros(np.shape(strategy.pipeline)), np.ones_like(strategy.pipeline)
    for live, late in _moments(pieces, end.at_end, layers.shape[1]):
        now = sum(count * size for count, size in zip([*live, *late], [*kept, *waiting], strict=True))
        most, first_passes = np.maximum(most, now), np.maximum(first_passes, live[0])
    piped = strategy.pipeline > 1
    return np.where(piped, most, sum(kept)), np.where(piped, first_passes, 1)


_Moment = tuple[list[Ints], list[Ints]]  # by chunk: passes that are live, and those whose weight gradients wait


def _moments(pieces: Pieces, at_end: bool, chunks: int) -> Iterator[_Moment]:
    strategy = pieces.strategy
    passes = np.maximum(strategy.micro_batches(pieces.job.global_batch), 1)
    if strategy.pipeline.max() == 1:
        return
    if strategy.schedule == "zbv":
        yield from _counted(strategy.pipeline, passes, at_end)
        return
    rank = strategy.pipeline - 1 if at_end else np.zeros_like(strategy.pipeline)
    turn_length = np.ones_like(passes) if strategy.schedule == "1f1b" else length_of_turn(passes, strategy.pipeline)
    total = strategy.chunks * passes
    begun = warmup(strategy.schedule, strategy.pipeline, strategy.chunks, passes, rank) + 1
    for turn in _turns(strategy, rank, begun, turn_length, total):
        yield _moment(strategy, np.minimum(begun + turn, total), turn, turn, rank, chunks, turn_length)
        if splits_backward(strategy.schedule):
            yield _moment(strategy, np.minimum(begun + turn, total), turn + 1, turn, rank, chunks, turn_length)


def _turns(strategy: Strategy, rank: Ints, begun: Ints, turn_length: Ints, total: Ints) -> Iterator[Ints]:
    """The first turn; where a schedule splits, one when as many weight gradients wait as ever; and, where there are
    chunks, those in which most passes of the first one, which may have the embedding, and of the last one are live."""
    yield np.zeros_like(begun)
    if splits_backward(strategy.schedule):
        yield np.minimum(rank, total - 1)
    if strategy.chunks.max() > 1:
        period = turn_length * strategy.chunks
        for full in (turn_length, period):
            turn = (full - begun) % period
            yield np.where(begun + turn <= total, turn, 0)


def _moment(
    strategy: Strategy, forwards: Ints, backwards: Ints, turn: Ints, rank: Ints, chunks: int, turn_length: Ints
) -> _Moment:
    done = passes_by_chunk(forwards, strategy.chunks, turn_length, chunks)
    made = passes_by_chunk(backwards, strategy.chunks, turn_length, chunks, backward=True)
    live = [begun - ended for begun, ended in zip(done, made, strict=True)]
    if not splits_backward(strategy.schedule):
        return live, [0] * chunks
    late = passes_by_chunk(weights_done(turn, rank), strategy.chunks, turn_length, chunks, backward=True)
    return live, [begun - ended for begun, ended in zip(made, late, strict=True)]


def _counted(ranks: Ints, passes: Ints, at_end: bool) -> Iterator[_Moment]:
    """Of a V: all moments of each pipeline's length and number of micro-batches."""
    pairs, of_each = _pairs(ranks, np.minimum(passes, 2 * ranks + 1))
    found = [held("zbv", p, 2, m, p - 1 if at_end else 0) for p, m in pairs]
    for moment in range(max(len(f.live) for f in found)):
        rows = [(f.live[min(moment, len(f.live) - 1)], f.waiting[min(moment, len(f.live) - 1)]) for f in found]
        live, waiting = (np.array([row[part] for row in rows])[of_each] for part in (0, 1))
        yield [live[:, 0], live[:, 1]], [waiting[:, 0], waiting[:, 1]]
