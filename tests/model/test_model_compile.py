"""torch.compile over the decoder; the tracing back end without code generation, which takes a compiler and a minute."""

from __future__ import annotations

import pytest
import torch
from model_builders import build, tiny, tokens
from torch._dynamo.utils import counters

from phalanx.model.context import DropoutState


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
