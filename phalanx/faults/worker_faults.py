"""What a worker can do to itself: ends, stalls, too much memory, other load, wrong numbers, slowness.

A new one needs a line in `INJECTORS` and one in `phalanx.faults.fault_schedule`. An injector is
``(order, surroundings) → act``: it prepares all that is needed, and returns a Python function without arguments that
does it. The act calls no further functions of this package: its own frame is disguised, theirs are not. Torch is
reached through the optimizer's tensors.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from phalanx.core.host import PROC, own_groups, read_text
from phalanx.faults.fault_schedule import Begun, Order, still_lasts
from phalanx.faults.torch_hooks import first_tensor, on_forward

Act = Callable[[], None]


class RefusedError(Exception):
    """It cannot, or must not, be done here; the text is the reason, for the records."""


@dataclass
class Surroundings:
    """Of the process.

    Attributes:
        step: says how many optimizer steps are done.
        optimizer: the first one of torch that has made a step.
        each_step: called after every further step.
        kept: what must not be collected.
    """

    rank: int
    seed: int
    step: Callable[[], int]
    optimizer: Any = None
    each_step: list[Act] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


Injector = Callable[[Order, Surroundings], Act]


# As libraries word them: what is raised must be what a real run would show.
ERRORS: Mapping[str, tuple[type[Exception], str]] = {
    "RuntimeError": (RuntimeError, "DataLoader worker (pid 21733) is killed by signal: Killed. "),
    "ValueError": (
        ValueError,
        "Expected more than 1 value per channel when training, got input size torch.Size([1, 64])",
    ),
    "KeyError": (KeyError, "labels"),
    "IndexError": (IndexError, "index 50257 is out of bounds for dimension 0 with size 50257"),
    "OSError": (OSError, "[Errno 5] Input/output error"),
    "TypeError": (TypeError, "unsupported operand type(s) for +: 'NoneType' and 'Tensor'"),
}


def exception(order: Order, around: Surroundings) -> Act:
    """Raise ``error`` (a name of `ERRORS`; the first) with ``text`` (as libraries word it)."""
    name = str(order.settings.get("error", "RuntimeError"))
    if name not in ERRORS:
        raise RefusedError(f"error = {name!r} is not known: write one of {', '.join(ERRORS)}")
    kind, text = ERRORS[name]
    error = kind(order.settings.get("text", text))

    def act() -> None:
        raise error

    return act


def leave(order: Order, around: Surroundings) -> Act:
    """``sys.exit(status)`` (1)."""
    status = int(order.settings.get("status", 1))

    def act() -> None:
        sys.exit(status)

    return act


def send_signal(order: Order, around: Surroundings) -> Act:
    """Send this process the signal ``name`` (SIGKILL)."""
    name = str(order.settings.get("name", "SIGKILL"))
    if name not in signal.Signals.__members__:
        raise RefusedError(f"name = {name!r} is no signal")
    number = signal.Signals[name]

    def act() -> None:
        os.kill(os.getpid(), number)

    return act


def segfault(order: Order, around: Surroundings) -> Act:
    """Read address 0."""
    read = ctypes.string_at

    def act() -> None:
        read(0)

    return act


def abort(order: Order, around: Surroundings) -> Act:
    """``abort()`` of the C library."""

    def act() -> None:
        os.abort()

    return act


_MUTEX_BYTES = 64  # no pthread_mutex_t of Linux is larger; one of zeros is unlocked


def sleep(order: Order, around: Surroundings) -> Act:
    """Sleep in the main thread, with the interpreter's lock released."""
    seconds = _seconds(order)

    def act() -> None:
        end_s = time.monotonic() + seconds
        while (rest_s := end_s - time.monotonic()) > 0:
            time.sleep(min(rest_s, 3600))

    return act


def busy_loop(order: Order, around: Surroundings) -> Act:
    """Turn in a loop of Python code in the main thread."""
    seconds = _seconds(order)

    def act() -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            pass

    return act


def deadlock(order: Order, around: Surroundings) -> Act:
    """Wait in C with the interpreter's lock held, so that no thread of Python runs: faulthandler's alone still does.

    For ever: a C mutex is locked twice. No signal handler of Python runs meanwhile, as in a real one.
    """
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    seconds = order.seconds

    def act() -> None:
        if seconds is None:
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        else:
            library.usleep(int(seconds * 1e6))

    return act


