"""Starting from weights that exist: a Hugging Face folder, or another run. Not resume: the optimizer starts fresh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.huggingface import import_folder
from phalanx.model.logical import LogicalParameters
from phalanx.train.run_folder import RunFolder
from phalanx.train.trained import load_weights, require_checkpoint


def load_initial_weights(
    parameters: LogicalParameters, model: ModelConfig, source: Path, say: Callable[[str], None]
) -> None:
    """Fill `parameters` from the run folder or Hugging Face folder `source`.

    Raises:
        UserError: `source` is neither, or its weights do not fit the model's config.
    """
    if (source / "checkpoints").is_dir():
        checkpoint = require_checkpoint(RunFolder(source), say)
        load_weights(checkpoint, parameters)
        say(f"weights of {checkpoint.path}")
        return
    theirs, tensors = import_folder(source)
    _require_same_shape(model, theirs, source)
    _copy(parameters, tensors, source)
    say(f"weights of {source}")


def _require_same_shape(ours: ModelConfig, theirs: ModelConfig, source: Path) -> None:
    """Refuse weights of another architecture: equal shapes alone would hide a different activation or rotation."""
    for name in type(ours).model_fields:
        if name in _FREE:
            continue
        mine, given = getattr(ours, name), getattr(theirs, name)
        if mine != given:
            raise UserError(
                f"{source} was made with {given!r}", cure=f"set model.{name}={given}", field=f"model.{name}", value=mine
            )


# What may differ between a model and the weights it starts from. Derived sizes are compared tensor by tensor.
_FREE = frozenset(
    {
        "vocab_size",
        "vocab_multiple",
        "max_sequence",
        "kv_heads",
        "head_size",
        "mlp_hidden",
        "mlp_multiple",
        "merged_projections",
        "attention_backend",
        "z_loss",
        "dropout",
        "attention_dropout",
        "init_std",
        "init_depth_scaled",
        "residual",
    }
)


@torch.no_grad()
def _copy(parameters: LogicalParameters, tensors: Mapping[str, Tensor], source: Path) -> None:
    for name, parameter in parameters.items():
        given = tensors.get(name)
        if given is None:
            raise UserError(
                f"has no weight {name}", cure="make the model's config that of the weights", value=str(source)
            )
        rows = min(len(given), len(parameter))
        padded = name in ("embedding", "head") and given.shape[1:] == parameter.shape[1:]
        if given.shape != parameter.shape and not padded:
            raise UserError(
                f"{name} has shape {tuple(given.shape)}, the model needs {tuple(parameter.shape)}",
                cure="make the model's config that of the weights",
                value=str(source),
            )
        parameter[:rows].copy_(given[:rows])
