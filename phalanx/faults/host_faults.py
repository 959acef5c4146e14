"""What a campaign does from outside to the emulated hosts of one machine, never to the machine itself.

Everything here makes sure that it has really happened, and what can be undone is undone when its ``with`` ends. A wall
clock can jump, too: programs that take the time by `wall_clock` see the machine's clock plus the offset in the file
that ``PHALANX_CLOCK`` names; without the variable it is the machine's clock, at no cost. Monotonic clocks never jump.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from phalanx.core.errors import UserError
from phalanx.faults.case_manifest import Incident
from phalanx.faults.tcp_proxy import Link
from phalanx.ipc.processes import descendants, processes

VARIABLE = "PHALANX_CLOCK"

_OFFSET = struct.Struct("<d")


def wall_clock(environ: Mapping[str, str] = os.environ) -> Callable[[], float]:
    """A function that says the seconds since 1970.

    Raises:
        UserError: the variable names no file with an offset.
    """
    name = environ.get(VARIABLE)
    if not name:
        return time.time
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", cure="unset it", field=VARIABLE, value=name) from None

    def now() -> float:
        content = os.pread(file, _OFFSET.size, 0)
        if len(content) != _OFFSET.size:
            raise UserError("holds no offset", cure="write it with set_offset", field=VARIABLE, value=name)
        return time.time() + float(_OFFSET.unpack(content)[0])

    now()
    return now


def set_offset(path: Path, seconds: float) -> None:
    """Set what all that read this file are ahead of the machine's clock; in place, so that they see it at once."""
    if not math.isfinite(seconds):
        raise ValueError(f"set_offset({seconds}): needs a number")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, _OFFSET.pack(seconds), 0)
    finally:
        os.close(file)


@contextmanager
def jumped(path: Path, seconds: float) -> Iterator[None]:
    """The clocks that read this file are `seconds` ahead meanwhile, behind where negative; 0 afterwards."""
    set_offset(path, seconds)
    try:
        ahead_s = wall_clock({VARIABLE: str(path)})() - time.time()
        if abs(ahead_s - seconds) > 1:
            raise RuntimeError(f"the clock is {ahead_s} s ahead, not {seconds} s")
        yield
    finally:
        set_offset(path, 0.0)


T = TypeVar("T")

LARGEST_DISK_BYTES = 1 << 30
"""A disk is only filled where it is a tmpfs no larger than this."""

_WAIT_S = 30.0
_PIECE = b"\0" * (1 << 16)


class NotDoneError(RuntimeError):
    """The fault did not happen, or could not be undone: the case says nothing."""


@dataclass(frozen=True)
class Machine:
    """An emulated host; empty is what it does not have.

    Attributes:
        executor: process id.
        others: process ids of what belongs to it and is no descendant of the executor, as its keeper.
        mark: ``NAME=value``, an environment variable that all its processes were started with.
        interface, namespace: of its network.
        disk: a small tmpfs.
        clock: the file of `phalanx.faults.host_faults`.
        link: between it and the driver.
    """

    executor: int
    others: tuple[int, ...] = ()
    mark: str = ""
    interface: str = ""
    namespace: str = ""
    disk: Path | None = None
    clock: Path | None = None
    link: Link | None = None

    def processes(self) -> list[int]:
        """All there are now."""
        roots = [self.executor, *self.others, *(marked(self.mark) if self.mark else [])]
        return tree_of(roots)


def kill(pids: Iterable[int]) -> list[int]:
    """SIGKILL to processes, at once; returns those that were there when they are gone.

    Raises:
        NotDoneError: one is still there after 30 s.
    """
    handles: dict[int, int] = {}
    with ExitStack() as stack:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handles[pid] = os.pidfd_open(pid)
                stack.callback(os.close, handles[pid])
        for handle in handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        end_s = time.monotonic() + _WAIT_S
        for pid, handle in handles.items():
            if not select.select([handle], [], [], max(end_s - time.monotonic(), 0))[0]:
                raise NotDoneError(f"process {pid} is still there {_WAIT_S:.0f} s after SIGKILL")
    return list(handles)


