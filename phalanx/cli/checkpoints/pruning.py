"""`phalanx checkpoint prune`: delete what is not to be kept, by the same rules as training does. Torch-free."""

from __future__ import annotations

from typing import Any, cast

import click
from rich.markup import escape

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.storage.base import Store
from phalanx.checkpoint.storage.prune import prune
from phalanx.cli.checkpoints.places import Place, places
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.units import parse_size


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
    rules = CheckpointConfig(
        keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, best_metric=metric, budget_bytes=_size(budget)
    )
    found = places(run, quarantined=True)
    store = _Watched(found[0].store, dry_run)
    sizes = {place.name: _size_bytes(place) for place in found}
    try:
        prune(cast(Store, store), rules)
    except OSError as error:
        said = error.strerror or str(error)
        raise UserError(f"cannot be pruned ({said})", cure="see to it that it may be written", field=run) from error
    _tell(store.deleted, sizes, dry_run)


class _Watched:
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


def _size(text: str) -> int:
    try:
        return parse_size(text) if text else 0
    except ValueError as error:
        problem, _, cure = str(error).partition(": ")
        raise UserError(problem, cure=cure, field="--budget") from None


def _size_bytes(place: Place) -> int:
    total = 0
    for file in place.store.files(place.name):
        try:
            total += place.size_bytes(file)
        except OSError:
            continue  # gone since it was listed, or held back by a store that has not published it
    return total


def _tell(deleted: list[str], sizes: dict[str, int], dry_run: bool) -> None:
    table = make_table("checkpoint", "size", "", right=(1,), whole=(0,))
    for name in sizes:
        said = ("would be deleted" if dry_run else "deleted") if name in deleted else "kept"
        colour = "red" if name in deleted else "green"
        table.add_row(escape(name), units.size(sizes[name]), f"[{colour}]{said}[/{colour}]")
    console = make_console()
    console.print(table)
    freed = units.size(sum(sizes.get(name, 0) for name in deleted))
    verb = "would be freed" if dry_run else "freed"
    console.print(f"{freed} {verb}: {len(deleted)} of {len(sizes)} checkpoints", highlight=False)
