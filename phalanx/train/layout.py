"""The layout of a run: what its config, its text and its machines leave to choose. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.core.errors import UserError
from phalanx.parallel.choose import Choice, Machines, Task, choose_layout
from phalanx.train.config import RunConfig
from phalanx.train.derived import complete_model
from phalanx.train.memory import standing_bytes


def wanted_ranks(config: RunConfig) -> int:
    """Ranks that the config asks for."""
    return config.parallel.devices or config.parallel.layout.world_size


def resolve_layout(
    config: RunConfig, vocab_size: int, machines: Machines, world_size: int, say: Callable[[str], None]
) -> RunConfig:
    """`config` with every axis of its layout given, and the micro-batch where a pipeline decides it.

    Where `[parallel]` says nothing at all, the axes are chosen for the ranks that there are.

    Args:
        vocab_size: of the tokenizer.
        world_size: ranks that there are.
        say: is told the reasons of what was chosen.

    Raises:
        UserError: the layout is impossible, or another number of ranks is there than it needs.
    """
    if wanted_ranks(config) == 1:
        config = _with_parallel(config, devices=world_size)
    if wanted_ranks(config) != world_size:
        raise UserError(
            f"asks for {wanted_ranks(config)} ranks, and {world_size} were started",
            cure="start as many, or set parallel.devices to what there is",
            field="parallel",
        )
    choice = choose(config, vocab_size, machines)
    for reason in choice.reasons:
        say(reason)
    chosen = config.model_copy(update={"parallel": choice.config})
    if choice.micro_batch:
        train = config.train.model_copy(update={"micro_batch": choice.micro_batch})
        chosen = chosen.model_copy(update={"train": train})
    return chosen


def choose(config: RunConfig, vocab_size: int, machines: Machines) -> Choice:
    """The layout of `config`, once it is known to be possible.

    Raises:
        UserError: it is not.
    """
    return choose_layout(config.parallel, _task(config, vocab_size), machines)


def _task(config: RunConfig, vocab_size: int) -> Task:
    model = complete_model(config, vocab_size)
    weights, gradients, state = standing_bytes(model, config.optim).values()
    warmup, full = config.optim.batch_warmup, config.train.global_batch
    sizes = set(range(warmup.start, full, warmup.increment)) if warmup.start else set()
    return Task(
        model=model,
        sequence_length=config.data.sequence_length,
        global_batches=tuple(sorted(sizes | {full})),
        micro_batch=config.train.micro_batch,
        weight_bytes=weights,
        gradient_bytes=gradients,
        state_bytes=state,
    )


def _with_parallel(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=changes)})
