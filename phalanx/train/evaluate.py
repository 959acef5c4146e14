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
        loss: mean cross-entropy per token, nats.
        tokens: number of predicted tokens.
        text_bytes: UTF-8 bytes that those tokens stand for; 0 where that is not known.
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
        """As they are logged and kept with a checkpoint; what is not known is left out."""
        bits = {"validation_bits_per_byte": self.bits_per_byte} if self.text_bytes else {}
        return {
            "validation_loss": self.loss,
            "validation_perplexity": self.perplexity,
            **bits,
            "validation_tokens": self.tokens,
        }

    @classmethod
    def from_figures(cls, figures: Mapping[str, float], held_out_tokens: int = 0) -> Evaluation:
        """What `figures` made of it."""
        loss, tokens = figures["validation_loss"], int(figures["validation_tokens"])
        bits = figures.get("validation_bits_per_byte")
        text_bytes = loss * tokens / (math.log(2) * bits) if bits else 0.0
        return cls(loss, tokens, round(text_bytes) if math.isfinite(text_bytes) else 0, held_out_tokens)

    def require_finite(self, step: int) -> None:
        """Refuse to go on from weights that nothing can be made of.

        Raises:
            UserError: the loss is not finite.
        """
        if self.tokens and not math.isfinite(self.loss):
            raise UserError(
                f"the loss on held-out text is not finite ({self.loss}): the weights of step {step} are of no use",
                cure="begin again from an earlier checkpoint (`phalanx checkpoint ls`), or anew in another run.folder, "
                "with a lower optim.lr",
            )


class HeldOut:
    """Held-out text as it is looked at, in batches.

    Args:
        batches: `samples` in all, and rows that only fill the last one up.
        samples: of `of_samples` that there are.
        of_tokens: tokens of all of them.
    """

    def __init__(self, batches: Iterable[Batch], samples: int, of_samples: int, of_tokens: int) -> None:
        self.batches, self.samples = batches, samples
        self.of_tokens = of_tokens if samples < of_samples else 0


def held_out(loader: Loader, rows: int, tokens: int) -> HeldOut:
    """About `tokens` held-out tokens in batches of `rows` samples, spread over all of them; 0: all."""
    there = loader.validation_samples
    samples = min(max(tokens // loader.config.sequence_length, 1), there) if tokens else there
    of_tokens = loader.prepared.num_tokens("validation")
    return HeldOut(loader.validation_batches(rows, samples), samples, there, of_tokens)


Watched = Callable[[HeldOut], Iterable[Batch]]
"""Batches of held-out text passed on, perhaps not all of them: where they are shown, and may be ended early."""


class _Counted:
    """Passes batches on, and counts what they predict: tokens, and the UTF-8 bytes that those stand for."""

    def __init__(self, batches: Iterable[Batch], token_bytes_V: np.ndarray) -> None:
        self._batches = batches
        self._lengths_V = torch.from_numpy(np.ascontiguousarray(token_bytes_V, dtype=np.int64))
        self.samples = self.tokens = self.text_bytes = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.samples += int((batch.sample_index_B >= 0).sum())
            counted: Tensor = batch.weights_BS > 0
            self.tokens += int(counted.sum())
            self.text_bytes += int(self._lengths_V[batch.targets_BS[counted]].sum())
            yield batch


def evaluate(
    loss_of: Callable[[Iterable[Batch]], Tensor],
    text: HeldOut,
    tokenizer: Tokenizer,
    watched: Watched = lambda text: text.batches,
) -> Evaluation:
    """Mean loss over the weighted tokens of `text`.

    The bytes of a predicted token count, those of a document's first token, which nothing predicts, do not.

    Args:
        loss_of: sums the loss over batches, such as `Trainer.held_out_loss`.
        tokenizer: says how many UTF-8 bytes a token stands for.
        watched: see there.
    """
    counted = _Counted(watched(text), _token_bytes(tokenizer))
    loss = float(loss_of(counted))
    mean = loss / counted.tokens if counted.tokens else math.nan
    whole = counted.samples >= text.samples
    return Evaluation(mean, counted.tokens, counted.text_bytes, text.of_tokens, whole)


def _token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes of each id; 0 for all where the tokenizer does not know."""
    try:
        return tokenizer.token_bytes()
    except UserError:
        return np.zeros(tokenizer.vocab_size, np.int64)


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
