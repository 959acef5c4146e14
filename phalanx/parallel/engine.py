"""One rank of a spread model at work: gradients of its share of a global batch, and losses on held-out text.

Shapes: B samples, L positions of whole sequences, T tokens of a micro-batch on this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from phalanx.parallel.group import Groups, Work
from phalanx.parallel.pipeline.pipeline_executor import PipelineExecutor
from phalanx.parallel.pipeline.schedules import Placement, Table, forward_table, make_table
from phalanx.parallel.stage import AutogradStage, MicroBatch, Samples, Stage, cut_micro_batch
from phalanx.parallel.zero.chunk import ShardedChunk
from phalanx.parallel.zero.reductions import GradientNorm, reduction_over

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
    """A rank's part of a model; made by `phalanx.parallel.apply.build_engine`.

    Args:
        model: of the whole model.
        config: of the layout.
        groups: of this rank.
        spread: this rank's part of every sequence.
        held: this rank's stages, by number.
        placement: of all stages.
        device: where they are.
        fill: whether to fill a last, shorter micro-batch up, so that nothing is compiled for another shape.

    Attributes:
        parameters: what the optimizer updates here, by logical name.
        shards: what part of its logical parameter each of them is.
        reduction, gradient_norm: sums over parameters that are spread over ranks, for the optimizers.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ParallelConfig,
        groups: Groups,
        spread: ContextSpread,
        held: Mapping[int, Held],
        placement: Placement,
        device: torch.device,
        *,
        fill: bool = False,
    ) -> None:
        self.model, self._config, self._groups, self._spread, self._device = model, config, groups, spread, device
        self._held, self._placement, self._fill = held, placement, fill
        self.chunks = [part.chunk for part in held.values()]
        self.parameters: dict[str, nn.Parameter] = {n: p for chunk in self.chunks for n, p in chunk.parameters.items()}
        self.shards: dict[str, Shard] = {n: s for chunk in self.chunks for n, s in chunk.shards.items()}
        known: dict[Tensor, Shard] = {parameter: self.shards[name] for name, parameter in self.parameters.items()}
        self.reduction, self.gradient_norm = reduction_over(groups, known), GradientNorm(groups, known)
        self._micros: list[MicroBatch] = []
        self._total_weight, self._adding = torch.ones((), device=device), Work()
        self._runners = {number: _Runner(self, part) for number, part in held.items()}
        self._executor = self._make_executor() if config.pipeline > 1 else None
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

        Args:
            batch: this rank's share; ranks of other tokens or layers of the same samples have the same.
            micro_batch: samples per forward and backward pass; divides the share.
            step: 0-based index of the optimizer step, for dropout.

        Returns:
            The mean cross-entropy per weighted token, nats, without the z-loss term; the same on all ranks.
        """
        total = batch.weights_BS.sum().to(self._device, non_blocking=True)
        self._total_weight, self._adding = total, self._groups.group(*_SAMPLE_AXES).all_reduce(total)
        self._load(_pieces(batch, micro_batch, fill=self._fill), seed, step)
        self._run(backward=True)
        for chunk in self.chunks:
            chunk.reduce()
        for chunk in self.chunks:
            chunk.finish()
        self._adding.wait()
        return self._loss_sum() / total

    @torch.no_grad()
    def held_out_loss(self, batches: Iterable[Samples]) -> Tensor:
        """Cross-entropy summed over the weighted tokens of `batches`; nats, float64, the same on all ranks.

        Args:
            batches: the same on all ranks, of a size that the data-parallel ranks can share evenly.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for some in _together(map(self._share, batches), 2 * self._config.pipeline):
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
        return out / self._total_weight

    def is_last(self, micro_batch: int) -> bool:
        """Whether a micro-batch is the last of the step."""
        return micro_batch == len(self._micros) - 1

    def _load(self, pieces: Iterable[Samples], seed: int = 0, step: int | None = None) -> None:
        """Cut micro-batches to this rank's tokens; with `step`, for training."""
        dropped = step is not None and bool(self.model.dropout or self.model.attention_dropout)
        self._micros = [
            cut_micro_batch(
                piece,
                self._spread,
                DropoutState(seed, step, piece.sample_index_B) if dropped and step is not None else None,
                self._device,
            )
            for piece in pieces
        ]
        for part in self._held.values():
            part.stage.reset()

    def _run(self, *, backward: bool) -> None:
        if self._executor is not None:
            table = self._table(len(self._micros), backward)
            self._executor.run(table, [self._stream_shape(micro) for micro in self._micros])
        else:
            (runner,) = self._runners.values()
            for index in range(len(self._micros)):
                runner.forward(index, None)
                if backward:
                    runner.backward(index, None)

    def _table(self, micro_batches: int, backward: bool) -> Table:
        key = (micro_batches, backward)
        if key not in self._tables:
            make = make_table if backward else forward_table
            config = self._config
            self._tables[key] = make(config.schedule, config.pipeline, config.num_chunks, micro_batches)
        return self._tables[key]

    def _stream_shape(self, micro: MicroBatch) -> tuple[int, int]:
        return micro.tokens_BS.numel() // self._config.tensor, self.model.hidden

    def _make_executor(self) -> PipelineExecutor:
        dtype = next(iter(self._held.values())).stage.part.residual_dtype
        return PipelineExecutor(self._groups, self._placement, self._runners, dtype=dtype, device=self._device)

    def _local_loss(self) -> Tensor:
        return torch.stack([part.stage.loss_sum for part in self._held.values()]).sum()

    def _loss_sum(self) -> Tensor:
        loss = self._local_loss()
        self._groups.group(*_LOSS_AXES).all_reduce(loss).wait()
        return loss

    def _share(self, batch: Samples) -> Samples:
        rows = len(batch) // self.data_ranks
        return batch.rows(self.data_index * rows, (self.data_index + 1) * rows)


class _Runner(AutogradStage):
    """A stage in the schedule, which lets its chunk reduce gradients as soon as the last are made."""

    def __init__(self, engine: Engine, part: Held) -> None:
        super().__init__(lambda x, micro_batch: engine.objective(part, x, micro_batch), part.queue)
        self._engine, self._chunk = engine, part.chunk

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """All gradients, those of weights too unless they are being put off."""
        if self._engine.is_last(micro_batch) and not self.is_splitting and not self._queue.waiting:
            self._chunk.last_backward()
        return super().backward(micro_batch, gradient)

    def backward_weights(self, micro_batch: int) -> None:
        """The weight gradients that were put off."""
        super().backward_weights(micro_batch)
        if self._engine.is_last(micro_batch):
            self._chunk.reduce()


def _pieces(batch: Samples, size: int, *, fill: bool) -> Iterator[Samples]:
    pieces = (batch.rows(begin, begin + size) for begin in range(0, len(batch), size))
    return (piece.filled(size) for piece in pieces) if fill else pieces


def _together(items: Iterable[Samples], count: int) -> Iterator[Sequence[Samples]]:
    """Runs of `count` items, the last perhaps shorter."""
    remaining = iter(items)
    while some := list(islice(remaining, count)):
        yield some
