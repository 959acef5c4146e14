"""Which processes are keepers of checkpoints, which outlive the ranks that have started them. Linux, torch-free.

A keeper is known by what only it has: the listening socket at an address in a folder that only this user can enter, in
a session whose leader has gone, and by running the keeper's program. A rank that is about to start a keeper has that
socket too, for a moment, and so have processes that it forks in this moment; but they run the rank's program.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.keeper.start import VARIABLE
from phalanx.core.kernel_files import PROC
from phalanx.core.process_table import Process, descendants, read_process

_PROGRAM = b"phalanx.checkpoint.keeper.main"
_LISTENS = 1 << 16  # __SO_ACCEPTCON, as /proc/net/unix shows it


def keepers_among(table: Mapping[int, Process], environ: Mapping[str, str]) -> set[int]:
    """The keepers, and what they have started, among the processes of `table`.

    Args:
        environ: of the job, which may say where its keepers listen.
    """
    detached = [pid for pid, process in table.items() if _is_detached(process) and _runs_keeper(pid)]
    inodes = _listening(environ) if detached else set()
    found = {pid for pid in detached if inodes and inodes & _sockets(pid)}
    return found | descendants(table, found)


def _is_detached(process: Process) -> bool:
    """Whether it is in a session whose leader has gone."""
    if process.session == process.pid:
        return False
    leader = read_process(process.session)
    return leader is None or not leader.is_alive


def _runs_keeper(pid: int) -> bool:
    """Whether it was started as a keeper is: not enough to be one, for anybody can be started so."""
    try:
        return _PROGRAM in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def _listening(environ: Mapping[str, str]) -> set[str]:
    """Inodes of the sockets that listen where keepers do."""
    found = set()
    for line in (PROC / "net" / "unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & _LISTENS and _is_address(fields[7], environ):
            found.add(fields[6])
    return found


def _is_address(path: str, environ: Mapping[str, str]) -> bool:
    """Whether it is one that `phalanx.checkpoint.keeper.start.address_for` could give to this user."""
    address = Path(path)
    given = environ.get(VARIABLE)
    if given and address == Path(given).absolute():
        return _is_ours(address.parent, 0o022)
    temporary = {environ.get("XDG_RUNTIME_DIR"), environ.get("TMPDIR"), tempfile.gettempdir()} - {None, ""}
    folders = [Path(str(folder)) / f"phalanx-{os.geteuid()}" for folder in temporary]
    return address.parent in folders and address.name.startswith("keeper-") and _is_ours(address.parent, 0o077)


def _is_ours(folder: Path, forbidden: int) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & forbidden


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                target = str(link.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found
