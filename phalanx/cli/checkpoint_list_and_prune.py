"""`phalanx checkpoint ls`, `prune` and `keep`: checkpoints of a run, what may go, what this host's memory holds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import click
from rich.markup import escape

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format.manifest import DamagedCheckpointError
from phalanx.checkpoint.format.shard_plan import Record
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_start import address_for, ensure_keeper, until_ended
from phalanx.checkpoint.keeper_contract import KeeperLostError, restorable
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.retention import prune
from phalanx.cli.checkpoint_paths import Place, destinations, first_usable, places
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.units import parse_size


class Kept(NamedTuple):
    """A snapshot of which this host keeps `shards` of `of`; whole: training can go on from what is here alone."""

    step: int
    attempt: int
    taken: datetime
    size_bytes: int
    shards: int
    of: int
    is_whole: bool


def kept(records: Sequence[Record]) -> list[Kept]:
    """The snapshots that these shards are of, newest first."""
    whole = {choice.snapshot for choice in restorable({"here": records})}
    shards: dict[tuple[int, int, str], dict[int, Record]] = {}
    for record in records:
        shards.setdefault((record.attempt, record.step, record.set_id), {})[record.rank] = record
    found = []
    for (attempt, step, _), of_rank in sorted(shards.items(), reverse=True):
        some = next(iter(of_rank.values()))
        taken = datetime.fromtimestamp(some.unix_ns * 1e-9, UTC)
        size_bytes = sum(record.data_bytes for record in of_rank.values())
        found.append(Kept(step, attempt, taken, size_bytes, len(of_rank), some.shards, some.snapshot in whole))
    return found


_COLOURS = {"latest": "green", "stale": "yellow", "sick": "yellow", "unused": "yellow", "damaged": "red"}


@dataclass(frozen=True)
class Row:
    """What is shown of one checkpoint.

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
    rows = [_in_memory(one, now) for one in kept(_records_here(destinations(run)))]
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
            manifest = place.examine()
        except DamagedCheckpointError as damage:
            rows.append(Row(place.name, "damaged", problem=damage.reason))
            continue
        row = Row(
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
        rows.append(row)
    return rows


def _records_here(urls: Sequence[str]) -> list[Record]:
    """The records of what the keeper of the first of these destinations holds that has one; none where none has."""
    for url in urls:
        try:
            with closing(KeeperClient(address_for(url, os.environ), 0, 1)) as keeper:
                return [held.record for held in keeper.held()]
        except (KeeperLostError, UserError):  # there is none, or none could have been started
            continue
    return []


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
    text = f"{row.status}: {row.problem}" if row.problem else row.status
    status = f"[{colour}]{escape(text)}[/{colour}]" if colour else text
    if row.step is None or row.age_s is None or row.size_bytes is None:
        return [escape(row.name), *[""] * 7, status]
    more = f" and {len(row.metrics) - 1} more" if len(row.metrics) > 1 else ""
    metrics = "".join(f"{name}={value:.4g}" for name, value in list(row.metrics.items())[:1]) + more
    figures = [f"{row.step:,}", units.duration(max(0.0, row.age_s)), units.size(row.size_bytes)]
    files = "" if row.files is None else str(row.files)
    return [escape(row.name), *figures, files, str(row.attempt), escape(row.layout), escape(metrics), status]


@click.command("prune")
@click.argument("run")
@click.option("--keep-last", type=click.IntRange(1), default=2, show_default=True, help="Keep this many newest.")
@click.option("--keep-every", type=click.IntRange(0), default=0, help="Keep steps that are a multiple of this.")
@click.option("--keep-best", type=click.IntRange(0), default=0, help="Keep this many with the lowest metric.")
@click.option("--metric", default="validation_loss", show_default=True, help="The figure --keep-best goes by.")
@click.option("--budget", default="", help='Room for all together, such as "500 GB".')
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
def prune_command(
    run: str, keep_last: int, keep_every: int, keep_best: int, metric: str, budget: str, dry_run: bool
) -> None:
    """Delete the checkpoints of RUN that are not to be kept, oldest first.

    Never deleted: the newest whole one (its bytes are read and checked), whatever is newer, and the one that the
    pointer to the latest names. Of those put aside as stale or sick the newest two stay.
    """
    try:
        budget_bytes = parse_size(budget) if budget else 0
    except ValueError as error:
        problem, _, cure = str(error).partition(": ")
        raise UserError(problem, cure=cure, field="--budget") from None
    rules = CheckpointConfig(
        keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, best_metric=metric, budget_bytes=budget_bytes
    )
    found = places(run, quarantined=True)
    store = _RecordingStore(found[0].store, dry_run)
    sizes = {place.name: _size_bytes(place) for place in found}
    try:
        prune(cast(Store, store), rules)
    except OSError as error:
        problem = f"cannot be pruned ({error.strerror or error})"
        raise UserError(problem, cure="see to it that it may be written", field=run) from error
    table = make_table("checkpoint", "size", "", right=(1,), whole=(0,))
    for name, size in sizes.items():
        fate = ("would be deleted" if dry_run else "deleted") if name in store.deleted else "kept"
        colour = "red" if name in store.deleted else "green"
        table.add_row(escape(name), units.size(size), f"[{colour}]{fate}[/{colour}]")
    console = make_console()
    console.print(table)
    freed = units.size(sum(sizes.get(name, 0) for name in store.deleted))
    verb = "would be freed" if dry_run else "freed"
    console.print(f"{freed} {verb}: {len(store.deleted)} of {len(sizes)} checkpoints", highlight=False)


class _RecordingStore:
    """A store that notes what is deleted, and in a rehearsal deletes nothing."""

    def __init__(self, store: Store, rehearsal: bool) -> None:
        self._store, self._rehearsal = store, rehearsal
        self.deleted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clean(self, attempt: int) -> None:
        """Remove what dead writers have left."""
        if not self._rehearsal:
            self._store.clean(attempt)

    def delete(self, name: str) -> None:
        """Delete a checkpoint."""
        if not self._rehearsal:
            self._store.delete(name)
        self.deleted.append(name)


def _size_bytes(place: Place) -> int:
    total = 0
    for file in place.store.files(place.name):
        try:
            total += place.files.size_bytes(file)
        except OSError:
            continue  # gone since it was listed, or held back by a store that has not published it
    return total


@click.command("keep")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--folder", default="", help="checkpoint.folder of the run, where that is set.")
@click.option(
    "--ttl", "ttl_s", type=click.FloatRange(min=0, min_open=True), default=1800.0, show_default=True, help="Seconds."
)
@click.option("--wait", is_flag=True, help="Return when the keeper ends, so that the job step it is in goes on.")
def keep_command(run: Path, folder: str, ttl_s: float, wait: bool) -> None:
    """Start the process that keeps snapshots of RUN in the memory of this host, if there is none.

    `phalanx train` does so by itself. Where what it starts ends with it (a Slurm step), start it in a step of its own.
    It ends when the run has ended well, or when no rank has been there for --ttl seconds.
    """
    address = address_for(folder or str(run / "checkpoints"), os.environ)
    try:
        ensure_keeper(address, ttl_s=ttl_s)
    except (KeeperLostError, OSError) as error:
        raise UserError(f"no keeper can be started ({error})", cure="see to that", value=str(address)) from error
    click.echo(f"snapshots of {run} are kept by the process that listens at {address}")
    if wait:
        until_ended(address)
