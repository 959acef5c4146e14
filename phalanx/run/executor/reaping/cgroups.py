"""A control group of our own, where the host lets us make one: version 2, else the freezer of version 1. Linux.

Whatever a process in the group starts is in the group, however it detaches itself. Frozen, the group holds still while
what is in it is looked at and killed, so none can fork away from that.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.kernel_files import Mount, own_groups, parse_mounts

_FREEZE_S = 0.5  # what waits in the kernel may not freeze at all
_POLL_S = 0.001
_REMOVE_S = 1.0
_NAMES = 100


@dataclass(frozen=True)
class Home:
    """Where this process stands in a hierarchy of control groups.

    Attributes:
        version: 2, or 1 for the freezer's hierarchy.
        folder: of its own group.
    """

    version: int
    folder: Path


def homes(proc: Path = Path("/proc")) -> list[Home]:
    """The hierarchies in which a group could be made, version 2 first."""
    groups = own_groups(proc)
    mounts = parse_mounts((proc / "self" / "mountinfo").read_text())
    own = {version: groups[name] for version, name in ((2, ""), (1, "freezer")) if name in groups}
    return [home for version, path in own.items() for home in _mounted(version, path, mounts)]


def _mounted(version: int, path: str, mounts: Sequence[Mount]) -> Iterator[Home]:
    """The folder of group `path`, if its hierarchy is mounted here: at most one."""
    for mount in mounts:
        fits = mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and "freezer" in mount.options
        if fits and (mount.root == "/" or path == mount.root or path.startswith(f"{mount.root}/")):
            below = path[len(mount.root) if mount.root != "/" else 0 :].lstrip("/")
            yield Home(version, Path(mount.point) / below)
            return


class Group:
    """A control group that this process and its forks hold, by a lock that the kernel gives back when they end.

    Args:
        home: the group in which it is made.
        name: of it. What an executor that was killed has left under this name is taken over, with what still runs in
            it; if somebody holds it, a name beside it is used.

    Raises:
        OSError: it cannot be made, or processes cannot be moved into it.
    """

    def __init__(self, home: Home, name: str) -> None:
        self.version = home.version
        self._home = home.folder
        self._held = -1
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:100]
        for number in range(_NAMES):
            self.folder = home.folder / (f"phalanx-{slug}-{number}" if number else f"phalanx-{slug}")
            if self._lock():
                break
        else:
            raise FileExistsError(f"{_NAMES} groups beside {home.folder}/phalanx-{slug} are in use")
        try:
            self._try()
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Move a process into the group; what it has started before stays where it is.

        Raises:
            OSError: it is gone, or may not be moved.
        """
        (self.folder / "cgroup.procs").write_text(str(pid))

    def put_out(self, pid: int) -> None:
        """Move a process to where this process stands; nothing where it is gone."""
        with suppress(ProcessLookupError):
            (self._home / "cgroup.procs").write_text(str(pid))

    def pids(self) -> set[int]:
        """All processes in the group, and in groups that they made in it, zombies left out."""
        found: set[int] = set()
        for folder, _, _ in os.walk(self.folder):
            with suppress(OSError):
                found.update(int(line) for line in (Path(folder) / "cgroup.procs").read_text().split())
        return found - {0}

    def freeze(self) -> None:
        """Halt all in the group; returns when they stand still, or after half a second, for what the kernel holds."""
        until_s = time.monotonic() + _FREEZE_S
        if self.version == 2:
            (self.folder / "cgroup.freeze").write_text("1")
        else:
            (self.folder / "freezer.state").write_text("FROZEN")
        while not self._is_frozen() and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def thaw(self) -> None:
        """Let them go on. What was killed meanwhile does not: it ends before it runs again."""
        if self.version == 2:
            (self.folder / "cgroup.freeze").write_text("0")
        else:
            (self.folder / "freezer.state").write_text("THAWED")

    def kill(self) -> bool:
        """Have the kernel kill all in the group, at one stroke; False: this kernel cannot (before 5.14, version 1)."""
        try:
            (self.folder / "cgroup.kill").write_text("1")
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Remove the group, once nothing is left in it; what cannot be removed stays, for the next of this name."""
        until_s = time.monotonic() + _REMOVE_S
        while self.folder.exists() and not self._remove() and time.monotonic() < until_s:
            time.sleep(_POLL_S)  # what has just ended counts for a moment
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _remove(self) -> bool:
        if self.pids():
            return True
        for folder, _, _ in os.walk(self.folder, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:
                return False
        return True

    def _lock(self) -> bool:
        self.folder.mkdir(exist_ok=True)
        self._held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._held)
            self._held = -1
            return False
        return True

    def _is_frozen(self) -> bool:
        if self.version == 2:
            return "frozen 1" in (self.folder / "cgroup.events").read_text()
        return (self.folder / "freezer.state").read_text().strip() == "FROZEN"

    def _try(self) -> None:
        """See that a process can be moved into the group and that the group can be frozen."""
        ready, wake = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(wake)
            os.read(ready, 1)
            os._exit(0)
        try:
            self.add(pid)
            self.freeze()
            self.thaw()
        finally:
            os.close(wake)
            os.close(ready)
            os.waitpid(pid, 0)
