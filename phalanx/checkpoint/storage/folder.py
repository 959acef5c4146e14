"""The folder that holds the checkpoints of a run: names, publishing all at once, and clearing up after killed writers.

    step-00001200                        a whole checkpoint
    .writing-step-00001300-3f…           one being written
    .writing-step-00001300-3f….lock      held (flock) by its writer for as long as that process lives
    .writing-step-00001300-3f….replaced  the checkpoint of the same step that it takes the place of, for a moment
                                         (only where two folders cannot change names in one step)
    .deleting-step-00001000-9a…          one being deleted
    stale-step-00001100.a3-3f…           one that is kept aside and never used (also ``sick-…``)
    odd-step-00001200-7c…                what bore the name of a checkpoint and was no folder, and so in the way of one
    latest-00000007.json                 the pointer, see `phalanx.checkpoint.storage.latest`
    .creating-latest-00000007.json-5c…   a small file being made; locked like the above

The kernel drops a lock with its process, so a lock that can be taken marks a leftover, and a second process at work in
the same folder is never disturbed. Where the file system has no locks, leftovers are left alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.files import fsync_folder

_log = logging.getLogger(__name__)

_FINAL = re.compile(r"step-(\d{8,})")
WRITING = ".writing-"
CREATING = ".creating-"
_DELETING = ".deleting-"
_LOCK = ".lock"
_REPLACED = ".replaced"
_AT_FDCWD = -100  # <fcntl.h>
_RENAME_EXCHANGE = 2  # <linux/fs.h>
_TRIES = 100  # where each is in vain only because another process came between


@dataclass(frozen=True, order=True)
class Candidate:
    """A folder that bears the name of a checkpoint; whether it is whole is another question."""

    step: int
    path: Path


def checkpoint_name(step: int) -> str:
    """``step-00000012`` for step 12."""
    return f"step-{step:08d}"


def candidates(folder: Path) -> list[Candidate]:
    """Everything in `folder` that bears the name of a checkpoint, newest (largest step) first; none if it is absent."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = _FINAL.fullmatch(path.name)
            if match and checkpoint_name(int(match[1])) == path.name and path.is_dir():
                found.append(Candidate(int(match[1]), path))
    return sorted(found, reverse=True)


def hold(aside: Path) -> int:
    """Take the lock of the folder `aside`, which is yet to be made; what a killed writer left of it is removed.

    Returns:
        The descriptor of the lock, for `release`.

    Raises:
        FileExistsError: a living writer holds it (or it cannot be known, where the file system has no locks).
    """
    lock = Path(f"{aside}{_LOCK}")
    was_ours = False
    for _ in range(_TRIES):
        _clean_writing(aside)
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if not was_ours:
                raise
            time.sleep(0.001)  # whoever took our new file for a leftover is about to remove it
            continue
        if try_lock(descriptor) is not False and lock.exists():
            return descriptor
        os.close(descriptor)
        was_ours = True
    raise OSError(errno.EAGAIN, f"other processes took it for a leftover, {_TRIES} times", str(lock))


def release(aside: Path, lock: int) -> None:
    """Remove what is still at `aside`, or there in its place, and release the lock."""
    _recover(aside)
    Path(f"{aside}{_LOCK}").unlink(missing_ok=True)
    os.close(lock)


def published_path(aside: Path) -> Path:
    """The final place of what is written at `aside`."""
    return aside.parent / aside.name.removeprefix(WRITING).rpartition("-")[0]


