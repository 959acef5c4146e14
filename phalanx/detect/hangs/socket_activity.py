"""Ranks without steps: what their processes receive and wait for, and whether anything about them still moves.

Ranks that make steps cost nothing here. One that has made none for a while is looked at every five seconds by the
executor of `phalanx run`, in a thread: its counters in /proc, and where it is in its code, by py-spy. `phalanx detect
hang` looks at ranks that it would name (`phalanx.detect.hangs.rank_motion`). `phalanx.detect.hangs.stack_traces` holds
the looks against each other.

What a process receives with ``recv`` is not in /proc/PID/io, and counters of interfaces are of all processes: the bytes
of its TCP sockets come from sock_diag(7). The bytes of other sockets are not counted anywhere. Linux only.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import struct
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from phalanx.core.host import PROC, list_folder, read_text
from phalanx.detect.hangs.python_stacks import Frame, main_stack
from phalanx.detect.hangs.stack_dumps import native_library, py_spy_program, stacks_of
from phalanx.detect.hangs.stack_traces import LOOK_S, RankStillness, Sample
from phalanx.ipc.processes import Process, StartChild, descendants, processes

_SOCK_DIAG = 4  # the protocol of netlink
_BY_FAMILY = 20
_REQUEST_DUMP = 0x1 | 0x300
_ERROR, _DONE = 2, 3
_INFO = 2  # the attribute that holds a tcp_info
_ANY_STATE = 0xFFF & ~(1 << 6 | 1 << 10)  # but those in TIME_WAIT, which no process has any more, and those that listen
_HEAD = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: family, protocol, attributes, states, id
_MESSAGE_BYTES, _INODE_AT = 72, 68  # inet_diag_msg
_CARRIED = struct.Struct("=120xQQ")  # tcp_info: bytes_acked, bytes_received
_ANSWER_BYTES = 1 << 18
_PATIENCE_S = 1.0
_CHATTER_BYTES = 16 << 10  # heartbeats on one socket in the seconds between two looks are less
_IN_PIPE = re.compile(r"pipe_read")
_IN_SOCKET = re.compile(r"unix_stream_(?:read|data_wait)|skb_wait_for_more_packets|datagram")
"""Functions of the kernel in which a thread waits to be sent something: all but those of TCP."""

_IN_SLEEP = re.compile(r"nanosleep|n_tty_read")

SLEEPING = {"x86_64": frozenset({35, 230}), "aarch64": frozenset({101, 115})}
"""Numbers of nanosleep and clock_nanosleep."""

RECEIVING = {"x86_64": frozenset({0, 19, 45, 47}), "aarch64": frozenset({63, 65, 207, 212})}
"""Numbers of read, readv, recvfrom and recvmsg by machine, whose first argument is a descriptor."""


def tcp_bytes() -> dict[int, int] | None:
    """What each TCP socket of this network namespace has carried, sent and received, by its inode.

    Returns:
        None: the kernel does not report them.
    """
    found: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(_PATIENCE_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                asked = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ANY_STATE)
                kernel.send(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _REQUEST_DUMP, family, 0) + asked)
                while not _take(kernel.recv(_ANSWER_BYTES), found):
                    pass
    except (OSError, AttributeError, struct.error):  # another system, a sandbox, or a module that is not loaded
        return None
    return found


def _take(answer: bytes, found: dict[int, int]) -> bool:
    """Take in messages; whether they were the last. Raises OSError: the kernel refuses."""
    at = 0
    while at + _HEAD.size <= len(answer):
        length, kind, *_ = _HEAD.unpack_from(answer, at)
        if kind == _DONE:
            return True
        if kind == _ERROR or length < _HEAD.size:
            raise OSError("sock_diag is refused")
        message = answer[at + _HEAD.size : at + length]
        (inode,) = struct.unpack_from("=I", message, _INODE_AT)
        place = _MESSAGE_BYTES
        while place + 4 <= len(message):
            size, attribute = struct.unpack_from("=HH", message, place)
            if size < 4:
                break
            if attribute == _INFO and size - 4 >= _CARRIED.size <= len(message) - place - 4:
                found[inode] = sum(_CARRIED.unpack_from(message, place + 4))
            place += (size + 3) & ~3  # aligned
        at += (length + 3) & ~3
    return not answer


def open_files(pid: int, proc: Path = PROC) -> Iterator[str]:
    """What the descriptors of a process stand for, such as ``/dev/null`` or ``socket:[123]``."""
    with suppress(OSError), os.scandir(proc / str(pid) / "fd") as entries:
        for entry in entries:
            with suppress(OSError):
                yield str(Path(entry.path).readlink())


def waits_for(pid: int, tcp: Container[int], proc: Path = PROC) -> str:
    """What the main thread of a process waits to be sent something by: "pipe", "socket" or nothing of these.

    Args:
        tcp: inodes of TCP sockets, which do not count.
    """
    # What is sent something often does not wait all the time: one look may find it on a core, or waiting for Python's
    # lock.
    for number in range(_WAIT_LOOKS):
        if number:
            time.sleep(_WAIT_LOOK_S)
        if found := _waits_now_for(pid, tcp, proc):
            return found
    return ""


def is_asleep(pid: int, proc: Path = PROC) -> bool:
    """Whether the main thread of a process sleeps for a set time, or reads from a terminal; False: not known, too."""
    # One that was halted by whoever read its stack has yet to go back to its sleep: one look may find it on its way.
    for number in range(_WAIT_LOOKS):
        if number:
            time.sleep(_WAIT_LOOK_S)
        if _sleeps_now(pid, proc):
            return True
    return False


def _sleeps_now(pid: int, proc: Path) -> bool:
    task = proc / str(pid) / "task" / str(pid)
    if (where := read_text(task / "wchan") or "0") != "0":
        return bool(_IN_SLEEP.search(where))
    number, *_ = (*(read_text(task / "syscall") or "").split(), "")
    return number.isdigit() and int(number) in SLEEPING.get(platform.machine(), ())


def _waits_now_for(pid: int, tcp: Container[int], proc: Path) -> str:
    task = proc / str(pid) / "task" / str(pid)
    where = read_text(task / "wchan") or "0"
    if where != "0":
        return "pipe" if _IN_PIPE.search(where) else "socket" if _IN_SOCKET.search(where) else ""
    # What the descriptor stands for from which the thread reads, by the line of /proc/PID/syscall.
    number, descriptor, *_ = (*(read_text(task / "syscall") or "").split(), "", "")
    link = ""
    if number.isdigit() and int(number) in RECEIVING.get(platform.machine(), ()):
        with suppress(OSError):
            link = str((proc / str(pid) / "fd" / str(int(descriptor, 16))).readlink())
    kind, _, inode = link.rstrip("]").partition(":[")
    return kind if kind == "pipe" or (kind == "socket" and int(inode) not in tcp) else ""


class SocketBytes:
    """What the sockets of some processes have carried, since the first look."""

    def __init__(self) -> None:
        self._last: dict[int, int] | None = None
        self._bytes = 0

    def add(self, pids: Iterable[int], by_inode: Mapping[int, int], proc: Path = PROC) -> int:
        """Take in another look; a socket that several of them have counts once, and one that is new counts all.

        What has carried next to nothing since the last look does not count: a thousand ranks that hang say much
        together to the store that one of them holds.

        Args:
            by_inode: from `tcp_bytes`.
        """
        links = {link for pid in pids for link in open_files(pid, proc) if link.startswith("socket:[")}
        inodes = {int(link[8:-1]) for link in links}
        now = {inode: by_inode[inode] for inode in inodes if inode in by_inode}
        if self._last is not None:
            grown = (carried - self._last.get(inode, 0) for inode, carried in now.items())
            self._bytes += sum(one for one in grown if one >= _CHATTER_BYTES)
        self._last = now
        return self._bytes


QUIET_S, QUIET_MOST_S = 5.0, 20.0
"""A rank that has made no step for one and a half times as long as its last one took is looked at; not before the first
of these, and from the second on whatever it took: by the time that a job may count as hung its ranks have been seen."""

GPU_WORKS = 0.02
"""Share of a second in which the memory of a GPU that works is read or written; kernels that wait leave it alone."""

_STACKS_S = 2.0
_NATIVE_S = 10.0
_WAIT_LOOKS, _WAIT_LOOK_S = 4, 0.005
_READY_LOOKS = 4
_READY_S = 0.02
_POLLS_S = 100e-6
"""A thread that gives a core back sooner has only looked at something. What computes keeps it for milliseconds, and
threads that take turns at Python's lock for half of one, however busy the machine is."""
_SECTOR_BYTES = 512
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")


