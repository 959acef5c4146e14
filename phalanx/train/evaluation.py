"""Loss, perplexity and bits per byte on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.data.batch import Batch
from phalanx.data.loader import Loader
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.model.decoder import Decoder
from phalanx.train.device import Device


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of text it was not trained on.

    Attributes:
        loss: mean cross-entropy per token, nats; NaN where none was predicted.
        tokens: that were predicted.
        text_bytes: UTF-8 bytes that those tokens stand for; 0: not known.
        held_out_tokens: tokens of the text they were taken from; 0: that is all of it.
        is_whole: nothing ended it early.
    """

    loss: float
    tokens: int
    text_bytes: int
    held_out_tokens: int = 0
    is_whole: bool = True

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits to encode one UTF-8 byte of the text, whatever the tokenizer."""
        return self.loss * self.tokens / (math.log(2) * self.text_bytes) if self.text_bytes else math.nan

    def figures(self) -> dict[str, float]:
        """As they are logged and kept with a checkpoint; what is unknown is left out."""
        if not self.tokens:
            return {"validation_tokens": 0}
        bits = {"validation_bits_per_byte": self.bits_per_byte} if self.text_bytes else {}
        return {
            "validation_loss": self.loss,
            "validation_perplexity": self.perplexity,
            **bits,
            "validation_tokens": self.tokens,
        }

    @classmethod
    def from_figures(cls, figures: Mapping[str, float], held_out_tokens: int = 0) -> Evaluation:
        """The inverse of `figures`."""
        loss, tokens = figures.get("validation_loss", math.nan), int(figures["validation_tokens"])
        bits = figures.get("validation_bits_per_byte")
        text_bytes = loss * tokens / (math.log(2) * bits) if bits else 0.0
        return cls(loss, tokens, round(text_bytes) if math.isfinite(text_bytes) else 0, held_out_tokens)

    def require_finite(self, step: int) -> None:
        """Refuse to go on from weights whose loss is not finite."""
        if self.tokens and not math.isfinite(self.loss):
            raise UserError(
                f"the loss on held-out text is not finite ({self.loss}): the weights of step {step} are of no use",
                cure="begin again from an earlier checkpoint (`phalanx checkpoint ls`), or anew in another run.folder, "
                "with a lower optim.lr",
            )


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as it is evaluated, in batches."""

    batches: Iterable[Batch]  # `samples` in all, and rows that only fill the last one up
    samples: int
    of_tokens: int  # tokens of the whole text, of which these samples are a part; 0: they are all of it


def held_out(loader: Loader, rows: int, tokens: int) -> HeldOut:
    """About `tokens` held-out tokens in batches of `rows` samples, spread over all of them; 0: all."""
    there = loader.validation_samples
    samples = min(max(tokens // loader.config.sequence_length, 1), there) if tokens else there
    of_tokens = loader.prepared.num_tokens("validation") if samples < there else 0
    return HeldOut(loader.validation_batches(rows, samples), samples, of_tokens)


Watched = Callable[[HeldOut], Iterable[Batch]]
"""Batches of held-out text passed on, perhaps not all of them: where they are shown, and may be ended early."""


def evaluate(
    loss_of: Callable[[Iterable[Batch]], Tensor],
    text: HeldOut,
    tokenizer: Tokenizer,
    watched: Watched = lambda text: text.batches,
) -> Evaluation:
    """Mean loss over the weighted tokens of `text`.

    The bytes of a predicted token count, those of a document's first token, which nothing predicts, do not.

    Args:
        loss_of: sums the loss over batches, such as `LocalTrainer.held_out_loss`.
        tokenizer: knows how many UTF-8 bytes a token stands for.
    """
    try:
        token_bytes_V = tokenizer.token_bytes()
    except UserError:  # of token files that came without a tokenizer
        token_bytes_V = np.zeros(tokenizer.vocab_size, np.int64)
    lengths_V = torch.from_numpy(np.ascontiguousarray(token_bytes_V, dtype=np.int64))
    samples = tokens = text_bytes = 0

    def counted() -> Iterator[Batch]:
        nonlocal samples, tokens, text_bytes
        for batch in watched(text):
            samples += int((batch.sample_index_B >= 0).sum())
            predicted: Tensor = batch.weights_BS > 0
            tokens += int(predicted.sum())
            text_bytes += int(lengths_V[batch.targets_BS[predicted]].sum())
            yield batch

    loss = float(loss_of(counted()))
    mean = loss / tokens if tokens else math.nan
    return Evaluation(mean, tokens, text_bytes, text.of_tokens, samples >= text.samples)


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
