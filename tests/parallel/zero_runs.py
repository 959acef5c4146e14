"""A few steps of a tiny model, in one process and split over ranks, and what can be compared of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor

from phalanx.core.layout import Layout, Shard
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder, DecoderPart
from phalanx.model.logical_parameters import LogicalParameters, initial_values, initialise
from phalanx.model.shapes import parameter_table
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.optim.config import OptimConfig
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.feasible import local_config, tensor_shards
from phalanx.parallel.stage import local_context
from phalanx.parallel.tensor.tensor_parallel import spread_tensor
from phalanx.parallel.zero.chunk import ShardedChunk
from phalanx.parallel.zero.reductions import GradientNorm, reduction_over

SEED = 5
SEQUENCES, LENGTH = 12, 8
DATA = ("replicate", "shard", "context")


@dataclass
class Job:
    """What is trained, and how."""

    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    sgd: bool = False
    micro_batches: int = 1
    steps: int = 5
    recompute: Any = "none"
    compute_dtype: torch.dtype = torch.float32
    fp8_layers: range = range(0)
    defers: bool = False
    queue: WeightQueue | None = None

    @property
    def config(self) -> ModelConfig:
        sizes = {"vocab_size": 61, "vocab_multiple": 8, "layers": 2, "hidden": 32, "heads": 4, "max_sequence": LENGTH}
        return ModelConfig.model_validate(sizes | {"init_std": 0.1} | self.model)

    def optimizer(self, parameters: Mapping[str, torch.nn.Parameter], **how: Any) -> OptimizerSet:
        """AdamW, LAMB, CAME; or SGD behind the same interface, since these hide a wrong scale of the gradient."""
        config = OptimConfig.model_validate({"lr": 1e-3} | self.optim)
        made = build_optimizer(config, parameters, **how)
        if self.sgd:
            made._optimizers = {"adamw": Sgd(list(parameters.values()))}  # type: ignore[dict-item]
        return made


class Sgd:
    """Plain gradient descent that honours `grad_scale`."""

    param_groups: tuple[()] = ()
    grad_scale: Tensor | None = None

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        scale = 1.0 if self.grad_scale is None else self.grad_scale
        for p in self.parameters:
            assert p.grad is not None
            p -= 0.05 * p.grad / scale


@dataclass
class Record:
    """What a run was: whole tensors."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    final: dict[str, Tensor]


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets, and weights of which samples have uneven sums."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(61, (SEQUENCES, LENGTH + 1), generator=generator)
    weights = (torch.rand(SEQUENCES, LENGTH, generator=generator) < torch.linspace(0.2, 1, SEQUENCES)[:, None]).float()
    return tokens[:, :-1], tokens[:, 1:], weights


def backwards(model: Any, rows: Sequence[Tensor], job: Job, total: float, before_last: Callable[[], None]) -> Tensor:
    """Forward and backward passes of all micro-batches; the sum of the weighted loss."""
    loss = torch.zeros(())
    micro = [r.chunk(job.micro_batches) for r in rows]
    for index, (tokens, targets, weights) in enumerate(zip(*micro, strict=True)):
        context = model.context(tokens)
        x = model.blocks(model.embed(tokens, context), context)
        sums = model.sums(model.norm(x), targets.flatten(), weights.flatten())
        if index == job.micro_batches - 1:
            before_last()
        (sum(sums) / total).backward()
        loss += sums[0].detach()
    return loss / total


def single(job: Job) -> Record:
    """The run of one process."""
    model = Decoder(job.config, compute_dtype=job.compute_dtype, fp8_layers=job.fp8_layers)
    model.set_recompute(job.recompute)
    initialise(model, SEED)
    logical = LogicalParameters(model)
    optimizer = job.optimizer(logical)
    record = Record({n: p.detach().clone() for n, p in logical.items()}, {}, [], [], {})
    for step in range(job.steps):
        rows = batch(step)
        loss = backwards(model, rows, job, float(rows[2].sum()), lambda: None)
        logical.bind_gradients()
        if step == 0:
            record.gradients = {n: p.grad.clone() for n, p in logical.items() if p.grad is not None}
        norm, scale = optimizer.clip()
        optimizer.step(grad_scale=scale)
        logical.drop_gradients()
        record.losses.append(float(loss))
        record.norms.append(float(norm))
    record.final = {n: p.detach().clone() for n, p in logical.items()}
    return record


