"""`phalanx generate`: continue prompts with a trained model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from phalanx.core.errors import UserError
from phalanx.train.weights.sampling import Continuation, continue_text, continue_texts, prompt_ids, read_prompts
from phalanx.train.weights.trained import Trained, open_trained

_BETWEEN = "---"


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
    given = list(prompt) if file is None else [*prompt, *_read(file)]
    if file is not None and not given:
        raise UserError("has no prompt", cure="write one on each line", field="--prompts", value=str(file))
    prompts = given or [""]
    trained = open_trained(run, lambda text: click.echo(text, err=True), device=device)
    how: dict[str, Any] = {
        "max_new_tokens": tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    start_s = time.perf_counter()
    if len(prompts) == samples == 1 and not as_json:
        count, full = _stream(trained, prompts[0], how)
    else:
        texts = continue_texts(trained.model, trained.tokenizer, prompts, samples=samples, batch=batch, **how)
        count, full = _print_all(texts, as_json)
    rate = count / max(time.perf_counter() - start_s, 1e-9)
    longest = f", the model's longest sequence of {trained.model.config.max_sequence} is full" if full else ""
    number = len(prompts) * samples
    several = f"{number} texts, " if number > 1 else ""
    click.echo(f"[{several}{count} tokens, {rate:.0f} per second, step {trained.step}{longest}]", err=True)


def _stream(trained: Trained, prompt: str, how: dict[str, Any]) -> tuple[int, bool]:
    """Print one text as it comes; how many tokens it has, and whether the model has no room for more."""
    pieces = continue_text(trained.model, trained.tokenizer, prompt, **how)
    count = 0
    sys.stdout.write(prompt)
    for count, piece in enumerate(pieces, start=1):  # noqa: B007
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    used = len(prompt_ids(trained.tokenizer, prompt)) + count
    return count, used >= trained.model.config.max_sequence and count < how["max_new_tokens"]


def _print_all(texts: Iterable[Continuation], as_json: bool) -> tuple[int, bool]:
    """Print texts as they are finished; how many tokens they have, and whether the model had no room for more."""
    count, full = 0, False
    for number, each in enumerate(texts):
        if as_json:
            sys.stdout.write(json.dumps(asdict(each), ensure_ascii=False) + "\n")
        else:
            sys.stdout.write((f"{_BETWEEN}\n" if number else "") + f"{each.prompt}{each.text}\n")
        sys.stdout.flush()
        count, full = count + each.tokens, full or each.ended == "max_sequence"
    return count, full


def _read(file: Path) -> Sequence[str]:
    """The prompts of a file, or of the standard input.

    Raises:
        UserError: it cannot be read, is not UTF-8, or a line of it is not a prompt.
    """
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
