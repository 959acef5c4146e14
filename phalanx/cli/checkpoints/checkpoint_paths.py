"""Where the checkpoints are that a person means: of a run, in a folder, or one alone.

A bar on the terminal's error stream for what takes long; nothing where that is not a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from phalanx.checkpoint.format.checkpoint_files import examine
from phalanx.checkpoint.format.manifest import MANIFEST, Manifest
from phalanx.checkpoint.format.plain_dcp_index import PLAIN_INDEX, PlainIndex, decode_index
from phalanx.checkpoint.storage import checkpoint_store
from phalanx.checkpoint.storage.checkpoint_store import Stored
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError


class Place(Stored):
    """A checkpoint that may be there, whole or not."""

    @property
    def quarantine(self) -> str:
        """``stale`` or ``sick`` where it was put aside for that, else empty."""
        return self.name.partition("-")[0] if checkpoint_store.quarantined(self.name) else ""

    @property
    def is_plain(self) -> bool:
        """Whether it looks like one that torch.distributed.checkpoint wrote, and not we."""
        files = self.store.files(self.name)
        return PLAIN_INDEX in files and MANIFEST not in files

    def examine(self) -> Manifest:
        """Its manifest, after a look at names and sizes of its files.

        Raises:
            DamagedCheckpointError: with the first thing found wrong.
        """
        return examine(self, checksums=False)

    def index(self) -> PlainIndex:
        """DCP's own index.

        Raises:
            UserError: it is damaged, or refused.
        """
        return decode_index(self.read(PLAIN_INDEX), self.url)


def places(where: str, *, quarantined: bool = False) -> list[Place]:
    """The checkpoints meant by `where`, newest first: a checkpoint itself, a run, or a folder of checkpoints.

    Args:
        where: a path, or a URL such as ``s3://bucket/run/checkpoints``.
        quarantined: of a run also those put aside because they are stale or sick; they come last.

    Raises:
        UserError: there is none.
    """
    one = _alone(where)
    if one is not None:
        return [one]
    for url in destinations(where):
        store = open_store(url)
        found = store.names() + (store.quarantined() if quarantined else [])
        if found:
            return [Place(store, name) for name in found]
    there = "://" in where or Path(where).exists()
    problem = "there is no checkpoint here" if there else "there is no such folder"
    raise UserError(problem, cure="give a run folder or the folder of one checkpoint", value=where)


def destinations(where: str) -> tuple[str, str]:
    """Where the checkpoints of a run may be that a person calls `where`: below it, or there."""
    return (f"{where.rstrip('/')}/checkpoints" if "://" in where else str(Path(where) / "checkpoints")), where


def one_place(where: str) -> Place:
    """The checkpoint meant by `where`: of several the latest with nothing wrong at first sight, else the latest.

    Raises:
        UserError: there is none.
    """
    found = places(where)
    usable = found[first_usable(found) :]
    for place in usable if len(usable) > 1 else ():
        try:
            place.examine()
        except UserError:
            continue
        return place
    return usable[0]


def first_usable(found: list[Place]) -> int:
    """Which of the checkpoints of a run, newest first, the pointer to the latest says; 0 where there is no pointer.

    Newer ones are the work of leftovers of earlier attempts, and training never goes on from them.
    """
    latest = read_latest(found[0].store)
    names_found = [place.name for place in found]
    return names_found.index(latest.name) if latest is not None and latest.name in names_found else 0


def _alone(where: str) -> Place | None:
    """`where`, if that is one checkpoint."""
    parent, name = _split(where)
    try:
        place = Place(open_store(parent), checkpoint_store.plain(name))
    except ValueError:
        return None
    files = place.store.files(name)
    is_one = MANIFEST in files or PLAIN_INDEX in files
    return place if is_one or (files and (checkpoint_store.parse(name) or checkpoint_store.quarantined(name))) else None


def _split(where: str) -> tuple[str, str]:
    if "://" in where:
        parent, _, name = where.rstrip("/").rpartition("/")
        return parent, name
    path = Path(where).absolute()
    return str(Path(where).parent) if Path(where).name not in ("", "..") else str(path.parent), path.name


T = TypeVar("T")


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """`items` one after another."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not _is_seen(console)) as p:
        task = p.add_task(what, total=len(items))
        for item in items:
            yield item
            p.advance(task)


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """What is yielded is called with the number of bytes that have been done since."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not _is_seen(console)) as p:
        task = p.add_task(what, total=total)
        yield lambda count: p.advance(task, count)


def _is_seen(console: Console) -> bool:
    return console.is_terminal
