"""A process above the executor that ends what the executor leaves behind, however that ends. Linux only.

    guard ── forks ──► executor ── starts ──► template ── forks ──► ranks

It has nothing to do but to wait. Where a PID namespace holds the processes, the executor is its init and the kernel
does the guard's work.

Which processes are keepers of checkpoints, which outlive the ranks that have started them. Linux only.

A keeper is known by what only it has: the listening socket at an address in a folder that only this user can enter, in
a session whose leader has gone, and by running the keeper's program. A rank that is about to start a keeper has that
socket too, for a moment, and so have processes that it forks in this moment; but they run the rank's program.

No orphans: whatever a worker has started is gone when its attempt has ended. Linux only.

    choice = choose_way(report, name=f"{job}-{host}")
    status = run_guarded(choice, serve, environ=environ)       # serve(reaper) is the executor

In `serve`: ``reaper.contain(template.pid)``; ``reaper.end_attempt(10)`` kills everything but the template and keepers
of checkpoints; ``reaper.end_all(10)`` everything but these keepers. A template that is forking at this moment goes on
with it: it is asked to stop first. Children that the executor starts for itself (to look at a rank, to test the host)
are started by ``reaper.helper``, or they would be taken for something that a rank has left.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.checkpoint.keeper.keeper_start import VARIABLE, ensure_keeper
from phalanx.checkpoint.keeper_contract import KeeperLostError
from phalanx.core.errors import UserError
from phalanx.core.host import PROC
from phalanx.ipc.processes import STOP_SIGNALS, Process, descendants, name_process, processes, read_process
from phalanx.run.executor.control_groups import (
    ByGroup,
    ByNamespace,
    BySubreaper,
    Group,
    Way,
    homes,
    strike,
    until_killed,
)
from phalanx.run.executor.system_calls import (
    become_subreaper,
    children_of_this,
    describe,
    die_with,
    mount_own_proc,
    unshare_pids,
)

_FORWARDED = (*STOP_SIGNALS, signal.SIGHUP)


def run_below(serve: Callable[[], int], after: Callable[[], None], *, in_namespace: bool) -> int:
    """Run ``serve()`` in a new process, wait until it has ended, then call ``after()`` here.

    Signals that mean "stop soon" are passed on to that process, which is in a process group of its own, so that one
    from a terminal reaches it once. It dies with this process.

    Args:
        serve: its exit status.
        in_namespace: make the new process the init of a PID namespace.

    Returns:
        The exit status of the new process; 128 and the number of the signal that killed it.

    Raises:
        OSError: the kernel refuses what is needed, before anything was started.
    """
    become_subreaper()
    if in_namespace:
        unshare_pids()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    parent = 0 if in_namespace else os.getpid()
    child = os.fork()
    if child == 0:
        _be_executor(serve, parent, before, in_namespace)
    handlers = {number: signal.signal(number, lambda number, _: _pass_on(child, number)) for number in _FORWARDED}
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        after()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _be_executor(serve: Callable[[], int], parent: int, mask: set[int | signal.Signals], in_namespace: bool) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        die_with(parent)
        if in_namespace:
            mount_own_proc()
        become_subreaper()
        name_process("phalanx executor")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = serve()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(status)  # the frames above are the guard's


def _pass_on(child: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


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
    """Whether it is one that `phalanx.checkpoint.keeper.keeper_start.address_for` could give to this user."""
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


WAYS = ("cgroup", "pid-namespace", "subreaper")
"""In order of preference. A control group comes first, although a namespace is as tight: scripts do not notice it,
while in a namespace process ids are others than the host's, and than those that devices report."""

_GUARD_S = 30.0

Release = Callable[[Set[int], float], Sequence[str]]
"""Waits until devices have taken back what these processes held, at most so many seconds; says what they have not."""


