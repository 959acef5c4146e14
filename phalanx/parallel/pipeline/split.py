"""Layers cut into pipeline stages of as equal a cost as can be.

Cost is matrix-product FLOPs of one token, forward and backward: projections, attention over as many keys as the layer's
window leaves, and the loss head, which weighs as much as several layers where the vocabulary is large. The embedding
multiplies nothing: it copies one row forward and adds one backward, which is counted as one operation per element.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import mean_keys, parameter_table


@dataclass(frozen=True)
class StageSpan:
    """What one pipeline stage holds: a run of layers, and the embedding or the loss head at the ends."""

    layers: range
    first: bool
    last: bool
    flops_per_token: float  # forward and backward, of the whole stage


@dataclass(frozen=True)
class Costs:
    """FLOPs of one token, forward and backward: of the embedding, of every layer, of the loss head."""

    embedding: float
    layers: tuple[float, ...]
    head: float

    @property
    def total(self) -> float:
        """Of the whole model."""
        return self.embedding + sum(self.layers) + self.head


@lru_cache(maxsize=16)  # the search for a layout asks again and again
def stage_costs(config: ModelConfig, sequence_length: int) -> Costs:
    """What the pieces of `config` cost; layers and head together are `phalanx.model.shapes.flops_per_token`.

    Raises:
        UserError: the vocabulary or the longest sequence is not known yet.
    """
    weights = [0] * config.layers
    for parameter in parameter_table(config).values():
        if parameter.layer is not None and parameter.role in ("input", "output"):
            weights[parameter.layer] += parameter.size
    per_key = 4 * config.heads * config.head_dim
    layers = tuple(
        3 * (2.0 * size + per_key * mean_keys(sequence_length, config.window_of(layer)))
        for layer, size in enumerate(weights)
    )
    return Costs(2.0 * config.hidden, layers, 6.0 * config.vocab_rows * config.hidden)


def split_stages(config: ModelConfig, sequence_length: int, stages: int) -> list[StageSpan]:
    """Cut `config` into `stages` runs of layers, at least one layer each, so that the most expensive is cheapest.

    Exact. Among all cuts that are equal in this, the one with the smallest sum of squared costs.

    Raises:
        UserError: there are more stages than layers.
    """
    if stages > config.layers:
        raise UserError(
            f"{stages} pipeline stages (parallel.pipeline times parallel.chunks) cannot share {config.layers} layers",
            cure=f"lower parallel.pipeline or parallel.chunks to at most {config.layers} stages, or raise model.layers",
            field="model.layers",
            value=config.layers,
        )
    costs = stage_costs(config, sequence_length)
    pieces = list(costs.layers)
    pieces[0] += costs.embedding
    pieces[-1] += costs.head
    bounds = cut(tuple(pieces), stages)
    return [
        StageSpan(range(begin, end), begin == 0, end == config.layers, sum(pieces[begin:end]))
        for begin, end in itertools.pairwise(bounds)
    ]


def imbalance(spans: Sequence[StageSpan]) -> float:
    """How much longer the most expensive stage takes than the mean: 0 is even, 0.25 a quarter more.

    A pipeline runs at the pace of its most expensive stage, so its ranks idle ``imbalance / (1 + imbalance)`` of the
    time on top of the schedule's bubble.
    """
    costs = [span.flops_per_token for span in spans]
    return max(costs) * len(costs) / sum(costs) - 1


@lru_cache(maxsize=256)
def cut(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Bounds 0 = b0 < b1 < … = len(costs): the least possible maximum of the sums between them, then of squares.

    Dynamic programming over where each span ends; of equal cuts, that with the shortest last span.
    """
    sums = list(itertools.accumulate(costs, initial=0.0))
    limit = _widest(sums, stages) * (1 + 1e-9)
    values, chosen = {0: 0.0}, []
    for left in reversed(range(stages)):
        values, begins = _one_more(sums, values, limit, left)
        chosen.append(begins)
    bounds = [len(costs)]
    for begins in reversed(chosen):
        bounds.append(begins[bounds[-1]])
    return tuple(bounds[::-1])


def _one_more(
    sums: Sequence[float], values: Mapping[int, float], limit: float, left: int
) -> tuple[dict[int, float], dict[int, int]]:
    """The best sums of squares by where one span more ends, and where it begins.

    Args:
        values: of the spans before, by where they end, ascending.
        left: spans that are still to come, none of which may be longer than `limit`.
    """
    last = len(sums) - 1 - left
    enough = (sums[-1] - left * limit) * (1 - 1e-9)  # for spans as long as they may be to reach the end
    first = bisect.bisect_left(sums, enough) if enough > 0 else 0
    found: dict[int, float] = {}
    begins: dict[int, int] = {}
    for begin, value in values.items():
        for end in range(max(begin + 1, first), last + 1):
            span = sums[end] - sums[begin]
            if span > limit:
                break
            total = value + span * span
            if total <= found.get(end, math.inf):
                found[end], begins[end] = total, begin
    return found, begins


def _widest(sums: Sequence[float], stages: int) -> float:
    """The least possible cost of the most expensive span: the first that fits, of all that it can be.

    It is no less than a fair share or the costliest piece, and spans that go on for as long as they stay within the
    share and one piece more are never too many.
    """
    share, piece = sums[-1] / stages, max(end - begin for begin, end in itertools.pairwise(sums))
    low, high = max(share, piece) * (1 - 1e-9), (share + piece) * (1 + 1e-9)
    spans: set[float] = set()
    for before in sums:
        ends = range(bisect.bisect_left(sums, before + low), bisect.bisect_right(sums, before + high))
        spans.update(sums[end] - before for end in ends)
    costs = sorted(spans)
    return costs[bisect.bisect_left(costs, True, key=lambda limit: _fits(sums, stages, limit))]


def _fits(sums: Sequence[float], stages: int, limit: float) -> bool:
    """Whether spans that are each as long as `limit` lets them be reach the end."""
    begin = 0
    for _ in range(stages):
        end = bisect.bisect_right(sums, limit, lo=begin, key=lambda total: total - sums[begin]) - 1
        if end == begin:
            return False
        if end == len(sums) - 1:
            return True
        begin = end
    return False
