"""`phalanx plan calibrate`: measure this machine, and describe it for predictions. Its help imports only click."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import click


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="[HOST.toml]")
@click.option("--ranks", type=click.IntRange(min=1), multiple=True, metavar="N", help="Processes; may be repeated.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="What to measure [auto].")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), multiple=True, help="Of products; else what is fast.")
@click.option("--quick", is_flag=True, help="Few small sizes: whether it works; figures mean little.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    output: Path | None,
    ranks: tuple[int, ...],
    device: str,
    precision: tuple[str, ...],
    quick: bool,
    as_json: bool,
) -> None:
    """Measure this machine's kernels and collectives, and write a file that --cluster takes.

    They are measured as training runs them: by one process on all cores, and by one for each core (up to 16), all at
    once; --ranks says otherwise. On a host with GPUs, by one process for each. It takes a minute or two; let nothing
    else run meanwhile.
    """
    from phalanx.cli.calibration import Request, calibrate, show  # not before: help comes without it

    request = Request(output or Path(f"{socket.gethostname()}.toml"), ranks, device, precision, quick)
    show(calibrate(request, os.environ, silent=as_json), as_json)
