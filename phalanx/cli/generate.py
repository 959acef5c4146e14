"""`phalanx generate`: continue a prompt with a trained model."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from phalanx.train.weights.sampling import continue_text, prompt_ids
from phalanx.train.weights.trained import open_trained


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
    pieces = continue_text(
        trained.model,
        trained.tokenizer,
        prompt,
        max_new_tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    sys.stdout.write(prompt)
    start_s, count = time.perf_counter(), 0
    for count, piece in enumerate(pieces, start=1):  # noqa: B007
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    rate = count / max(time.perf_counter() - start_s, 1e-9)
    longest = trained.model.config.max_sequence
    used = len(prompt_ids(trained.tokenizer, prompt)) + count
    full = f", the model's longest sequence of {longest} is full" if used >= longest and count < tokens else ""
    click.echo(f"[{count} tokens, {rate:.0f} per second, step {trained.step}{full}]", err=True)
