"""Stacks as faulthandler and py-spy write them, taken apart; and what of them is compared.

Whether a rank stands still: what successive looks at it say, while it makes no step.

No step for a while is no hang. A rank moves when any of this is seen between two looks (`RankStillness`):

- its main thread is in code where it has not been since its last step;
- it computes: it wants 5 % of a core or more, and goes through several places in the code, or one call of a compiled
  library takes long, or its other threads or its children compute (data loaders, compilers);
- its GPU reads or writes its memory (a kernel that only waits for a peer keeps a GPU "100 % busy", but moves nothing);
- it writes output, reads or writes files, its memory grows, or the disk works for which it waits;
- its own sockets carry bytes all the time, as of a download; where it waits in a collective, so many as that may move;
- its main thread waits for a pipe or a socket, and is sent something all the time;
- it saves or loads, compiles or imports, by its stack: for half an hour that may be a file system that nobody can see.

What is left is a rank that sleeps, waits for a lock or for its peers, or goes round in one place: an endless loop. That
alone blames nobody, and it takes a minute of it until anything is done (`phalanx.run.judge.step_limits`).

When the looks themselves are late or fail, because the machine is busy, time in which nobody looked does not count.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FAULTHANDLER_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+.{0,80}most recent call first")
_FAULTHANDLER_FRAME = re.compile(
    r'\s{1,8}File "(?P<file>[^"]{1,1000})", line (?P<line>\d+|\?\?\?) in (?P<name>.{1,300})'
)
_PY_SPY_THREAD = re.compile(
    r'Thread (?:0x[0-9a-fA-F]+|\d+)\s{0,4}\((?:active|idle)[^)]{0,20}\)(?:: "(?P<name>[^"]{0,200})")?'
)
_PY_SPY_FRAME = re.compile(r"\s{1,8}(?P<name>[^\s(].{0,300}?) \((?P<file>[^()]{1,1000}?)(?::(?P<line>\d+))?\)$")
_NOISE = re.compile(r"0x[0-9a-fA-F]+|\d+")
_LONGEST = 200_000
_WAITS = re.compile(
    r"\(distributed/(?:distributed_c10d|c10d_logger|_functional_collectives)|^(?:_engine_run_backward|wait_tensor) "
    r"|^synchronize \((?:cuda|accelerator)/|^wait_for_everyone \(accelerate/|^_wait \(ipc/tree_peers\.",
)
"""Functions of torch, and of ours, in which a rank waits for others; gradients are reduced inside of backward.

By their files: what a user calls ``send`` or ``barrier`` may do anything, and calls one of these if it waits.
"""


@dataclass(frozen=True)
class Frame:
    """One function on a stack; `file` is the end of its path: the folder and the name."""

    name: str
    file: str
    line: str = ""

    def __str__(self) -> str:
        """Such as ``backward (torch/_tensor.py:525)``."""
        return f"{self.name} ({self.file}:{self.line})" if self.line else f"{self.name} ({self.file})"


def main_stack(text: str) -> tuple[Frame, ...]:
    """The frames of the main thread, innermost first; empty if there is none to be seen.

    Of faulthandler's threads the main one is the last, of py-spy's the one named MainThread, else the first. A text of
    another form is taken line by line, without numbers.
    """
    threads = _threads(text[:_LONGEST])
    if not threads:
        return tuple(Frame(_NOISE.sub("#", line.strip()), "") for line in text[:_LONGEST].splitlines() if line.strip())
    named = [frames for name, frames in threads if name == "MainThread"]
    is_py_spy = any(name is not None for name, _ in threads)
    return tuple((named or [threads[0 if is_py_spy else -1][1]])[0])


def without_lines(frames: tuple[Frame, ...]) -> tuple[str, ...]:
    """Functions and files alone: what stacks are clustered by."""
    return tuple(f"{frame.name} ({frame.file})" for frame in frames)


def waits_for_peers(frames: Sequence[Frame]) -> bool:
    """Whether a thread with this stack is in a collective, or may be."""
    return any(_WAITS.search(text) for text in without_lines(tuple(frames)))


def has_ended(frames: Sequence[Frame]) -> bool:
    """Whether the main thread has this stack because its script is over, and Python waits for other threads."""
    return bool(frames) and frames[0].name == "_shutdown" and frames[0].file.endswith("threading.py")


def is_in_backward(frames: Sequence[Frame]) -> bool:
    """Whether the innermost function is torch's own backward, compiled code that computes as often as it waits."""
    return bool(frames) and frames[0].name == "_engine_run_backward"


