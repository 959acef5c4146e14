"""Initialisation and the aliases that optimizers and checkpoints see."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from model_builders import VARIANTS, build, tiny, tokens

from phalanx.model.decoder import Decoder
from phalanx.model.logical_parameters import LogicalParameters, initial_values, initialise
from phalanx.model.shapes import parameter_table


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_weights_are_named_slices_of_one_hash(variant: str) -> None:
    config = tiny(variant)
    model = Decoder(config)
    initialise(model, 7)
    for name, spec in parameter_table(config).items():
        whole = LogicalParameters(model)[name]
        rows = slice(spec.shape[0] // 3, spec.shape[0] - 1)
        offsets = (rows.start, *(0 for _ in spec.shape[1:]))
        shape = (rows.stop - rows.start, *spec.shape[1:])
        assert torch.equal(initial_values(config, spec, 7, offsets=offsets, shape=shape), whole[rows]), name


def test_initial_spread_is_gpt2s() -> None:
    config = tiny("gpt2", hidden=256, layers=4, mlp_hidden=1024, vocab_size=512, init_std=0.02)
    model = Decoder(config)
    initialise(model, 0)
    for name, parameter in LogicalParameters(model).items():
        role = parameter_table(config)[name].role
        if role in ("norm", "bias"):
            assert torch.equal(parameter, torch.full_like(parameter, float(role == "norm"))), name
            continue
        std = 0.02 / math.sqrt(8) if role == "output" else 0.02
        assert parameter.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(parameter.mean().item()) < 4 * std / math.sqrt(parameter.numel()), name


def test_seeds_and_names_give_different_weights() -> None:
    first, second = Decoder(tiny()), Decoder(tiny())
    initialise(first, 0)
    initialise(second, 1)
    a, b = LogicalParameters(first), LogicalParameters(second)
    assert not torch.equal(a["layers.0.attention.q"], b["layers.0.attention.q"])
    assert not torch.equal(a["layers.0.attention.k"], a["layers.0.attention.v"])
    assert not torch.equal(a["layers.0.attention.q"], a["layers.1.attention.q"])


def test_merged_storage_starts_from_the_same_logical_weights() -> None:
    merged, separate = build(tiny("merged")), build(tiny("merged", merged_projections=False))
    a, b = LogicalParameters(merged), LogicalParameters(separate)
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert merged.layers[0].input.weight.shape[0] == 32 + 2 * 16 + 2 * 128


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_optimizer_on_aliases_trains_the_model(variant: str) -> None:
    config = tiny(variant)
    model, ids = build(config), tokens(config)
    twin = build(config)
    logical = LogicalParameters(model)
    ours = torch.optim.SGD(logical.values(), lr=1e-3)
    theirs = torch.optim.SGD(twin.parameters(), lr=1e-3)
    for keep in (True, False, False):
        for each in (model, twin):
            sum(each.loss(each(ids), ids)).backward()
        logical.bind_gradients()
        ours.step()
        theirs.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        model.zero_grad(set_to_none=keep)
        twin.zero_grad(set_to_none=keep)


@pytest.mark.parametrize("variant", VARIANTS)
def test_aliases_cover_every_stored_element_once(variant: str) -> None:
    model = build(tiny(variant))
    logical = LogicalParameters(model)
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in logical.values())
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert sum(p.numel() for p in logical.values()) == sum(p.numel() for p in model.parameters())
    assert all(p.is_contiguous() for p in logical.values())


def test_gradients_are_bound_and_unbound() -> None:
    config = tiny("merged")
    model, ids = build(config), tokens(config)
    logical = LogicalParameters(model)
    logical.bind_gradients()
    assert all(p.grad is None for p in logical.values())
    model.loss(model(ids), ids)[0].backward()
    logical.bind_gradients()
    first = logical["layers.0.mlp.down"].grad
    assert first is not None
    assert torch.equal(first, model.layers[0].output.weight.grad[32:])
    model.loss(model(ids), ids)[0].backward()
    logical.bind_gradients()
    torch.testing.assert_close(logical["layers.0.mlp.down"].grad, model.layers[0].output.weight.grad[32:])
    model.zero_grad(set_to_none=True)
    logical.bind_gradients()
    assert logical["layers.0.mlp.down"].grad is None
    assert logical["layers.0.attention.q"].grad is None


def test_loading_a_state_dict_shows_through_aliases() -> None:
    model, other = build(tiny("merged")), build(tiny("merged"), seed=1)
    logical = LogicalParameters(model)
    model.load_state_dict(other.state_dict())
    expected = LogicalParameters(other)
    assert all(torch.equal(logical[name], expected[name]) for name in expected)
