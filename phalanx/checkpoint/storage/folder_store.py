"""A folder as a store: renames, locks and hard links of a file system that all hosts share.

Large files are written past the page cache. Through it, a checkpoint costs the cores of training a page for every 4 kB,
and takes memory from whatever else is cached. For 300 MB on a cloud machine with ext4 that was 0.11 to 1.4 s of system
time (the more, the less memory the host had lent to the machine by then), and 0.025 s with O_DIRECT.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from phalanx.checkpoint.format.checkpoint_files import FolderFiles
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, FileEntry, plain
from phalanx.checkpoint.storage import checkpoint_store
from phalanx.checkpoint.storage import folder as folders
from phalanx.checkpoint.storage.checkpoint_store import KEY_MOST_BYTES, SupersededError
from phalanx.checkpoint.storage.latest import read_latest, require_charge
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.files import fsync_folder, read_regular

BUFFER_BYTES = 4 << 20
_BUFFERS = 2
_BLOCK_BYTES = 4096  # no file system wants more of addresses, offsets and lengths
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_SO = (errno.EINVAL, errno.EOPNOTSUPP)  # from file systems that take the flag and then refuse the write


def write_whole(descriptor: int, content: Iterable[Buffer], digest: Any = None) -> None:
    """Write all of `content` to an empty file, from its start, and make it durable.

    What does not fill `BUFFER_BYTES` goes through the page cache, and so does everything where the file system cannot
    do without. Takes `_BUFFERS` times `BUFFER_BYTES`: one is filled while the others are written and summed, each in a
    thread of its own, since a disk may be as fast as a core sums.

    Args:
        digest: of `hashlib`, updated with all that is written.

    Raises:
        OSError: storage refuses.
    """
    with ThreadPoolExecutor(1, "write") as writing, ThreadPoolExecutor(1, "sum") as summing:
        writer = _Writer(descriptor, writing, summing, digest)
        try:
            for piece in content:
                writer.add(memoryview(piece).cast("B"))
            writer.finish()
        finally:
            for thread in (writing, summing):
                thread.shutdown(cancel_futures=True)


class _Writer:
    def __init__(self, descriptor: int, writing: ThreadPoolExecutor, summing: ThreadPoolExecutor, digest: Any) -> None:
        self._descriptor, self._writing, self._summing, self._digest = descriptor, writing, summing, digest
        self._buffer: mmap.mmap | None = None  # page-aligned, as O_DIRECT wants it
        self._filled = 0
        self._is_refused = False
        self._full: deque[tuple[mmap.mmap, list[Future[None]]]] = deque()

    def add(self, data: memoryview) -> None:
        while data:
            buffer = self._filling()
            part = data[: BUFFER_BYTES - self._filled]
            buffer[self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            data = data[part.nbytes :]
            if self._filled == BUFFER_BYTES:
                asked = [self._writing.submit(self._write, buffer)]
                if self._digest is not None:
                    asked.append(self._summing.submit(self._digest.update, buffer))
                self._full.append((buffer, asked))
                self._buffer, self._filled = None, 0

    def finish(self) -> None:
        while self._full:
            self._emptied()
        if self._filled:
            with memoryview(self._filling()) as buffer, buffer[: self._filled] as rest:
                _write_all(self._descriptor, rest)
                if self._digest is not None:
                    self._digest.update(rest)
        os.fsync(self._descriptor)

    def _filling(self) -> mmap.mmap:
        """The buffer that is filled: a new one, or the one that was handed over first, once it is done with."""
        if self._buffer is None:
            self._buffer = mmap.mmap(-1, BUFFER_BYTES) if len(self._full) < _BUFFERS else self._emptied()
        return self._buffer

    def _write(self, full: mmap.mmap) -> None:
        if self._is_refused:
            return  # what came before this is missing
        try:
            with memoryview(full) as view:
                done = _write_direct(self._descriptor, view)
                with view[done:] as rest:
                    _write_all(self._descriptor, rest)
        except BaseException:
            self._is_refused = True
            raise

    def _emptied(self) -> mmap.mmap:
        buffer, asked = self._full.popleft()
        for one in asked:
            one.result()
        return buffer


def _write_direct(descriptor: int, view: memoryview) -> int:
    """How much could be written past the cache: 0 where the file system cannot, or after a write that was cut short,
    since the file does not end on a block boundary then."""
    if not _DIRECT or os.lseek(descriptor, 0, os.SEEK_CUR) % _BLOCK_BYTES or not _set_direct(descriptor, wanted=True):
        return 0
    try:
        return os.write(descriptor, view)
    except OSError as error:
        if error.errno not in _NOT_SO:
            raise
        return 0


def _write_all(descriptor: int, view: memoryview) -> None:
    _set_direct(descriptor, wanted=False)
    while view:
        view = view[os.write(descriptor, view) :]


def _set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Whether writes go past the cache from now on."""
    if not _DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & _DIRECT) == wanted:
        return wanted
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ _DIRECT)
    except OSError:
        return False
    return wanted


