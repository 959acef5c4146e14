"""What makes the gradients of a run: one model on one device, or one rank's part of a spread one.

Gradients of a global batch come micro-batch by micro-batch, with every token weighted the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from phalanx.core.layout import Shard
from phalanx.data.batch import Batch
from phalanx.kernels.attention import CausalKernel
from phalanx.kernels.attention_trial import Trial
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.forward_context import DropoutState
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.model.recompute import Recompute
from phalanx.optim.base import GradientNorm, Reduction, grad_norm, local
from phalanx.parallel.engine import Engine
from phalanx.train.device import Device
from phalanx.train.evaluate import held_out_loss


def accumulate_gradients(
    model: Decoder, batch: Batch, *, micro_batch: int, device: Device, seed: int, step: int, fill: bool = False
) -> Tensor:
    """Add the gradient of the mean loss over all weighted tokens of `batch` to the model's parameters.

    Each micro-batch is divided by the token weight of the *whole* batch, so that the sum is right also where masks
    leave micro-batches with uneven numbers of tokens. Dropout is a function of (seed, step, sample), not of the split.

    Args:
        micro_batch: sequences per forward and backward pass.
        step: 0-based index of the optimizer step.
        fill: fill a last, shorter micro-batch up with rows that do not count, so that all have one shape and nothing is
            compiled for another.

    Returns:
        The mean cross-entropy per weighted token, nats, without the z-loss term; a scalar on the device. NaN where no
        token of the batch counts.
    """
    batch = batch.to(device.torch_device)
    total_weight = batch.weights_BS.sum()  # never read back: nothing waits
    loss = torch.zeros((), device=device.torch_device)
    for begin in range(0, len(batch), micro_batch):
        micro = batch.rows(begin, min(begin + micro_batch, len(batch)))
        if fill:
            micro = micro.filled(micro_batch)
        loss += _both_passes(model, micro, seed, step, total_weight)
    return loss / total_weight


def _both_passes(model: Decoder, micro: Batch, seed: int, step: int, total_weight: Tensor) -> Tensor:
    """The summed loss of one micro-batch, of which nothing else is left when the next one's passes begin."""
    dropout = DropoutState(seed, step, micro.sample_index_B)
    hidden_BSD = model(micro.tokens_BS, documents_BS=micro.documents_BS, dropout=dropout)
    loss_sum, z_sum = model.loss(hidden_BSD, micro.targets_BS, micro.weights_BS)
    torch.autograd.backward((loss_sum + z_sum) / total_weight)
    return loss_sum.detach()


class Trainer(Protocol):
    """The model of a run as the training loop sees it. Ranks of a spread model call everything alike."""

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        ...

    @property
    def whole_model(self) -> Decoder | None:
        """The model, where all of it is here."""
        ...

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """What the optimizer updates here, by logical name."""
        ...

    @property
    def shards(self) -> Mapping[str, Shard]:
        """What part of its logical parameter each of them is."""
        ...

    @property
    def data_index(self) -> int:
        """Which share of every global batch is this rank's."""
        ...

    @property
    def data_ranks(self) -> int:
        """Shares of a global batch."""
        ...

    @property
    def reduction(self) -> Reduction:
        """Completes the optimizers' sums over parameters that are spread over ranks."""
        ...

    @property
    def gradient_norm(self) -> GradientNorm:
        """The norm of the whole gradient."""
        ...

    def recompute(self, level: Recompute) -> None:
        """Compute so much again in backward passes from now on (`phalanx.model.recompute`)."""
        ...

    def accumulate_gradients(self, batch: Batch, *, micro_batch: int, seed: int, step: int) -> Tensor:
        """Put gradients of this rank's share of a global batch, added over all ranks, on `parameters`.

        Args:
            micro_batch: sequences per forward and backward pass.
            step: 0-based index of the optimizer step.

        Returns:
            The mean cross-entropy per weighted token of the global batch, nats.
        """
        ...

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        ...

    def weights_changed(self) -> None:
        """Take note that `parameters` have other values now: after an update, or when they were loaded."""
        ...

    def attention_trial(self, batch: int, length: int) -> Trial:
        """What is to be tried of the attention of `batch` sequences of `length` before a kernel is chosen."""
        ...

    def use_attention(self, kernel: CausalKernel) -> None:
        """Do plain causal attention on a GPU by this kernel."""
        ...

    def held_out_loss(self, batches: Iterable[Batch]) -> Tensor:
        """Cross-entropy summed over the weighted tokens of `batches`, nats, float64; the same batches on all ranks."""
        ...


