"""`phalanx generate`: continue a prompt with a trained model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from phalanx.core.errors import UserError
from phalanx.data.tokenizer import Tokenizer
from phalanx.model.generate import generate
from phalanx.train.trained import Trained, open_trained


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("prompt", default="")
@click.option("--tokens", default=200, type=click.IntRange(min=0), show_default=True, help="New tokens at most.")
@click.option("--temperature", default=0.8, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", default=0.95, show_default=True, help="Sample from the likeliest tokens up to this sum.")
@click.option("--top-k", default=0, show_default=True, help="Sample from this many likeliest tokens; 0: all.")
@click.option(
    "--seed", default=0, type=click.IntRange(0, 2**63 - 1), show_default=True, help="The same seed gives the same text."
)
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
def command(
    run: Path, prompt: str, tokens: int, temperature: float, top_p: float, top_k: int, seed: int, device: str
) -> None:
    """Continue PROMPT with the model in the run folder RUN, printing as it comes. The text alone goes to stdout."""
    trained = open_trained(run, lambda text: click.echo(text, err=True), device=device)
    ids = prompt_ids(trained, prompt)
    room = room_after(trained, ids)
    end = trained.tokenizer.end_of_text
    stop = () if end is None else (end,)
    sampled = generate(
        trained.model,
        ids,
        max_new_tokens=min(tokens, room),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
    )
    sys.stdout.write(prompt)
    start_s, count = time.perf_counter(), 0
    for count, piece in enumerate(stream_text(trained.tokenizer, sampled), start=1):  # noqa: B007
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    rate = count / max(time.perf_counter() - start_s, 1e-9)
    full = f", the model's longest sequence of {len(ids) + count} is full" if count == room < tokens else ""
    click.echo(f"[{count} tokens, {rate:.0f} per second, step {trained.step}{full}]", err=True)


def room_after(trained: Trained, ids: list[int]) -> int:
    """New tokens that fit behind a prompt.

    Raises:
        UserError: none does.
    """
    longest = trained.model.config.max_sequence
    if len(ids) >= longest:
        raise UserError(
            f"the prompt takes {len(ids)} tokens and the model's longest sequence is {longest}",
            cure="shorten the prompt, or train with a larger model.max_sequence",
        )
    return longest - len(ids)


def prompt_ids(trained: Trained, prompt: str) -> list[int]:
    """Ids of the prompt, after the end-of-text token with which every training document begins."""
    end = trained.tokenizer.end_of_text
    start = [] if end is None else [end]
    return start + trained.tokenizer.encode(prompt)


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