def make_chunk(groups: ThreadGroups, config: ModelConfig, parallel: ParallelConfig, job: Job) -> ShardedChunk:
    """This rank's stage of the decoder of `config`, its matrices split over `tensor`, its state as `parallel` says."""
    table, layout, here = parameter_table(config), groups.layout, groups.layout.coordinates(groups.rank)

    def initial(name: str, shard: Shard) -> Tensor:
        return initial_values(config, table[name], SEED, offsets=shard.offsets, shape=shard.sizes)

    per_stage = config.layers // layout.pipeline
    part = DecoderPart(
        local_config(config, layout.tensor),
        layers=range(here.pipeline * per_stage, (here.pipeline + 1) * per_stage),
        first=here.pipeline == 0,
        last=here.pipeline == layout.pipeline - 1,
        device="meta",
        compute_dtype=job.compute_dtype,
        fp8_layers=job.fp8_layers,
    )
    part.set_recompute(job.recompute)
    spread_tensor(part, groups.group("tensor"), config, queue=job.queue)
    shards = tensor_shards(config, layout.tensor, here.tensor)
    return ShardedChunk(part, shards, groups, parallel, initial=initial)


def optimizer_of(job: Job, groups: ThreadGroups, chunk: ShardedChunk) -> OptimizerSet:
    shards = {p: chunk.shards[n] for n, p in chunk.parameters.items()}
    whole = {name: p.shape for name, p in parameter_table(job.config).items()}
    reduction, norm = reduction_over(groups, shards), GradientNorm(groups, shards)
    return job.optimizer(chunk.parameters, reduction=reduction, gradient_norm=norm, whole_shapes=whole)


@dataclass
class Part:
    """What one rank has to show."""

    record: Record
    shards: dict[str, Shard]


def split(job: Job, layout: Layout, **settings: Any) -> Record:
    """The run over the ranks of `layout`, put together from their parts; losses and norms are asserted to be alike."""
    parts = run_ranks(layout, lambda groups: split_part(groups, job, layout, **settings))
    first = parts[0].record
    assert all(part.record.norms == first.norms and part.record.losses == first.losses for part in parts)
    pick = ("initial", "gradients", "final")
    whole = {which: together([(getattr(p.record, which), p.shards) for p in parts]) for which in pick}
    return Record(**whole, losses=first.losses, norms=first.norms)


def split_part(groups: ThreadGroups, job: Job, layout: Layout, **settings: Any) -> Part:
    parallel = ParallelConfig(**asdict(layout), **{"bucket_bytes": 20_000} | settings)
    job = replace(job, queue=WeightQueue() if job.defers else None)
    chunk = make_chunk(groups, job.config, parallel, job)
    optimizer = optimizer_of(job, groups, chunk)
    record = Record({n: p.detach().clone() for n, p in chunk.parameters.items()}, {}, [], [], {})
    for step in range(job.steps):
        chunk.gather()
        loss = split_backwards(groups, chunk, job, step)
        chunk.reduce()
        chunk.finish()
        if step == 0:
            record.gradients = {n: p.grad.clone() for n, p in chunk.parameters.items() if p.grad is not None}
        norm, scale = optimizer.clip()
        optimizer.step(grad_scale=scale)
        chunk.zero_grad()
        groups.group("pipeline", *DATA).all_reduce(loss).wait()
        record.losses.append(float(loss))
        record.norms.append(float(norm))
    record.final = {n: p.detach().clone() for n, p in chunk.parameters.items()}
    return Part(record, chunk.shards)


