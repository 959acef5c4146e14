"""Three ways of holding the processes of a rank together, so that none gets away: cgroup, PID namespace, subreaper.

A control group of our own, where the host lets us make one: version 2, else the freezer of version 1. Linux.

Whatever a process in the group starts is in the group, however it detaches itself. Frozen, the group holds still while
what is in it is looked at and killed, so none can fork away from that.

Three ways of holding processes together, so that all of them are found and none gets away. Linux only.

=============  =====================  ==================================  =============================================
way            what belongs           what holds them still               what is left when the executor is killed
=============  =====================  ==================================  =============================================
cgroup         who is in the group    the freezer                         the guard, or the next executor, kills it
pid-namespace  all but the executor   SIGSTOP to all, by its init         the kernel kills all: their init is gone
subreaper      who descends from it   SIGSTOP to groups, until no more    the guard kills it
=============  =====================  ==================================  =============================================

The last can be escaped from by a process that forks, detaches itself and ends faster than /proc is read, over and over.

Killing all that is held, but for what is spared, until nothing of it is left. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.host import Mount, own_groups, parse_mounts
from phalanx.ipc.processes import Process, descendants, processes, read_process
from phalanx.run.executor.system_calls import send, until_gone

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


_ROUNDS = 100  # of stopping what has been started meanwhile
_STILL = "TtDZX"  # stopped, traced, in the kernel or gone


class Way(ABC):
    """How processes are held together.

    Attributes:
        name: ``cgroup``, ``pid-namespace`` or ``subreaper``.
        reason: why it was chosen, and what the others lacked, for people.
    """

    name: str
    reason: str = ""

    @abstractmethod
    def contain(self, pid: int) -> None:
        """Hold a process, and what it starts.

        Raises:
            OSError: it cannot be held.
        """

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


class ByGroup(Way):
    """A control group."""

    name = "cgroup"

    def __init__(self, group: Group) -> None:
        self._group = group

    def contain(self, pid: int) -> None:
        """Move it and all its descendants, until no new one is found outside."""
        self._group.add(pid)
        while outside := descendants(processes(), {pid}) - self._group.pids():
            moved = 0
            for other in outside:
                with suppress(OSError):
                    self._group.add(other)
                    moved += 1
            if not moved:  # zombies only
                return

    def members(self, own: Set[int]) -> set[int]:
        """Who is in the group; helpers of the executor never are."""
        return {pid for pid in self._group.pids() if _is_alive(pid)}

    @contextmanager
    def frozen(self, own: Set[int]) -> Iterator[set[int]]:
        """By the freezer."""
        self._group.freeze()
        try:
            yield self.members(own)
        finally:
            self._group.thaw()

    def release(self, pid: int) -> None:
        """Move it out."""
        self._group.put_out(pid)

    def kill_rest(self, safe: Set[int]) -> bool:
        """By ``cgroup.kill``, unless one of these is still in the group."""
        return not safe & self._group.pids() and self._group.kill()

    def close(self) -> None:
        """Remove the group."""
        self._group.remove()


class _BySignals(Way):
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

    def _among(self, table: dict[int, Process], own: Set[int]) -> set[int]:
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
        """What is held and runs; and the process groups of what has ended, whose numbers nobody else can have yet."""
        table = processes()
        mine = own | descendants(table, own)
        below = [table[pid] for pid in descendants(table, {os.getpid()}) - mine]
        return {process.pid: process for process in below if process.is_alive}, {
            process.group for process in below if not process.is_alive
        }

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
            self._signal(new, zombies, own)
            time.sleep(_POLL_S)
        return set(found)

    def _signal(self, new: dict[int, Process], groups: set[int], own: Set[int]) -> None:
        # Whatever else is in a group of a descendant descends from this process too, but for the groups of these.
        helpers = (read_process(pid) for pid in own)
        shared = {os.getpgrp()} | {process.group for process in helpers if process is not None}
        for group in (groups | {process.group for process in new.values()}) - shared:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGSTOP)
        for process in new.values():
            with suppress(PermissionError):
                send(process, signal.SIGSTOP)


def _is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and process.is_alive


_LOOK_S = 0.05


def until_killed(strike: Callable[[], set[int]], within_s: float) -> tuple[set[int], set[int]]:
    """Call `strike` until it finds nobody any more, or the time is over.

    Args:
        strike: kills all that it finds and returns them; see `strike`.

    Returns:
        Who was killed, and who of them has not gone: the kernel does not let go of it, or it is not ours to kill.
    """
    until_s = time.monotonic() + within_s
    killed: set[int] = set()
    while victims := strike():
        killed |= victims
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return killed, victims
        until_gone(victims, min(_LOOK_S, left_s))
    return killed, set()


def strike(way: Way, spared: Callable[[Set[int]], Set[int]], own: Set[int]) -> set[int]:
    """Kill once all that is held and not spared, while it holds still; returns them.

    Args:
        spared: which of these, all that is held, shall live.
        own: see `Way.members`.
    """
    with way.frozen(own) as members:  # even if none is seen: what forks and ends all the time is not, unless it stands
        safe = spared(members) & members
        victims = members - safe
        if victims and not way.kill_rest(safe):
            _kill_each(victims)
    return victims


def _kill_each(pids: Set[int]) -> None:
    for pid in pids:
        process = read_process(pid)
        if process is not None:
            with suppress(PermissionError):
                send(process, signal.SIGKILL)