def _threads(text: str) -> list[tuple[str | None, list[Frame]]]:
    """Threads in order; the name is None for faulthandler's, and for py-spy's what it says, or empty."""
    threads: list[tuple[str | None, list[Frame]]] = []
    for line in text.splitlines():
        if _FAULTHANDLER_THREAD.match(line):
            threads.append((None, []))
        elif (header := _PY_SPY_THREAD.match(line)) is not None:
            threads.append((header["name"] or "", []))
        elif threads and (frame := _FAULTHANDLER_FRAME.match(line) or _PY_SPY_FRAME.match(line)) is not None:
            threads[-1][1].append(Frame(frame["name"].strip(), _tail(frame["file"]), frame["line"] or ""))
    return threads


def _tail(path: str) -> str:
    return "/".join(path.replace("\\", "/").split("/")[-2:])


LOOK_S = 5.0
"""Between two looks at a rank."""

COMPUTES = 0.05
"""Share of a core that a rank wants which computes; what sleeps or waits uses less."""

THREADS_COMPUTE = 0.25
"""The same of its other threads, where the main one waits: one that polls, or watches something, uses less."""

_WIRE_BYTES_PER_S = _DISK_BYTES_PER_S = 1e6
_SOCKET_BYTES_PER_S = 16e3
"""At two looks running: watchdogs and stores say less, and who is asked for figures says so much only now and then."""
_WAKES_PER_S = 4.0
"""Of a main thread that waits for a socket, at two looks running; py-spy causes a few when it looks."""
_FILE_BYTES = 256 << 10
"""What a rank writes when it is asked for its stacks is less."""
_GROWTH_BYTES = 4 << 20
_RECENT = 8
_MOST_PLACES = 1000
_LATE = 2.0
"""So many times `LOOK_S` may lie between two looks, and all of it counts."""

_NO_WORK = (
    *("libpython", "python", "ld-linux", "ld-musl", "libc.", "libc-", "libpthread", "linux-vdso", "[vdso]"),
    *("libcuda", "libnccl", "librccl", "libamdhip", "libhsa", "libgloo"),
)
"""Libraries in which a thread goes round in Python, waits for the kernel, or waits for a device or its peers."""

_PATIENCE = re.compile(
    r"^(?:fsync|\w*backend_compile)\b|^\w*(?:save|load|write|dump|restore)\w*(?:checkpoint|state|model|pretrained)"
    r"|\((?:torch/serialization\.py|safetensors/|checkpoint/|importlib/|<frozen importlib"
    r"|_dynamo/convert_frame|_inductor/(?:compile_fx|graph|scheduler|async_compile)|triton/compiler)",
    re.IGNORECASE,
)
"""Functions and files that may wait for a file system or a compiler, of which nothing else may be seen."""
_PATIENCE_S = 1800.0