def publish(aside: Path, points: Points = NO_POINTS) -> Path:
    """Give the finished folder `aside` its final name, durably, and return its new path.

    A checkpoint of the same step changes names with it in one call of the system, so that one of the two is there at
    every moment. File systems that cannot do that (NFS) need two renames: between them neither is there, and should
    this process die there, `clean` puts the former one back. What bears the name and is not a folder is moved aside.
    """
    final = published_path(aside)
    fsync_folder(aside)
    points.reach("checkpoint.before-rename", path=aside)
    for _ in range(_TRIES):
        _make_way(final)
        if _rename_to_free(aside, final) or exchange(aside, final):
            break
        _rename_to_free(final, Path(f"{aside}{_REPLACED}"))
        points.reach("checkpoint.between-renames", path=aside)
    else:
        problem = f"something lies there again after {_TRIES} tries to make room"
        raise FileExistsError(errno.EEXIST, problem, str(final))
    points.reach("checkpoint.after-rename", path=final)
    fsync_folder(aside.parent)
    points.reach("checkpoint.published", path=final)
    return final


def give_back(aside: Path) -> bool:
    """Undo `publish` where it took the place of another checkpoint, which is still at hand; whether it did."""
    final, replaced = published_path(aside), Path(f"{aside}{_REPLACED}")
    if aside.exists():
        given_back = exchange(aside, final)
    elif replaced.exists():
        final.rename(aside)
        given_back = _rename_to_free(replaced, final)
    else:
        return False
    fsync_folder(aside.parent)
    return given_back


def clean(folder: Path) -> None:
    """Remove what killed writers and deleters left in `folder`; put back a checkpoint whose replacement was cut short.

    Does nothing to folders that a living process writes, and nothing where this process may not write.
    """
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.startswith((WRITING, _DELETING, CREATING)))
    except OSError:
        return
    for path in {folder / name.removesuffix(_LOCK).removesuffix(_REPLACED) for name in names}:
        with suppress(OSError):  # what cannot be cleared up hinders no other
            if path.name.startswith(CREATING):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if try_lock(descriptor) is True:
                        path.unlink(missing_ok=True)
                finally:
                    os.close(descriptor)
            elif path.name.startswith(_DELETING):
                shutil.rmtree(path, ignore_errors=True)
            else:
                _clean_writing(path)


def delete(path: Path, points: Points = NO_POINTS) -> None:
    """Delete a checkpoint so that, killed half way, no part of it bears the name of a checkpoint."""
    aside = path.with_name(f"{_DELETING}{path.name}-{uuid.uuid4().hex[:12]}")
    path.rename(aside)
    fsync_folder(path.parent)
    points.reach("checkpoint.deleting", path=aside)
    shutil.rmtree(aside, ignore_errors=True)


def _make_way(final: Path) -> None:
    """Move what is not a folder (a link, even to one) out of the way of a checkpoint; a person may need it."""
    if not os.path.lexists(final) or (final.is_dir() and not final.is_symlink()):
        return
    aside = final.with_name(f"odd-{final.name}-{uuid.uuid4().hex[:12]}")
    with suppress(FileNotFoundError):  # another process was faster
        final.rename(aside)
        _log.warning("%s was no folder, and in the way of a checkpoint: it is kept as %s", final, aside.name)


def try_lock(descriptor: int) -> bool | None:
    """Whether the lock of an open file could be taken, without waiting; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _clean_writing(aside: Path) -> None:
    lock = Path(f"{aside}{_LOCK}")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # A living writer makes its lock before its folder and removes it after, so this folder has no writer.
        _recover(aside)
        return
    try:
        if try_lock(descriptor) is True:
            _recover(aside)
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _recover(aside: Path) -> None:
    """Remove `aside`; put back the checkpoint it was to replace if nothing took its place, else remove that too."""
    replaced = Path(f"{aside}{_REPLACED}")
    final = published_path(aside)
    if replaced.exists() and _rename_to_free(replaced, final):
        fsync_folder(aside.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


def exchange(left: Path, right: Path) -> bool:
    """Let two folders change names in one step (Linux ``renameat2(2)``); whether it was done."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # another system, or a C library older than glibc 2.28
        return False
    names = os.fsencode(left.absolute()), os.fsencode(right.absolute())
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def _rename_to_free(source: Path, target: Path) -> bool:
    """Rename a folder unless something lies at `target` (or `source` has gone); whether it was done."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or (error.errno == errno.ENOENT and not source.exists()):
            return False
        raise
    return True
