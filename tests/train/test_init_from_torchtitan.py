"""Weights from torchtitan's checkpoints: the logits of its Llama, whose rotation pairs neighbours, are ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import write_corpus
from torch import Tensor
from torch.nn import functional as F
from train_helpers import begin, configured

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.train.weights.initial import read_llama

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

from plain_writers import save_alone

CONFIG = ModelConfig(
    vocab_size=257, vocab_multiple=1, layers=2, hidden=32, heads=4, kv_heads=2, mlp_hidden=48, max_sequence=16
)


def titan_state(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    state = {"tok_embeddings.weight": normal(257, 32), "norm.weight": normal(32) + 1, "output.weight": normal(257, 32)}
    for layer in range(2):
        rows = {"wq": (32, 32), "wk": (16, 32), "wv": (16, 32), "wo": (32, 32)}
        inner = {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}
        state |= {f"layers.{layer}.attention.{name}.weight": normal(*shape) for name, shape in rows.items()}
        state |= {f"layers.{layer}.feed_forward.{name}.weight": normal(*shape) for name, shape in inner.items()}
        state |= {f"layers.{layer}.{name}_norm.weight": normal(32) + 1 for name in ("attention", "ffn")}
    return state


def rotate(x: Tensor) -> Tensor:
    """As Llama's authors do: neighbours are real and imaginary part. (B, S, N, E)."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    turns = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
    turned = (
        torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(turns), turns)[:, None]
    )
    return torch.view_as_real(turned).flatten(-2)


def titan_logits(state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = state["tok_embeddings.weight"][tokens]
    for layer in range(2):
        w = {n.removeprefix(f"layers.{layer}."): t for n, t in state.items() if n.startswith(f"layers.{layer}.")}
        y = F.rms_norm(x, (32,), w["attention_norm.weight"], 1e-5)
        q, k, v = ((y @ w[f"attention.{n}.weight"].T).unflatten(-1, (-1, 8)) for n in ("wq", "wk", "wv"))
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(2, dim=2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(-2) @ w["attention.wo.weight"].T
        y = F.rms_norm(x, (32,), w["ffn_norm.weight"], 1e-5)
        gate, up = (y @ w[f"feed_forward.{n}.weight"].T for n in ("w1", "w3"))
        x = x + (F.silu(gate) * up) @ w["feed_forward.w2.weight"].T
    return F.rms_norm(x, (32,), state["norm.weight"], 1e-5) @ state["output.weight"].T


@pytest.mark.parametrize("nested", [False, True])
def test_logits_are_those_of_torchtitan(tmp_path: Path, nested: bool) -> None:
    state = titan_state()
    extra: dict[str, Any] = {"optimizer": {"lr": 0.1}, "train_state": {"step": torch.tensor(4)}}
    save_alone(tmp_path / "step-4", ({"model": state} if nested else state) | extra)
    told, tensors = read_llama(tmp_path / "step-4", CONFIG)
    assert told.mlp_width == 48
    model = Decoder(CONFIG)
    LogicalParameters(model).load(tensors)
    tokens = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model.logits(model(tokens))
    assert torch.allclose(ours, titan_logits(state, tokens), atol=1e-5)


SETTINGS = {"model.heads": 4, "model.kv_heads": 2, "model.mlp_hidden": 48}


def test_train_init_from(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    save_alone(tmp_path / "step-4", titan_state())
    notes: list[str] = []
    run = begin(configured(tmp_path, SETTINGS | {"train.init_from": str(tmp_path / "step-4")}, "run"), notes)
    run.folder.release()
    expected = read_llama(tmp_path / "step-4", CONFIG)[1]
    for name, parameter in run.trainer.parameters.items():
        assert torch.equal(parameter[: len(expected[name])], expected[name]), name
    assert any("does not say model.heads, model.rope_theta" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.layers": 3}, r"model\.layers = 3.*set model\.layers=2"),
        ({"model.mlp_hidden": 64}, r"model\.mlp_hidden = 64.*set model\.mlp_hidden=48"),
        ({"model.kv_heads": 4}, r"model\.kv_heads = 4.*set model\.kv_heads=2"),
        ({"model.norm": "layer"}, r"model\.norm = 'layer'.*set model\.norm=\"rms\""),
        ({"model.tie_embeddings": True}, r"model\.tie_embeddings = True.*set model\.tie_embeddings=False"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    write_corpus(tmp_path)
    save_alone(tmp_path / "step-4", titan_state())
    with pytest.raises(UserError, match=says):
        begin(configured(tmp_path, SETTINGS | changes | {"train.init_from": str(tmp_path / "step-4")}, "run"))


def test_what_is_no_llama_is_refused(tmp_path: Path) -> None:
    save_alone(tmp_path / "a", {"weight": torch.ones(3)})
    with pytest.raises(UserError, match=r"is no Llama of torchtitan's: it lacks tok_embeddings\.weight"):
        read_llama(tmp_path / "a", CONFIG)
    save_alone(tmp_path / "b", titan_state() | {"layers.0.moe.router.gate.weight": torch.ones(3)})
    with pytest.raises(UserError, match=r"layers have moe\.router\.gate\.weight"):
        read_llama(tmp_path / "b", CONFIG)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers.0.attention.wq.weight_scale": torch.ones(1)}, "layers have attention.wq.weight_scale"),
        ({"adapter.weight": torch.ones(1)}, "it has adapter.weight, too"),
        ({"output.weight": torch.ones(257, 32, dtype=torch.float8_e4m3fn)}, "output.weight is quantised"),
        ({"layers.1.feed_forward.w2.weight": torch.ones(32, 48).to(torch.int8)}, "w2.weight is quantised"),
        ({"norm.weight": torch.full((32,), torch.nan)}, "norm: has values that are NaN"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, change: dict[str, Tensor], says: str) -> None:
    write_corpus(tmp_path)
    save_alone(tmp_path / "step-4", titan_state() | change)
    with pytest.raises(UserError, match=says):
        begin(configured(tmp_path, SETTINGS | {"train.init_from": str(tmp_path / "step-4")}, "run"))
