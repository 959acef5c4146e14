"""Every layout gives the numbers of a single process: initial weights, gradients, losses, norms, held-out loss."""

from __future__ import annotations

import pytest
import torch
from layouts import Case, single, spread

PARALLEL_BLOCK = {"block": "parallel"}
WINDOWS = {"attention": ("window", "window", "full"), "window": 5, "kv_heads": 2}
DROPPED = {"dropout": 0.2, "attention_dropout": 0.2, "attention_backend": "math"}
SGD = {"name": "sgd"}

CASES = {
    "replicate": Case({"replicate": 2}),
    "zero 1": Case({"shard": 2}, optim=SGD),
    "zero 2 of 4, lamb": Case({"shard": 4, "zero": 2}, optim={"name": "lamb"}),
    "zero 3, came": Case({"shard": 2, "zero": 3}, optim={"name": "came"}),
    "hybrid zero 3, recompute": Case({"replicate": 2, "shard": 2, "zero": 3}, recompute="full", optim=SGD),
    "tensor": Case({"tensor": 2}, optim=SGD),
    "tensor 4, parallel block, dropout": Case({"tensor": 4}, PARALLEL_BLOCK | DROPPED),
    "tensor, chunked": Case({"tensor": 2, "tensor_overlap": "chunked"}, PARALLEL_BLOCK, optim=SGD),
    "ring": Case({"context": 2}, WINDOWS, optim=SGD),
    "all to all, dropout": Case({"context": 2, "context_method": "all_to_all"}, DROPPED),
    "1f1b": Case({"pipeline": 2}, optim=SGD),
    "1f1b of 4, tied, dropout": Case({"pipeline": 4}, {"tie_embeddings": True} | DROPPED),
    "interleaved": Case({"pipeline": 2, "schedule": "interleaved_1f1b"}, optim=SGD),
    "zero bubble": Case({"pipeline": 2, "schedule": "interleaved_zero_bubble"}, optim=SGD),
    "zbv, tied, zero 3": Case(
        {"pipeline": 2, "shard": 2, "zero": 3, "schedule": "zbv"}, {"tie_embeddings": True}, optim=SGD
    ),
    "zbv, tied": Case({"pipeline": 2, "schedule": "zbv"}, {"tie_embeddings": True}, optim=SGD),
    "pp, fs, tp": Case({"pipeline": 2, "shard": 2, "tensor": 2}, PARALLEL_BLOCK | WINDOWS, optim={"name": "lamb"}),
    "pp, dp, cp": Case({"pipeline": 2, "replicate": 2, "context": 2}, {"tie_embeddings": True}, optim=SGD),
    "fs, cp, tp, zero 3": Case({"shard": 2, "context": 2, "tensor": 2, "zero": 3}, DROPPED, optim={"name": "came"}),
    "zero bubble, fs, tp": Case(
        {"pipeline": 2, "shard": 2, "tensor": 2, "schedule": "interleaved_zero_bubble"},
        {"bias": "all", "norm": "layer", "activation": "gelu", "position": "learned"},
    ),
    "no clipping, gpt": Case(
        {"shard": 2, "tensor": 2}, {"bias": "all", "norm": "layer", "position": "learned"},
        optim=SGD | {"clip_norm": 0.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_layout_computes_what_one_process_computes(name: str) -> None:
    case = CASES[name]
    expected, found = single(case), spread(case)
    assert found.weights.keys() == expected.weights.keys()
    for parameter, weights in expected.weights.items():
        assert torch.equal(found.weights[parameter], weights), parameter
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for parameter, gradient in expected.gradients.items():
        # The gradient of a key's bias is zero in theory where nothing is rotated: what is left of it is rounding.
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        torch.testing.assert_close(found.gradients[parameter], gradient, rtol=1e-5, atol=1e-5 * scale, msg=parameter)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.held_out == pytest.approx(expected.held_out, rel=1e-5)
