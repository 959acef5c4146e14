"""torch.compile over the decoder; the tracing back end without code generation, which takes a compiler and a minute."""

from __future__ import annotations

import pytest
import torch
from model_builders import build, tiny, tokens
from torch._dynamo.utils import counters

from phalanx.model.forward_context import DropoutState
from phalanx.model.recompute import Recompute


@pytest.mark.campaign(but=("llama",))
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "merged"])
def test_a_forward_pass_is_one_graph(variant: str) -> None:
    config = tiny(variant)
    model, ids = build(config), tokens(config)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_dropout_under_the_compiler_drops_the_same_and_is_not_compiled_per_step() -> None:
    config = tiny("llama", layers=12, dropout=0.2, attention_dropout=0.1, attention_backend="math")
    model, ids = build(config), tokens(config)
    torch.compiler.reset()
    compiled = build(config)
    compiled.compile(backend="aot_eager")
    graphs = []
    for step in range(4):
        state = DropoutState(1, step, torch.tensor([0, 1]))
        torch.testing.assert_close(compiled(ids, dropout=state), model(ids, dropout=state), rtol=1e-4, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[3]


@pytest.mark.parametrize("backend", ["chunked", "math"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_of_a_kind_are_compiled_once_whatever_attends(backend: str, recompute: Recompute) -> None:
    def steps(layers: int, compiled: bool) -> tuple[list[int], list[torch.Tensor]]:
        config = tiny("llama", layers=layers, attention=("window",), window=6, attention_backend=backend)
        model, ids = build(config), tokens(config)
        model.set_recompute(recompute)
        torch.compiler.reset()
        counters.clear()
        if compiled:
            model.compile(backend="aot_eager")
        graphs = []
        for _ in range(3):
            model.zero_grad()
            model(ids).square().mean().backward()
            graphs.append(counters["stats"]["unique_graphs"])
        return graphs, [p.grad for p in model.parameters() if p.grad is not None]

    (few, _), (many, mine) = steps(1, True), steps(3, True)
    assert many == few and many[0] == many[2] > 0
    for one, other in zip(mine, steps(3, False)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.campaign(but=("True",))
@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True])
def test_layers_in_8_bits_share_a_kind_and_have_the_numbers_of_eager_ones(held: bool) -> None:
    def gradients(layers: int, compiled: bool) -> tuple[int, list[torch.Tensor]]:
        config = tiny("llama", layers=layers)
        torch.compiler.reset()
        counters.clear()
        model = build(config, fp8_layers=range(1, layers - 1))
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        if held:
            model.hold_casts()
        ids = tokens(config)
        model(ids).float().square().mean().backward()
        return counters["stats"]["unique_graphs"], [p.grad for p in model.parameters() if p.grad is not None]

    few, many = gradients(3, True), gradients(5, True)
    assert few[0] == many[0]
    for mine, theirs in zip(many[1], gradients(5, False)[1], strict=True):
        # Between the products compiled layers round otherwise here and there, and then a value is quantised to another.
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()
