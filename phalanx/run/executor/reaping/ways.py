"""Three ways of holding processes together, so that all of them are found and none gets away. Linux, torch-free.

=============  =====================  ==================================  =============================================
way            what belongs           what holds them still               what is left when the executor is killed
=============  =====================  ==================================  =============================================
cgroup         who is in the group    the freezer                         the guard, or the next executor, kills it
pid-namespace  all but the executor   SIGSTOP to all, by its init         the kernel kills all: their init is gone
subreaper      who descends from it   SIGSTOP to groups, until no more    the guard kills it
=============  =====================  ==================================  =============================================

The last can be escaped from by a process that forks, detaches itself and ends faster than /proc is read, over and over.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager, suppress

from phalanx.core.process_table import Process, descendants, processes, read_process
from phalanx.run.executor.reaping.cgroups import Group
from phalanx.run.executor.reaping.tree import send

_ROUNDS = 100  # of stopping what has been started meanwhile
_POLL_S = 0.001
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