@dataclass(frozen=True)
class Killed:
    """What has been killed.

    Attributes:
        pids: who was.
        stuck: who has not gone: the kernel does not let go of it.
        words: about each of these, for people.
        held: what devices have not taken back, for people.
    """

    pids: list[int]
    stuck: list[int]
    words: list[str]
    held: list[str]
    seconds: float


@dataclass
class Reaper:
    """Ends processes. May be used from several threads.

    Args:
        way: how processes are held together.
        environ: of the job: where its keepers listen.
        release: see `Release`; None: there is no device to wait for.
    """

    way: Way
    environ: Mapping[str, str]
    release: Release | None = None
    _roots: dict[int, int] = field(default_factory=dict)  # and when each began, for numbers are given out again
    _own: dict[int, subprocess.Popen] = field(default_factory=dict)
    _turn: threading.RLock = field(default_factory=threading.RLock)

    def contain(self, pid: int) -> None:
        """Hold a child of this process, the root of an attempt's processes, before it starts anything.

        Raises:
            OSError: it is gone, or cannot be held.
        """
        with self._turn:
            self.way.contain(pid)
            process = read_process(pid)
            if process is None:
                raise ProcessLookupError(f"process {pid} is gone")
            self._roots[pid] = process.started_ticks

    def helper(self, start: Callable[[], subprocess.Popen]) -> subprocess.Popen:
        """Start a child that is the executor's own: it is never killed here, nor is what it starts."""
        with self._turn:
            process = start()
            self._own = {pid: other for pid, other in self._own.items() if other.returncode is None}
            self._own[process.pid] = process
            return process

    def end_attempt(self, within_s: float) -> Killed:
        """Kill all but the roots (the template, which forks the next attempt) and keepers.

        Returns when they have gone, and devices have taken back what they held; or when the time is over.
        """
        return self._end(within_s, spare_roots=True)

    def end_all(self, within_s: float) -> Killed:
        """Kill all but keepers; as `end_attempt`."""
        return self._end(within_s, spare_roots=False)

    def left(self) -> set[int]:
        """What is held and runs, without roots and keepers."""
        with self._turn:
            members = self.way.members(self._helpers())
            return members - self._spared(members, spare_roots=True)

    def reap(self) -> None:
        """Let ended orphans go that have become children of this process; to be called now and then."""
        with self._turn:
            mine = self._known_roots() | self._own.keys()  # whoever has started these waits for them
            for process in children_of_this():
                if process.state == "Z" and process.pid not in mine:
                    with suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)

    def _end(self, within_s: float, *, spare_roots: bool) -> Killed:
        begin_s = time.monotonic()
        killed, stuck = until_killed(lambda: self._strike(spare_roots), within_s)
        self.reap()
        left_s = max(0.0, begin_s + within_s - time.monotonic())
        held = list(self.release(killed, left_s)) if self.release is not None and killed else []
        words = [describe(pid) for pid in sorted(stuck)]
        return Killed(sorted(killed), sorted(stuck), words, held, time.monotonic() - begin_s)

    def _strike(self, spare_roots: bool) -> set[int]:
        with self._turn:
            return strike(self.way, lambda pids: self._spared(pids, spare_roots=spare_roots), self._helpers())

    def _known_roots(self) -> set[int]:
        """Roots that are there still; the others are forgotten."""
        found = {pid: read_process(pid) for pid in self._roots}
        self._roots = {
            pid: process.started_ticks
            for pid, process in found.items()
            if process is not None and process.started_ticks == self._roots[pid]
        }
        return set(self._roots)

    def _spared(self, members: Set[int], *, spare_roots: bool) -> set[int]:
        """Those of `members` that live: roots; and keepers, which are let out for good."""
        found = (read_process(pid) for pid in members)
        table = {process.pid: process for process in found if process is not None}
        keepers = keepers_among(table, self.environ)
        for pid in keepers:
            with suppress(OSError):
                self.way.release(pid)
        return (self._known_roots() & members if spare_roots else set()) | keepers

    def _helpers(self) -> set[int]:
        own = {pid for pid, process in self._own.items() if process.returncode is None}
        return own | descendants(processes(), own) if own else own