_LONGEST_WAIT_S = 0.5
_TRIES = 100
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """A `Store` in the folder at `path`, which is made when something is written.

    Areas are folders ``.writing-step-…`` beside the checkpoints; only the publisher, which has begun one, holds its
    lock. `points` are those of `phalanx.checkpoint.storage.folder`, where tests inject faults.
    """

    def __init__(self, path: Path, points: Points = NO_POINTS) -> None:
        self.path = path
        self._points = points
        self._locks: dict[str, int] = {}

    @property
    def url(self) -> str:
        """The path."""
        return str(self.path)

    def names(self) -> list[str]:
        """See `Store`."""
        return [candidate.path.name for candidate in folders.candidates(self.path)]

    def quarantined(self) -> list[str]:
        """See `Store`."""
        found = []
        with suppress(FileNotFoundError, NotADirectoryError):
            found = [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
        return checkpoint_store.newest_first([name for name in found if checkpoint_store.quarantined(name)])

    def at(self, name: str) -> FolderFiles:
        """See `Store`."""
        return FolderFiles(self.path / plain(name))

    def files(self, name: str) -> list[str]:
        """See `Store`."""
        return sorted(self.at(name).sizes())

    def begin(self, step: int, attempt: int, nonce: str) -> str:
        """See `Store`. FileExistsError: a living process has begun it already."""
        aside = self._area(step, attempt, nonce)
        self.path.mkdir(parents=True, exist_ok=True)
        self._locks[aside.name] = folders.hold(aside)
        try:
            aside.mkdir()
        except OSError:
            self._release(aside)
            raise
        return aside.name

    def join(self, step: int, attempt: int, nonce: str, timeout_s: float) -> str:
        """See `Store`. The parent folder is listed, which NFS answers anew, instead of asking for the name."""
        aside = self._area(step, attempt, nonce)
        deadline, wait_s = time.monotonic() + timeout_s, 0.005
        while True:
            with suppress(FileNotFoundError):
                if aside.name in os.listdir(self.path):  # noqa: PTH208
                    return aside.name
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"nobody began it within {timeout_s:.0f} s", str(aside))
            time.sleep(min(wait_s, max(0.0, deadline - time.monotonic())))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def write(self, area: str, file: str, content: Iterable[Buffer]) -> FileEntry:
        """See `Store`. The file has its name only when it is whole and durable: a waiting publisher reads it and
        renames the folder at once."""
        path = self.path / plain(area) / plain(file)
        with _naming(path), _folder_of(path) as folder:
            half_made = f".{file}.{uuid.uuid4().hex[:12]}"
            try:
                size_bytes, sha256 = _write(half_made, folder, content)
                os.replace(half_made, file, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(half_made, dir_fd=folder)
                raise
            os.fsync(folder)
        return FileEntry.model_construct(name=file, size_bytes=size_bytes, sha256=sha256)

    def publish(self, area: str, step: int) -> str:
        """See `Store`.

        Raises:
            SupersededError: the publisher was asleep while a higher attempt took charge, and woke up to replace a
                checkpoint of the same step, which is given its name back.
        """
        aside = self._held(area)
        if folders.published_path(aside).name != folders.checkpoint_name(step):
            raise ValueError(f"{area} is not an area of step {step}")
        for file in (MANIFEST, SUMS):
            self.at(area).size_bytes(file)
        final = folders.publish(aside, self._points)
        try:
            require_charge(read_latest(self), _attempt_and_nonce(area)[0])
        except SupersededError:
            if folders.give_back(aside):
                raise
        self._release(aside)
        return final.name

    def discard(self, area: str) -> None:
        """See `Store`."""
        if area in self._locks:
            self._release(self.path / area)

    def quarantine(self, area: str, why: str) -> str:
        """See `Store`."""
        aside = self._held(area)
        final = folders.published_path(aside).name
        full_name = checkpoint_store.full_name(checkpoint_store.step_of(final), *_attempt_and_nonce(area))
        target = aside.with_name(checkpoint_store.quarantine_name(why, full_name))
        fsync_folder(aside)
        aside.rename(target)
        fsync_folder(self.path)
        self._release(aside)
        return target.name

    def delete(self, name: str) -> None:
        """See `Store`."""
        folders.delete(self.path / plain(name), self._points)

    def clean(self, attempt: int) -> None:
        """See `Store`. Locks distinguish dead writers from living ones, of whatever attempt."""
        folders.clean(self.path)

    def create(self, key: str, content: bytes) -> bool:
        """See `Store`. UserError: the file system has no hard links."""
        path = self.path / plain(key)
        self.path.mkdir(parents=True, exist_ok=True)
        with _naming(path):
            for _ in range(_TRIES):
                made = self._create(path, content)
                if made is not None:
                    fsync_folder(self.path)
                    return made
        raise OSError(errno.EAGAIN, f"what was to become it vanished {_TRIES} times: something clears up here", path)

    def keys(self, prefix: str) -> list[str]:
        """See `Store`."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(entry.name for entry in os.scandir(self.path) if entry.name.startswith(prefix))
        return []

    def get(self, key: str) -> bytes:
        """See `Store`."""
        return read_regular(self.path / plain(key), KEY_MOST_BYTES)

    def remove(self, key: str) -> None:
        """See `Store`."""
        (self.path / plain(key)).unlink(missing_ok=True)

    def _create(self, path: Path, content: bytes) -> bool | None:
        """None: a cleaner in another process took the half made file for a leftover before it was locked."""
        half_made = path.with_name(f"{folders.CREATING}{path.name}-{uuid.uuid4().hex[:12]}")
        descriptor = os.open(half_made, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            folders.try_lock(descriptor)
            with os.fdopen(os.dup(descriptor), "wb") as stream:
                stream.write(content)
            os.fsync(descriptor)
            path.hardlink_to(half_made)
        except FileExistsError:
            return False
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NO_LINKS:
                cure = "put the run on a file system that has hard links, or on an object store"
                raise UserError("cannot make a file only if there is none", cure=cure, field=str(path)) from error
            raise
        finally:
            half_made.unlink(missing_ok=True)
            os.close(descriptor)
        return True

    def _area(self, step: int, attempt: int, nonce: str) -> Path:
        checkpoint_store.full_name(step, attempt, nonce)  # refuses a nonce that cannot be part of a name
        return self.path / f"{folders.WRITING}{folders.checkpoint_name(step)}-a{attempt}.{nonce}"

    def _held(self, area: str) -> Path:
        if area not in self._locks:
            raise ValueError(f"{area} was not begun here, or has been published or discarded")
        return self.path / area

    def _release(self, aside: Path) -> None:
        folders.release(aside, self._locks.pop(aside.name))


@contextmanager
def _folder_of(path: Path) -> Iterator[int]:
    """The descriptor of the folder of a file, which stays that of the same folder when it is renamed."""
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(file: str, folder: int, content: Iterable[Buffer]) -> tuple[int, str]:
    """Size and SHA-256 of what was written."""
    digest, size_bytes = hashlib.sha256(), 0

    def counted() -> Iterator[Buffer]:
        nonlocal size_bytes
        for piece in content:
            size_bytes += memoryview(piece).nbytes
            yield piece

    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        write_whole(descriptor, counted(), digest)
    finally:
        os.close(descriptor)
    return size_bytes, digest.hexdigest()


def _attempt_and_nonce(area: str) -> tuple[int, str]:
    attempt, _, nonce = area.rpartition("-")[2].partition(".")
    return int(attempt.removeprefix("a")), nonce


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors of calls that know only its descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and (error.filename is None or not os.path.isabs(error.filename)):  # noqa: PTH117
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
