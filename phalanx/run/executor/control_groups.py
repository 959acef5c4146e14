"""Three ways of holding the processes of a rank together, so that all are found and none gets away. Linux only.

=============  =====================  ==================================  =============================================
way            what belongs           what holds them still               what is left when the executor is killed
=============  =====================  ==================================  =============================================
cgroup         all in the group       the freezer                         the guard, or the next executor, kills it
pid-namespace  all but the executor   SIGSTOP to all, by its init         the kernel kills all: their init is gone
subreaper      its descendants        SIGSTOP to groups, until no more    the guard kills it
=============  =====================  ==================================  =============================================

Whatever a process in a control group starts is in the group, however it detaches itself; frozen, the group holds still
while it is looked at and killed, so that none can fork away from that. The group is one of our own, where the host lets
us make one: version 2, else the freezer of version 1.

The last way can be escaped from by a process that forks, detaches itself and ends faster than /proc is read, over and
over.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.host import own_groups, parse_mounts
from phalanx.ipc.processes import Process, descendants, processes, read_process, send

_FREEZE_S = 0.5
_POLL_S = 0.001
_REMOVE_S = 1.0
_NAMES = 100


@dataclass(frozen=True)
class GroupHome:
    """Where this process stands in a hierarchy of control groups."""

    version: int  # 2, or 1 for the freezer's hierarchy
    folder: Path  # of its own group


def homes(proc: Path = Path("/proc")) -> list[GroupHome]:
    """The hierarchies in which a group could be made, version 2 first."""
    groups = own_groups(proc)
    mounts = parse_mounts((proc / "self" / "mountinfo").read_text())
    own = {version: groups[name] for version, name in ((2, ""), (1, "freezer")) if name in groups}
    found = []
    for version, path in own.items():
        for mount in mounts:
            fits = mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and "freezer" in mount.options
            if fits and (mount.root == "/" or path == mount.root or path.startswith(f"{mount.root}/")):
                below = path[len(mount.root) if mount.root != "/" else 0 :].lstrip("/")
                found.append(GroupHome(version, Path(mount.point) / below))
                break
    return found


_ROUNDS = 100  # of stopping what has been started meanwhile
_STILL = "TtDZX"  # stopped, traced, in the kernel or gone


class Containment(ABC):
    """How processes are held together. `reason`: why it was chosen, and what the others lacked, for people."""

    name: str
    reason: str = ""

    @abstractmethod
    def contain(self, pid: int) -> None:
        """Hold a process, and what it starts. Raises OSError: it cannot be held."""

    @abstractmethod
    def members(self, own: Set[int]) -> set[int]:
        """All that is held and runs.

        Args:
            own: children of the executor that are none of it (helpers of its own), with what they start.
        """

    @abstractmethod
    def frozen(self, own: Set[int]) -> AbstractContextManager[set[int]]:
        """A context in which nothing that is held runs, as far as the kernel can see to that; gives the members."""

    def release(self, pid: int) -> None:
        """A process is to live longer than this executor."""
        return

    def kill_rest(self, safe: Set[int]) -> bool:
        """Kill all that is held at one stroke, if that can be done and spares these; False: it cannot."""
        return False

    def close(self) -> None:
        """Give back what the way took of the host."""
        return


class ByGroup(Containment):
    """A control group that this process and its forks hold, by a lock that the kernel gives back when they end.

    Args:
        home: the group in which it is made.
        name: of it. What an executor that was killed has left under this name is taken over, with what still runs in
            it; if somebody holds it, a name beside it is used.

    Raises:
        OSError: it cannot be made, or processes cannot be moved into it.
    """

    name = "cgroup"

    def __init__(self, home: GroupHome, name: str) -> None:
        self._version, self._home, self._lock = home.version, home.folder, -1
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:100]
        for number in range(_NAMES):
            self.folder = home.folder / (f"phalanx-{slug}-{number}" if number else f"phalanx-{slug}")
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(self._lock)
                self._lock = -1
        else:
            raise FileExistsError(f"{_NAMES} groups beside {home.folder}/phalanx-{slug} are in use")
        try:
            # A process that waits for nothing is moved into the group and frozen: what is refused is refused now.
            ready, wake = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(wake)
                os.read(ready, 1)
                os._exit(0)
            try:
                self._add(pid)
                with self.frozen(frozenset()):
                    pass
            finally:
                os.close(wake)
                os.close(ready)
                os.waitpid(pid, 0)
        except OSError:
            self.close()
            raise

    def contain(self, pid: int) -> None:
        """Move it and all its descendants, until no new one is found outside."""
        self._add(pid)
        while outside := descendants(processes(), {pid}) - self._pids():
            moved = 0
            for other in outside:
                with suppress(OSError):
                    self._add(other)
                    moved += 1
            if not moved:  # zombies only
                return

    def members(self, own: Set[int]) -> set[int]:
        """The processes in the group; helpers of the executor never are."""
        found = (read_process(pid) for pid in self._pids())
        return {process.pid for process in found if process is not None and process.is_alive}

    @contextmanager
    def frozen(self, own: Set[int]) -> Iterator[set[int]]:
        """By the freezer. What was killed meanwhile does not go on: it ends before it runs again."""
        freezer = self.folder / ("cgroup.freeze" if self._version == 2 else "freezer.state")
        until_s = time.monotonic() + _FREEZE_S
        freezer.write_text("1" if self._version == 2 else "FROZEN")
        while time.monotonic() < until_s:  # no longer: what the kernel holds may not freeze at all
            if self._version == 2:
                is_frozen = "frozen 1" in (self.folder / "cgroup.events").read_text()
            else:
                is_frozen = freezer.read_text().strip() == "FROZEN"
            if is_frozen:
                break
            time.sleep(_POLL_S)
        try:
            yield self.members(own)
        finally:
            freezer.write_text("0" if self._version == 2 else "THAWED")

    def release(self, pid: int) -> None:
        """Move it to where this process stands; nothing where it is gone."""
        with suppress(ProcessLookupError):
            (self._home / "cgroup.procs").write_text(str(pid))

    def kill_rest(self, safe: Set[int]) -> bool:
        """By ``cgroup.kill``, unless one of these is in the group; kernels before 5.14 and version 1 have none."""
        if safe & self._pids():
            return False
        try:
            (self.folder / "cgroup.kill").write_text("1")
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Remove the group, once nothing is left in it; what cannot be removed stays, for the next of this name."""
        until_s = time.monotonic() + _REMOVE_S
        while self.folder.exists() and not self._pids() and time.monotonic() < until_s:
            try:
                for folder, _, _ in os.walk(self.folder, topdown=False):
                    Path(folder).rmdir()
            except OSError:
                time.sleep(_POLL_S)  # what has just ended counts for a moment
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))  # what it has started before stays where it is

    def _pids(self) -> set[int]:
        """All processes in the group, and in groups that they made in it, zombies left out."""
        found: set[int] = set()
        for folder, _, _ in os.walk(self.folder):
            with suppress(OSError):
                found.update(int(line) for line in (Path(folder) / "cgroup.procs").read_text().split())
        return found - {0}