def split_backwards(groups: ThreadGroups, chunk: ShardedChunk, job: Job, step: int) -> Tensor:
    """Forward and backward passes of this rank's micro-batches, stage after stage; its part of the loss."""
    layout, whole = groups.layout, batch(step)
    mine = [x.chunk(layout.size(*DATA))[layout.index(groups.rank, DATA)] for x in whole]
    micro = list(zip(*(r.chunk(job.micro_batches) for r in mine), strict=True))
    loss = torch.zeros(())
    for index, rows in enumerate(micro):
        if index == len(micro) - 1 and job.queue is None:
            chunk.last_backward()
        if job.queue is not None:
            job.queue.begin(index)
        loss += pass_through(groups, chunk, rows, float(whole[2].sum()))
    if job.queue is not None:
        job.queue.end()
        for index in range(len(micro)):
            job.queue.run(index)
    return loss


def pass_through(groups: ThreadGroups, chunk: ShardedChunk, rows: Sequence[Tensor], total: float) -> Tensor:
    """One micro-batch through this stage, there and back; the loss on the last stage, else 0."""
    part, stages, (tokens, targets, weights) = chunk.part, groups.group("pipeline"), rows
    context = local_context(part.context(tokens), groups.group("tensor"))
    x = torch.empty(tokens.numel() // groups.layout.tensor, part.config.hidden)
    if part.embedding is not None:
        x = part.embed(tokens, context)
    else:
        stages.receive(x, stages.index - 1).wait()
        x.requires_grad_()
    out = part.blocks(x, context)
    if part.norm is not None:
        sums = part.sums(part.norm(out), targets.flatten(), weights.flatten())
        torch.autograd.backward((sums[0] + sums[1]) / total)
        loss = sums[0].detach() / total
    else:
        stages.send(out.detach(), stages.index + 1).wait()
        gradient = torch.empty_like(out)
        stages.receive(gradient, stages.index + 1).wait()
        out.backward(gradient)
        loss = torch.zeros(())
    if part.embedding is None:
        assert x.grad is not None
        stages.send(x.grad, stages.index - 1).wait()
    return loss


def together(parts: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Shard]]]) -> dict[str, Tensor]:
    """Whole tensors from what the ranks own; every element is owned once, and all copies of a block are alike."""
    whole: dict[str, Tensor] = {}
    owned: dict[str, Tensor] = {}
    for tensors, shards in parts:
        for name, tensor in tensors.items():
            shard = shards[name]
            assert tuple(tensor.shape) == shard.sizes
            if shard.owner:
                whole.setdefault(name, torch.zeros(shard.shape))[_block(shard)] = tensor
                owned.setdefault(name, torch.zeros(shard.shape))[_block(shard)] += 1
    for name, count in owned.items():
        assert torch.equal(count, torch.ones_like(count)), name
    for tensors, shards in parts:
        for name, tensor in tensors.items():
            assert torch.equal(whole[name][_block(shards[name])], tensor), f"copies of {name} differ"
    return whole


def _block(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))


def assert_parity(mine: Record, single: Record, tolerance: float = 1e-5) -> None:
    """Initial weights bit-equal; gradients of step 1, losses and norms to a relative tolerance."""
    assert mine.initial.keys() == single.initial.keys() == mine.gradients.keys()
    for name, value in single.initial.items():
        assert torch.equal(mine.initial[name], value), name
    for name, value in single.gradients.items():
        # A softmax does not see the bias of keys: that gradient is rounding error, small beside that of the queries'.
        size = single.gradients[name.replace("k_bias", "q_bias")].norm()
        error = float((mine.gradients[name] - value).norm() / size)
        assert error <= tolerance, f"gradient of {name}: {error}"
    for which in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(mine, which)), torch.tensor(getattr(single, which)), rtol=tolerance, atol=0
        )
