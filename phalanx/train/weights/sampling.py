"""Text from a model: the prompt as training documents begin, the continuation as it comes, or those of many prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.core.errors import UserError
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.model.decoder import Decoder
from phalanx.model.generate import generate, generate_batch


@dataclass(frozen=True)
class Continuation:
    """What a prompt was continued with: new `tokens`, ended by the end of the text, by their number, or by the model's
    longest sequence."""

    prompt: str
    text: str
    tokens: int
    ended: Literal["end_of_text", "tokens", "max_sequence"]


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


def continue_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int = 0,
    seed: int = 0,
    samples: int = 1,
    batch: int = 32,
) -> Iterator[Continuation]:
    """What follows each of `prompts`, in their order; the first sample of a prompt is that of `continue_text`.

    Args:
        samples: texts for each prompt, one behind the other. A prompt that comes again has further ones.
        batch: texts at once at most.

    Raises:
        UserError: at the call, with the number of the prompt where there are several.
    """
    ids, limits = [], []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids += [prompt_ids(tokenizer, prompt)] * samples
            limits += [min(max_new_tokens, room_after(model, ids[-1]))] * samples
        except UserError as error:
            which = f"prompt {number}: " if len(prompts) > 1 else ""
            raise UserError(which + error.problem, cure=error.cure) from None
    end = tokenizer.end_of_text
    found = generate_batch(
        model,
        ids,
        max_new_tokens=limits,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=() if end is None else (end,),
        batch=batch,
    )

    def continued() -> Iterator[Continuation]:
        each = [prompt for prompt in prompts for _ in range(samples)]
        for prompt, limit, tokens in zip(each, limits, found, strict=True):
            full: Literal["tokens", "max_sequence"] = "tokens" if limit == max_new_tokens else "max_sequence"
            ended = "end_of_text" if len(tokens) < limit else full
            yield Continuation(prompt, tokenizer.decode(tokens), len(tokens), ended)

    return continued()


def read_prompts(text: str, *, json_lines: bool) -> list[str]:
    """The prompts of a file: a line each, or a JSON string or an object with `prompt` each; empty lines are left out.

    Raises:
        UserError: a line is not JSON, or has no prompt.
    """
    prompts = []
    # U+2028 and others, at which `splitlines` would cut, do not end a line.
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        prompt: object = line
        if not line.strip():
            continue
        if json_lines:
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise UserError(f"line {number} is no JSON ({error})", cure="write one JSON value a line") from None
            prompt = entry.get("prompt") if isinstance(entry, dict) else entry
        if not isinstance(prompt, str):
            raise UserError(f"line {number} has no prompt", cure='write {"prompt": "…"} or "…"')
        prompts.append(prompt)
    return prompts


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of the prompt, after the end-of-text token with which every training document begins."""
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # of arguments that are not UTF-8
        raise UserError("the prompt is not UTF-8 text", cure="write it in UTF-8")
    end = tokenizer.end_of_text
    start = [] if end is None else [end]
    return start + tokenizer.encode(prompt)


def room_after(model: Decoder, ids: list[int]) -> int:
    """New tokens that fit behind a prompt; refused if none does."""
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