def quiet_after_s(last_step_s: float) -> float:
    """For how long a rank makes no step before it is looked at, by what its last step took."""
    return min(max(QUIET_S, 1.5 * last_step_s), QUIET_MOST_S)


@dataclass(frozen=True)
class QuietRank:
    """A rank that has made no step for a while."""

    rank: int
    pid: int
    since: tuple[int, ...]  # says which pause this is: another one, and it is looked at anew
    output_bytes: int = 0
    dump: Path | None = None  # the file to which it writes its stacks, where py-spy may not look


class MemoryActivity(Protocol):
    """Of an accelerator, as `phalanx.run.messages.Accelerator` has it."""

    @property
    def memory_activity(self) -> float:
        """Share of the last second in which its memory was read or written; below 0: not known."""


class _Scheduled(NamedTuple):
    """Of a thread, since it began: seconds on a core, seconds ready while others had it, and turns on a core."""

    used_s: float = 0.0
    waited_s: float = 0.0
    turns: int = 0


@dataclass
class _WatchedRank:
    since: tuple[int, ...]
    stillness: RankStillness
    looked_s: float
    sockets: SocketBytes = field(default_factory=SocketBytes)
    threads: dict[int, _Scheduled] = field(default_factory=dict)

    def polling(self, pids: Sequence[int], proc: Path) -> set[int]:
        """Threads that since the last look have only woken up now and then: see `_POLLS_S`.

        On a busy machine these wait for a core most of the time, as threads do that compute.
        """
        tasks = [task for pid in pids for task in list_folder(proc / str(pid) / "task")]
        last, self.threads = self.threads, {int(task.name): _scheduled(task) for task in tasks}
        found = set()
        for thread in last.keys() & self.threads.keys():
            before, now = last[thread], self.threads[thread]
            turns = now.turns - before.turns
            if turns > 0 and now.used_s - before.used_s < turns * _POLLS_S:
                found.add(thread)
        return found


