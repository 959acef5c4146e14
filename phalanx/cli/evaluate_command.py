"""`phalanx evaluate`: a trained model on the held-out text of its run, or on that of another config."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from phalanx.core.config import load
from phalanx.core.errors import UserError
from phalanx.ipc.stop_request import StopRequest, exit_status
from phalanx.train.config import RunConfig


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", "data_config", type=click.Path(path_type=Path), help="Take the text of this config instead.")
@click.option("--batch", default=8, type=click.IntRange(min=1), show_default=True, help="Sequences at a time.")
@click.option(
    "--tokens",
    default=0,
    type=click.IntRange(min=0),
    show_default=True,
    help="About so many tokens; 0: all held-out text.",
)
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: Path, data_config: Path | None, batch: int, tokens: int, device: str, as_json: bool) -> None:
    """Loss, perplexity and bits per byte of the newest checkpoint in RUN on held-out text.

    Ctrl-C ends it early, with the figures of what was looked at until then.
    """
    # They import torch, which help and wrong options do without.
    from phalanx.train.evaluation import evaluate, held_out, held_out_loss
    from phalanx.train.reports.display import make_display, shown
    from phalanx.train.reports.reporter import describe
    from phalanx.train.weights.trained import held_out_text, open_trained

    trained = open_trained(run, lambda text: click.echo(text, err=True), device=device)
    other = None if data_config is None else load(RunConfig, data_config).value.data
    loader = held_out_text(trained, run, other)
    text = held_out(loader, batch, tokens)
    loss_of = partial(held_out_loss, trained.model, device=trained.device)
    display = make_display(Console(emoji=False, stderr=True))
    with StopRequest() as stop:
        try:
            show = partial(shown, display, trained.step, loader.config.sequence_length)
            result = evaluate(loss_of, text, trained.tokenizer, lambda text: show(text, stop.until_asked(text.batches)))
        finally:
            display.close()
    if result.is_whole and not result.tokens:
        cure = "give other text with --data, or have more of it held out (data.validation_fraction)"
        raise UserError("no token of the held-out text is a target: there is nothing to evaluate", cure=cure)
    if as_json:
        values = {
            "step": trained.step,
            "loss": result.loss if result.tokens else None,
            "perplexity": result.perplexity if result.tokens else None,
            "bits_per_byte": result.bits_per_byte if result.text_bytes else None,
            "tokens": result.tokens,
            "bytes": result.text_bytes,
            "whole": result.is_whole,
        }
        click.echo(json.dumps(values))
    else:
        click.echo(f"step {trained.step}: held-out {describe(result)}")
    if not result.is_whole:
        click.echo(f"stopped by {stop.name}", err=True)
        sys.exit(exit_status(stop.name))
