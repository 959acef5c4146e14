"""Gradients of one global batch, micro-batch by micro-batch, with every token weighted the same."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.data.batch import Batch
from phalanx.model.context import DropoutState
from phalanx.model.decoder import Decoder
from phalanx.train.device import Device


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
