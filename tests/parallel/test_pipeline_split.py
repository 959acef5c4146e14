"""Stages are cut by cost: no cut is better, and costs are the model's FLOPs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import flops_per_token
from phalanx.parallel.pipeline.split import StageSpan, cut, imbalance, split_stages, stage_costs


def config(**changes: object) -> ModelConfig:
    sizes = {"vocab_size": 256, "max_sequence": 512, "layers": 8, "hidden": 64, "heads": 4}
    return ModelConfig.model_validate(sizes | changes)


def layers(spans: list[StageSpan]) -> list[int]:
    return [len(span.layers) for span in spans]


def test_costs_are_the_flops_of_the_model() -> None:
    for changes in ({}, {"attention": ["window", "full"], "window": 64}, {"block": "parallel", "kv_heads": 2}):
        model = config(**changes)
        costs = stage_costs(model, 512)
        assert sum(costs.layers) + costs.head == pytest.approx(flops_per_token(model, 512).total)
    windowed = stage_costs(config(attention=["window", "full"], window=64), 512)
    assert windowed.layers[0] < windowed.layers[1] == windowed.layers[3]


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers() -> None:
    spans = split_stages(config(vocab_size=4096), 128, 4)
    assert layers(spans) == [2, 3, 2, 1]
    assert [span.first for span in spans] == [True, False, False, False]
    assert [span.last for span in spans] == [False, False, False, True]
    assert [layer for span in spans for layer in span.layers] == list(range(8))
    even = split_stages(config(vocab_size=16, vocab_multiple=16), 128, 4)
    assert layers(even) == [2, 2, 2, 2]
    assert imbalance(even) < 0.05 < imbalance(spans)


def test_the_embedding_breaks_a_tie() -> None:
    model = config(layers=5, vocab_size=1, vocab_multiple=1, hidden=64)
    assert layers(split_stages(model, 128, 4)) == [1, 2, 1, 1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_no_cut_is_better(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def value(bounds: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        return max(sums), sum(s * s for s in sums)

    inner = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(value((0, *bounds, len(costs))) for bounds in inner)
    found = list(cut(tuple(float(cost) for cost in costs), stages))
    assert found == sorted(set(found)) and len(found) == stages + 1
    assert value(tuple(found)) == best


def test_one_stage_is_the_whole_model() -> None:
    (span,) = split_stages(config(), 128, 1)
    assert (span.layers, span.first, span.last) == (range(8), True, True)
    assert imbalance([span]) == 0.0


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"model.layers = 8: 9 pipeline stages .* 8 layers; lower parallel.pipeline or"):
        split_stages(config(), 128, 9)


def test_a_deep_model_is_cut_quickly_and_well() -> None:
    spans = split_stages(config(layers=200, attention=["window", "window", "full"], window=32), 512, 64)
    assert len(spans) == 64
    assert set(layers(spans)) == {3, 4}
