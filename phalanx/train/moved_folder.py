"""A run folder that is renamed while its run trains: the run goes on in it, and says so.

Ranks, the writer of spans, the keeper of checkpoints and the watcher open files by the path that the run began with.
Files that are open follow a rename, and all others would be made anew in the old place: the run would lie in two
folders. So rank 0 looks four times a second whether the path still leads to the folder whose lock it holds, and puts a
link in its place where it does not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.core.files import write_json
from phalanx.telemetry.run_presence import MOVED
from phalanx.train.run_folder import RunFolder

EVERY_S = 0.25
_ENDS_S = 5.0

Note = Callable[[str], None]


@contextmanager
def kept_together(folder: RunFolder, note: Note) -> Iterator[None]:
    """For the block, look after the folder of a run; of ranks that hold no lock nothing is done.

    Args:
        note: takes what is said of a folder that was moved, from another thread.
    """
    guard = _opened(folder, note)
    if guard is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            guard.look()

    thread = threading.Thread(target=watch, name="run folder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_ENDS_S)  # not for ever: a file system may not answer
        guard.look()
        guard.close()


def _opened(folder: RunFolder, note: Note) -> FolderGuard | None:
    if folder.lock is None or not hasattr(os, "O_PATH"):  # it takes Linux to know a folder by itself
        return None
    with suppress(OSError):
        (folder.path / MOVED).unlink(missing_ok=True)
        return FolderGuard(folder.path, note)
    return None


class FolderGuard:
    """Knows a folder by itself and not by its path; for one thread.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, note: Note) -> None:
        self._path, self._note = path.absolute(), note
        self._folder = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._said = ""
        self._links: set[Path] = set()

    def close(self) -> None:
        """Let the folder go."""
        os.close(self._folder)

    def look(self) -> None:
        """See that the path leads to the folder; what cannot be mended is said once."""
        with suppress(OSError):  # storage that does not answer says nothing
            if not self._leads_to(self._path):
                self._mend()

    def _mend(self) -> None:
        place = self._place()
        if place is None:
            # some file systems give a folder another number now and then: only what is removed has no name
            if not self._path.exists() or not os.fstat(self._folder).st_nlink:
                self._lost()
        elif self._is_taken():
            self._say(
                f"{self._path} is the folder of another run now, and this one was moved to {place}: files that it "
                "opens from now on lie among those of the other; stop this run, and start it again with run.folder "
                "set to its new place"
            )
        else:
            self._link(place)

    def _leads_to(self, path: Path) -> bool:
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        own = os.fstat(self._folder)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def _place(self) -> Path | None:
        """Where the folder is now; None: nowhere."""
        with suppress(OSError):
            named = Path(f"/proc/self/fd/{self._folder}").readlink()
            if self._leads_to(named):
                return named
        return None

    def _is_taken(self) -> bool:
        """Whether somebody else's run lies in the old place: what this one left there has no lock."""
        return (self._path / ".lock").exists() or (self._path / "config.json").exists()

    def _link(self, place: Path) -> None:
        """Let the path lead to the folder again."""
        try:
            strays = _take_in(self._path, place) if self._path.is_dir() and not self._path.is_symlink() else ""
            at, to = self._path, place
            # where a folder above it was moved, that is what is to be linked
            while at.name == to.name and not at.parent.exists() and at.parent != at:
                at, to = at.parent, to.parent
            if at in self._links:  # of an earlier move
                at.unlink(missing_ok=True)
            at.symlink_to(os.path.relpath(to, at.parent.resolve()), target_is_directory=True)
            self._links.add(at)
        except OSError as error:
            self._say(
                f"the run folder was moved to {place}, and no link to it can be put in its old place, {self._path} "
                f"({error.strerror}): files that the run opens from now on lie there; stop it, put them together, and "
                "start it again with run.folder set to its new place"
            )
            return
        self._keep(place, {"from": str(self._path)})
        self._say(
            f"the run folder was moved to {place}: the run goes on there, and a link in its old place, {at}, lets it; "
            f"remove the link when the run has ended{strays}"
        )

    def _lost(self) -> None:
        """It was removed, or copied to another file system and removed."""
        self._say(
            f"the run folder {self._path} was removed, or moved to another file system, while the run trains: figures "
            "and logs that are open are lost, and what is written from now on begins anew there; stop the run, which "
            "keeps a checkpoint there, and put together what is left"
        )
        if self._path.is_dir() and not (self._path / MOVED).exists():  # made anew by what writes there
            self._keep(self._path, {"lost": True})

    def _keep(self, folder: Path, said: dict[str, object]) -> None:
        """Let `phalanx runs` say it, too."""
        with suppress(OSError):
            write_json(folder / MOVED, said | {"unix_s": time.time()})

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._note(text)


def _take_in(strays: Path, place: Path) -> str:
    """What was written in the old place before the link was there comes into the folder; words for what could not."""
    for folder, _, names in os.walk(strays, topdown=False):
        inner = Path(folder)
        target = place / inner.relative_to(strays)
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (target / name).exists():
                (inner / name).rename(target / name)
        with suppress(OSError):
            inner.rmdir()
    if not strays.exists():
        return ""
    beside = next(one for number in range(1, 1000) if not (one := place / f"strays-{number}").exists())
    strays.rename(beside)
    return f"; files of the same names that were made there meanwhile are in {beside}"
