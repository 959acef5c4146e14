"""A benchmark leaves nothing behind, however it ends: no processes, no mounts, no temporary files. Linux."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.core.host import parse_mounts

_MARK = "WORK_FOLDER"
"""A variable of all that a benchmark starts; the name tells ranks nothing of what is to happen to them."""

_ORDERLY = (signal.SIGTERM, signal.SIGHUP)
_GOING_S = 60.0
_POLL_S = 0.02


@contextlib.contextmanager
def nothing_left(
    after: Callable[[Path], None] = lambda folder: None, *, keep: bool = False, inside: Path | None = None
) -> Iterator[Path]:
    """The folder for temporary files, which goes, with all that was started meanwhile, when this process ends.

    SIGTERM and SIGHUP end it as Ctrl-C does: contexts are left. Where it does not come to that, as with SIGKILL, a
    second process does it, which waits for that. What was started is known by a variable that it inherits; so what was
    forked from this process, and has started no other program, is not found.

    Args:
        after: lets go of what else belongs to the folder, once no process does; called in either process.
        keep: what is in the folder stays.
        inside: where the folder is made.
    """
    folder = Path(tempfile.mkdtemp(prefix="work-", dir=inside)).absolute()
    warden = _start_warden(lambda: _clear(folder, after, keep=keep))
    with _marked(folder), _signals_raise():
        try:
            yield folder
        finally:
            _clear(folder, after, keep=keep)  # where a signal interrupts that, the warden does it
            os.kill(warden, signal.SIGKILL)
            os.waitpid(warden, 0)


def _started(folder: Path) -> list[int]:
    """Processes that have inherited the mark."""
    found, wanted = [], f"{_MARK}={folder}\0".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has gone, or is another's
                if wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return sorted(found)


def _start_warden(clear: Callable[[], None]) -> int:
    """A process that waits for the end of this one, and then clears up; it hears no signals for its group."""
    ours = os.pidfd_open(os.getpid())
    warden = os.fork()
    if warden:
        os.close(ours)
        return warden
    try:
        os.setsid()
        for number in (signal.SIGINT, *_ORDERLY):
            signal.signal(number, signal.SIG_IGN)
        select.select([ours], [], [])
        clear()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # the frames above are the benchmark's


def _clear(folder: Path, after: Callable[[Path], None], *, keep: bool) -> None:
    _kill_started(folder)
    mounts = [mount.point for mount in parse_mounts(Path("/proc/self/mountinfo").read_text())]
    for point in reversed(mounts):
        if point.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", point], check=False)
    after(folder)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    elif not any(folder.iterdir()):
        folder.rmdir()


def _kill_started(folder: Path) -> None:
    """SIGKILL, until there is nobody left: what is killed may be about to start something."""
    end_s = time.monotonic() + _GOING_S
    while (left := _started(folder)) and time.monotonic() < end_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    if left:
        print(f"these processes do not end: {left}", file=sys.stderr)


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """What is started meanwhile inherits the mark, and temporary files of this process are in the folder."""
    before = tempfile.tempdir
    os.environ[_MARK] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        del os.environ[_MARK]


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Signals that would end this process without a word leave its contexts first."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    mine = [number for number in _ORDERLY if signal.getsignal(number) == signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