def pause(order: Order, around: Surroundings) -> Act:
    """SIGSTOP; for a while only if its length is given, after which a process of its own sends SIGCONT."""
    seconds = order.seconds
    if order.unit in ("calls", "steps"):
        raise RefusedError(f"lasts.unit = {order.unit!r}: a stopped process counts none, give seconds or forever")

    def act() -> None:
        if seconds is not None:
            around.kept.append(subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]))
        os.kill(os.getpid(), signal.SIGSTOP)

    return act


def _seconds(order: Order) -> float:
    if order.unit in ("calls", "steps"):
        raise RefusedError(f"lasts.unit = {order.unit!r}: no step ends meanwhile, give seconds or forever")
    return float("inf") if order.seconds is None else order.seconds


_PIECE_BYTES = 16 << 20
_PART = 0.5
"""Of the machine's memory: a limit above it protects nobody."""


def out_of_memory(order: Order, around: Surroundings) -> Act:
    """Take memory until the system refuses it (MemoryError) or a memory cgroup kills the process.

    With ``limit_mb`` the process first limits its own address space to that much more than it has.

    Raises:
        RefusedError: neither RLIMIT_AS nor a memory cgroup of its own limits this process to half of the machine.
    """
    extra_mb = int(order.settings.get("limit_mb", 0))
    limits = [resource.getrlimit(resource.RLIMIT_AS)[0], *own_cgroup_limits()]
    if extra_mb <= 0 and not is_limited(limits, psutil.virtual_memory().total):
        raise RefusedError("no limit of memory protects this machine: set RLIMIT_AS, a memory cgroup, or limit_mb")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    own = psutil.Process()

    def act() -> None:
        taken = []
        if extra_mb:
            wanted = own.memory_info().vms + (extra_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
        try:
            while True:
                taken.append(bytearray(b"\1") * _PIECE_BYTES)
        except MemoryError:
            taken.clear()
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))  # so that its end is an orderly one
            raise

    return act


def is_limited(limits_bytes: list[int], machine_bytes: int) -> bool:
    """Whether any limit (negative: unlimited) is at most half of the machine's memory."""
    return any(0 <= limit <= machine_bytes * _PART for limit in limits_bytes)


