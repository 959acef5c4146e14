"""A trained model, opened from its run folder for sampling or evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.checkpoint.restore import Checkpoint, newest
from phalanx.core.errors import UserError
from phalanx.data.saved import open_saved_tokenizer
from phalanx.data.tokenizer import Tokenizer
from phalanx.model.decoder import Decoder
from phalanx.model.logical import LogicalParameters
from phalanx.train.config import RunConfig
from phalanx.train.derived import complete_model
from phalanx.train.device import Device, choose_device
from phalanx.train.run_folder import RunFolder


@dataclass(frozen=True)
class Trained:
    """A model with the weights of a checkpoint, and the tokenizer it was trained with."""

    config: RunConfig
    model: Decoder
    tokenizer: Tokenizer
    device: Device
    step: int


def open_trained(path: Path, say: Callable[[str], None], *, device: str = "auto") -> Trained:
    """Open the newest good checkpoint of the run in `path`; `say` is told which, and of damaged ones.

    Raises:
        UserError: no run, no checkpoint or no tokenizer is there.
    """
    folder = RunFolder(path)
    config = folder.config()
    checkpoint = require_checkpoint(folder, say)
    tokenizer = open_saved_tokenizer(folder.tokenizer)
    chosen = choose_device(config.train.model_copy(update={"device": device, "deterministic": False}))
    model = Decoder(
        complete_model(config, tokenizer.vocab_size), device=chosen.torch_device, compute_dtype=chosen.compute_dtype
    )
    load_weights(checkpoint, LogicalParameters(model))
    model.eval()
    return Trained(config, model, tokenizer, chosen, checkpoint.step)


def require_checkpoint(folder: RunFolder, say: Callable[[str], None]) -> Checkpoint:
    """The newest good checkpoint of a run.

    Raises:
        UserError: there is none.
    """
    checkpoint = newest(folder.checkpoints, say)
    if checkpoint is None:
        raise UserError(
            "has no good checkpoint yet", cure="train until the first one is written", value=str(folder.path)
        )
    return checkpoint


def load_weights(checkpoint: Checkpoint, parameters: LogicalParameters) -> None:
    """Fill `parameters` from the weights of `checkpoint`, whatever else it holds.

    Raises:
        UserError: a weight is missing or has another shape.
    """
    wanted = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    with torch.no_grad():
        differences = checkpoint.load_into(wanted, strict=False)
    if differences.missing:
        raise UserError(
            f"lacks {', '.join(differences.missing[:4])}",
            cure="use the config it was trained with",
            value=str(checkpoint.path),
        )