def choose_way(report: Callable[[str], None], *, name: str, ways: Sequence[str] = WAYS) -> Way:
    """Choose how to hold processes together, by what the host allows, and say which and why.

    Args:
        report: gets the line for people.
        name: of the job and the host. What an executor of this name has left behind, if it and its guard were killed,
            is taken over where control groups are used.
        ways: which may be chosen, in order.

    Raises:
        UserError: one is unknown, or none works here, or this is not Linux.
    """
    if sys.platform != "linux":
        raise UserError("processes are held together on Linux only", cure="run on Linux", value=sys.platform)
    unknown = [way for way in ways if way not in WAYS]
    if unknown or not ways:
        raise UserError("not ways of holding processes", cure=f"choose from {', '.join(WAYS)}", value=list(ways))
    problems: list[str] = []
    for wanted in ways:
        try:
            way = _open(wanted, name)
        except OSError as error:
            problems.append(f"{wanted}: {error}")
            continue
        way.reason = f"processes are held by {wanted}" + (f" ({'; '.join(problems)})" if problems else "")
        report(way.reason)
        return way
    raise UserError(
        f"none of the ways to hold processes works here ({'; '.join(problems)})",
        cure="allow 'subreaper', which needs no rights",
        value=list(ways),
    )


def run_guarded(
    way: Way,
    serve: Callable[[Reaper], int],
    *,
    environ: Mapping[str, str],
    release: Release | None = None,
    keeper: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> int:
    """Run an executor in a new process, and end what it leaves behind, however it ends; returns its exit status.

    To be called while there is one thread, early: the new process is a fork of this one.

    Args:
        way: from `choose_way`.
        serve: the executor.
        environ: of the job; see `Reaper`.
        release: see `Reaper`.
        keeper: where the job's keeper listens. It is started here when the executor has a PID namespace, for inside of
            that it would end with the executor.
        report: gets a line about each process that could not be ended.
    """
    in_namespace = isinstance(way, ByNamespace)
    if in_namespace and keeper is not None:
        try:
            ensure_keeper(keeper, environ=environ)
        except (KeeperLostError, OSError) as error:
            report(f"no keeper outlives this executor: {error}")

    def after() -> None:
        for rest in (BySubreaper(),) if in_namespace else (way, BySubreaper()):  # helpers of the executor are left too
            for words in Reaper(rest, environ).end_all(_GUARD_S).words:
                report(f"not ended: {words}")
        way.close()

    way_inside = Reaper(way, environ, release)
    return run_below(lambda: serve(way_inside), after, in_namespace=in_namespace)


def _open(wanted: str, name: str) -> Way:
    """Make a way ready.

    Raises:
        OSError: the host does not allow it.
    """
    if wanted == "subreaper":
        return BySubreaper()
    if wanted == "pid-namespace":
        _try_namespace()
        return ByNamespace()
    problems = []
    for home in homes():
        try:
            group = Group(home, f"{name}-{os.geteuid()}")
        except OSError as error:
            problems.append(f"version {home.version}: {error}")
            continue
        leftover = ByGroup(group)
        Reaper(leftover, os.environ).end_all(_GUARD_S)
        return leftover
    raise OSError("; ".join(problems) or "no hierarchy of control groups is mounted")


def _try_namespace() -> None:
    """See in processes that end again whether a namespace can be made here.

    Raises:
        OSError: it cannot.
    """
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            unshare_pids()
            inner = os.fork()
            if inner == 0:
                mount_own_proc()
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        except OSError as error:
            os.write(told, str(error).encode())
        finally:
            os._exit(status)
    os.close(told)
    with os.fdopen(ready, "rb") as words:
        problem = words.read().decode()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise OSError(problem or "the process that tried it failed")
