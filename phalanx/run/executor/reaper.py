"""No orphans: whatever a worker has started is gone when its attempt has ended. Linux only.

    guard ── forks ──► executor ── starts ──► template ── forks ──► ranks

    containment = choose_containment(report, name=f"{job}-{host}")
    status = run_guarded(containment, serve, environ=environ)       # serve(reaper) is the executor

In `serve`: ``reaper.contain(template.pid)``; ``reaper.end_attempt(10)`` kills everything but the template, keepers of
checkpoints and writers of spans; ``reaper.end_all(10)`` everything but these keepers and writers. A template that is
forking at this moment goes on with it: it is asked to stop first. Children that the executor starts for itself (to
look at a rank, to test the host) are started by ``reaper.helper``, or they would be taken for something that a rank
has left.

The *guard* has nothing to do but to wait, and ends what the executor leaves behind, however that ends. Where a PID
namespace holds the processes, the executor is its init and the kernel does the guard's work.

A *keeper* outlives the ranks that have started it. It is known by what only it has: the listening socket at an address
in a folder that only this user can enter, in a session whose leader has gone, and by running the keeper's program. A
rank that is about to start a keeper has that socket too, for a moment, and so have processes that it forks in this
moment; but they run the rank's program. A *writer of spans* outlives the ranks by a second or two, to write down what
they did last, and ends by itself. It is known likewise, by its program and the lock that it holds open.
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
from phalanx.ipc.processes import Process, descendants, name_process, processes, read_process, send
from phalanx.ipc.stop_request import STOP_SIGNALS
from phalanx.run.executor.control_groups import (
    ByGroup,
    ByNamespace,
    BySubreaper,
    Containment,
    homes,
)
from phalanx.run.executor.system_calls import (
    become_subreaper,
    children_of_this,
    describe,
    die_with,
    mount_own_proc,
    unshare_pids,
    until_gone,
)
from phalanx.telemetry.writer_place import LOCK, MEMORY, PROGRAM, rings_base

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
    # Until the child has its own handlers, and this process those that pass signals on, none may get lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    parent = 0 if in_namespace else os.getpid()
    child = os.fork()
    if child == 0:
        _be_executor(serve, parent, before, in_namespace)

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    handlers = {number: signal.signal(number, pass_on) for number in _FORWARDED}
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


_KEEPER = b"phalanx.checkpoint.keeper.main"
_WRITER = PROGRAM.encode()
_LISTENS = 1 << 16  # __SO_ACCEPTCON, as /proc/net/unix shows it


def keepers_among(table: Mapping[int, Process], environ: Mapping[str, str]) -> set[int]:
    """The keepers, and what they have started, among the processes of `table`.

    Args:
        environ: of the job, which may say where its keepers listen.
    """
    detached = _detached(table, _KEEPER)
    if not detached:
        return set()
    inodes = set()
    for line in (PROC / "net" / "unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & _LISTENS and _is_address(fields[7], environ):
            inodes.add(fields[6])
    sockets = {f"socket:[{inode}]" for inode in inodes}
    found = {pid for pid in detached if sockets & _open_files(pid)}
    return found | descendants(table, found)


def writers_among(table: Mapping[int, Process]) -> set[int]:
    """The processes of `table` that write spans, of runs of this user."""
    bases = [rings_base(memory) for memory in (MEMORY, Path(tempfile.gettempdir()))]

    def is_lock(target: str) -> bool:
        path = Path(target.removesuffix(" (deleted)"))
        return path.name == LOCK and any(path.parent.parent == base and _is_ours(base, 0o022) for base in bases)

    return {pid for pid in _detached(table, _WRITER) if any(map(is_lock, _open_files(pid)))}


def _detached(table: Mapping[int, Process], program: bytes) -> set[int]:
    """Those that run a program in a session whose leader has gone."""
    found = set()
    for pid, process in table.items():
        if process.session == pid or ((leader := read_process(process.session)) is not None and leader.is_alive):
            continue
        with suppress(OSError):
            # Its program is not enough, for anybody can be started so.
            if program in (PROC / str(pid) / "cmdline").read_bytes():
                found.add(pid)
    return found


def _open_files(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.add(str(link.readlink()))
    return found


def _is_address(path: str, environ: Mapping[str, str]) -> bool:
    # See `phalanx.checkpoint.keeper.keeper_start.address_for`: what it could give to this user.
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


WAYS = ("cgroup", "pid-namespace", "subreaper")
"""In order of preference. A control group comes first, although a namespace is as tight: scripts do not notice it,
while in a namespace process ids are others than the host's, and than those that devices report."""

_GUARD_S = 30.0
_LOOK_S = 0.05  # between two looks for what is left

Release = Callable[[Set[int], float], Sequence[str]]
"""Waits until devices have taken back what these processes held, at most so many seconds; says what they have not."""


@dataclass(frozen=True)
class Killed:
    """What has been killed."""

    pids: list[int]
    stuck: list[int]  # of these, what has not gone: the kernel does not let go of it
    words: list[str]  # about each of the stuck, for people
    held: list[str]  # what devices have not taken back, for people
    seconds: float