def kill_host(*machines: Machine) -> list[int]:
    """SIGKILL to all processes of hosts at once: they are stopped first, so that none can start another meanwhile."""
    seen: set[int] = set()
    while fresh := {pid for machine in machines for pid in machine.processes()} - seen:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        seen |= fresh
    return kill(sorted(seen))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP to a process, SIGCONT afterwards, if it is still there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        end_s = time.monotonic() + _WAIT_S
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            if time.monotonic() > end_s:
                raise NotDoneError(f"process {pid} does not stop")
            time.sleep(0.005)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def link_down(interface: str, namespace: str) -> Iterator[None]:
    """A network interface is down meanwhile.

    Raises:
        UserError: no namespace is named: the machine's own interfaces are not touched.
    """
    if not namespace:
        raise UserError("an interface of the machine itself", cure="name a network namespace", value=interface)

    def set_link(state: Literal["up", "down"]) -> None:
        _command("ip", "-n", namespace, "link", "set", interface, state)
        (shown,) = json.loads(_command("ip", "-n", namespace, "-json", "link", "show", interface))
        if ("UP" in shown["flags"]) != (state == "up"):
            raise NotDoneError(f"{interface} in {namespace} is {shown['operstate']}")

    set_link("down")
    try:
        yield
    finally:
        set_link("up")


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of this size lies over `folder` meanwhile. For root only.

    Raises:
        UserError: it is larger than `LARGEST_DISK_BYTES`, or may not be mounted.
    """
    if not 0 < size_bytes <= LARGEST_DISK_BYTES:
        raise UserError("is no small disk", cure=f"at most {LARGEST_DISK_BYTES}", field="size_bytes", value=size_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _command("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(folder))
    except NotDoneError as error:
        raise UserError(f"cannot be mounted ({error})", cure="run as root", value=str(folder)) from None
    try:
        _check_small(folder)
        yield folder
    finally:
        _command("umount", "--lazy", str(folder))


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """No byte is free meanwhile on the small disk that `folder` is.

    Raises:
        UserError: it is none.
    """
    _check_small(folder)
    filler = folder / "data.bin"
    file = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for piece in (_PIECE, b"\0"):  # the last page byte by byte
            try:
                while True:
                    os.write(file, piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        if os.statvfs(folder).f_bavail:
            raise NotDoneError(f"{folder} is not full")
        yield
    finally:
        os.close(file)
        filler.unlink()


def is_time(incident: Incident, attempt: int, step: int, *, is_saving: bool = False) -> bool:
    """Whether an incident from outside is due, as far as can be seen from outside; its `delay_s` comes on top.

    Args:
        attempt: the present one, from 1.
        step: the last one that was reported.
        is_saving: a rank says that it is in a checkpoint.
    """
    when = incident.when
    if attempt < when.attempt:
        return False
    if when.phase in ("start", "recovery"):
        return True
    return step >= when.step and (is_saving or when.phase == "step")


@contextmanager
def happen(incident: Incident, machines: Sequence[Machine], driver: int) -> Iterator[None]:
    """An incident that is not a worker's own, on all its places; what can be undone is, when the ``with`` ends.

    Raises:
        NotDoneError: it did not happen.
        UserError: a machine has not what it needs.
    """
    with ExitStack() as stack:
        if incident.place.what == "driver":
            if incident.kind == "driver-stopped":
                stack.enter_context(stopped(driver))
            elif not kill([driver]):
                raise NotDoneError("the driver was gone before")
        chosen = [machines[number] for number in incident.place.numbers]
        if incident.kind == "host-killed":
            if not kill_host(*chosen):
                raise NotDoneError(f"no process of the hosts of executors {[one.executor for one in chosen]} was there")
        else:
            for machine in chosen:
                _to_machine(incident, machine, stack)
        yield


def _to_machine(incident: Incident, machine: Machine, stack: ExitStack) -> None:
    kind, settings = incident.kind, incident.settings
    stops = kind == "spare-bad" and settings.get("how") == "stops"
    if kind == "executor-killed" or (kind == "spare-bad" and not stops):
        if not kill([machine.executor]):
            raise NotDoneError(f"executor {machine.executor} was gone before")
    elif stops:
        for pid in machine.processes():  # the first of them may only watch over the one that answers
            stack.enter_context(stopped(pid))
    elif kind == "link-down":
        stack.enter_context(link_down(machine.interface, machine.namespace))
    elif kind == "disk-full":
        stack.enter_context(full_disk(_has(machine.disk, "disk", kind)))
    elif kind == "clock-jump":
        stack.enter_context(jumped(_has(machine.clock, "clock", kind), float(settings.get("offset_s", 3600))))
    elif kind == "link-delayed":
        stack.enter_context(_has(machine.link, "link", kind).delayed(float(settings.get("delay_s", 1))))
    elif kind == "link-cut":
        stack.enter_context(_has(machine.link, "link", kind).cut())
    elif kind == "link-silent":
        stack.enter_context(_has(machine.link, "link", kind).silent())
    else:
        raise UserError("is not done from outside", cure="let workers do it", field="kind", value=kind)


def tree_of(roots: Iterable[int]) -> list[int]:
    """These processes and all their descendants that are there, each once."""
    table = processes()  # one walk through /proc for all of them
    found = dict.fromkeys(root for root in roots if root in table)
    return list(found | dict.fromkeys(sorted(descendants(table, found))))


def marked(mark: str) -> list[int]:
    """Processes that were started with this environment variable, ``NAME=value``."""
    wanted, found = mark.encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _check_small(folder: Path) -> None:
    size = os.statvfs(folder)
    size_bytes = size.f_blocks * size.f_frsize
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    if kinds.get(str(folder.resolve())) != "tmpfs" or size_bytes > LARGEST_DISK_BYTES:
        cure = f"mount a tmpfs of at most {LARGEST_DISK_BYTES} bytes there"
        raise UserError("is no small disk of its own", cure=cure, value=str(folder))


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except OSError as error:
        raise NotDoneError(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        raise NotDoneError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _has(value: T | None, name: str, kind: str) -> T:
    if value is None:
        raise UserError("the machine has none", cure=f"give it one, or leave out {kind}", field=name)
    return value
