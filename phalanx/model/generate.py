"""Sampling from a decoder, token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.model.decoder import Decoder


def generate(
    model: Decoder,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Continue `tokens`; yields new ids, ends after a token of `stop` (which is not yielded) or `max_new_tokens`.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token (greedy).
        top_p: sample from the fewest tokens whose probabilities reach this sum (nucleus, arXiv 1904.09751).
        top_k: sample from this many likeliest tokens; 0 = all.
        seed: of a generator of its own, so that neither reads nor disturbs torch's global one.
        stop: ids that end the text, such as the tokenizer's end of text.

    Raises:
        UserError: at the call, before sampling: no prompt, an id outside the vocabulary, a bad setting, or prompt and
            new tokens beyond `max_sequence`.
    """
    _check(model, tokens, max_new_tokens, temperature, top_p, top_k)
    choose = _Chooser(temperature, top_p, top_k, model.config.vocab_size, seed)
    return _continue(model, tokens, max_new_tokens, choose, frozenset(stop))


def _continue(
    model: Decoder, tokens: Sequence[int], count: int, choose: _Chooser, stop: frozenset[int]
) -> Iterator[int]:
    device = model.embedding.weight.device
    with torch.inference_mode():
        cache = model.new_cache(1, len(tokens) + count)
        ahead = torch.tensor([list(tokens)], device=device)
    for _ in range(count):
        with torch.inference_mode():  # Not held over a yield: the mode would leak into the caller.
            token = choose(model.logits(model(ahead, cache=cache)[0, -1]))
            ahead = torch.tensor([[token]], device=device)
        if token in stop:
            return
        yield token


class _Chooser:
    """Picks one id from the logits of one position."""

    def __init__(self, temperature: float, top_p: float, top_k: int, vocab_size: int, seed: int) -> None:
        self.temperature, self.top_p, self.top_k, self.vocab_size = temperature, top_p, top_k, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits_V: Tensor) -> int:
        logits = logits_V[: self.vocab_size].float().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = truncate(torch.softmax(logits / self.temperature, dim=0), self.top_p, self.top_k)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def truncate(probabilities_V: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set all but the likeliest to 0: the first `top_k` (0 = all), and of those the fewest that sum to `top_p`."""
    ordered, order = probabilities_V.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    kept = before < top_p if top_p < 1 else torch.ones_like(before, dtype=torch.bool)
    kept[0] = True
    if top_k:
        kept[top_k:] = False
    return torch.zeros_like(probabilities_V).scatter(0, order[kept], ordered[kept])


def _check(model: Decoder, tokens: Sequence[int], count: int, temperature: float, top_p: float, top_k: int) -> None:
    if not tokens:
        raise UserError("there is nothing to continue", cure="give a prompt of at least one token")
    outside = [token for token in tokens if not 0 <= token < model.config.vocab_size]
    if outside:
        problem = f"is outside the vocabulary of {model.config.vocab_size}"
        raise UserError(problem, cure="use the model's own tokenizer", field="token", value=outside[0])
    for field, value, fits, cure in (
        ("max_new_tokens", count, count >= 0, "take 0 or more"),
        ("temperature", temperature, temperature >= 0, "take 0 (greedy) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "take a number above 0, at most 1"),
        ("top_k", top_k, top_k >= 0, "take 0 (all) or more"),
    ):
        if not fits:
            raise UserError("is out of range", cure=cure, field=field, value=value)
    total, limit = len(tokens) + count, model.config.max_sequence
    if model.config.position != "none" and total > limit:
        problem = f"prompt ({len(tokens)} tokens) and new tokens ({count}) are longer than max_sequence ({limit})"
        raise UserError(problem, cure="shorten the prompt, or generate fewer tokens")
