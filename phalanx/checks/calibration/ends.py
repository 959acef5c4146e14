"""Both ends of a model: looking rows up, and the loss head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from phalanx.checks.calibration.both_ways import both_ways
from phalanx.checks.calibration.contract import Precision
from phalanx.checks.calibration.stopwatch import Case, Pool
from phalanx.kernels.loss import linear_cross_entropy


def cases(shapes: Sequence[tuple[int, int, int]], precision: Precision, pool: Pool, wide: Pool) -> list[Case]:
    """For each (tokens, width, words): the embedding, the head with its gradients, and the head's products alone."""
    found = []
    for tokens, width, words in shapes:
        sizes = {"tokens": tokens, "width": width, "words": words}
        chosen = torch.randint(words, (tokens,), device=wide.device)
        found += _embedding(sizes, chosen, precision, wide)
        found.append(Case("head", sizes, precision, _head(tokens, width, words, chosen, pool, wide)))
        found.append(Case("head_products", sizes, precision, _products(tokens, width, words, pool)))
    return found


def _embedding(sizes: dict[str, int], chosen: torch.Tensor, precision: Precision, wide: Pool) -> list[Case]:
    def look_up(weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(chosen, weight)

    return both_ways("embedding", sizes, precision, look_up, lambda: [wide.take(sizes["words"], sizes["width"])])


def _head(tokens: int, width: int, words: int, targets: torch.Tensor, pool: Pool, wide: Pool) -> Callable[[], object]:
    """Hidden states so small that logits are as in training: exponentials of large ones are slow, or fast, in vain.

    The weight is cast once per step in training, so before.
    """
    x = (pool.take(tokens, width) / width**0.5).requires_grad_()
    weight = wide.take(words, width).detach().requires_grad_()
    cast = None if x.dtype == weight.dtype else weight.detach().to(x.dtype)

    def run() -> object:
        loss, _ = linear_cross_entropy(x, weight, targets, cast_VD=cast)
        return torch.autograd.grad(loss, (x, weight))

    return run


def _products(tokens: int, width: int, words: int, pool: Pool) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> object:
        x, weight, logits = pool.take(tokens, width), pool.take(words, width), pool.take(tokens, words)
        return torch.mm(x, weight.t()), torch.mm(logits, weight), torch.mm(logits.t(), x)

    return run
