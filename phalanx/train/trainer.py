"""What makes the gradients of a run: one model on one device; on several ranks it is `phalanx.parallel.engine`.

Gradient accumulation: gradients of a global batch come micro-batch by micro-batch, with every token weighted the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from phalanx.core.layout import Shard
from phalanx.data.batch import Batch
from phalanx.kernels.attention import CausalKernel
from phalanx.kernels.attention_trial import Trial
from phalanx.model.decoder import Decoder
from phalanx.model.forward_context import DropoutState
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.model.recompute import Recompute
from phalanx.optim.skipping import GradientNorm, Reduction, grad_norm, local
from phalanx.parallel.engine import Engine
from phalanx.telemetry.spans import Passes, Recorder
from phalanx.train.device import Device
from phalanx.train.evaluation import held_out_loss


def accumulate_gradients(
    model: Decoder,
    batch: Batch,
    *,
    micro_batch: int,
    device: Device,
    seed: int,
    step: int,
    fill: bool = False,
    passes: Passes | None = None,
) -> Tensor:
    """Add the gradient of the mean loss over all weighted tokens of `batch` to the model's parameters.

    Dropout is a function of (seed, step, sample), not of the split into micro-batches.

    Args:
        micro_batch: sequences per forward and backward pass.
        step: 0-based index of the optimizer step.
        fill: fill a last, shorter micro-batch up with rows that do not count, so that all have one shape and nothing is
            compiled for another.
        passes: what records each forward and backward pass; None: nothing does.

    Returns:
        The mean cross-entropy per weighted token, nats, without the z-loss term; a scalar on the device. Where no token
        of the batch counts it is NaN, and the gradients are zero.
    """

    recorded = passes or Passes()

    def both_passes(micro: Batch, number: int) -> Tensor:
        """Summed loss. A function of its own, so that a micro-batch leaves nothing else when the next one begins."""
        with recorded.forward(number):
            dropout = DropoutState(seed, step, micro.sample_index_B)
            hidden_BSD = model(micro.tokens_BS, documents_BS=micro.documents_BS, dropout=dropout)
            loss_sum, z_sum = model.loss(hidden_BSD, micro.targets_BS, micro.weights_BS)
        with recorded.backward(number):
            torch.autograd.backward((loss_sum + z_sum) / divisor)
        return loss_sum.detach()

    batch = batch.to(device.torch_device)
    # Each micro-batch is divided by the token weight of the whole batch, so that the sum is right also where masks
    # leave micro-batches with uneven numbers of tokens. The weight is never read back: the host waits for nothing.
    total_weight = batch.weights_BS.sum()
    divisor = total_weight + (total_weight == 0)
    loss = torch.zeros((), device=device.torch_device)
    for number, begin in enumerate(range(0, len(batch), micro_batch)):
        micro = batch.rows(begin, min(begin + micro_batch, len(batch)))
        loss += both_passes(micro.filled(micro_batch) if fill else micro, number)
    return loss / total_weight


class LocalTrainer:
    """A whole model on one device, whose matrices are cast once per step.

    Args:
        compiled: the model is.
        recorder: where passes are recorded; None: nowhere.

    Attributes:
        whole_model: the model; None in an engine, which has a part of it.
        parameters: what the optimizer updates here, by logical name.
        shards: what part of its logical parameter each of them is.
        data_index, data_ranks: which share of every global batch is this rank's, of how many.
        reduction, gradient_norm: complete the optimizers' sums over parameters that are spread over ranks.
        total_weight: of all targets of the last global batch, a scalar on the device.
    """

    data_index, data_ranks = 0, 1
    reduction: Reduction = staticmethod(local)
    gradient_norm: GradientNorm = staticmethod(grad_norm)

    def __init__(
        self, model: Decoder, device: Device, *, compiled: bool = False, recorder: Recorder | None = None
    ) -> None:
        self.model, self.model_config, self.whole_model = model, model.config, model
        # Matrices are used several times a step, forward and backward, so each is cast once, after the update.
        model.hold_casts()
        self.parameters = LogicalParameters(model)
        self.shards = {name: Shard.whole(tuple(p.shape)) for name, p in self.parameters.items()}
        self._device, self._passes = device, Passes.of(recorder)
        self.total_weight = torch.ones((), device=device.torch_device)
        # Compilers, and a GPU's attention kernels, which are compiled too, work per shape: micro-batches then have one.
        self._fill = compiled or device.torch_device.type == "cuda"

    def recompute(self, level: Recompute) -> None:
        """Compute so much again in backward passes from now on."""
        self.model.set_recompute(level)

    def accumulate_gradients(self, batch: Batch, *, micro_batch: int, seed: int, step: int) -> Tensor:
        """See `phalanx.train.trainer.accumulate_gradients`."""
        batch = batch.to(self._device.torch_device)
        self.total_weight = batch.weights_BS.sum()
        loss = accumulate_gradients(
            self.model,
            batch,
            micro_batch=micro_batch,
            device=self._device,
            seed=seed,
            step=step,
            fill=self._fill,
            passes=self._passes,
        )
        # Gradients are on the stored, merged parameters now; the optimizer reads those of the logical ones.
        self.parameters.bind_gradients()
        return loss

    @property
    def blocks(self) -> list[nn.Module]:
        """All layers."""
        return list(self.model.layers)

    def add_over_ranks(self, values: Tensor) -> Tensor:
        """Sums over all ranks, of which this is the only one."""
        return values

    def zero_grad(self) -> None:
        """Drop all gradients, stored and logical."""
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
        """See `phalanx.train.evaluation.held_out_loss`."""
        return held_out_loss(self.model, batches, self._device)


Trainer = LocalTrainer | Engine
"""The model of a run as the training loop sees it; of an engine all ranks call everything alike."""