class _BySignals(Containment):
    """What has no freezer is halted with SIGSTOP."""

    @abstractmethod
    def _stop(self, own: Set[int], stopped: dict[int, Process]) -> set[int]:
        """Halt all; returns the members, and adds those that ran before to `stopped`."""

    @contextmanager
    def frozen(self, own: Set[int]) -> Iterator[set[int]]:
        """By SIGSTOP; what is not killed meanwhile goes on, unless it was stopped before."""
        stopped: dict[int, Process] = {}
        try:
            yield self._stop(own, stopped)
        finally:
            for process in stopped.values():
                with suppress(PermissionError):
                    send(process, signal.SIGCONT)


class ByNamespace(_BySignals):
    """A PID namespace of which this process is the init, and whose /proc it sees."""

    name = "pid-namespace"

    def contain(self, pid: int) -> None:
        """Nothing to do: whatever this process starts is in the namespace."""

    def members(self, own: Set[int]) -> set[int]:
        """All but this process and its helpers."""
        return self._among(processes(), own)

    @staticmethod
    def _among(table: dict[int, Process], own: Set[int]) -> set[int]:
        mine = own | descendants(table, own) | {os.getpid()}
        return {pid for pid, process in table.items() if pid not in mine and process.is_alive}

    def _stop(self, own: Set[int], stopped: dict[int, Process]) -> set[int]:
        assert os.getpid() == 1  # else it would be every process of this user
        before = {pid for pid, process in processes().items() if process.state == "T"}
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)  # all at once: also what is being forked at this moment
        table = processes()
        stopped |= {pid: process for pid, process in table.items() if pid != 1 and pid not in before}
        return self._among(table, own)


class BySubreaper(_BySignals):
    """This process is the parent that orphans below it come to, so all that is held descends from it."""

    name = "subreaper"

    def contain(self, pid: int) -> None:
        """Nothing to do: it is a descendant of this process."""

    def members(self, own: Set[int]) -> set[int]:
        """All descendants of this process but its helpers and theirs."""
        return set(self._look(own)[0])

    def _look(self, own: Set[int]) -> tuple[dict[int, Process], set[int]]:
        """What is held and runs; and the process groups of what has ended, whose numbers no other can have yet."""
        table = processes()
        below = [table[pid] for pid in descendants(table, {os.getpid()}) - own - descendants(table, own)]
        zombies = {process.group for process in below if not process.is_alive}
        return {process.pid: process for process in below if process.is_alive}, zombies

    def _stop(self, own: Set[int], stopped: dict[int, Process]) -> set[int]:
        """Stop whole process groups, which catches those that are forking, until all stand and no new one is found.

        One that forks and ends all the time is hardly ever seen, but the zombies that it leaves show its group.
        """
        found: dict[int, Process] = {}
        for number in range(_ROUNDS):
            found, zombies = self._look(own)
            new = {pid: process for pid, process in found.items() if pid not in stopped and process.state != "T"}
            if number and not new and all(found[pid].state in _STILL for pid in stopped if pid in found):
                break
            stopped |= new
            # Whatever else is in a group of a descendant descends from this process too, but for the groups of these.
            helpers = (read_process(pid) for pid in own)
            shared = {os.getpgrp()} | {process.group for process in helpers if process is not None}
            for group in (zombies | {process.group for process in new.values()}) - shared:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGSTOP)
            for process in new.values():
                with suppress(PermissionError):
                    send(process, signal.SIGSTOP)
            time.sleep(_POLL_S)
        return set(found)
