"""A trained model, opened from its run folder for sampling or evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.checkpoint.restoring.compatibility import Differences
from phalanx.checkpoint.restoring.restore import Targets, Wanted, restore
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader
from phalanx.data.prepare import prepare
from phalanx.data.tokenizers.spec import open_saved_tokenizer, saved_tokenizer_config
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.model.decoder import Decoder
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_numbers import complete_model
from phalanx.train.device import Device, choose_device
from phalanx.train.run_folder import RunFolder


@dataclass(frozen=True)
class Trained:
    """A model with the weights of a checkpoint."""

    config: RunConfig
    model: Decoder
    tokenizer: Tokenizer
    device: Device
    step: int


def open_trained(path: Path, say: Callable[[str], None], *, device: str = "auto") -> Trained:
    """Open the newest good checkpoint of the run in `path`; `say` shows which, and damaged ones.

    Raises:
        UserError: there is no run, no checkpoint or no tokenizer, or a weight is missing or has another shape.
    """
    folder = RunFolder(path)
    config = folder.config()
    tokenizer = open_saved_tokenizer(folder.tokenizer)
    chosen = choose_device(config.train.model_copy(update={"device": device, "deterministic": False}))
    model = Decoder(
        complete_model(config, tokenizer.vocab_size), device=chosen.torch_device, compute_dtype=chosen.compute_dtype
    )
    wanted = {f"model.{name}": parameter.detach() for name, parameter in LogicalParameters(model).items()}

    def require_all(differences: Differences) -> None:  # whatever else the checkpoint holds
        if differences.missing:
            problem = f"the newest checkpoint lacks {', '.join(differences.missing[:4])}"
            raise UserError(problem, cure="use the config it was trained with", value=str(path))

    restored = take_newest(folder, lambda _: Targets(wanted, check=require_all), say)
    model.eval()
    return Trained(config, model, tokenizer, chosen, restored.step)


def same_ids(left: Tokenizer, right: Tokenizer) -> bool:
    """Whether every id stands for the same text in both; ids that only one of them has do not count."""
    shared = range(min(left.vocab_size, right.vocab_size))
    return all(left.decode([token]) == right.decode([token]) for token in shared)


def held_out_text(trained: Trained, run: Path, other: DataConfig | None) -> Loader:
    """The held-out text of the run, or that of `other`, split into tokens as the model of the run knows them.

    Raises:
        UserError: the text has changed so that its tokenizer is another now, or cannot be written in the run's tokens.
    """
    config = trained.config.data
    if other is not None:
        given = saved_tokenizer_config(run / "tokenizer") or config.tokenizer
        config = DataConfig.model_validate(other.model_dump() | {"tokenizer": given.model_dump()})
    prepared = prepare(config)
    if prepared.vocab_size != trained.tokenizer.vocab_size or not same_ids(prepared.tokenizer, trained.tokenizer):
        raise UserError(
            "the tokenizer that its text gives now is not the one the model was trained with",
            cure="put the text back that it was trained on",
            field="data.sources",
        )
    return Loader(prepared, config)


def take_newest(folder: RunFolder, wanted: Wanted, say: Callable[[str], None]) -> Restored:
    """Fill what is `wanted` from the newest checkpoint of a run from which it can be read; refused if there is none."""
    store = open_store(folder.checkpoints)
    with torch.no_grad():
        restored = restore(wanted, keeper=None, store=store, report=say, strict=False)
    if restored is None:
        raise UserError(
            "has no good checkpoint yet", cure="train until the first one is written", value=str(folder.path)
        )
    return restored
