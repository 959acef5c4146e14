"""`phalanx checkpoint ls`: the checkpoints of a run and what became of each. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import click
from rich.markup import escape

from phalanx.checkpoint.format.manifest import DamagedCheckpointError, Manifest
from phalanx.cli.checkpoints.memory import Kept, kept, records_here
from phalanx.cli.checkpoints.places import Place, destinations, first_usable, places
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.errors import UserError

_COLOURS = {"latest": "green", "stale": "yellow", "sick": "yellow", "unused": "yellow", "damaged": "red"}


@dataclass(frozen=True)
class Row:
    """What is told of one checkpoint.

    Attributes:
        status: ``latest``, ``whole``, ``stale``, ``sick``, ``unused`` (newer than the latest: what a leftover of an
            earlier attempt wrote), ``damaged``, or ``memory`` (a snapshot that this host keeps). Contents are not read:
            ``whole`` means that names and sizes of its files are as its manifest says.
        problem: what is wrong with a damaged one, or keeps training from going on from a snapshot.
    """

    name: str
    status: str
    step: int | None = None
    written: str = ""
    age_s: float | None = None
    size_bytes: int | None = None
    files: int | None = None
    attempt: int | None = None
    layout: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    config_sha256: str = ""
    torch_version: str = ""
    problem: str = ""


@click.command("ls")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list and nothing else.")
def ls_command(run: str, as_json: bool) -> None:
    """Show the checkpoints of RUN, newest first.

    The latest is the one that training goes on from, unless a snapshot in memory is newer: those this host keeps of a
    run that has not ended come first. What was put aside as stale or sick comes last. Sizes of files are checked,
    contents are not (see verify).
    """
    now = datetime.now(UTC)
    rows = [_in_memory(one, now) for one in kept(records_here(destinations(run)))]
    try:
        rows += rows_of(places(run, quarantined=True), now)
    except UserError:
        if not rows:
            raise
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    columns = ("checkpoint", "step", "age", "size", "files", "attempt", "layout", "metrics", "status")
    table = make_table(*columns, right=(1, 2, 3, 4, 5), whole=(0, 2))
    for row in rows:
        table.add_row(*_cells(row))
    make_console().print(table)


def rows_of(found: list[Place], now: datetime) -> list[Row]:
    """A row for each place; the latest is what the pointer says, else the first that is good and not in quarantine."""
    first = first_usable(found)
    rows: list[Row] = []
    for number, place in enumerate(found):
        has_latest = any(row.status == "latest" for row in rows)
        status = place.quarantine or ("unused" if number < first else "whole" if has_latest else "latest")
        try:
            rows.append(_row(place, status, place.examine(), now))
        except DamagedCheckpointError as damage:
            rows.append(Row(place.name, "damaged", problem=damage.reason))
    return rows


def _row(place: Place, status: str, manifest: Manifest, now: datetime) -> Row:
    return Row(
        place.name,
        status,
        step=manifest.step,
        written=manifest.created,
        age_s=(now - datetime.fromisoformat(manifest.created)).total_seconds(),
        size_bytes=manifest.size_bytes,
        files=len(manifest.files),
        attempt=manifest.attempt,
        layout=manifest.layout,
        metrics=dict(manifest.metrics),
        config_sha256=manifest.config_sha256,
        torch_version=manifest.torch_version,
    )


def _in_memory(one: Kept, now: datetime) -> Row:
    bad = "stale or sick" if one.shards == one.of else f"{one.shards} of {one.of} shards are here"
    return Row(
        "in memory",
        "memory",
        step=one.step,
        written=one.taken.isoformat(timespec="milliseconds"),
        age_s=(now - one.taken).total_seconds(),
        size_bytes=one.size_bytes,
        attempt=one.attempt,
        problem="" if one.is_whole else bad,
    )


def _cells(row: Row) -> list[str]:
    colour = _COLOURS.get(row.status)
    told = f"{row.status}: {row.problem}" if row.problem else row.status
    status = f"[{colour}]{escape(told)}[/{colour}]" if colour else told
    if row.step is None or row.age_s is None or row.size_bytes is None:
        return [escape(row.name), *[""] * 7, status]
    more = f" and {len(row.metrics) - 1} more" if len(row.metrics) > 1 else ""
    metrics = "".join(f"{name}={value:.4g}" for name, value in list(row.metrics.items())[:1]) + more
    figures = [f"{row.step:,}", units.duration(max(0.0, row.age_s)), units.size(row.size_bytes)]
    files = "" if row.files is None else str(row.files)
    return [escape(row.name), *figures, files, str(row.attempt), escape(row.layout), escape(metrics), status]
