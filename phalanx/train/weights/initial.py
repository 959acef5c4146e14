"""Starting from weights that exist: a Hugging Face folder, another run, or a checkpoint of torchtitan. Not resume.

The optimizer starts fresh. A folder of torchtitan's (plain DCP, such as ``step-1000``) has names and shapes, and
nothing else about the model. What follows from these is compared with the model to be filled; the rest (`UNKNOWN`) must
be right in its config, or the weights compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.format.dcp import torch_dtype
from phalanx.checkpoint.format.manifest import TensorEntry
from phalanx.checkpoint.format.plain_dcp import is_plain, open_plain
from phalanx.checkpoint.restoring.restore import Opened, Targets
from phalanx.core.errors import UserError
from phalanx.data.tokenizers.spec import open_saved_tokenizer
from phalanx.data.tokenizers.tokenizer import LibraryTokenizer, Tokenizer
from phalanx.model.config import ModelConfig
from phalanx.model.huggingface import import_folder, require_finite
from phalanx.model.logical_parameters import fill
from phalanx.model.shapes import parameter_table
from phalanx.train.derived.run_numbers import complete_model
from phalanx.train.run_folder import RunFolder
from phalanx.train.trainer import Trainer
from phalanx.train.weights.trained import same_ids, take_newest

UNKNOWN = ("model.heads", "model.rope_theta", "model.rope_scaling", "model.norm_eps")

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
# What may lie beside the weights.
_BESIDE = re.compile(r"(optimizer|optim|lr_scheduler|dataloader|train_state|rng)\..*|freqs_cis|rope.cache")
_CURE = "give a checkpoint of torchtitan's Llama, or convert it to a Hugging Face folder first"


def read_llama(path: Path, config: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The weights in the folder `path`, by logical name, as a model of `config` wants them.

    Returns:
        `config` with what follows from names and shapes (to be compared with `config`), and the tensors in host memory,
        the vocabulary without padding; no tensors if that comparison would fail.

    Raises:
        UserError: it is no Llama of torchtitan's, its index is refused, or it is damaged.
    """
    found = open_plain(path)
    prefix = "model." if "model.tok_embeddings.weight" in found.tensors else ""
    stored = {n.removeprefix(prefix): entry for n, entry in found.tensors.items() if n.startswith(prefix)}
    described = _described(path, stored, config)
    if any(getattr(described, field) != getattr(config, field) for field in _COMPARED):
        return described, {}
    names = {}
    for name in parameter_table(described):
        match = _LAYER.fullmatch(name)
        inside = match and f"layers.{match[1]}.{_INSIDE.get(match[2], match[2])}"
        names[name] = inside or _OUTSIDE.get(name, name)
    missing = [theirs for theirs in names.values() if theirs not in stored]
    if missing:
        raise UserError(f"lacks {missing[0]}", cure=_CURE, field=str(path))
    left = sorted(name for name in {*stored} - {*names.values()} if not _BESIDE.fullmatch(name))
    if left:
        raise UserError(f"is no Llama of torchtitan's: it has {left[0]}, too", cure=_CURE, field=str(path))
    dtypes = {theirs: torch_dtype(stored[theirs].dtype) for theirs in names.values()}
    packed = [theirs for theirs, dtype in dtypes.items() if not dtype.is_floating_point or dtype.itemsize == 1]
    if packed:
        raise UserError(f"{packed[0]} is quantised: {dtypes[packed[0]]}", cure=_CURE, field=str(path))
    tensors = found.read(prefix + theirs for theirs in names.values())
    return described, {ours: _ours(ours, tensors[prefix + theirs], described) for ours, theirs in names.items()}


def _described(path: Path, stored: Mapping[str, TensorEntry], config: ModelConfig) -> ModelConfig:
    """The model as far as names and shapes describe it."""
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


