"""`phalanx generate`: continue prompts with a trained model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from phalanx.core.errors import UserError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("prompt", nargs=-1)
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    help='A prompt on each line of this file, or {"prompt": "…"} if it ends in .jsonl; -: of the standard input.',
)
@click.option("--samples", default=1, type=click.IntRange(min=1), show_default=True, help="Texts for each prompt.")
@click.option("--batch", default=32, type=click.IntRange(min=1), show_default=True, help="Texts at a time at most.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each text.")
@click.option("--tokens", default=200, type=click.IntRange(min=0), show_default=True, help="New tokens at most.")
@click.option("--temperature", default=0.8, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", default=0.95, show_default=True, help="Sample from the likeliest tokens up to this sum.")
@click.option("--top-k", default=0, show_default=True, help="Sample from this many likeliest tokens; 0: all.")
@click.option(
    "--seed", default=0, type=click.IntRange(0, 2**63 - 1), show_default=True, help="The same seed gives the same text."
)
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
def command(
    run: Path,
    prompt: tuple[str, ...],
    file: Path | None,
    samples: int,
    batch: int,
    as_json: bool,
    tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    device: str,
) -> None:
    """Continue each PROMPT with the model in the run folder RUN. The text alone goes to stdout.

    A single text is printed as it comes, several one after another with a line of --- between them. A prompt's text
    is the same whatever else is asked for.
    """
    # They import torch, which help and wrong options do without.
    from phalanx.train.weights.sampling import continue_text, continue_texts, prompt_ids
    from phalanx.train.weights.trained import open_trained

    given = list(prompt) if file is None else [*prompt, *_read(file)]
    if file is not None and not given:
        raise UserError("has no prompt", cure="write one on each line", field="--prompts", value=str(file))
    prompts = given or [""]
    trained = open_trained(run, lambda text: click.echo(text, err=True), device=device)
    model, tokenizer = trained.model, trained.tokenizer
    how: dict[str, Any] = {
        "max_new_tokens": tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    start_s = time.perf_counter()
    count, is_full = 0, False  # of new tokens; whether the model had no room for more
    if len(prompts) == samples == 1 and not as_json:
        pieces = continue_text(model, tokenizer, prompts[0], **how)  # which refuses what it cannot do, before a word
        sys.stdout.write(prompts[0])
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            count += 1
        sys.stdout.write("\n")
        used = len(prompt_ids(tokenizer, prompts[0])) + count
        is_full = used >= model.config.max_sequence and count < tokens
    else:
        texts = continue_texts(model, tokenizer, prompts, samples=samples, batch=batch, **how)
        for number, each in enumerate(texts):
            if as_json:
                sys.stdout.write(json.dumps(asdict(each), ensure_ascii=False) + "\n")
            else:
                sys.stdout.write(("---\n" if number else "") + f"{each.prompt}{each.text}\n")
            sys.stdout.flush()
            count, is_full = count + each.tokens, is_full or each.ended == "max_sequence"
    rate = count / max(time.perf_counter() - start_s, 1e-9)
    longest = f", the model's longest sequence of {model.config.max_sequence} is full" if is_full else ""
    number = len(prompts) * samples
    several = f"{number} texts, " if number > 1 else ""
    click.echo(f"[{several}{count} tokens, {rate:.0f} per second, step {trained.step}{longest}]", err=True)


def _read(file: Path) -> Sequence[str]:
    """The prompts of a file, or of the standard input."""
    from phalanx.train.weights.sampling import read_prompts

    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return read_prompts(content.decode("utf-8-sig"), json_lines=file.suffix == ".jsonl")
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise UserError(problem, cure="name a file of prompts", field="--prompts", value=str(file)) from None
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
        raise UserError(problem, cure="write it in UTF-8", field="--prompts", value=str(file)) from None
    except UserError as error:
        raise UserError(error.problem, cure=error.cure, field="--prompts", value=str(file)) from None
