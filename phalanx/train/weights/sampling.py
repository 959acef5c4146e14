"""Text from a model: the prompt as training documents begin, the continuation as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from phalanx.core.errors import UserError
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.model.decoder import Decoder
from phalanx.model.generate import generate


def continue_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, one per token; as many as fit into the model's longest sequence at most.

    Args:
        temperature, top_p, top_k, seed: see `phalanx.model.generate.generate`.

    Raises:
        UserError: no token fits behind the prompt, or a setting is out of range.
    """
    ids = prompt_ids(tokenizer, prompt)
    end = tokenizer.end_of_text
    sampled = generate(
        model,
        ids,
        max_new_tokens=min(max_new_tokens, room_after(model, ids)),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=() if end is None else (end,),
    )
    return stream_text(tokenizer, sampled)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of the prompt, after the end-of-text token with which every training document begins."""
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # of arguments that are not UTF-8
        raise UserError("the prompt is not UTF-8 text", cure="write it in UTF-8")
    end = tokenizer.end_of_text
    start = [] if end is None else [end]
    return start + tokenizer.encode(prompt)


def room_after(model: Decoder, ids: list[int]) -> int:
    """New tokens that fit behind a prompt.

    Raises:
        UserError: none does.
    """
    longest = model.config.max_sequence
    if len(ids) >= longest:
        raise UserError(
            f"the prompt takes {len(ids)} tokens and the model's longest sequence is {longest}",
            cure="shorten the prompt, or train with a larger model.max_sequence",
        )
    return longest - len(ids)


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text of each id as it comes; the bytes of a character that is not whole yet are held back."""
    shown, seen = "", []
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen)
        whole = text.rstrip("�")
        yield whole[len(shown) :]
        shown = whole
    rest = tokenizer.decode(seen)[len(shown) :]
    if rest:
        yield rest
