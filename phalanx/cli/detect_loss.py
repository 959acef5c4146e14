"""`phalanx detect loss`: losses and gradient norms that leave their path, and the text that did it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from phalanx.cli.options import AS_JSON

_MOST_CHARACTERS = 600
_MOST_READ = 512


@click.command("loss")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--batch", "step", type=click.IntRange(1), metavar="STEP", help="Show the text that this step read.")
@click.option(
    "--most", type=click.IntRange(1), default=8, show_default=True, metavar="N", help="Detections, or samples, to show."
)
@click.option("--full", is_flag=True, help="With --batch: the whole text of each sample.")
@AS_JSON
def command(run: Path, step: int | None, most: int, full: bool, as_json: bool) -> None:
    """Find spikes, divergences and odd gradients in the figures of RUN, and the batch that did it.

    RUN is the folder of a run with metrics.jsonl. With --batch nothing is judged: the samples of a step are shown, from
    the corpus that the run prepared, the oddest first.
    """
    if step is not None:
        _show_batch(run, step, most, full, as_json)
        return
    from phalanx.cli.verdict_output import write_verdict
    from phalanx.detect.drift.loss_judge import judge_run

    sys.exit(write_verdict(judge_run(run), as_json=as_json, most=most))


def _show_batch(run: Path, step: int, most: int, full: bool, as_json: bool) -> None:
    from phalanx.cli.tables import make_console, printable
    from phalanx.core.errors import UserError
    from phalanx.detect.drift.batch_of_step import odd_first, text_of_samples
    from phalanx.detect.drift.loss_curve import read_curve

    curve = read_curve(run)
    place = int(curve.step.searchsorted(step))
    if place == len(curve) or curve.step[place] != step:
        raise UserError("has no figures of this step", cure="give one that it trained", field=str(run), value=step)
    where = curve.samples(place)
    if where is None:
        raise UserError(
            "neither its tokens nor its settings say which samples it read",
            cure="give the folder that `phalanx train` wrote",
            field=str(run),
        )
    start, count = where
    read = text_of_samples(run, start, min(count, _MOST_READ))
    samples = odd_first(read)[:most]
    if as_json:
        texts = [asdict(one) | {"compresses_to": share} for one, share in samples]
        shown = {"step": step, "first_sample": start, "samples": count, "texts": texts}
        click.echo(json.dumps(shown, indent=1, ensure_ascii=False))
        return
    console = make_console()
    loss, norm = curve.loss[place], curve.grad_norm[place]
    figures = f"step {step:,}: {count} samples from {start:,}, loss {loss:.6g}, gradient's norm {norm:.6g}"
    console.print(figures, highlight=False, markup=False, style="bold")
    if len(read) > 1:
        console.print("the oddest first, by how far each compresses", highlight=False, markup=False)
    for one, share in samples:
        text = "".join(piece.text for piece in one.pieces)
        cut = text if full else text[:_MOST_CHARACTERS]
        console.print(
            f"\nsample {one.number:,} of {printable(one.source)}, from token {one.begin_token:,},"
            f" compresses to {share:.0%}",
            highlight=False,
            markup=False,
            style="bold",
        )
        console.print(printable(cut) + (" …" if len(cut) < len(text) else ""), highlight=False, markup=False)
    if count > len(samples):
        console.print(f"\n{count - len(samples)} more: --most {count}", highlight=False, markup=False)