@dataclass(frozen=True)
class _HostSample:
    """What all looks of one time share: all processes, `tcp_bytes`, and of the host what `Sample` has."""

    table: Mapping[int, Process]
    sockets: Mapping[int, int]
    disk_bytes: int
    rdma_bytes: int
    is_gpu_active: bool | None


@dataclass
class StillnessWatch:
    """Of the ranks of one attempt on this host.

    Args:
        program: py-spy; None: there is none.
        counts_ready: time for which a main thread was ready while others had the cores counts as computing; where looks
            are close to each other, being looked at may have caused it.
        asks_libraries: what computes at one place of Python code may be in one long call of a compiled library, which
            takes py-spy a second to tell; else it goes round (`RankStillness.goes_round`).
    """

    accelerators: Callable[[], Sequence[MemoryActivity]] = list
    start: StartChild = lambda make: make()
    program: Path | None = field(default_factory=py_spy_program)
    proc: Path = PROC
    clock: Callable[[], float] = time.monotonic
    counts_ready: bool = True
    asks_libraries: bool = True
    _watched: dict[int, _WatchedRank] = field(default_factory=dict)

    def look(self, quiet: Sequence[QuietRank], rdma_bytes: int = 0) -> None:
        """Look at all ranks that are quiet now; blocks for up to two seconds each.

        Args:
            rdma_bytes: what the RDMA ports that training uses have carried.
        """
        ranks = {one.rank for one in quiet}
        self._watched = {rank: watched for rank, watched in self._watched.items() if rank in ranks}
        shares = [share for one in self.accelerators() if (share := one.memory_activity) >= 0]
        is_gpu_active = any(share >= GPU_WORKS for share in shares) if shares else None
        disk_bytes = _disk_bytes(self.proc)
        shared = _HostSample(processes(self.proc), tcp_bytes() or {}, disk_bytes, rdma_bytes, is_gpu_active)
        for one in quiet:
            watched = self._watched.get(one.rank)
            if watched is None or watched.since != one.since:
                stillness = RankStillness(lambda pid=one.pid: self._native_library(pid))  # type: ignore[misc]
                watched = self._watched[one.rank] = _WatchedRank(one.since, stillness, self.clock())
            sample = self._sample(one, watched, shared)
            if sample is not None:
                watched.stillness.observe(sample)
                watched.looked_s = sample.at_s

    def still_s(self, rank: int, since: tuple[int, ...]) -> float:
        """For how long nothing of a rank has moved; -1: it has not been looked at in this pause."""
        watched = self._watched.get(rank)
        if watched is None or watched.since != since:
            return -1.0
        return watched.stillness.still_s + min(max(self.clock() - watched.looked_s, 0.0), LOOK_S)

    def stillness_of(self, rank: int) -> RankStillness | None:
        """What the looks at a rank have shown; None: it has not been looked at, or is gone."""
        watched = self._watched.get(rank)
        return None if watched is None or not watched.stillness.looks else watched.stillness

    def _sample(self, one: QuietRank, watched: _WatchedRank, shared: _HostSample) -> Sample | None:
        """What there is to be seen of a rank; None: it is gone."""
        table = shared.table
        process = table.get(one.pid)
        if process is None:
            return None
        below = descendants(table, [one.pid])
        cpu_s, ended_s, file_bytes, rss_bytes = _counters(one.pid)
        main = _scheduled(self.proc / str(one.pid) / "task" / str(one.pid))
        polling = watched.polling([one.pid, *below], self.proc)
        main_ready, threads_ready = _ready([one.pid], polling, self.proc)
        io = (read_text(self.proc / str(one.pid) / "task" / str(one.pid) / "io") or "").split()
        for pid in below:
            of_child = _counters(pid)
            file_bytes, rss_bytes = file_bytes + of_child[2], rss_bytes + of_child[3]
        return Sample(
            at_s=self.clock(),
            state=process.state,
            main_cpu_s=main.used_s + (main.waited_s if self.counts_ready else 0.0),
            main_wants_core=main_ready,
            threads_cpu_s=cpu_s - main.used_s,
            threads_want_core=threads_ready,
            children_cpu_s=ended_s + sum(table[pid].cpu_ticks for pid in below) / os.sysconf("SC_CLK_TCK"),
            children_want_core=any(_ready([pid for pid in below if table[pid].state == "R"], polling, self.proc)),
            output_bytes=one.output_bytes,
            file_bytes=file_bytes,
            rss_bytes=rss_bytes,
            socket_bytes=watched.sockets.add([one.pid, *below], shared.sockets, self.proc),
            rdma_bytes=shared.rdma_bytes,
            disk_bytes=shared.disk_bytes,
            uses_gpu=any(link.startswith(_GPU_FILES) for link in open_files(one.pid, self.proc)),
            is_gpu_active=shared.is_gpu_active,
            waits_for=waits_for(one.pid, shared.sockets, self.proc),
            main_read_bytes=int(io[1]) if io[:1] == ["rchar:"] else 0,  # of files and pipes
            main_turns=main.turns,
            frames=self._frames(one),  # last: py-spy halts the process, which counters would show
        )

    def _frames(self, one: QuietRank) -> tuple[Frame, ...] | None:
        until_s = time.monotonic() + _STACKS_S
        found = stacks_of(one.pid, until_s, program=self.program, dump=one.dump, start=self.start, proc=self.proc)
        return main_stack(found.text) if found.text else None

    def _native_library(self, pid: int) -> str | None:
        if self.program is None:
            return None
        if not self.asks_libraries:
            return ""
        return native_library(self.program, pid, time.monotonic() + _NATIVE_S, self.start)


