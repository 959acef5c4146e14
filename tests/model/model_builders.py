"""Small models and batches for the tests of this room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.logical_parameters import initialise

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "gpt2": {
        "norm": "layer",
        "bias": "all",
        "activation": "gelu_tanh",
        "position": "learned",
        "tie_embeddings": True,
    },
    "nanogpt": {"norm": "layer", "activation": "gelu", "position": "learned", "tie_embeddings": True},
    "qwen": {"bias": "qkv", "kv_heads": 1, "qk_norm": True, "tie_embeddings": True},
    "windows": {"attention": ("window", "window", "full"), "window": 5, "kv_heads": 2},
    "parallel": {"block": "parallel", "merged_projections": False, "activation": "gelu"},
    "merged": {"block": "parallel", "merged_projections": True, "kv_heads": 2},
    "merged_biased": {"block": "parallel", "merged_projections": True, "bias": "all", "norm": "layer"},
    "capped": {"logit_softcap": 5.0, "z_loss": 0.01, "position": "none", "head_size": 12},
}


def tiny(variant: str = "llama", **changes: Any) -> ModelConfig:
    base = {"vocab_size": 61, "vocab_multiple": 8, "layers": 3, "hidden": 32, "heads": 4, "max_sequence": 24}
    return ModelConfig(**{**base, **VARIANTS[variant], **changes})


def build(config: ModelConfig, seed: int = 0, std: float = 0.2, **how: Any) -> Decoder:
    """An initialised decoder; weights are larger than in training so that every part matters, biases and norms too."""
    model = Decoder(config.model_copy(update={"init_std": std}), **how)
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "position" not in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def tokens(config: ModelConfig, batch: int = 2, length: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)
