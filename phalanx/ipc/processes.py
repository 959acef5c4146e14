"""Processes of a host: children that end with their parent, the process table, stack dumps."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.host import PROC, boot_id

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_WATCH_S = 0.2
_NICE_TRIES = 5  # the kernel takes one change of an autogroup in a tenth of a second
_NICE_S = 0.1

StartChild = Callable[[Callable[[], subprocess.Popen]], subprocess.Popen]
"""Starts a child of an executor's own: see `phalanx.run.executor.reaper.Reaper.helper`."""

# Open in a process that has initialised CUDA or ROCm; the driver's state does not survive a fork.
_DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as `parent`, its parent, is gone, however that ends.

    Elsewhere than on Linux a thread watches for it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(_WATCH_S)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:  # it was gone before the kernel knew
        os._exit(1)


def start_helper(module: str) -> subprocess.Popen[str]:
    """Start ``python -m MODULE PID``, with lines of text on its stdin and stdout.

    It imports nothing of the caller, is to call `die_with_parent` with that process id, and stands outside the
    terminal's foreground group: what a Ctrl-C means is for its parent alone to decide.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )


def name_process(name: str) -> None:
    """Show `name`, 15 bytes of it, in ps and top, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def give_way(nice: int) -> None:
    """Make the session of this process, which it began, as nice as `nice`, 0 to 19, towards all others.

    Where the kernel shares the cores out among sessions first (autogroup, see sched(7)), as on most desktops and cloud
    machines, the niceness of a thread counts within its session only: a process in a session of its own would take
    half of a busy core however nice its threads are.
    """
    group = Path("/proc/self/autogroup")
    for _ in range(_NICE_TRIES):
        try:
            group.write_text(str(nice))
            return
        except BlockingIOError:
            time.sleep(_NICE_S)
        except OSError:  # no such kernel
            return


def why_not_fork(modules: dict[str, Any]) -> str | None:
    """Why a fork of this process would not work, or None where it does.

    A fork copies one thread only, so locks that others hold stay locked forever, and their pools are gone; and a device
    that was initialised before a fork cannot be used after it.
    """
    if sys.platform != "linux":
        return f"forking after imports is not safe on {sys.platform}"
    names = task_names()
    if len(names) > 1:
        return f"the imports started {len(names) - 1} thread(s): {', '.join(names[1:])}"
    torch = modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports initialised CUDA"
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists the folder is gone again
            name = str(link.readlink())
            if name in _DEVICE_FILES:
                return f"the imports opened {name}"
    return None


def task_names() -> list[str]:
    """Names of the threads of this process as the kernel counts them, Python's or not, the main one first."""
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name))
    return [(task / "comm").read_text().strip() for task in tasks]


_GONE = "ZXx"
_EXITING = 0x4 | 0x400  # PF_EXITING, PF_SIGNALED
_KILL_PENDING = 1 << (signal.SIGKILL - 1)
_STAT_BYTES = 4096


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes:
        state: as in /proc: ``R``, ``S``, ``D`` (in the kernel, not to be killed), ``T`` (stopped), ``Z`` …
        cpu_ticks: CPU time so far, in clock ticks.
        started_ticks: when it began, after the boot; with its number it identifies the process.
    """

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    threads: int
    cpu_ticks: int
    started_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether it can still run: the leader of one with threads may be a zombie long before the others end."""
        return self.state not in _GONE or self.threads > 1


def read_process(pid: int, proc: Path = PROC) -> Process | None:
    """Look at one process; None where there is none."""
    try:
        descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # hundreds are read: no file object
    except OSError:
        return None
    try:
        return parse_stat(os.read(descriptor, _STAT_BYTES))
    except OSError:  # it has gone meanwhile
        return None
    finally:
        os.close(descriptor)


def is_dying(pid: int, proc: Path = PROC) -> bool:
    """Whether a process is ending, or has got a SIGKILL, though the kernel may not have freed its memory yet."""
    try:
        stat = Path(f"{proc}/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        status = Path(f"{proc}/{pid}/status").read_text(errors="replace")
    except OSError:  # there is no /proc, or no such process
        return False
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return bool(int(stat[6]) & _EXITING) or any(signals & _KILL_PENDING for signals in pending)


def parse_stat(content: bytes) -> Process | None:
    """What /proc/PID/stat holds; the name in it may hold anything, parentheses too; None for no such content."""
    head, _, rest = content.rpartition(b")")
    pid, _, name = head.partition(b" (")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return Process(
        pid=int(pid),
        name=name.decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started_ticks=int(fields[19]),
    )


def processes(proc: Path = PROC) -> dict[int, Process]:
    """All processes by their numbers, zombies included."""
    with os.scandir(proc) as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    found = (read_process(pid, proc) for pid in pids)
    return {process.pid: process for process in found if process is not None}


def descendants(table: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """The processes below `roots`, without these."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def send(process: Process, number: int) -> None:
    """Send a signal to this very process, never to one that has been given its number since; nothing where it is gone.

    Raises:
        PermissionError: it belongs to somebody else.
    """
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            now = read_process(process.pid)
            if now is not None and now.started_ticks == process.started_ticks:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Identity:
    """A process: its number may be given again; number, start in clock ticks and the machine's boot id are not."""

    pid: int
    started_ticks: int
    boot_id: str


def identity_of(pid: int) -> Identity | None:
    """The process that has the number `pid` now; None where none has it, or it has ended."""
    process = read_process(pid)
    if process is None or process.state in "ZX":
        return None
    return Identity(pid, process.started_ticks, boot_id())


class Watched:
    """A process whose end is reported in the running event loop, also where it is not a child: `on_end` is called once.

    Raises:
        ProcessLookupError: it is gone already.
    """

    def __init__(self, identity: Identity, on_end: Callable[[], None]) -> None:
        self.identity = identity
        self._on_end = on_end
        self._descriptor = os.pidfd_open(identity.pid)
        if identity_of(identity.pid) != identity:  # looked at after it was opened: the number cannot change hands now
            os.close(self._descriptor)
            raise ProcessLookupError(f"process {identity.pid} is another one now")
        self._ended = asyncio.Event()
        self.code: int | None = None
        """How it ended, as subprocess has it; None: it has not, or is not a child of this process."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._end)

    def send(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor >= 0:
                signal.pidfd_send_signal(self._descriptor, number)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is gone; False: it is not, after `timeout_s`."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Watch it no longer."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _end(self) -> None:
        with contextlib.suppress(ChildProcessError):  # reaped where it is our child, so that it does not stay a zombie
            pid, status = os.waitpid(self.identity.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        self.close()
        self._ended.set()
        self._on_end()


def dump_signal() -> int:
    """The signal on which a process that has called `register` writes its stacks: nothing else uses it."""
    return int(signal.SIGRTMAX) - 3


def dump_beside(page: str | os.PathLike[str]) -> Path:
    """Where a rank with this progress page writes its stacks."""
    return Path(f"{os.fspath(page)}.stacks")


def register(path: Path) -> None:
    """Have this process add the stacks of all its threads to a file, which stays open, whenever it gets `dump_signal`.

    It does so although Python does not run. What it waits for in the kernel goes on, as after any signal that restarts
    system calls; sleeping and polling in C, which are never restarted, return early.
    """
    file = path.open("a")  # faulthandler keeps it
    faulthandler.register(dump_signal(), file=file, all_threads=True, chain=False)
