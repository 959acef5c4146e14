"""Weights of a Llama that torchtitan trained, from its own checkpoints (plain DCP folders such as ``step-1000``).

Such a folder says nothing of the model but names and shapes. What these tell is compared with the model to be filled;
what they do not (`UNTOLD`) must be right in its config, or the weights compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from phalanx.checkpoint.format.manifest import TensorEntry
from phalanx.checkpoint.format.plain import open_plain
from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import parameter_table

UNTOLD = ("model.heads", "model.rope_theta", "model.rope_scaling", "model.norm_eps")

_OUTSIDE = {"embedding": "tok_embeddings.weight", "norm": "norm.weight", "head": "output.weight"}
_INSIDE = {
    "attention.norm": "attention_norm.weight",
    "attention.q": "attention.wq.weight",
    "attention.k": "attention.wk.weight",
    "attention.v": "attention.wv.weight",
    "attention.o": "attention.wo.weight",
    "mlp.norm": "ffn_norm.weight",
    "mlp.gate": "feed_forward.w1.weight",
    "mlp.up": "feed_forward.w3.weight",
    "mlp.down": "feed_forward.w2.weight",
}
_TRANSPOSED = ("attention.o", "mlp.down")  # ours are (inputs, outputs)
_ROTATED = ("attention.q", "attention.k")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_COMPARED = ("layers", "hidden", "num_kv_heads", "mlp_width", "tie_embeddings", "vocab_size", "bias", "qk_norm")
_CURE = "give a checkpoint of torchtitan's Llama, or convert it to a Hugging Face folder first"


def read_llama(path: Path, config: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The weights in the folder `path`, by logical name, as a model of `config` wants them.

    Returns:
        `config` with what names and shapes tell of the model that was trained (to be compared with `config`), and its
        tensors in host memory, the vocabulary without padding; no tensors if that comparison would fail.

    Raises:
        UserError: it is no Llama of torchtitan's, its index is refused, or it is damaged.
    """
    found = open_plain(path)
    prefix = "model." if "model.tok_embeddings.weight" in found.tensors else ""
    stored = {n.removeprefix(prefix): entry for n, entry in found.tensors.items() if n.startswith(prefix)}
    told = _told(path, stored, config)
    if any(getattr(told, field) != getattr(config, field) for field in _COMPARED):
        return told, {}
    names = {name: _stored_name(name) for name in parameter_table(told)}
    missing = [theirs for theirs in names.values() if theirs not in stored]
    if missing:
        raise UserError(f"lacks {missing[0]}", cure=_CURE, field=str(path))
    tensors = found.read(prefix + theirs for theirs in names.values())
    return told, {ours: _ours(ours, tensors[prefix + theirs], told) for ours, theirs in names.items()}


def _told(path: Path, stored: Mapping[str, TensorEntry], config: ModelConfig) -> ModelConfig:
    """What names and shapes say of the model."""
    needed = ["tok_embeddings.weight", *(f"layers.0.{_INSIDE[name]}" for name in ("attention.k", "mlp.gate", "mlp.up"))]
    missing = [name for name in needed if name not in stored]
    if missing:
        raise UserError(f"is no Llama of torchtitan's: it lacks {missing[0]}", cure=_CURE, field=str(path))
    words, width = stored[needed[0]].shape
    key_rows, inner = stored[needed[1]].shape[0], stored[needed[2]].shape[0]
    layers = [int(match[1]) for match in map(_LAYER.fullmatch, stored) if match is not None]
    known = {*_INSIDE.values()}
    extra = sorted(m[2] for m in map(_LAYER.fullmatch, stored) if m is not None and m[2] not in known)
    if extra:
        raise UserError(f"is no Llama of torchtitan's: layers have {extra[0]}", cure=_CURE, field=str(path))
    sizes = {"vocab_size": words, "hidden": width, "layers": max(layers) + 1, "mlp_hidden": inner}
    sizes |= {"kv_heads": key_rows // config.head_dim}
    kind = {"block": "serial", "position": "rotary", "norm": "rms", "activation": "swiglu", "bias": "none"}
    other = {"qk_norm": False, "tie_embeddings": "output.weight" not in stored, "logit_softcap": 0.0}
    return config.model_copy(update={**sizes, **kind, **other})


def _stored_name(name: str) -> str:
    match = _LAYER.fullmatch(name)
    return _OUTSIDE.get(name, name) if match is None else f"layers.{match[1]}.{_INSIDE.get(match[2], match[2])}"


def _ours(name: str, stored: Tensor, config: ModelConfig) -> Tensor:
    if name.endswith(_TRANSPOSED):
        return stored.t().contiguous()
    if name.endswith(_ROTATED):
        return _halves(stored, config.head_dim)
    return stored


def _halves(stored: Tensor, head: int) -> Tensor:
    """Rows of every head with the pairs that turn together half a head apart, not side by side."""
    rows, width = stored.shape
    return stored.view(rows // head, head // 2, 2, width).transpose(1, 2).reshape(rows, width)