def _counters(pid: int) -> tuple[float, float, int, int]:
    """CPU seconds of a process, of its children that have ended, bytes read and written, bytes of resident memory."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        resident = process.memory_info().rss
        files = 0
        with suppress(psutil.Error):  # of another user's process
            counted = process.io_counters()
            files = counted.read_chars + counted.write_chars
        return times.user + times.system, times.children_user + times.children_system, files, resident
    return 0.0, 0.0, 0, 0


def _scheduled(task: Path) -> _Scheduled:
    """All zero where the kernel does not report it.

    That a thread has waited for a core says of the main one that it computes; others may wake up and wait often.
    """
    words = (read_text(task / "schedstat") or "").split()
    if len(words) < 3 or not all(word.isdigit() for word in words):
        return _Scheduled()
    return _Scheduled(int(words[0]) * 1e-9, int(words[1]) * 1e-9, int(words[2]))


def _ready(pids: Sequence[int], polling: Collection[int], proc: Path) -> tuple[bool, bool]:
    """Whether the main thread of the first of these was ready at each of some looks, and whether any other thread was.

    The others count together: threads that hand the interpreter's lock to each other are ready in turn.

    Args:
        polling: threads that do not count.
    """
    tasks = [task for pid in pids for task in list_folder(proc / str(pid) / "task") if int(task.name) not in polling]
    main = others = bool(tasks)
    for number in range(_READY_LOOKS):
        if not (main or others):
            break
        if number:
            time.sleep(_READY_S)
        ready = {
            int(task.name) for task in tasks if (read_text(task / "stat") or "").rpartition(")")[2].split()[:1] == ["R"]
        }
        main, others = main and pids[0] in ready, others and bool(ready - {pids[0]})
    return main, others


def _disk_bytes(proc: Path) -> int:
    """What the disks have read and written; parts of a disk count twice, which does not matter here."""
    sectors = 0
    for line in (read_text(proc / "diskstats") or "").splitlines():
        words = line.split()
        if len(words) >= 10 and words[5].isdigit() and words[9].isdigit():
            sectors += int(words[5]) + int(words[9])
    return sectors * _SECTOR_BYTES
