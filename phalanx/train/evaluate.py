"""Loss, perplexity and bits per byte on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable
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


@torch.no_grad()
def evaluate(model: Decoder, batches: Iterable[Batch], token_bytes_V: np.ndarray, device: Device) -> Evaluation:
    """Mean loss over the weighted tokens of `batches`.

    The bytes of a predicted token count, those of a document's first token, which nothing predicts, do not.

    Args:
        token_bytes_V: UTF-8 bytes of each token id; 0 for end-of-text.
    """
    was_training = model.training
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=device.torch_device)
    lengths_V = torch.from_numpy(np.ascontiguousarray(token_bytes_V, dtype=np.int64))
    tokens, text_bytes = 0, 0
    for batch in batches:
        counted: Tensor = batch.weights_BS > 0
        tokens += int(counted.sum())
        text_bytes += int(lengths_V[batch.targets_BS[counted]].sum())
        on_device = batch.to(device.torch_device)
        hidden_BSD = model(on_device.tokens_BS, documents_BS=on_device.documents_BS)
        loss_sum, _ = model.loss(hidden_BSD, on_device.targets_BS, on_device.weights_BS)
        loss += loss_sum.double()
    model.train(was_training)
    return Evaluation(float(loss) / tokens if tokens else math.nan, tokens, text_bytes)
