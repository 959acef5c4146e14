"""Loss, perplexity and bits per byte on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.data.batch import Batch
from phalanx.model.decoder import Decoder
from phalanx.train.device import Device


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of text it was not trained on.

    Attributes:
        loss: mean cross-entropy per token, nats.
        tokens: number of predicted tokens.
        text_bytes: UTF-8 bytes that those tokens stand for.
    """

    loss: float
    tokens: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits to encode one UTF-8 byte of the text, whatever the tokenizer."""
        return self.loss * self.tokens / (math.log(2) * self.text_bytes) if self.text_bytes else math.nan


class _Counted:
    """Passes batches on, and counts what they predict: tokens, and the UTF-8 bytes that those stand for."""

    def __init__(self, batches: Iterable[Batch], token_bytes_V: np.ndarray) -> None:
        self._batches = batches
        self._lengths_V = torch.from_numpy(np.ascontiguousarray(token_bytes_V, dtype=np.int64))
        self.tokens = self.text_bytes = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            counted: Tensor = batch.weights_BS > 0
            self.tokens += int(counted.sum())
            self.text_bytes += int(self._lengths_V[batch.targets_BS[counted]].sum())
            yield batch


def evaluate(
    loss_of: Callable[[Iterable[Batch]], Tensor], batches: Iterable[Batch], token_bytes_V: np.ndarray
) -> Evaluation:
    """Mean loss over the weighted tokens of `batches`.

    The bytes of a predicted token count, those of a document's first token, which nothing predicts, do not.

    Args:
        loss_of: sums the loss over batches, such as `Trainer.held_out_loss`.
        token_bytes_V: UTF-8 bytes of each token id; 0 for end-of-text.
    """
    counted = _Counted(batches, token_bytes_V)
    loss = float(loss_of(counted))
    return Evaluation(loss / counted.tokens if counted.tokens else math.nan, counted.tokens, counted.text_bytes)


@torch.no_grad()
def held_out_loss(model: Decoder, batches: Iterable[Batch], device: Device) -> Tensor:
    """Cross-entropy of a whole model, summed over the weighted tokens of `batches`; nats, float64."""
    was_training = model.training
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=device.torch_device)
    for batch in batches:
        on_device = batch.to(device.torch_device)
        hidden_BSD = model(on_device.tokens_BS, documents_BS=on_device.documents_BS)
        loss_sum, _ = model.loss(hidden_BSD, on_device.targets_BS, on_device.weights_BS)
        loss += loss_sum.double()
    model.train(was_training)
    return loss
