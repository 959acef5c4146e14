from __future__ import annotations

import pytest
from model_builders import VARIANTS, build, tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.model.shapes import flops_per_token, mean_keys, num_parameters, parameter_table

GPT2 = ModelConfig(
    vocab_size=50257, vocab_multiple=1, layers=12, hidden=768, heads=12, max_sequence=1024, norm="layer", bias="all",
    activation="gelu_tanh", position="learned", tie_embeddings=True,
)  # fmt: skip
LLAMA_3_8B = ModelConfig(
    vocab_size=128256,
    vocab_multiple=1,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    mlp_hidden=14336,
    max_sequence=8192,
)
QWEN2_HALF_B = ModelConfig(
    vocab_size=151936, vocab_multiple=1, layers=24, hidden=896, heads=14, kv_heads=2, mlp_hidden=4864, bias="qkv",
    tie_embeddings=True, max_sequence=131072,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"), [(GPT2, 124_439_808), (LLAMA_3_8B, 8_030_261_248), (QWEN2_HALF_B, 494_032_768)]
)
def test_parameter_counts_are_the_published_ones(config: ModelConfig, published: int) -> None:
    assert num_parameters(config) == published


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_is_what_the_decoder_holds(variant: str) -> None:
    config = tiny(variant)
    model = build(config)
    logical = LogicalParameters(model)
    assert {name: tuple(p.shape) for name, p in logical.items()} == {
        name: p.shape for name, p in parameter_table(config).items()
    }
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


def test_sizes_that_are_not_known_yet_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        parameter_table(ModelConfig(max_sequence=8))
    with pytest.raises(UserError, match=r"model\.max_sequence"):
        parameter_table(ModelConfig(vocab_size=8))


def test_flops_of_gpt2_by_hand() -> None:
    matrices = 12 * 12 * 768**2 + 50257 * 768  # 4 D^2 attention and 8 D^2 MLP per layer, and the head
    attention = 12 * 4 * 768 * 1025 / 2
    flops = flops_per_token(GPT2, 1024)
    assert flops.forward == 2 * matrices + attention
    assert flops.total == 6 * matrices + 3 * attention


@pytest.mark.parametrize(("length", "window"), [(7, None), (7, 3), (7, 1), (7, 7), (7, 20), (1, None)])
def test_mean_keys_counts_the_mask(length: int, window: int | None) -> None:
    pairs = sum(0 <= i - j < (window or length) for i in range(length) for j in range(length))
    assert mean_keys(length, window) == pytest.approx(pairs / length, rel=1e-15)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "qwen", "parallel", "merged"])
def test_flops_agree_with_torchs_counter(variant: str) -> None:
    """torch counts the whole square of scores; the rest must agree to the last multiply-add, backward included."""
    config = tiny(variant, attention_backend="math")
    model, ids = build(config), tokens(config, batch=1, length=16)
    with FlopCounterMode(display=False) as counter:
        hidden = model(ids)
        (hidden @ model.head.weight.T).sum().backward()
    square = config.layers * 4 * config.heads * config.head_dim * 16
    causal = config.layers * 4 * config.heads * config.head_dim * mean_keys(16, None)
    assert counter.get_total_flops() / 16 == flops_per_token(config, 16).total + 3 * (square - causal)


def test_windows_and_grouped_heads_cost_less() -> None:
    full = ModelConfig(vocab_size=256, max_sequence=4096)
    window = ModelConfig(vocab_size=256, max_sequence=4096, attention=("window",), window=256)
    grouped = ModelConfig(vocab_size=256, max_sequence=4096, kv_heads=2)
    cost = flops_per_token(full, 4096).forward
    assert cost - flops_per_token(window, 4096).forward == pytest.approx(12 * 4 * 768 * (2048.5 - mean_keys(4096, 256)))
    assert cost - flops_per_token(grouped, 4096).forward == 12 * 2 * 2 * 768 * (768 - 128)