@dataclass
class Reaper:
    """Ends processes. May be used from several threads. `environ`: of the job: where its keepers listen."""

    containment: Containment
    environ: Mapping[str, str]
    release: Release | None = None
    _roots: dict[int, int] = field(default_factory=dict)  # and when each began, for numbers are given out again
    _own: dict[int, subprocess.Popen] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def contain(self, pid: int) -> None:
        """Hold a child of this process, the root of an attempt's processes, before it starts anything.

        Raises:
            OSError: it is gone, or cannot be held.
        """
        with self._lock:
            self.containment.contain(pid)
            process = read_process(pid)
            if process is None:
                raise ProcessLookupError(f"process {pid} is gone")
            self._roots[pid] = process.started_ticks

    def helper(self, start: Callable[[], subprocess.Popen]) -> subprocess.Popen:
        """Start a child that is the executor's own: it is never killed here, nor is what it starts."""
        with self._lock:
            process = start()
            self._own = {pid: other for pid, other in self._own.items() if other.returncode is None}
            self._own[process.pid] = process  # under the lock: nothing is killed between its start and this
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
        with self._lock:
            members = self.containment.members(self._helpers())
            return members - self._spared(members, spare_roots=True)

    def reap(self) -> None:
        """Let ended orphans go that have become children of this process; to be called now and then."""
        with self._lock:
            mine = self._known_roots() | self._own.keys()  # these are waited for by what has started them
            for process in children_of_this():
                if process.state == "Z" and process.pid not in mine:
                    with suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)

    def _end(self, within_s: float, *, spare_roots: bool) -> Killed:
        begin_s = time.monotonic()
        killed: set[int] = set()
        while True:
            with self._lock:
                victims = self._strike(spare_roots=spare_roots)
            killed |= victims
            left_s = begin_s + within_s - time.monotonic()
            if not victims or left_s <= 0:
                break
            until_gone(victims, min(_LOOK_S, left_s))
        self.reap()
        # A device whose driver has not let go of the dead would fail the next attempt.
        left_s = max(0.0, begin_s + within_s - time.monotonic())
        held = list(self.release(killed, left_s)) if self.release is not None and killed else []
        words = [describe(pid) for pid in sorted(victims)]
        return Killed(sorted(killed), sorted(victims), words, held, time.monotonic() - begin_s)

    def _strike(self, *, spare_roots: bool) -> set[int]:
        """Kill once all that is held and not spared, while it holds still; returns that."""
        # Even if nothing is seen: what forks and ends all the time is not, unless it stands still.
        with self.containment.frozen(self._helpers()) as members:
            safe = self._spared(members, spare_roots=spare_roots) & members
            victims = members - safe
            if victims and not self.containment.kill_rest(safe):
                for pid in victims:
                    process = read_process(pid)
                    if process is not None:
                        with suppress(PermissionError):
                            send(process, signal.SIGKILL)
        return victims

    def _known_roots(self) -> set[int]:
        # The others are forgotten: their numbers may be given to other processes.
        found = {pid: read_process(pid) for pid in self._roots}
        self._roots = {
            pid: process.started_ticks
            for pid, process in found.items()
            if process is not None and process.started_ticks == self._roots[pid]
        }
        return set(self._roots)

    def _spared(self, members: Set[int], *, spare_roots: bool) -> set[int]:
        """Those of `members` that live: roots; and keepers and writers of spans, which are let out for good."""
        found = (read_process(pid) for pid in members)
        table = {process.pid: process for process in found if process is not None}
        staying = keepers_among(table, self.environ) | writers_among(table)
        for pid in staying:
            with suppress(OSError):
                self.containment.release(pid)
        return (self._known_roots() & members if spare_roots else set()) | staying

    def _helpers(self) -> set[int]:
        own = {pid for pid, process in self._own.items() if process.returncode is None}
        return own | descendants(processes(), own) if own else own


def choose_containment(report: Callable[[str], None], *, name: str, ways: Sequence[str] = WAYS) -> Containment:
    """Choose how to hold processes together, by what the host allows, and say which way and why.

    Args:
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
    for way in ways:
        try:
            containment = _open(way, name)
        except OSError as error:
            problems.append(f"{way}: {error}")
            continue
        containment.reason = f"processes are held by {way}" + (f" ({'; '.join(problems)})" if problems else "")
        report(containment.reason)
        return containment
    raise UserError(
        f"none of the ways to hold processes works here ({'; '.join(problems)})",
        cure="allow 'subreaper', which needs no rights",
        value=list(ways),
    )


def run_guarded(
    containment: Containment,
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
        keeper: where the job's keeper listens. It is started here when the executor has a PID namespace, for inside of
            that it would end with the executor.
        report: gets a line about each process that could not be ended.
    """
    in_namespace = isinstance(containment, ByNamespace)
    if in_namespace and keeper is not None:
        try:
            ensure_keeper(keeper, environ=environ)
        except (KeeperLostError, OSError) as error:
            report(f"no keeper outlives this executor: {error}")

    def after() -> None:
        # As a subreaper too: helpers of the executor are in no group, and are left as well.
        for rest in (BySubreaper(),) if in_namespace else (containment, BySubreaper()):
            for words in Reaper(rest, environ).end_all(_GUARD_S).words:
                report(f"not ended: {words}")
        containment.close()

    reaper = Reaper(containment, environ, release)
    return run_below(lambda: serve(reaper), after, in_namespace=in_namespace)


def _open(way: str, name: str) -> Containment:
    if way == "subreaper":
        return BySubreaper()
    if way == "pid-namespace":
        _try_namespace()
        return ByNamespace()
    problems = []
    for home in homes():
        try:
            containment = ByGroup(home, f"{name}-{os.geteuid()}")
        except OSError as error:
            problems.append(f"version {home.version}: {error}")
            continue
        Reaper(containment, os.environ).end_all(_GUARD_S)  # what an executor of this name has left
        return containment
    raise OSError("; ".join(problems) or "no hierarchy of control groups is mounted")


def _try_namespace() -> None:
    """See in processes that end again whether a namespace can be made here; raises OSError where it cannot."""
    reading, writing = os.pipe()
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
            os.write(writing, str(error).encode())
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as words:
        problem = words.read().decode()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise OSError(problem or "the process that tried it failed")
