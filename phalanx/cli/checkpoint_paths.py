"""Where the checkpoints are that a person means: of a run, in a folder, or one alone; and bars for what takes long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from phalanx.checkpoint.format.checkpoint_files import Files, examine
from phalanx.checkpoint.format.manifest import MANIFEST, Manifest, plain
from phalanx.checkpoint.format.plain_dcp_index import PLAIN_INDEX, PlainIndex, decode_index
from phalanx.checkpoint.storage import checkpoint_store
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError


@dataclass(frozen=True)
class Place:
    """A checkpoint that may be there, whole or not."""

    store: Store
    name: str

    @property
    def files(self) -> Files:
        """Its files."""
        return self.store.at(self.name)

    @property
    def url(self) -> str:
        """Where it lies, for people."""
        return self.files.url

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
        """Its manifest, after a look at names and sizes of its files; DamagedCheckpointError: what is wrong first."""
        return examine(self.files, checksums=False)

    def index(self) -> PlainIndex:
        """DCP's own index; UserError: it is damaged, or refused."""
        return decode_index(self.files.read(PLAIN_INDEX), self.url)


def places(where: str, *, quarantined: bool = False) -> list[Place]:
    """The checkpoints meant by `where`, newest first: a checkpoint itself, a run, or a folder of checkpoints.

    With `quarantined`, of a run also those put aside because they are stale or sick; they come last.
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
    """The checkpoint meant by `where`: of several the latest with nothing wrong at first sight, else the latest."""
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
    if "://" in where:
        parent, _, name = where.rstrip("/").rpartition("/")
    else:
        path = Path(where).absolute()
        parent, name = str(Path(where).parent if Path(where).name not in ("", "..") else path.parent), path.name
    try:
        place = Place(open_store(parent), plain(name))
    except ValueError:
        return None
    files = place.store.files(name)
    is_one = MANIFEST in files or PLAIN_INDEX in files
    return place if is_one or (files and (checkpoint_store.parse(name) or checkpoint_store.quarantined(name))) else None


T = TypeVar("T")


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """`items` one after another, with a bar."""
    with _bar(TextColumn("{task.completed}/{task.total}")) as bar:
        task = bar.add_task(what, total=len(items))
        for item in items:
            yield item
            bar.advance(task)


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """What is yielded is called with the number of bytes that have been done since."""
    with _bar(DownloadColumn(True), TransferSpeedColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _bar(*columns: ProgressColumn) -> Progress:
    """On the terminal's error stream; nothing where that is not a terminal."""
    console = Console(emoji=False, stderr=True)
    every = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    return Progress(*every, console=console, transient=True, disable=not console.is_terminal)
