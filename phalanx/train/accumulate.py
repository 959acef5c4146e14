"""Gradients of one global batch, micro-batch by micro-batch, with every token weighted the same."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.data.batch import Batch
from phalanx.model.context import DropoutState
from phalanx.model.decoder import Decoder
from phalanx.train.device import Device


def accumulate_gradients(
    model: Decoder, batch: Batch, *, micro_batch: int, device: Device, seed: int, step: int
) -> Tensor:
    """Add the gradient of the mean loss over all weighted tokens of `batch` to the model's parameters.

    Each micro-batch is divided by the token weight of the *whole* batch, so that the sum is right also where masks
    leave micro-batches with uneven numbers of tokens. Dropout is a function of (seed, step, sample), not of the split.

    Args:
        micro_batch: sequences per forward and backward pass.
        step: 0-based index of the optimizer step.

    Returns:
        The mean cross-entropy per weighted token, nats, without the z-loss term; a scalar on the device. NaN where no
        token of the batch counts.
    """
    total_weight = float(batch.weights_BS.sum())  # still on the host: nothing waits
    loss = torch.zeros((), device=device.torch_device)
    for begin in range(0, len(batch), micro_batch):
        micro = batch.rows(begin, min(begin + micro_batch, len(batch)))
        on_device = micro.to(device.torch_device)
        hidden_BSD = model(
            on_device.tokens_BS,
            documents_BS=on_device.documents_BS,
            dropout=DropoutState(seed, step, on_device.sample_index_B),
        )
        loss_sum, z_sum = model.loss(hidden_BSD, on_device.targets_BS, on_device.weights_BS)
        torch.autograd.backward((loss_sum + z_sum) / total_weight)
        loss += loss_sum.detach()
    return loss / total_weight