Place = tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One look at a rank. What could not be read is None, 0 or empty, and says nothing.

    Attributes:
        at_s: when, of any clock.
        state: of the process, as in /proc.
        main_cpu_s: CPU time of the main thread, and for how long it was ready to run while others had the cores.
        main_wants_core: it is ready and stays so, or runs: on a busy machine it may get no core for seconds.
        threads_cpu_s, threads_want_core: CPU time of its other threads, and the same of them.
        children_cpu_s, children_want_core: the same of its descendants, also of those that have ended.
        output_bytes: that it has written to its standard output and error.
        file_bytes: that it and its descendants have read and written.
        rss_bytes: resident memory of it and its descendants.
        socket_bytes: that the sockets of it and its descendants have carried.
        rdma_bytes: that the RDMA ports of its host that training uses have carried, which no socket shows.
        disk_bytes: that the disks of its host have read and written.
        uses_gpu: it has a GPU.
        is_gpu_active: whether that reads or writes its memory; None: not known.
        frames: of the main thread, innermost first; None: not known.
        waits_for: what its main thread waits to be sent something by: "pipe", or "socket" where that is none of TCP.
        main_read_bytes: that its main thread has read, of whatever.
        main_turns: how often its main thread has got a core.
    """

    at_s: float
    state: str = "S"
    main_cpu_s: float = 0.0
    main_wants_core: bool = False
    threads_cpu_s: float = 0.0
    threads_want_core: bool = False
    children_cpu_s: float = 0.0
    children_want_core: bool = False
    output_bytes: int = 0
    file_bytes: int = 0
    rss_bytes: int = 0
    socket_bytes: int = 0
    rdma_bytes: int = 0
    disk_bytes: int = 0
    uses_gpu: bool = False
    is_gpu_active: bool | None = None
    frames: tuple[Frame, ...] | None = None
    waits_for: str = ""
    main_read_bytes: int = 0
    main_turns: int = 0


class RankStillness:
    """Of one rank since its last step or change of phase; a new step begins a new one.

    Args:
        native_library: the name of the compiled library that the main thread is in; empty: it is in Python, or it
            cannot be told. Asked only when everything else leaves it open, for it takes a while.

    Attributes:
        still_s: for how long nothing has moved, as far as was looked.
        why: the last movement, in a few words; empty: there was none.
    """

    def __init__(self, native_library: Callable[[], str | None] = lambda: None) -> None:
        self._native_library = native_library
        self._before: Sample | None = None
        self._places: set[Place] = set()
        self._recent: deque[Place] = deque(maxlen=_RECENT)
        self._largest_bytes = 0
        self._waited_s = 0.0
        self._socket_rate = 0.0
        self._was_fed = False
        self._can_tell = False
        self.still_s = 0.0
        self.why = ""

    def observe(self, sample: Sample) -> None:
        """Take in another look."""
        before, self._before = self._before, sample
        why = _first_look(sample) if before is None else self._movement(before, sample)
        self._remember(sample)
        if why == _UNTOLD and self._can_tell:
            return  # whoever looks got no core in time: that says nothing of the rank
        if why:
            self.still_s, self.why = 0.0, why
        elif before is not None:
            elapsed_s = sample.at_s - before.at_s
            self.still_s += elapsed_s if elapsed_s <= _LATE * LOOK_S else LOOK_S

    def _remember(self, sample: Sample) -> None:
        self._largest_bytes = max(self._largest_bytes, sample.rss_bytes)
        if sample.frames and len(self._places) < _MOST_PLACES:
            self._places.add(_place(sample.frames))
            self._recent.append(_place(sample.frames))

    def _movement(self, before: Sample, now: Sample) -> str:
        """What has moved, in a few words; empty: nothing."""
        if now.state in _STOPPED:
            return ""
        if now.frames and _place(now.frames) not in self._places:
            return "is elsewhere in its code"
        if now.is_gpu_active:
            return "its GPU works"
        elapsed_s = max(now.at_s - before.at_s, 1e-3)
        if _share(now.children_want_core, now.children_cpu_s - before.children_cpu_s, elapsed_s) >= COMPUTES:
            return "its children compute"
        if now.state == "D" and (now.disk_bytes - before.disk_bytes) / elapsed_s >= _DISK_BYTES_PER_S:
            return "the disk that it waits for works"
        main = _share(now.main_wants_core, now.main_cpu_s - before.main_cpu_s, elapsed_s)
        threads = _share(now.threads_want_core, now.threads_cpu_s - before.threads_cpu_s, elapsed_s)
        carries = self._carries((now.socket_bytes - before.socket_bytes) / elapsed_s)
        was_fed, self._was_fed = self._was_fed, _is_fed(before, now, elapsed_s)
        if now.frames and waits_for_peers(now.frames[:1]):
            rdma_rate = (now.rdma_bytes - before.rdma_bytes) / elapsed_s
            return _beside(now, main, threads, rdma_rate, carries)
        if threads >= THREADS_COMPUTE and not _waits_for_gpu(now):
            return "its threads compute"
        if carries >= _SOCKET_BYTES_PER_S:
            return "its sockets carry bytes"
        if was_fed and self._was_fed:
            return f"a {now.waits_for} brings it something"
        return self._output(before, now) or self._computes(now, main) or self._is_patient(now, elapsed_s)

    def _carries(self, bytes_per_s: float) -> float:
        """What its sockets carry all the time: the least of this look and the one before."""
        before, self._socket_rate = self._socket_rate, bytes_per_s
        return min(before, bytes_per_s)

    def _is_patient(self, now: Sample, elapsed_s: float) -> str:
        """What may well take long of itself; not for ever."""
        found = next((frame for frame in without_lines(now.frames or ()) if _PATIENCE.search(frame)), "")
        self._waited_s += elapsed_s if found else 0.0
        return f"is in {found}" if found and self._waited_s < _PATIENCE_S else ""

    def _output(self, before: Sample, now: Sample) -> str:
        if now.output_bytes > before.output_bytes:
            return "writes output"
        if now.file_bytes - before.file_bytes > _FILE_BYTES:
            return "reads or writes files"
        return "its memory grows" if now.rss_bytes > self._largest_bytes + _GROWTH_BYTES else ""

    def _computes(self, now: Sample, share: float) -> str:
        if share < COMPUTES:
            return ""
        if not now.frames:
            return "" if _waits_for_gpu(now) else _UNTOLD
        if any(place != _place(now.frames) for place in self._recent):
            return "computes"
        library = self._native_library()
        if library is None:
            return "" if _waits_for_gpu(now) else _UNTOLD
        self._can_tell = True
        if not library or library.startswith(_NO_WORK):
            # It waits for the GPU, of which nobody can say whether it works.
            return "waits for its GPU" if library and now.uses_gpu and now.is_gpu_active is None else ""
        return f"computes in {library}"


_STOPPED = "Tt"
_UNTOLD = "computes, where cannot be told"


def _first_look(sample: Sample) -> str:
    return "" if sample.state in _STOPPED else "was not looked at before"


def _share(wants_core: bool, used_s: float, elapsed_s: float) -> float:
    """Of a core that is wanted."""
    return 1.0 if wants_core else used_s / elapsed_s


def _beside(now: Sample, main: float, threads: float, rdma_bytes_per_s: float, socket_bytes_per_s: float) -> str:
    """What a rank does whose main thread waits for others or is in backward; on a GPU it may do so by spinning."""
    if socket_bytes_per_s >= _WIRE_BYTES_PER_S or (threads >= COMPUTES and rdma_bytes_per_s >= _WIRE_BYTES_PER_S):
        return "bytes are on the wire"
    least = COMPUTES if is_in_backward(now.frames or ()) else THREADS_COMPUTE
    return "computes beside" if (main >= COMPUTES or threads >= least) and not now.uses_gpu else ""


def _is_fed(before: Sample, now: Sample, elapsed_s: float) -> bool:
    """Whether its main thread was sent something since the look before, as far as that can be told of what it is at."""
    if now.waits_for == "pipe":
        return now.main_read_bytes > before.main_read_bytes
    wakes = now.main_turns - before.main_turns
    return now.waits_for == "socket" and wakes >= _WAKES_PER_S * max(elapsed_s, LOOK_S)


def _waits_for_gpu(now: Sample) -> bool:
    """Whether CPU time says nothing: it spins until its GPU is done, and that is known not to work."""
    return now.uses_gpu and now.is_gpu_active is False


def _place(frames: tuple[Frame, ...]) -> Place:
    """Where a thread is, but for the line of the innermost function: a loop goes round there without getting on."""
    innermost, *callers = frames
    return f"{innermost.name} ({innermost.file})", *map(str, callers)
