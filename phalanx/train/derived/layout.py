"""The layout of a run: what its config, its text and its machines leave to choose. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.core.layout import AXES, Layout
from phalanx.model.shapes import parameter_table
from phalanx.optim.groups import assign
from phalanx.parallel.choose import Choice, Judge, Machines, choose_layout
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.possible import Task
from phalanx.train.config import RunConfig
from phalanx.train.derived.figures import complete_model
from phalanx.train.derived.memory import host_available_bytes, standing_bytes

_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def wanted_ranks(config: RunConfig) -> int:
    """Ranks that the config asks for."""
    return config.parallel.devices or config.parallel.layout.world_size


def machines_here(config: RunConfig, count: int) -> Machines:
    """This host with `count` ranks; memory is known on a CPU alone, as a GPU's is asked for by its rank."""
    on_cpu = config.train.device == "cpu" or (
        config.train.device == "auto" and not any(path.exists() for path in _DEVICE_FILES)
    )
    available_bytes = host_available_bytes() if on_cpu else None
    return Machines(count, available_bytes and available_bytes // count)


def resolve_layout(
    config: RunConfig,
    vocab_size: int,
    machines: Machines,
    world_size: int,
    say: Callable[[str], None],
    judge: Judge | None = None,
) -> RunConfig:
    """`config` with every axis of its layout given, and the micro-batch where a pipeline decides it.

    Where `[parallel]` says nothing at all, the axes are chosen for the ranks that there are.

    Args:
        vocab_size: of the tokenizer.
        world_size: ranks that there are.
        say: is told the reasons of what was chosen.
        judge: says which layouts fit; None: where the state does.

    Raises:
        UserError: the layout is impossible, or another number of ranks is there than it needs.
    """
    check_started(config, world_size)
    if wanted_ranks(config) == 1:
        config = _with_parallel(config, devices=world_size)
    choice = choose(config, vocab_size, machines, judge)
    if choice.reasons:
        say("\n  ".join([f"layout chosen for {world_size} ranks:", *choice.reasons]))
    chosen = config.model_copy(update={"parallel": choice.config})
    if choice.micro_batch:
        train = config.train.model_copy(update={"micro_batch": choice.micro_batch})
        chosen = chosen.model_copy(update={"train": train})
    return chosen


def choose(config: RunConfig, vocab_size: int, machines: Machines, judge: Judge | None = None) -> Choice:
    """The layout of `config`, once it is known to be possible.

    Args:
        judge: says which layouts fit; None: where the state does.

    Raises:
        UserError: it is not.
    """
    choice = choose_layout(config.parallel, task_of(config, vocab_size), machines, judge)
    validate(
        RunConfig, _with_parallel(config, **dict(choice.config)).model_dump()
    )  # it must fit the other settings too
    return choice


def ignored_settings(config: ParallelConfig) -> list[str]:
    """What `[parallel]` says that has no effect in its layout, a line each.

    Args:
        config: with every axis given.
    """
    idle = {
        "zero": config.shard * config.context == 1 and "parallel.shard and parallel.context are 1",
        "schedule": config.pipeline == 1 and "parallel.pipeline is 1",
        "chunks": config.pipeline == 1 and "parallel.pipeline is 1",
        "tensor_overlap": config.tensor == 1 and "parallel.tensor is 1",
        "tensor_chunks": config.tensor_overlap not in ("chunked", "auto") and "parallel.tensor_overlap is not chunked",
        "context_method": config.context == 1 and "parallel.context is 1",
    }
    plain = ParallelConfig()
    return [
        f"parallel.{name} = {getattr(config, name)!r} has no effect: {why}"
        for name, why in idle.items()
        if why and getattr(config, name) != getattr(plain, name)
    ]


def task_of(config: RunConfig, vocab_size: int) -> Task:
    """What `config` trains, as far as its layout depends on it."""
    model = complete_model(config, vocab_size)
    weights, gradients, state = standing_bytes(model, config.optim).values()
    shapes = {name: len(parameter.shape) for name, parameter in parameter_table(model).items()}
    kinds = {group.kind for group in assign(config.optim, shapes).values()}
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
        whole_matrices_for="muon" if "muon" in kinds else "",
    )


def check_started(config: RunConfig, world_size: int) -> None:
    """Refuse another number of ranks than `config` asks for; where it asks for nothing, any number will do.

    Raises:
        UserError: it is another.
    """
    wanted = wanted_ranks(config)
    if wanted in (1, world_size):
        return
    asked = f"devices = {wanted}" if config.parallel.devices else axes_text(config.parallel.layout)
    raise UserError(
        f"{asked} needs {wanted} rank{'s' * (wanted > 1)}, and {world_size} {'were' if world_size > 1 else 'was'} "
        "started",
        cure=f"start {wanted} (torchrun --nnodes and --nproc-per-node, srun --ntasks), or change [parallel] to what "
        f"there is, such as parallel.devices={world_size} without axes",
        field="parallel",
    )


def axes_text(layout: Layout) -> str:
    """The axes that are used, such as ``pipeline 2 x tensor 4``."""
    return " x ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1)


def _with_parallel(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=changes)})
