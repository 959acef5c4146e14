"""Python stacks as faulthandler and py-spy write them: the main thread's frames, and whether they wait for peers."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    r"|^(?:\w+\.)*(?:synchronize \((?:cuda|accelerator)/|wait_for_everyone \(accelerate/"
    r"|_wait \(ipc/tree_peers\.|(?:wait|barrier) \(parallel/group\.)",
)
"""Functions of torch, and of ours, in which a rank waits for others; gradients are reduced inside of backward.

By their files: what a user calls ``send`` or ``barrier`` may do anything, and calls one of these if it waits. Newer
releases of py-spy name the class of a method, too.
"""

_LOCKS = re.compile(
    r"^(?:\w+\.)*(?:wait|wait_for|acquire|join|get|put|result|_wait_for_tstate_lock|__enter__)"
    r" \((?:[^()]{0,100}/)?(?:threading|queue|_base)\.py\)$"
)
"""Waits of Python's threads and queues, which only the program itself can end."""
_OF_FILES = re.compile(r"\((?:data/dataloader\.|_utils/|checkpoint/|safetensors/|torch/serialization\.)")
"""Outside of such a wait: who waits for a loader of data, or for a checkpoint, may wait for a disk."""


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


def waits_in_program(frames: Sequence[Frame]) -> Frame | None:
    """The wait of a thread that only its own program can end: a condition, an event, a queue, a thread; None: none."""
    texts = without_lines(tuple(frames))
    if not texts or not _LOCKS.search(texts[0]) or has_ended(frames):
        return None
    if waits_for_peers(frames) or any(_OF_FILES.search(text) for text in texts):
        return None
    outer = (frame for frame, text in zip(frames, texts, strict=True) if not _LOCKS.search(text))
    return next(outer, frames[0])


def has_ended(frames: Sequence[Frame]) -> bool:
    """Whether the main thread has this stack because its script is over, and Python waits for other threads."""
    return bool(frames) and frames[0].name == "_shutdown" and frames[0].file.endswith("threading.py")


def _threads(text: str) -> list[tuple[str | None, list[Frame]]]:
    """Threads in order; the name is None for faulthandler's, and for py-spy's what it says, or empty."""
    threads: list[tuple[str | None, list[Frame]]] = []
    for line in text.splitlines():
        if _FAULTHANDLER_THREAD.match(line):
            threads.append((None, []))
        elif (header := _PY_SPY_THREAD.match(line)) is not None:
            threads.append((header["name"] or "", []))
        elif threads and (frame := _FAULTHANDLER_FRAME.match(line) or _PY_SPY_FRAME.match(line)) is not None:
            file = "/".join(frame["file"].replace("\\", "/").split("/")[-2:])
            threads[-1][1].append(Frame(frame["name"].strip(), file, frame["line"] or ""))
    return threads
