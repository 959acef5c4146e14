from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from model_builders import VARIANTS, build, tiny, tokens
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.model.decoder import Decoder
from phalanx.model.forward_context import DropoutState
from phalanx.model.recompute import Recompute

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

MODES: tuple[Recompute, ...] = ("none", "selective", "mlp", "full")


def _gradients(model: Decoder, mode: Recompute, ids: Tensor, dropout: DropoutState | None = None) -> dict[str, Tensor]:
    model.set_recompute(mode)
    model.zero_grad()
    sum(model.loss(model(ids, dropout=dropout), ids)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_gives_the_same_gradient_bits(variant: str, dtype: torch.dtype) -> None:
    config = tiny(variant, dropout=0.2)
    model, ids = build(config, compute_dtype=dtype), tokens(config)
    dropout = DropoutState(3, 4, torch.tensor([0, 1]))
    expected = _gradients(model, "none", ids, dropout)
    assert len(expected) == len(list(model.parameters()))
    for mode in MODES[1:]:
        got = _gradients(model, mode, ids, dropout)
        assert all(torch.equal(got[name], expected[name]) for name in expected), mode


def test_attention_dropout_is_replayed() -> None:
    config = tiny("llama", attention_dropout=0.3, attention_backend="math")
    model, ids = build(config), tokens(config)
    dropout = DropoutState(3, 4, torch.tensor([0, 1]))
    expected = _gradients(model, "none", ids, dropout)
    for mode in MODES[1:]:
        got = _gradients(model, mode, ids, dropout)
        assert all(torch.equal(got[name], expected[name]) for name in expected), mode


@pytest.mark.parametrize("variant", ["llama", "nanogpt", "merged"])
def test_recompute_keeps_fewer_bytes(variant: str) -> None:
    """Bytes of distinct storages alive between forward and backward, beyond weights: what autograd keeps."""
    config = tiny(variant, hidden=64, layers=6)
    model, ids = build(config), tokens(config)
    none, selective, mlp, full = (_kept_bytes(model, mode, ids) for mode in MODES)
    assert full < 0.35 * none
    assert full < mlp < selective < 0.9 * none


def _kept_bytes(model: Decoder, mode: Recompute, ids: Tensor) -> int:
    model.set_recompute(mode)
    with torch.profiler.profile(profile_memory=True) as profile:
        hidden = model(ids)
    assert hidden.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.events() if event.name == "[memory]")


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _PRODUCTS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_mlp_makes_one_product_of_a_layer_again(variant: str, dtype: torch.dtype) -> None:
    """Where the products of attention have the sizes of the MLP's, too."""
    config = tiny(variant, mlp_hidden=32)
    model, ids = build(config, compute_dtype=dtype), tokens(config)
    counts = {mode: _num_products(model, mode, ids) for mode in MODES}
    assert counts["selective"] == counts["none"]
    assert counts["mlp"] == counts["none"] + config.layers
    assert counts["full"] > counts["mlp"] or config.merged


def _num_products(model: Decoder, mode: Recompute, ids: Tensor) -> int:
    model.set_recompute(mode)
    with _Products() as products:
        model(ids).float().sum().backward()
    return products.count


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", ["llama", "gpt2", "parallel", "merged"])
def test_a_block_compiled_with_its_recompute_computes_the_same_again(variant: str, mode: Recompute) -> None:
    """The graphs of both passes hold as many products as eager execution makes, and give its gradients."""
    config = tiny(variant, layers=1, mlp_hidden=32)
    model, ids = build(config), tokens(config)
    made = _num_products(model, mode, ids)
    expected = _gradients(model, mode, ids)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    model.compile(backend=backend, fullgraph=True)
    model.set_recompute(mode)
    model.zero_grad()
    context = model.context(ids)
    x = model.blocks(model.embed(ids, context), context)
    hidden = model.norm(x).view(*ids.shape, -1)
    sum(model.loss(hidden, ids)).backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)
    forward, backward = graphs
    products = _products_of(forward) + _products_of(backward)
    assert products == made or (mode == "full" and products < made)


def _products_of(graph: torch.fx.GraphModule) -> int:
    return sum(node.target in _PRODUCTS for node in graph.graph.nodes)