class LocalTrainer:
    """A whole model on one device, whose matrices are cast once per step.

    Args:
        compiled: the model is. As on a GPU, whose attention kernels are, micro-batches then have one shape.
    """

    data_index, data_ranks = 0, 1
    reduction: Reduction = staticmethod(local)
    gradient_norm: GradientNorm = staticmethod(grad_norm)

    def __init__(self, model: Decoder, device: Device, *, compiled: bool = False) -> None:
        self.model = model
        model.hold_casts()
        self.parameters = LogicalParameters(model)
        self.shards = {name: Shard.whole(tuple(p.shape)) for name, p in self.parameters.items()}
        self._device = device
        self._fill = compiled or device.torch_device.type == "cuda"

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self.model.config

    @property
    def whole_model(self) -> Decoder:
        """The model."""
        return self.model

    def recompute(self, level: Recompute) -> None:
        """Compute so much again in backward passes from now on."""
        self.model.set_recompute(level)

    def accumulate_gradients(self, batch: Batch, *, micro_batch: int, seed: int, step: int) -> Tensor:
        """See `phalanx.train.trainer.accumulate_gradients`."""
        loss = accumulate_gradients(
            self.model,
            batch,
            micro_batch=micro_batch,
            device=self._device,
            seed=seed,
            step=step,
            fill=self._fill,
        )
        self.parameters.bind_gradients()
        return loss

    def zero_grad(self) -> None:
        """Let go of all gradients, stored and logical."""
        self.parameters.drop_gradients()

    def weights_changed(self) -> None:
        """Cast the matrices anew."""
        self.model.weights_changed()

    def attention_trial(self, batch: int, length: int) -> Trial:
        """One layer's, of the whole model."""
        return Trial(self.model.attention_shape(batch, length))

    def use_attention(self, kernel: CausalKernel) -> None:
        """Do plain causal attention on a GPU by this kernel."""
        self.model.causal_kernel = kernel

    def held_out_loss(self, batches: Iterable[Batch]) -> Tensor:
        """See `phalanx.train.evaluate.held_out_loss`."""
        return held_out_loss(self.model, batches, self._device)


class SpreadTrainer:
    """One rank's part of a model that is spread over several."""

    whole_model = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.config = engine.model
        self.parameters, self.shards = engine.parameters, engine.shards
        self.data_index, self.data_ranks = engine.data_index, engine.data_ranks
        self.reduction: Reduction = engine.reduction
        self.gradient_norm: GradientNorm = engine.gradient_norm

    def recompute(self, level: Recompute) -> None:
        """See `phalanx.parallel.engine.Engine.recompute`."""
        self._engine.recompute(level)

    def accumulate_gradients(self, batch: Batch, *, micro_batch: int, seed: int, step: int) -> Tensor:
        """See `phalanx.parallel.engine.Engine.accumulate_gradients`."""
        return self._engine.accumulate_gradients(batch, micro_batch=micro_batch, seed=seed, step=step)

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        self._engine.zero_grad()

    def weights_changed(self) -> None:
        """Start to make the weights whole again where they are split."""
        self._engine.weights_changed()

    def attention_trial(self, batch: int, length: int) -> Trial:
        """See `phalanx.parallel.engine.Engine.attention_trial`."""
        return self._engine.attention_trial(batch, length)

    def use_attention(self, kernel: CausalKernel) -> None:
        """See `phalanx.parallel.engine.Engine.use_attention`."""
        self._engine.use_attention(kernel)

    def held_out_loss(self, batches: Iterable[Batch]) -> Tensor:
        """See `phalanx.parallel.engine.Engine.held_out_loss`."""
        return self._engine.held_out_loss(batches)