def _ours(name: str, stored: Tensor, config: ModelConfig) -> Tensor:
    if name.endswith(_TRANSPOSED):
        return stored.t().contiguous()
    if name.endswith(_ROTATED):
        # Rows of every head with the pairs that turn together half a head apart, not side by side.
        (rows, width), head = stored.shape, config.head_dim
        return stored.view(rows // head, head // 2, 2, width).transpose(1, 2).reshape(rows, width)
    return stored


# What may differ between a model and the weights it starts from; sizes are compared as they are resolved.
_FREE = frozenset(
    {
        *("vocab_size", "vocab_multiple", "max_sequence", "kv_heads", "head_size", "mlp_hidden", "mlp_multiple"),
        *("merged_projections", "attention_backend"),
        *("z_loss", "dropout", "attention_dropout", "init_std", "init_depth_scaled", "residual"),
    }
)
_RESOLVED = {"kv_heads": "num_kv_heads", "head_size": "head_dim", "mlp_hidden": "mlp_width"}


@dataclass(frozen=True)
class Weights:
    """Weights that exist: where, of what model, every logical parameter, and the tokenizer they were trained with."""

    origin: Path
    model: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer | None


def load_initial_weights(trainer: Trainer, tokenizer: Tokenizer, source: Path, say: Callable[[str], None]) -> None:
    """Fill a trainer's weights from `source`: a run (its newest checkpoint), a Hugging Face folder, or torchtitan's.

    Args:
        tokenizer: what the text of this run is tokenised with; `say` warns when the weights know another.

    Raises:
        UserError: `source` is neither, or its weights do not fit the model's config; nothing is changed then.
    """
    config = trainer.model_config
    if (source / "checkpoints").is_dir():
        weights = weights_of_run(source, say)
    elif is_plain(source):
        described, tensors = read_llama(source, config)
        say(f"{source} does not say {', '.join(UNKNOWN)}: they must be those it was trained with")
        weights = Weights(source, described, tensors, None)
    else:
        weights = weights_of_folder(source)
    require_same_model(config, weights.model, weights.origin)
    for name, tensor in weights.tensors.items():
        require_finite(name, tensor)
    # Those of the vocabulary with a row for each word and no more: this model pads for itself.
    words = weights.model.vocab_size
    tensors = {n: t[:words] if n in ("embedding", "head") else t for n, t in weights.tensors.items()}
    fill(trainer.parameters, trainer.shards, tensors, known=parameter_table(config))
    trainer.weights_changed()
    say(f"starting from the weights of {weights.origin}")
    if weights.tokenizer is not None and not same_ids(weights.tokenizer, tokenizer):
        say("warning: these weights were trained with another tokenizer than data.tokenizer, whose ids mean other text")


def require_same_model(ours: ModelConfig, theirs: ModelConfig, source: Path) -> None:
    """Refuse weights of another architecture: equal shapes alone would hide a different activation or rotation."""
    for name in type(ours).model_fields:
        resolved = _RESOLVED.get(name, name)
        if name not in _FREE or name in _RESOLVED:
            _require(name, getattr(ours, resolved), getattr(theirs, resolved), source)
    if ours.position == "learned":
        _require("max_sequence", ours.max_sequence, theirs.max_sequence, source)
    # What the weights say of a word is a share among the words they were trained with.
    if ours.vocab_size != theirs.vocab_size:
        raise UserError(
            f"the weights of {source} know {theirs.vocab_size} words",
            cure=f"set model.vocab_size={theirs.vocab_size}, and data.tokenizer to theirs",
            field="model.vocab_size",
            value=ours.vocab_size,
        )


def _require(name: str, mine: object, given: object, source: Path) -> None:
    if mine != given:
        shown = f'"{given}"' if isinstance(given, str) else given
        problem = f"the weights of {source} were made with {given!r}"
        raise UserError(problem, cure=f"set model.{name}={shown}", field=f"model.{name}", value=mine)


def weights_of_run(source: Path, say: Callable[[str], None]) -> Weights:
    """The weights of the newest good checkpoint of a run; `say` shows damaged ones.

    Raises:
        UserError: no run, no checkpoint or no tokenizer is there.
    """
    folder = RunFolder(source)
    prefix = "model."
    tensors: dict[str, Tensor] = {}

    def weights(opened: Opened) -> Targets:
        tensors.clear()
        for name, saved in opened.tensors.items():
            if name.startswith(prefix):
                tensors[name] = torch.empty(saved.shape, dtype=torch_dtype(saved.dtype))
        return Targets(tensors)

    taken = take_newest(folder, weights, say)
    tokenizer = open_saved_tokenizer(folder.tokenizer)
    model = complete_model(folder.config(), tokenizer.vocab_size)
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return Weights(folder.checkpoints / taken.name, model, named, tokenizer)


def weights_of_folder(source: Path) -> Weights:
    """The weights of a Hugging Face folder of a kind that can be imported."""
    if not source.is_dir():
        cure = "give a run folder or a Hugging Face folder"
        raise UserError("there is no such folder", cure=cure, field="train.init_from", value=str(source))
    model, tensors = import_folder(source)
    file = source / "tokenizer.json"
    tokenizer = LibraryTokenizer(file.read_text(encoding="utf-8")) if file.exists() else None
    return Weights(source, model, tensors, tokenizer)