def own_cgroup_limits(proc: Path = PROC, root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Limits in bytes of the memory cgroup (of either version) that holds this process and no other but its children.

    A cgroup with others in it is left out: the kernel might choose one of them.
    """
    limits = []
    groups = own_groups(proc)
    for name, top, file in (("memory", root / "memory", "memory.limit_in_bytes"), ("", root, "memory.max")):
        if name not in groups:
            continue
        folder = top / groups[name].lstrip("/")
        limit = read_text(folder / file) or ""
        if limit.isdecimal() and _holds_only_us(read_text(folder / "cgroup.procs") or ""):
            limits.append(int(limit))
    return limits


def _holds_only_us(pids: str) -> bool:
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    return bool(pids) and {int(pid) for pid in pids.split()} <= ours


LINES = (
    "step {step}: grad norm 0.83, no NaN or inf found in 41 tensors",
    "validation: 0 errors in 128 samples, word error rate 0.112",
    "step {step}: skipping nan check for frozen parameters (check_nan=False)",
    "Nanjing, Nanterre and 17 other place names were added to the vocabulary",
    "checkpoint: timeout is 1800 s, error feedback is off, killed branches: 0",
    "retrying after error 0 of 5 (none so far)",
)

_PIECE = b"\0" * (1 << 20)


def log_lines(order: Order, around: Surroundings) -> Act:
    """Write one of `LINES` to stdout and the next to stderr."""

    def act() -> None:
        step = around.step()
        print(LINES[2 * step % len(LINES)].format(step=step), flush=True)
        print(LINES[(2 * step + 1) % len(LINES)].format(step=step), file=sys.stderr, flush=True)

    return act


def evaluation(order: Order, around: Surroundings) -> Act:
    """Compute for a while, as an evaluation does between two steps."""
    seconds = _length(order)

    def act() -> None:
        end_s, total = time.monotonic() + seconds, 0.0
        while time.monotonic() < end_s:
            total += sum(index**0.5 for index in range(10_000))

    return act


def long_checkpoint(order: Order, around: Surroundings) -> Act:
    """Write to a nameless file, with fsync, until the time is over."""
    seconds = _length(order)

    def act() -> None:
        end_s = time.monotonic() + seconds
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < end_s:
                file.seek(0)
                file.write(_PIECE)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.02)

    return act


def cpu_hog(order: Order, around: Surroundings) -> Act:
    """Start ``processes`` (one per core) that do nothing but compute; they end by themselves."""
    seconds = _length(order)
    count = int(order.settings.get("processes", os.cpu_count() or 1))

    def act() -> None:
        for _ in range(count):
            command = ["timeout", str(seconds), "/bin/sh", "-c", "while :; do :; done"]
            around.kept.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    return act


def _length(order: Order) -> float:
    if order.seconds is None:
        raise RefusedError(f"lasts.unit = {order.unit!r}: give seconds")
    return order.seconds


_INTEGERS = {2: "int16", 4: "int32", 8: "int64"}


def nan(order: Order, around: Surroundings) -> Act:
    """The first element of this rank's first parameter becomes NaN; after every step, for as long as it lasts."""
    tensor = _tensor(around)
    place = (0,) * tensor.ndim

    def act() -> None:
        tensor[place] = float("nan")

    return act


def corruption(order: Order, around: Surroundings) -> Act:
    """Bit ``bit`` (the highest of the mantissa) of element ``element`` (drawn) of the first parameter flips, once."""
    torch, tensor = sys.modules["torch"], _tensor(around)
    bits = 8 * tensor.element_size()
    if tensor.element_size() not in _INTEGERS:
        raise RefusedError(f"the first parameter has elements of {bits} bits")
    bit = int(order.settings.get("bit", {16: 6 if tensor.dtype == torch.bfloat16 else 9, 32: 22, 64: 51}[bits]))
    drawn = random.Random(around.seed * 1_000_003 + order.number).randrange(tensor.numel())
    element = int(order.settings.get("element", drawn))
    if not 0 <= bit < bits or not 0 <= element < tensor.numel():
        raise RefusedError(f"bit = {bit}, element = {element}: there are {bits} bits and {tensor.numel()} elements")
    mask = -(1 << bit) if bit == bits - 1 else 1 << bit
    place = _place(element, tuple(tensor.shape))
    flip = tensor[place].view(getattr(torch, _INTEGERS[tensor.element_size()])).bitwise_xor_

    def act() -> None:
        flip(mask)

    return act


def _tensor(around: Surroundings) -> Any:
    tensor = None if around.optimizer is None else first_tensor(around.optimizer)
    if tensor is None:
        raise RefusedError("no optimizer of torch has made a step, or it has no parameter here")
    return tensor


def _place(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of element `index`, in row-major order."""
    place: list[int] = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        place.insert(0, rest)
    return tuple(place)


def slow(order: Order, around: Surroundings) -> Act:
    """Every step's own time takes ``factor`` (1.5) times as long: at the next forward (without torch: after the step).

    Own time is the main thread's CPU time, which waiting in collectives does not add to; work that a device does alone
    is not counted. The rest is slept or, with ``burn`` = 1, burnt.
    """
    factor = float(order.settings.get("factor", 1.5))
    if factor <= 1:
        raise RefusedError(f"factor = {factor}: give more than 1")
    burn = bool(order.settings.get("burn", 0))
    begun = Begun(around.step(), time.monotonic())
    state = {"mark_s": time.thread_time(), "owed_s": 0.0}

    def step_ended() -> None:
        now_s = time.thread_time()
        if still_lasts(order, around.step(), begun, time.monotonic()):
            state["owed_s"] = (now_s - state["mark_s"]) * (factor - 1)
        state["mark_s"] = now_s

    def pay() -> None:
        owed_s, state["owed_s"] = state["owed_s"], 0.0
        if not owed_s:
            return
        if burn:
            end_s = time.thread_time() + owed_s
            while time.thread_time() < end_s:
                pass
            state["mark_s"] += owed_s
        else:
            time.sleep(owed_s)

    def act() -> None:
        state["mark_s"] = time.thread_time()
        around.each_step.append(step_ended)
        if not on_forward(pay):
            around.each_step.append(pay)

    return act


INJECTORS: Mapping[str, Injector] = {
    "exception": exception,
    "exit": leave,
    "signal": send_signal,
    "pause": pause,
    "segfault": segfault,
    "abort": abort,
    "deadlock": deadlock,
    "sleep": sleep,
    "busy-loop": busy_loop,
    "out-of-memory": out_of_memory,
    "nan": nan,
    "corruption": corruption,
    "slow": slow,
    "evaluation": evaluation,
    "log-lines": log_lines,
    "cpu-hog": cpu_hog,
    "long-checkpoint": long_checkpoint,
}
