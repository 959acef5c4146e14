"""Whether a rank stands still, by successive looks at it.

No step for a while is not a hang. A rank moves when any of this is seen between two looks (`RankStillness`):

- its main thread is in code where it has not been since its last step;
- it computes: it wants 5 % of a core or more, and goes through several places in the code, or one call of a compiled
  library takes long, or its other threads or its children compute (data loaders, compilers);
- its GPU reads or writes its memory (a kernel that only waits for a peer keeps a GPU "100 % busy", but moves nothing);
- it writes output, reads or writes files, its memory grows, or the disk works for which it waits;
- its own sockets carry bytes all the time, as of a download; where it waits in a collective, so many as that may move;
- its main thread waits for a pipe or a socket, and is sent something all the time;
- it saves or loads, compiles or imports, by its stack: for half an hour that may be a file system that cannot be seen.

What is left is a rank that sleeps, waits for a lock or for its peers, or goes round in one place: an endless loop. That
alone blames no rank, and it takes a minute of it until anything is done (`phalanx.run.judge.step_limits`).

When the looks themselves are late or fail, because the machine is busy, time without looks does not count.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.detect.hangs.python_stacks import Frame, waits_for_peers, without_lines

LOOK_S = 5.0  # between two looks at a rank
COMPUTES = 0.05  # share of a core that a rank wants which computes; what sleeps or waits uses less
THREADS_COMPUTE = 0.25
"""The same of its other threads, where the main one waits: one that polls, or watches something, uses less."""

_WIRE_BYTES_PER_S = _DISK_BYTES_PER_S = 1e6
_SOCKET_BYTES_PER_S = 16e3
"""At two looks running: watchdogs and stores send less, and a server of metrics so much only now and then."""
_WAKES_PER_S = 4.0  # of a main thread that waits for a socket, at two looks running; py-spy causes a few when it looks
_FILE_BYTES = 256 << 10  # what a rank writes when it is asked for its stacks is less
_GROWTH_BYTES = 4 << 20
_RECENT = 8
_MOST_PLACES = 1000
_LATE = 2.0  # so many times `LOOK_S` may lie between two looks, and all of it counts
_PYTHON = ("libpython", "python", "ld-linux", "ld-musl", "libc.", "libc-", "libpthread", "linux-vdso", "[vdso]")
_NO_WORK = (
    *_PYTHON,
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

_STOPPED = "Tt"
UNKNOWN_PLACE = "computes, where cannot be told"
WAITS_FOR_GPU = "waits for its GPU"
"""Said as movements, which may be none: more would have to be known."""

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


def works_in(library: str) -> bool | None:
    """Whether a thread that computes at one place works, by the compiled library that it is in; empty: it is in Python.

    None: it waits for a device or its peers.
    """
    if not library or library.startswith(_PYTHON):
        return False
    return None if library.startswith(_NO_WORK) else True


class RankStillness:
    """Of one rank since its last step or change of phase; a new step begins a new one.

    Args:
        native_library: the name of the compiled library that the main thread is in; empty: it is in Python, or it
            cannot be told. Asked only when everything else leaves it open, for it takes a while.

    Attributes:
        still_s: for how long nothing has moved, as far as was looked.
        why: the last movement, in a few words; empty: there was none.
        looks: how many there were.
        goes_round: at the newest look it computed in one place of Python code, where it had been before.
        frames: of its main thread at the newest look at which they could be read, innermost first.
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
        self._knows_libraries = False
        self.still_s = 0.0
        self.why = ""
        self.looks = 0
        self.goes_round = False
        self.frames: tuple[Frame, ...] = ()

    def observe(self, sample: Sample) -> None:
        """Take in another look."""
        before, self._before = self._before, sample
        self.looks += 1
        self.goes_round = False
        self.frames = sample.frames or self.frames
        if before is None:
            why = "" if sample.state in _STOPPED else "was not looked at before"
        else:
            why = self._movement(before, sample)
        self._largest_bytes = max(self._largest_bytes, sample.rss_bytes)
        if sample.frames and len(self._places) < _MOST_PLACES:
            self._places.add(_place(sample.frames))
            self._recent.append(_place(sample.frames))
        if why == UNKNOWN_PLACE and self._knows_libraries:
            return  # py-spy got no core in time: that says nothing about the rank
        if why:
            self.still_s, self.why = 0.0, why
        elif before is not None:
            elapsed_s = sample.at_s - before.at_s
            self.still_s += elapsed_s if elapsed_s <= _LATE * LOOK_S else LOOK_S

    def _movement(self, before: Sample, now: Sample) -> str:
        """What has moved, in a few words; empty: nothing."""
        elapsed_s = max(now.at_s - before.at_s, 1e-3)

        def share(wants_core: bool, used_s: float) -> float:
            return 1.0 if wants_core else used_s / elapsed_s  # on a busy machine it may get no core for seconds

        if now.state in _STOPPED:
            return ""
        if now.frames and _place(now.frames) not in self._places:
            return "is elsewhere in its code"
        if now.is_gpu_active:
            return "its GPU works"
        if share(now.children_want_core, now.children_cpu_s - before.children_cpu_s) >= COMPUTES:
            return "its children compute"
        if now.state == "D" and (now.disk_bytes - before.disk_bytes) / elapsed_s >= _DISK_BYTES_PER_S:
            return "the disk that it waits for works"
        main = share(now.main_wants_core, now.main_cpu_s - before.main_cpu_s)
        threads = share(now.threads_want_core, now.threads_cpu_s - before.threads_cpu_s)
        # At two looks running: what comes only now and then are watchdogs, stores, and py-spy's own looks.
        rate_before, self._socket_rate = self._socket_rate, (now.socket_bytes - before.socket_bytes) / elapsed_s
        socket_rate = min(rate_before, self._socket_rate)
        if now.waits_for == "pipe":
            is_fed = now.main_read_bytes > before.main_read_bytes
        else:
            wakes = now.main_turns - before.main_turns
            is_fed = now.waits_for == "socket" and wakes >= _WAKES_PER_S * max(elapsed_s, LOOK_S)
        was_fed, self._was_fed = self._was_fed, is_fed
        if now.frames and waits_for_peers(now.frames[:1]):
            # In a collective or in backward; on a GPU a thread may wait there by spinning.
            rdma_rate = (now.rdma_bytes - before.rdma_bytes) / elapsed_s
            if socket_rate >= _WIRE_BYTES_PER_S or (threads >= COMPUTES and rdma_rate >= _WIRE_BYTES_PER_S):
                return "bytes are on the wire"
            # torch's own backward is compiled code, which computes as often as it waits.
            least = COMPUTES if now.frames[0].name == "_engine_run_backward" else THREADS_COMPUTE
            return "computes beside" if (main >= COMPUTES or threads >= least) and not now.uses_gpu else ""
        if threads >= THREADS_COMPUTE and not _waits_for_gpu(now):
            return "its threads compute"
        if socket_rate >= _SOCKET_BYTES_PER_S:
            return "its sockets carry bytes"
        if was_fed and is_fed:
            return f"a {now.waits_for} brings it something"
        if now.output_bytes > before.output_bytes:
            return "writes output"
        if now.file_bytes - before.file_bytes > _FILE_BYTES:
            return "reads or writes files"
        if now.rss_bytes > self._largest_bytes + _GROWTH_BYTES:
            return "its memory grows"
        if computes := self._computes(now, main):
            return computes
        # What may well take long of itself, but not for ever.
        patient = next((frame for frame in without_lines(now.frames or ()) if _PATIENCE.search(frame)), "")
        self._waited_s += elapsed_s if patient else 0.0
        return f"is in {patient}" if patient and self._waited_s < _PATIENCE_S else ""

    def _computes(self, now: Sample, share: float) -> str:
        if share < COMPUTES:
            return ""
        if not now.frames:
            return "" if _waits_for_gpu(now) else UNKNOWN_PLACE
        if any(place != _place(now.frames) for place in self._recent):
            return "computes"
        library = self._native_library()
        if library is None:
            return "" if _waits_for_gpu(now) else UNKNOWN_PLACE
        self._knows_libraries = True
        if not library or library.startswith(_NO_WORK):
            self.goes_round = not library or library.startswith(_PYTHON)
            # It waits for the GPU, and whether that works is not known.
            return WAITS_FOR_GPU if library and now.uses_gpu and now.is_gpu_active is None else ""
        return f"computes in {library}"


def _waits_for_gpu(now: Sample) -> bool:
    """Whether CPU time says nothing: it spins until its GPU is done, and that is known not to work."""
    return now.uses_gpu and now.is_gpu_active is False


def _place(frames: tuple[Frame, ...]) -> Place:
    """Where a thread is, but for the line of the innermost function: a loop goes round there without getting on."""
    innermost, *callers = frames
    return f"{innermost.name} ({innermost.file})", *map(str, callers)
