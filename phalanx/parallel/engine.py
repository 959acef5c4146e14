"""One rank of a spread model at work: gradients of its share of a global batch, and losses on held-out text.

Shapes: B samples, L positions of whole sequences, T tokens of a micro-batch on this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from phalanx.core.layout import Axis, Shard
from phalanx.kernels.attention import CausalKernel
from phalanx.kernels.attention_trial import Trial
from phalanx.model.config import ModelConfig
from phalanx.model.forward_context import DropoutState
from phalanx.model.recompute import Recompute
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.context.context_parallel import ContextSpread
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.digests import digests_of, together
from phalanx.parallel.group import Groups, Work
from phalanx.parallel.pipeline.pipeline_executor import AutogradStage, PipelineExecutor
from phalanx.parallel.pipeline.schedules import Placement, Table, forward_table, make_table
from phalanx.parallel.stage import MicroBatch, Samples, Stage, cut_micro_batch
from phalanx.parallel.zero.chunk import ShardedChunk
from phalanx.parallel.zero.reductions import GradientNorm, reduction_over
from phalanx.telemetry.spans import Passes, Recorder

# Ranks along these have different samples, or different tokens or layers of them; tensor ranks compute equal losses.
_LOSS_AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context")
_SAMPLE_AXES: tuple[Axis, ...] = ("replicate", "shard")


@dataclass(frozen=True)
class Held:
    """One stage of this rank: its forward pass, its parameters, and where its weight gradients may be put off."""

    stage: Stage
    chunk: ShardedChunk
    queue: WeightQueue | None


class Engine:
    """A rank's part of a model; made by `phalanx.parallel.apply.build_engine`."""

    whole_model = None  # it is nowhere whole

    def __init__(
        self,
        model: ModelConfig,
        config: ParallelConfig,
        groups: Groups,
        spread: ContextSpread,  # this rank's part of every sequence
        held: Mapping[int, Held],  # this rank's stages, by number
        placement: Placement,
        device: torch.device,
        *,
        # whether to fill a last, shorter micro-batch up, so that nothing is compiled for another shape
        fill: bool = False,
        recorder: Recorder | None = None,  # where passes are recorded
    ) -> None:
        self.model_config, self._config, self._device = model, config, device
        self._groups, self._spread = groups, spread
        self._held, self._placement, self._fill = held, placement, fill
        self.chunks = [part.chunk for part in held.values()]
        # What the optimizer updates here, by logical name.
        self.parameters: dict[str, nn.Parameter] = {n: p for chunk in self.chunks for n, p in chunk.parameters.items()}
        # What part of its logical parameter each of them is.
        self.shards: dict[str, Shard] = {n: s for chunk in self.chunks for n, s in chunk.shards.items()}
        # Reductions over parameters look them up by identity: optimizers hand them over without names.
        known: dict[Tensor, Shard] = {parameter: self.shards[name] for name, parameter in self.parameters.items()}
        # `reduction`, `gradient_norm`: sums over parameters that are spread over ranks, for the optimizers.
        self.reduction, self.gradient_norm = reduction_over(groups, known), GradientNorm(groups, known)
        self._micros: list[MicroBatch] = []
        # Of all targets of the last global batch, the same on all ranks once it was added up.
        self.total_weight, self._adding = torch.ones((), device=device), Work()
        self._runners = {
            number: _Runner(self, part, Passes.of(recorder, chunk)) for chunk, (number, part) in enumerate(held.items())
        }
        self._executor: PipelineExecutor | None = None
        if config.pipeline > 1:
            dtype = next(iter(held.values())).stage.part.residual_dtype
            self._executor = PipelineExecutor(groups, placement, self._runners, dtype=dtype, device=device)
        self._tables: dict[tuple[int, bool], Table] = {}

    @property
    def data_index(self) -> int:
        """Which share of every global batch is this rank's."""
        return self._groups.layout.index(self._groups.rank, _SAMPLE_AXES)

    @property
    def data_ranks(self) -> int:
        """Shares of a global batch."""
        return self._groups.layout.size(*_SAMPLE_AXES)

    def recompute(self, level: Recompute) -> None:
        """Compute so much again in backward passes from now on."""
        for part in self._held.values():
            part.stage.part.set_recompute(level)

    def accumulate_gradients(self, batch: Samples, *, micro_batch: int, seed: int, step: int) -> Tensor:
        """Gradients of the mean loss over all weighted tokens of the global batch, on `parameters`.

        `batch` is this rank's share, which `micro_batch` divides; ranks of other tokens or layers of the same samples
        have the same. `step` counts from 0, for dropout.

        Returns:
            The mean cross-entropy per weighted token, nats, without the z-loss term; the same on all ranks. Where no
            token of the global batch counts it is NaN, and the gradients are zero.
        """
        # Divided by while the objective is made, so that the mean is over all tokens of the global batch and not one of
        # means; the sum over ranks is on its way meanwhile.
        total = batch.weights_BS.sum().to(self._device, non_blocking=True)
        self.total_weight, self._adding = total, self._groups.group(*_SAMPLE_AXES).all_reduce(total)
        pieces = [batch.rows(begin, begin + micro_batch) for begin in range(0, len(batch), micro_batch)]
        self._load([piece.filled(micro_batch) for piece in pieces] if self._fill else pieces, seed, step)
        self._run(backward=True)
        # All chunks' reductions are started before any is waited for.
        for chunk in self.chunks:
            chunk.reduce()
        for chunk in self.chunks:
            chunk.finish()
        self._adding.wait()
        loss = self._local_loss()
        self._groups.group(*_LOSS_AXES).all_reduce(loss).wait()
        return loss / total

    @property
    def no_replay(self) -> str:
        """Why no micro-batch can be computed alone here; empty: it can."""
        if self._config.pipeline > 1:
            return "a stage of a pipeline has no micro-batch of its own"
        if not all(chunk.keeps_gradients for chunk in self.chunks):
            return "with ZeRO-3 no rank has whole gradients"
        if self._device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            return "kernels may give other bits each time (train.deterministic = true)"
        return ""

    def replay(self, samples: Samples, *, micro_batch: int, seed: int, step: int) -> Tensor:
        """(2,): one digest of the loss and the gradients of some samples before any reduction; leaves no gradients.

        Ranks of one tensor or context group call it together, with the same samples.
        """
        assert not self.no_replay
        before = self.total_weight, self._adding
        # Of a whole batch the objective is a mean, of this it is a sum: a factor has no bits to lose.
        self.total_weight, self._adding = torch.ones((), device=self._device), Work()
        self._load([samples.filled(micro_batch) if self._fill else samples], seed, step)
        (part,) = self._held.values()
        loss = self.objective(part, None, 0)
        torch.autograd.backward(loss)
        gradients = [p.grad for p in part.stage.part.parameters() if p.grad is not None]
        digest = together(digests_of([loss, *gradients]))
        self.zero_grad()
        self.total_weight, self._adding = before
        return digest

    @torch.no_grad()
    def held_out_loss(self, batches: Iterable[Samples]) -> Tensor:
        """Cross-entropy summed over the weighted tokens of `batches`; nats, float64, the same on all ranks.

        `batches` are the same on all ranks, of a size that the data-parallel ranks can share evenly.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        # Several batches at once, as the micro-batches of one pass, so that a pipeline is not emptied after each.
        remaining = map(self._share, batches)
        while some := list(islice(remaining, 2 * self._config.pipeline)):
            self._load(some)
            self._run(backward=False)
            total += self._local_loss().double()
        self._groups.group(*_LOSS_AXES).all_reduce(total).wait()
        return total

    def attention_trial(self, batch: int, length: int) -> Trial:
        """What is to be tried of the attention of `batch` samples of `length` positions."""
        part = next(iter(self._held.values())).stage.part
        return self._spread.attention_trial(part.attention_shape(batch, length))

    def use_attention(self, kernel: CausalKernel) -> None:
        """Do plain causal attention on CUDA by this kernel, which was found to be right."""
        self._spread.kernel = kernel
        for part in self._held.values():
            part.stage.part.causal_kernel = kernel

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers that this rank holds, or holds a part of."""
        return [block for part in self._held.values() for block in part.stage.part.layers]

    def add_over_ranks(self, values: Tensor) -> Tensor:
        """Sums over all ranks, in place."""
        self.gradient_norm.add(values)
        return values

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad()

    def weights_changed(self) -> None:
        """Start to make the weights whole again where they are split, in order of use."""
        for chunk in self.chunks:
            chunk.gather()

    def objective(self, part: Held, x: Tensor | None, micro_batch: int) -> Tensor:
        """The forward pass of one stage; of the last, the objective's share of this micro-batch."""
        out = part.stage.forward(x, self._micros[micro_batch])
        if not part.stage.is_last:
            return out
        self._adding.wait()  # it was on its way while the layers were computed
        return out / (self.total_weight + (self.total_weight == 0))

    def is_last(self, micro_batch: int) -> bool:
        """Whether a micro-batch is the last of the step."""
        return micro_batch == len(self._micros) - 1

    def _load(self, pieces: Iterable[Samples], seed: int = 0, step: int | None = None) -> None:
        dropped = step is not None and bool(self.model_config.dropout or self.model_config.attention_dropout)
        self._micros = []
        for piece in pieces:
            dropout = DropoutState(seed, step, piece.sample_index_B) if dropped and step is not None else None
            self._micros.append(cut_micro_batch(piece, self._spread, dropout, self._device))
        for part in self._held.values():
            part.stage.reset()

    def _run(self, *, backward: bool) -> None:
        if self._executor is not None:
            key = (len(self._micros), backward)
            if key not in self._tables:
                make = make_table if backward else forward_table
                config = self._config
                self._tables[key] = make(config.schedule, config.pipeline, config.num_chunks, len(self._micros))
            rows = [micro.tokens_BS.numel() // self._config.tensor for micro in self._micros]
            self._executor.run(self._tables[key], [(count, self.model_config.hidden) for count in rows])
        else:
            (runner,) = self._runners.values()
            for index in range(len(self._micros)):
                runner.forward(index, None)
                if backward:
                    runner.backward(index, None)

    def _local_loss(self) -> Tensor:
        return torch.stack([part.stage.loss_sum for part in self._held.values()]).sum()

    def _share(self, batch: Samples) -> Samples:
        rows = len(batch) // self.data_ranks
        return batch.rows(self.data_index * rows, (self.data_index + 1) * rows)


class _Runner(AutogradStage):
    """A stage in the schedule, which lets its chunk reduce gradients as soon as the last are made."""

    def __init__(self, engine: Engine, part: Held, passes: Passes) -> None:
        super().__init__(lambda x, micro_batch: engine.objective(part, x, micro_batch), part.queue)
        self._engine, self._chunk, self._passes = engine, part.chunk, passes

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():  # an evaluation is no part of a step
            return super().forward(micro_batch, x)
        with self._passes.forward(micro_batch):
            return super().forward(micro_batch, x)

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        # Where weight gradients are put off, those of earlier micro-batches may still come: `backward_weights` reduces.
        if self._engine.is_last(micro_batch) and not self._queue.deferring and not self._queue.waiting:
            self._chunk.last_backward()
        with (self._passes.inputs if self._queue.deferring else self._passes.backward)(micro_batch):
            return super().backward(micro_batch, gradient)

    def backward_weights(self, micro_batch: int) -> None:
        with self._passes.weights(micro_batch):
            super().backward_weights(micro_batch)
        if self._engine.is_last(micro_batch):
            self._chunk.reduce()
