"""Files as a whole: written so that a reader never sees half of one, and read so that nothing else is taken for one.

Private files are those of a cache that belongs to one user: a reader trusts only what this user has written.
They are kept in ``$XDG_CACHE_HOME/phalanx/warm``, or where PHALANX_WARM_CACHE says.

`folder_lock` keeps a folder for one process at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.core.errors import UserError

_BLOCK_BYTES = 1 << 18
_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))


class OddFileError(OSError):
    """Where a file should be lies something else, or a file larger than such a file can be; `strerror` says what."""


class StoreFailedError(OSError):
    """An object store gave no answer, or refused, or gave something else than was asked for.

    That says nothing about what it holds: no object counts as missing or damaged for it.
    """

    def to_user(self) -> UserError:
        """The error as a person reads it; names the object."""
        return UserError(
            f"the store failed ({self.strerror})",
            cure="nothing says that what lies there is damaged: start again when the store answers",
            field=self.filename,
        )


class StoreRefusedError(StoreFailedError, PermissionError):
    """It refused for want of a right."""


@contextmanager
def store_failures_told() -> Iterator[None]:
    """The block's failures of a store as a `UserError`."""
    try:
        yield
    except StoreFailedError as error:
        raise error.to_user() from error


def open_regular(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading, without waiting for anybody, whatever lies there; links are followed.

    Raises:
        OddFileError: it is a directory, a FIFO, a socket, a device, a link to nothing, or has more than `most_bytes`.
        OSError: it cannot be opened; FileNotFoundError: nothing lies there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        # Not whether anything lies there by now: a file may have come between the two calls.
        if error.errno == errno.ENXIO or (error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink()):
            what = "a socket" if error.errno == errno.ENXIO else "a link to nothing"
            raise _no_file(path, what) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _no_file(path, next((what for is_it, what in _KINDS if is_it(found.st_mode)), "a device"))
        if most_bytes is not None and found.st_size > most_bytes:
            raise too_large(path, found.st_size, most_bytes)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def first_refused(*places: Path) -> Path | None:
    """The first file or folder that this user may not read, of these and of what lies below; None: there is none.

    What is not there is passed over, and links below a folder are not followed.
    """
    for place in places:
        if _is_refused(place):
            return place
        for folder, folders, files in os.walk(place):
            for name in sorted((*folders, *files)):
                if _is_refused(path := Path(folder, name)):
                    return path
    return None


def _is_refused(path: Path) -> bool:
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return isinstance(error, PermissionError)
    return not os.access(path, os.R_OK | os.X_OK if is_folder else os.R_OK) and path.exists()


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All of a small file; errors as of `open_regular`."""
    with open_regular(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def too_large(path: Path | str, size_bytes: int, most_bytes: int) -> OddFileError:
    """The error for a file that is larger than such a file can be, before any of it is read."""
    problem = f"it has {size_bytes:,} bytes, more than the {most_bytes:,} that it can have"
    return OddFileError(errno.EFBIG, problem, str(path))


def _no_file(path: Path, what: str) -> OddFileError:
    return OddFileError(errno.EINVAL, f"it is {what}, and no file", str(path))


def fsync_folder(folder: Path) -> None:
    """Make renames and new names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def current_umask() -> int:
    """The bits that are taken away from the modes of new files and folders; a property of the whole process."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
    except (OSError, StopIteration):  # not Linux: it can only be read by changing it
        umask = os.umask(0o077)
        os.umask(umask)
        return umask


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that takes the place of `path` only when the block ends without an error.

    The file is written beside `path`, fsynced and renamed over it, then the folder is fsynced.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, durably and all at once."""
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, durably and all at once."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


VARIABLE = "PHALANX_WARM_CACHE"
"""Names the folder; set but empty: nothing is kept."""


def private_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of the cache; None where none can be made that only this user can write to."""
    home = environ.get("HOME", "")
    base = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    named = environ.get(VARIABLE, f"{base}/phalanx/warm" if base else "")
    folder = Path(named)
    return folder if named and folder.is_absolute() and make_private(folder) else None


def this_python() -> tuple[str, ...]:
    """What this interpreter is, as far as what it compiles and imports depends on it."""
    return os.path.realpath(sys.executable), sys.prefix, sys.version, str(sys.flags.optimize)


def digest(*parts: str) -> str:
    """A name for all of them."""
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:40]


def make_private(folder: Path) -> bool:
    """Make a folder, if need be; whether it is a folder of this user that nobody else can write to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _is_private(folder.lstat(), stat.S_ISDIR)
    except OSError:
        return False


def _is_private(found: os.stat_result, is_kind: Any) -> bool:
    """Whether a file or folder is of this kind, this user's, and others may not write to it."""
    return bool(is_kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def lines_backwards(file: BinaryIO, end: int | None = None) -> Iterator[bytes]:
    """The lines of a file, the last first, without their ends; of its first `end` bytes, None: of all."""
    size = file.seek(0, os.SEEK_END)
    start, rest, is_end = size if end is None else min(size, end), b"", True
    while start > 0:
        begin = max(start - _BLOCK_BYTES, 0)
        file.seek(begin)
        block = file.read(start - begin) + rest
        if is_end:
            block, is_end = block.removesuffix(b"\n"), False
        rest, *lines = block.split(b"\n")
        yield from reversed(lines)
        start = begin
    if rest or not is_end:
        yield rest


def read_private(path: Path, most_bytes: int) -> bytes | None:
    """The content of a regular file that only this user can write to; else None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not _is_private(found, stat.S_ISREG) or found.st_size > most_bytes:
            return None
        with contextlib.suppress(OSError):
            return file.read(most_bytes)
    return None


def write_private(path: Path, data: bytes, *, is_durable: bool = False) -> None:
    """Replace a file by one that is this user's alone whatever the umask, all at once.

    If not `is_durable`, a power cut may leave a part of it.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def prune(folder: Path, pattern: str, most: int) -> None:
    """Remove what was used longest ago, so that `most` are left."""
    with contextlib.suppress(OSError):
        found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[most:]:
            for inner in path.iterdir() if path.is_dir() else ():
                inner.unlink(missing_ok=True)
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def folder_lock(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Make `folder` and hold its lock (flock on the file ``lock``), which goes with the process, however that ends.

    `waiting` is called once when another process has it.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    with friendly_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def friendly_os_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, or no right to write in `folder`, into a `UserError` with its cure."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            cure = "free some space, or set data.folder to another disk; finished shards are kept"
            raise UserError(
                f"the disk is full ({error.strerror})", cure=cure, field="data.folder", value=str(folder)
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
            cure = "set data.folder to a folder you can write to"
            raise UserError(
                f"cannot be written to ({error.strerror})", cure=cure, field="data.folder", value=str(folder)
            ) from None
        raise
