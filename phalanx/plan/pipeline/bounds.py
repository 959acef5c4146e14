"""What a step in a pipeline takes at least, for hundreds of thousands of layouts at once.

Every bound is the length of some paths through the step, in which each action follows one on the same rank or one
that it needs; the step takes as long as the longest of all paths. Those taken here are the longest where stages are
alike but for the first and the last, or nearly so.

In formulas: p ranks, v chunks, m micro-batches, q of them in a round, n = v m passes of each kind on a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.config import Schedule
from phalanx.plan.types import Floats, Ints

Array: TypeAlias = NDArray[np.float64]

_NO_PATH = -np.inf
_BLOCK = 8192  # layouts at a time: as many as stay in a core's cache


@dataclass(frozen=True, eq=False)
class StagePasses:
    """Seconds of one micro-batch on one stage, for one layout or for many."""

    forward_s: Floats
    backward_s: Floats  # of the whole backward pass; for the input only in schedules that split it
    weights_s: Floats = 0.0  # of the backward pass for the weights, in schedules that split it; else nothing

    @property
    def total_s(self) -> Floats:
        """Of all passes."""
        return self.forward_s + self.backward_s + self.weights_s

    def plus(self, forward_s: Floats, backward_s: Floats) -> StagePasses:
        """The same with more to do."""
        return StagePasses(self.forward_s + forward_s, self.backward_s + backward_s, self.weights_s)


@dataclass(frozen=True, eq=False)
class _Pipe:
    """What the paths are made of. Passes take their sending too where that blocks; else `delay_s` lies between."""

    ranks: Floats
    chunks: Floats
    micro_batches: Floats
    middle: StagePasses
    first: StagePasses
    last: StagePasses
    delay_s: Floats
    held_s: Floats

    @property
    def per_round(self) -> Floats:
        return self.micro_batches / np.maximum(1.0, np.floor(self.micro_batches / self.ranks))


def lower_bound(
    schedule: Schedule,
    ranks: Ints,
    chunks: Ints,
    micro_batches: Ints,
    middle: StagePasses,
    first: StagePasses,
    last: StagePasses,
    send_s: Floats = 0.0,
    *,
    blocking: bool = False,
) -> Array:
    """Seconds that a step takes at least: never more than `span_s` of `evaluate`. All arguments broadcast.

    Infinite where numbers do not fit one another (where `evaluate` raises).

    Args:
        last: of the last stage, which has the loss head. Where one stage is both, it takes what either has more than
            a middle one.
    """
    numbers = [ranks, chunks, micro_batches, *_three(middle), *_three(first), *_three(last), send_s]
    arrays = [np.asarray(number, np.float64) for number in numbers]
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    flat = [array if array.ndim == 0 else np.broadcast_to(array, shape).ravel() for array in arrays]
    bounds = np.empty(shape)
    for begin in range(0, bounds.size, _BLOCK):
        block = [array if array.ndim == 0 else array[begin : begin + _BLOCK] for array in flat]
        bounds.reshape(-1)[begin : begin + _BLOCK] = _bounds(schedule, block, blocking=blocking)
    return bounds


def _three(passes: StagePasses) -> tuple[Floats, Floats, Floats]:
    return passes.forward_s, passes.backward_s, passes.weights_s


def _bounds(schedule: Schedule, numbers: Sequence[Array], *, blocking: bool) -> Array:
    ranks, chunks, micro_batches, *seconds, send = numbers
    middle, first, last = (StagePasses(*seconds[begin : begin + 3]) for begin in (0, 3, 6))
    held = send if blocking else 0.0
    pipe = _Pipe(
        ranks=ranks,
        chunks=chunks,
        micro_batches=micro_batches,
        middle=middle.plus(held, held),
        first=first.plus(held, 0.0),
        last=last.plus(0.0, held),
        delay_s=0.0 if blocking else send,
        held_s=held,
    )
    longest = functools.reduce(np.maximum, _PATHS[schedule](pipe))
    alone = micro_batches * ((chunks - 2) * middle.total_s + first.total_s + last.total_s)
    return np.where(_fits(schedule, pipe), np.where(ranks > 1, longest, alone), np.inf)


def _fits(schedule: Schedule, pipe: _Pipe) -> NDArray[np.bool_]:
    if schedule.startswith("interleaved"):
        right = np.equal(np.floor(pipe.per_round), pipe.per_round)
    else:
        right = np.equal(pipe.chunks, 2 if schedule == "zbv" else 1)
    return np.asarray(right & np.greater_equal(pipe.micro_batches, pipe.ranks))


def _one_forward_one_backward(pipe: _Pipe) -> list[Floats]:
    """Down to one rank, its own work with some trips from it to the last rank and back, and up again.

    With r ranks behind it a rank leads by r passes, so that a trip takes the place of r + 1 pairs of passes.
    """
    p, m = pipe.ranks, pipe.micro_batches
    first, middle, last = pipe.first.total_s, pipe.middle.total_s, pipe.last.total_s
    hop = middle + 2 * pipe.delay_s
    down = first + 2 * pipe.delay_s
    paths = [_trips(m, pipe.first, p - 1, down + (p - 2) * hop + last - p * first), down + (p - 2) * hop + m * last]
    for after in (np.maximum(1, p - 2), 1.0):
        path = down + (p - 2 - after) * hop + _trips(m, pipe.middle, after, last - middle + 2 * after * pipe.delay_s)
        paths.append(np.where(p > 2, path, _NO_PATH))
    return paths


def _trips(micro_batches: Floats, passes: StagePasses, after: Floats, more_s: Floats) -> Floats:
    """The most of a rank's work alone, with one trip, with two, and with as many as there are micro-batches for.

    Args:
        after: ranks behind it.
        more_s: that a trip takes, beyond the pairs of passes in whose place it comes; may be less than nothing.
    """
    one = more_s + after * np.maximum(passes.forward_s, passes.backward_s)
    trips = 1 + np.floor((micro_batches - 1) / (after + 1))
    many = np.where(trips > 1, after * passes.total_s + np.maximum(2 * more_s, trips * more_s), _NO_PATH)
    return micro_batches * passes.total_s + np.maximum(0.0, np.maximum(one, many))


def _head(pipe: _Pipe) -> Floats:
    """When the last stage begins: the last rank has filled, or the first micro-batch has come all the way."""
    p, forward = pipe.ranks, pipe.middle.forward_s
    hop = forward + pipe.delay_s
    down = pipe.first.forward_s + pipe.delay_s + (p - 2) * hop
    return down + (pipe.chunks - 1) * np.maximum(pipe.per_round * forward, p * hop)


def _up(pipe: _Pipe) -> Floats:
    """From the last rank's last backward pass in its first chunk to the end of the first rank's."""
    hop = pipe.middle.backward_s + pipe.delay_s
    return pipe.first.backward_s + pipe.delay_s + (pipe.ranks - 2) * hop


def _tail(pipe: _Pipe) -> Floats:
    """From the last stage's last backward pass to the end of the first one's: `_head` the other way round."""
    p, backward = pipe.ranks, pipe.middle.backward_s
    return _up(pipe) + (pipe.chunks - 1) * np.maximum(pipe.per_round * backward, p * (backward + pipe.delay_s))


def _reach(pipe: _Pipe, after: Floats) -> Floats:
    back = after * pipe.delay_s + (after - 1) * pipe.middle.backward_s
    return _head(pipe) + pipe.last.forward_s + pipe.last.backward_s + back


def _interleaved(pipe: _Pipe) -> list[Floats]:
    """Through the last rank; or from the first backward pass of another to its last forward pass; or the first's work.

    A rank leads by (v - 1) q + 2 after passes, so that its pairs of a forward and a backward pass are so many fewer.
    """
    p, v, m, q = pipe.ranks, pipe.chunks, pipe.micro_batches, pipe.per_round
    forward, backward, passes = pipe.middle.forward_s, pipe.middle.backward_s, pipe.middle.total_s
    more_forward, more_backward = pipe.first.forward_s - forward, pipe.first.backward_s - backward
    n, tail = v * m, _tail(pipe)

    def leave(after: Floats) -> Floats:
        return after * pipe.delay_s + (after - 1) * forward + pipe.last.total_s + tail

    def pairs(after: Floats) -> Floats:
        return n - (v - 1) * q - 2 * after - 1

    after = p - 1
    both, of_first = np.maximum(0, pairs(after)), np.maximum(0, m - 2 * p + 1)
    begin, end = _reach(pipe, after), leave(after)
    through_first = begin + both * passes + of_first * (more_forward + more_backward) + end
    through_other = _reach(pipe, 1) + pairs(1) * passes + leave(1)
    return [
        _head(pipe) + (n - (v - 1) * q) * passes + m * (pipe.last.total_s - passes) + tail,
        np.where(pairs(after) >= 0, through_first, _NO_PATH),
        np.where((pairs(1) >= 0) & (p > 2), through_other, _NO_PATH),
        begin + n * backward + both * forward + m * more_backward + of_first * more_forward,
        n * forward + both * backward + m * more_forward + of_first * more_backward + end,
        n * passes + m * (more_forward + more_backward),
    ]


def _zero_bubble(pipe: _Pipe) -> list[Floats]:
    """All that one rank has left to do when it can begin; or through the last rank, but for its last weights, and up.

    A rank leads by (v - 1) q + after passes; the last one is p - 1 passes behind with its weights.
    """
    p, v, m, q = pipe.ranks, pipe.chunks, pipe.micro_batches, pipe.per_round
    forward, backward, weights = pipe.middle.forward_s, pipe.middle.backward_s, pipe.middle.weights_s
    first, last = pipe.first, pipe.last
    n, lead = v * m, (v - 1) * q

    def left(after: Floats) -> Floats:
        return _reach(pipe, after) + n * (backward + weights) + np.maximum(0, n - lead - after - 1) * forward

    more_first = m * (first.total_s - forward - backward - weights)
    early = np.minimum(m, np.where(v > 1, q, p))  # forward passes of the first stage before its first backward pass
    more_last = m * (last.forward_s + last.backward_s - forward - backward)
    more_weights = last.weights_s - weights
    filled = _head(pipe) + (n - lead) * (forward + backward) + more_last
    up = _up(pipe) + first.weights_s
    wrapped = (v - 1) * p * (backward + pipe.delay_s)
    return [
        n * pipe.middle.total_s + more_first,
        left(p - 1) + more_first - early * (first.forward_s - forward),
        np.where(p > 2, left(1.0), _NO_PATH),
        filled + lead * backward + n * weights + m * more_weights,
        filled + lead * backward + (n - p) * weights + (m - np.where(v > 1, 0, p)) * more_weights + up,
        filled + (n - lead - p) * weights + (m - p) * more_weights + wrapped + up,
    ]


def _v_shaped(pipe: _Pipe) -> list[Floats]:
    """The first rank's work, from when the last stage can begin, and from its last backward pass along all ranks to
    the last one's weights; the work of one in the middle, and of the last, once they can begin, the latter also from
    when the first gradient comes to it after 2 p forward passes. At the turn of the V nothing is sent.
    """
    p, m = pipe.ranks, pipe.micro_batches
    forward, backward, weights = pipe.middle.forward_s, pipe.middle.backward_s, pipe.middle.weights_s
    first, last, passes = pipe.first, pipe.last, pipe.middle.total_s
    hop, back = forward + pipe.delay_s, backward + pipe.delay_s
    down = first.forward_s + pipe.delay_s + (p - 2) * hop
    turn = forward - pipe.held_s + (p - 1) * hop
    reach = down + turn + last.forward_s + last.backward_s + pipe.delay_s + (p - 2) * back
    waits = np.maximum(0.0, down + turn - np.minimum(2 * p - 1, m) * first.forward_s)
    through_first = m * (first.total_s + last.total_s) + waits
    undone = last.weights_s + p * (first.backward_s + first.weights_s)
    along = (p - 1) * back - pipe.held_s + backward + (2 * p - 1) * weights
    return [
        through_first,
        np.where(m >= 2 * p - 1, through_first - undone + along, _NO_PATH),
        np.where(p > 2, down - hop + 2 * m * passes, _NO_PATH),
        down + 2 * m * (passes - pipe.held_s),
        reach + 2 * m * (passes - forward) + 2 * (m - p) * forward - (2 * m - p) * pipe.held_s,
    ]


_PATHS: Mapping[Schedule, Callable[[_Pipe], list[Floats]]] = {
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "interleaved_zero_bubble": _zero_bubble,
    "zbv": _v_shaped,
}
