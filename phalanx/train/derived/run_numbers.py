"""What follows from a config without training: open sizes, parameters, FLOPs, batches, steps."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.data.config import configured_vocab_size
from phalanx.launch.cores import require_threads, wanted_threads
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import flops_per_token, num_parameters, parameter_table
from phalanx.optim.groups import assign
from phalanx.optim.schedule import batch_size, lr_factor, samples_before, steps_for_samples
from phalanx.train.config import RunConfig

# Tokens of a micro-batch on a CPU: twice as many save at most 3 % of time and take a GiB more at 10M parameters.
_CPU_TOKENS = 4096


@dataclass(frozen=True)
class Derived:
    """Numbers that a config implies."""

    parameters: int  # elements of the model, padding of the vocabulary included
    tokens_per_step: int  # of a full global batch
    flops_per_token: float  # forward and backward, without recomputation
    steps: int
    total_tokens: int


def derive(config: RunConfig) -> Derived:
    """What `config` implies.

    Raises:
        UserError: the vocabulary is not known before the tokenizer is made, or sizes do not fit.
    """
    model = complete_model(config, config.model.vocab_size or configured_vocab_size(config.data.tokenizer))
    length = config.data.sequence_length
    steps = total_steps(config)
    return Derived(
        parameters=num_parameters(model),
        tokens_per_step=config.train.global_batch * length,
        flops_per_token=flops_per_token(model, length).total,
        steps=steps,
        total_tokens=length * samples_before(config.optim.batch_warmup, steps, config.train.global_batch),
    )


def check_early(config: RunConfig) -> None:
    """Refuse, before a byte of text is read, what the settings alone show to be impossible: schedule, batch warm-up,
    sizes, groups of the optimizer, the file of a tokenizer, more threads than a machine of so many CPUs can use."""
    require_threads(config.train.threads, "train.threads")
    if not config.train.threads:
        require_threads(wanted_threads(os.environ), "OMP_NUM_THREADS")
    model = complete_model(config, known_vocab_size(config) or config.model.vocab_size or 1)
    assign(config.optim, {name: len(parameter.shape) for name, parameter in parameter_table(model).items()})
    lr_factor(config.optim.schedule, 0, total_steps(config))
    batch_size(config.optim.batch_warmup, 0, config.train.global_batch)
    if config.evaluate.every_steps and not config.data.held_out and not config.data.validation_sources:
        raise UserError(
            "there is no held-out text to look at (data.validation_fraction = 0)",
            cure="hold some out, give data.validation_sources, or set evaluate.every_steps=0",
            field="evaluate.every_steps",
            value=config.evaluate.every_steps,
        )


def known_vocab_size(config: RunConfig) -> int | None:
    """Ids of the tokenizer as far as the settings define them; None where the text will (kind chars)."""
    tokenizer = config.data.tokenizer
    return None if tokenizer.kind == "chars" else configured_vocab_size(tokenizer)


def complete_model(config: RunConfig, vocab_size: int) -> ModelConfig:
    """The model's config with what it takes from the data filled in: the tokenizer's vocabulary, the longest sequence.

    Raises:
        UserError: the tokenizer has more ids than the model, or the data's sequences are longer than the model's.
    """
    model, length = config.model, config.data.sequence_length
    if model.vocab_size and vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {vocab_size} ids",
            cure=f"set model.vocab_size to {vocab_size} or more, or to 0 to take the tokenizer's",
            field="model.vocab_size",
            value=model.vocab_size,
        )
    if model.max_sequence and length > model.max_sequence:
        raise UserError(
            f"the data's sequences are longer (data.sequence_length = {length})",
            cure=f"set model.max_sequence to {length} or more, or to 0 to take the data's",
            field="model.max_sequence",
            value=model.max_sequence,
        )
    filled = {"vocab_size": model.vocab_size or vocab_size, "max_sequence": model.max_sequence or length}
    return model.model_copy(update=filled)


def total_steps(config: RunConfig) -> int:
    """Optimizer steps of the whole run; a token budget is rounded up to whole steps."""
    if config.train.steps:
        return config.train.steps
    samples = math.ceil(config.train.tokens / config.data.sequence_length)
    return steps_for_samples(config.optim.batch_warmup, samples, config.train.global_batch)


def cpu_micro_batch(share: int, sequence_length: int) -> int:
    """Sequences per forward pass on a CPU, where the config leaves that open: the largest divisor that is small enough.

    Args:
        share: sequences per step of one data-parallel rank.
    """
    fitting = (n for n in range(share, 0, -1) if share % n == 0 and n * sequence_length <= _CPU_TOKENS)
    return next(fitting, 1)


def default_folder(config: RunConfig, config_path: Path) -> Path:
    """`run.folder`, or ``runs/<name of the config file>``."""
    return Path(config.run.folder or Path("runs") / config_path.stem)


def destination(config: RunConfig, run_folder: Path) -> str:
    """Where the checkpoints of the run in `run_folder` lie: a folder, or a URL."""
    return config.checkpoint.folder or str(run_folder / "checkpoints")
