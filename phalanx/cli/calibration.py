"""What `phalanx plan calibrate` does: where ranks compute, measuring, writing, showing."""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import cast

import click
from rich.markup import escape

from phalanx.checks.calibration.calibration_messages import Precision
from phalanx.checks.nvml import count_files
from phalanx.checks.thresholds import MOST_OTHER_WORK, OtherWork
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.launch.cores import allowed_cpus, local_shares, read_cores
from phalanx.plan.calibrate.calibration_files import MeasuredMachine, summary, write_cluster
from phalanx.plan.calibrate.measure import MeasurementPlan, Measurements, RankPlacement, found_of, measure

_MOST_RANKS = 16


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    output: Path
    ranks: tuple[int, ...]  # numbers of processes; empty: see `counts_of`
    device: str  # ``auto``, ``cpu`` or ``cuda``
    precisions: tuple[str, ...]
    quick: bool


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    files: tuple[Path, ...]  # all that were written, the cluster's last
    found: tuple[Measurements, ...]
    seconds: float
    busy_share: float  # of this host's cores that other work kept busy


def calibrate(request: Request, environment: Mapping[str, str], *, silent: bool) -> Outcome:
    """Measure and write."""
    # Refuse before minutes are lost.
    if request.output.suffix != ".toml":
        raise UserError(
            "is no name of a TOML file", cure="end it in .toml", field="--output", value=str(request.output)
        )
    if not request.output.parent.is_dir() or not os.access(request.output.parent, os.W_OK):
        cure = "name a folder that is there and may be written to"
        raise UserError("cannot be written", cure=cure, field="--output", value=str(request.output))
    gpus = _gpus(request.device, environment)
    wanted = MeasurementPlan("cuda" if gpus else "cpu", cast(tuple[Precision, ...], request.precisions), request.quick)
    machine = MeasuredMachine(socket.gethostname(), "gpu" if gpus else "cpu", datetime.date.today().isoformat())
    console, began_s = make_console(), time.perf_counter()
    found = []
    with OtherWork() as other:
        for count in counts_of(request.ranks, gpus):
            text = f"measuring with {count} process{'es' if count > 1 else ''} …"
            with nullcontext() if silent or not console.is_terminal else console.status(text):
                places = places_of(count, on_gpus=gpus > 0)
                found.append(found_of(measure(places, wanted), places[0].threads))
    files = write_cluster(request.output, found, machine)
    return Outcome(tuple(files), tuple(found), time.perf_counter() - began_s, other.share)


def counts_of(asked: tuple[int, ...], gpus: int) -> list[int]:
    """Numbers of processes, ascending: as asked; else one for each GPU; else one, and one for each core."""
    cores = len(read_cores(allowed_cpus()))
    most, what = (gpus, "GPUs") if gpus else (max(cores, _MOST_RANKS), "cores")
    if asked and max(asked) > most:
        problem = f"this host has {gpus or cores} {what}"
        raise UserError(problem, cure=f"take up to {most}", field="--ranks", value=max(asked))
    if asked:
        return sorted(set(asked))
    return [gpus] if gpus else [1, max(2, min(_MOST_RANKS, cores))]


def places_of(count: int, *, on_gpus: bool) -> list[RankPlacement]:
    """Where ranks compute, as `phalanx train` has it: one alone on all cores, several each on its share."""
    if count == 1 and not on_gpus:
        return [RankPlacement((), len(allowed_cpus()))]
    return [RankPlacement(tuple(sorted(share.cpus or ())), share.threads) for share in local_shares(count)]


def show(outcome: Outcome, as_json: bool) -> None:
    """Print what was found."""
    too_busy = outcome.busy_share > MOST_OTHER_WORK
    path = outcome.files[-1]
    if as_json:
        measured = [
            {
                "ranks": found.ranks,
                "threads": found.threads,
                "values": {line.name: {"value": line.value, "unit": line.unit} for line in summary(found)},
            }
            for found in outcome.found
        ]
        values = {
            "host": socket.gethostname(),
            "files": [str(file) for file in outcome.files],
            "seconds": round(outcome.seconds, 1),
            "other_work_share": round(outcome.busy_share, 3),
            "too_busy": too_busy,
            "measured": measured,
        }
        click.echo(json.dumps(values, indent=1))
        return
    console = make_console()
    heads = []
    for found in outcome.found:
        threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
        heads.append(f"1 process, {threads}" if found.ranks == 1 else f"each of {found.ranks}, {threads}")
    table = make_table("measured", *heads, right=(1, 2, 3, 4, 5, 6), whole=(0,))
    columns = [{line.name: line for line in summary(found)} for found in outcome.found]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(escape(column[name].text) if name in column else "" for column in columns))
    console.print(table)
    if too_busy:
        warning = f"[yellow]other work kept {outcome.busy_share:.0%} of this host busy[/]: these figures are too low"
        console.print(f"{warning}; measure again when it is idle", highlight=False)
    beside = ", ".join(file.name for file in outcome.files[:-1])
    console.print(f"written in {units.duration(outcome.seconds)}: {escape(str(path))} (with {escape(beside)})",
                  highlight=False, soft_wrap=True)  # fmt: skip
    console.print(f"next: phalanx plan CONFIG --cluster {escape(quote(str(path)))}", highlight=False, soft_wrap=True)


def _gpus(device: str, environment: Mapping[str, str]) -> int:
    """GPUs to measure, of those that this process may use.

    Raises:
        UserError: GPUs are asked for, and there are none.
    """
    if device == "cpu":
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = count_files(Path("/dev"))
    if visible is not None:
        count = min(count, len([name for name in visible.split(",") if name.strip()]))
    if device == "cuda" and not count:
        raise UserError("no GPU is visible", cure="take cpu or auto", field="--device", value=device)
    return count
