"""How far a rank is: a page of memory that the rank writes after every step and its executor reads.

The page is a small file (`PAGE_BYTES`) that the writer has mapped. It holds a header and two slots, which are written
in turn. The sequence number at a slot's start is odd while it is written, and a checksum covers the rest, so a reader
knows a torn slot on any processor, and finds the other slot whole when the writer was killed or stopped in the middle.
The reader never maps the file, so it gets no SIGBUS whatever becomes of that. All times are nanoseconds of the host's
monotonic clock.

Two may write to one page in one process: code that counts steps for a script that does not report them, and the script
itself, which then claims the page so that the first stops (`ProgressWriter.is_claimed`). What a process restored,
when it had imported torch and which checkpoints it keeps have places of their own on the page (`say_restored`,
`say_imported`, `say_checkpoints`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRESS_VARIABLE = "PHALANX_PROGRESS"
"""The environment variable that names a rank's page."""

ATTEMPT_VARIABLE = "PHALANX_RUN_ATTEMPT"
"""The number of the attempt, for the page; torchrun's variables count restarts only."""

PAGE_BYTES = 4096
VERSION = 1
PHASE_BYTES = 31
MESSAGE_BYTES = 95

UNKNOWN = -1
"""Of a number that is not known."""

_MAGIC = b"PHLXPAGE"
# magic, version, bytes of a slot's body, whether the script has claimed the page, whether it numbers its steps
_HEADER = struct.Struct("<8sIIHH")
_CLAIM_AT = 16
_NUMBERS_AT = 18
_SLOTS_AT = 64
_SLOT_BYTES = 512
_RESTORED_AT = 1152
_IMPORTED_AT = 1168
_CHECKPOINTS_AT = 1216
_RING_AT = 2048
_RING = 128
"""Own times of the last so many steps, that of step n of this process at place n - 1 modulo this."""

# The numbers of a slot, before loss, has loss, and the two texts.
_NUMBERS = (
    "pid", "attempt", "step", "steps_here", "step_ended_ns", "step_took_ns", "phase_began_ns", "expects_ns", "busy_ns",
    "busy_total_ns", "broken_step",
)  # fmt: skip
_BODY = struct.Struct("<11qd?32p96p")
_SEQUENCE = struct.Struct("<Q")
_CHECK = struct.Struct("<I")
_TIME = struct.Struct("<q")

_NUMBER = struct.Struct("<qI")
"""A number from 0 and its checksum."""

CHECKPOINTS_BYTES = 239

_CHECKPOINTS = struct.Struct("<I240p")
"""A checksum and a text."""

_READS = 3


@dataclass(frozen=True)
class Progress:
    """The last state that a rank has written."""

    pid: int  # of the process that wrote it
    attempt: int = 0  # that it belongs to
    step: int = 0  # optimizer steps as the run counts them; those of this process where the run does not say
    steps_here: int = 0  # optimizer steps of this process
    step_ended_ns: int = UNKNOWN  # when the last of them ended; -1: none has
    step_took_ns: int = UNKNOWN  # from the end of the one before to its end; -1: not known
    phase: str = ""  # of the rank, by its own word; empty: none
    phase_began_ns: int = 0  # when that began
    expects_ns: int = 0  # for how long from then no step need be expected
    busy_ns: int = UNKNOWN  # own time of the last step, without waiting in collectives; -1: not known
    busy_total_ns: int = UNKNOWN  # of all steps of this process; -1: not known
    loss: float | None = None  # of the last step; None: not known, NaN: that is what it was
    message: str = ""  # a short one for people
    # the first step of those in a row until now whose loss is not finite; -1: the last one's is
    broken_step: int = UNKNOWN
    # the script gives `step` its numbers, so that they go on where an earlier process has ended
    is_absolute: bool = False
    restored: int = UNKNOWN  # step of the state with which this process began; 0: there was none; -1: not known
    imported_ns: int = UNKNOWN  # from its start, of a new Python, until it had imported torch; -1: not known
    checkpoints: str = ""  # what storage can keep up with, where it cannot keep up with what is asked for


class ProgressWriter:
    """A rank's side of its page, which is created where it is absent; a method call costs a few microseconds.

    What an earlier process or attempt left on the page goes. What this process has written there already, through
    another writer, stays.

    Raises:
        OSError: the page cannot be created, such as on a full disk.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        attempt: int = 0,
        *,
        # whether this writer speaks for the script, so that those that only count for it are to stop
        claims: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._page = _open_page(path)
        before = parse_page(bytes(self._page))
        pid = os.getpid()
        continues = before is not None and (before.pid, before.attempt) == (pid, attempt)
        said = before if continues and before is not None else Progress(pid, attempt, phase_began_ns=clock_ns())
        self._sequence = _last_sequence(bytes(self._page))
        self._numbers = [getattr(said, name) for name in _NUMBERS]
        self._loss = said.loss
        self._phase, self._message = said.phase.encode(), said.message.encode()
        claimed = claims or (continues and self.is_claimed)
        self._page[: _HEADER.size] = _HEADER.pack(_MAGIC, VERSION, _BODY.size, claimed, said.is_absolute)
        self._write()

    @property
    def is_claimed(self) -> bool:
        """Whether the script writes this page itself."""
        return self._page[_CLAIM_AT] != 0

    def resume(self, step: int) -> None:
        """The training goes on after this step: 0, or the last one that what was restored has seen.

        Without it the step of a script that fails before its first step ends is not known.
        """
        self._page[_NUMBERS_AT] = 1
        self._numbers[2] = step
        self._write()

    def step(self, step: int | None = None, *, busy_ns: int = UNKNOWN, loss: float | None = None) -> None:
        """A step has ended: its number from 1 (None: the next), own time without collectives, and loss if known."""
        numbers, now_ns = self._numbers, self._clock_ns()
        if step is not None:
            self._page[_NUMBERS_AT] = 1
        numbers[2] = numbers[2] + 1 if step is None else step
        numbers[3] += 1
        numbers[5] = now_ns - numbers[4] if numbers[4] >= 0 else UNKNOWN
        numbers[4] = now_ns
        numbers[8] = busy_ns
        if busy_ns >= 0:
            numbers[9] = max(numbers[9], 0) + busy_ns
        _TIME.pack_into(self._page, _RING_AT + _TIME.size * ((numbers[3] - 1) % _RING), busy_ns)
        if loss is None or math.isfinite(loss):
            numbers[10] = UNKNOWN
        elif numbers[10] < 0:
            numbers[10] = numbers[2]
        self._loss = loss
        self._write()

    def phase(self, name: str, expects_s: float = 0.0) -> None:
        """Another phase begins; no step need be expected for `expects_s` seconds from now."""
        self._phase = _cut(name, PHASE_BYTES)
        self._numbers[6] = self._clock_ns()
        self._numbers[7] = int(expects_s * 1e9)
        self._write()

    def message(self, text: str) -> None:
        """Say something to people, in a few words."""
        self._message = _cut(text, MESSAGE_BYTES)
        self._write()

    def close(self) -> None:
        """Let go of the page, which stays."""
        self._page.close()

    def _write(self) -> None:
        loss = self._loss
        known = loss is not None
        body = _BODY.pack(*self._numbers, loss if known else math.nan, known, self._phase, self._message)
        begin = _SLOTS_AT + _SLOT_BYTES * ((self._sequence // 2 + 1) % 2)  # the slot that is not the newest one
        middle = begin + _SEQUENCE.size
        page = self._page
        page[begin:middle] = _SEQUENCE.pack(self._sequence + 1)
        page[middle : middle + _CHECK.size + _BODY.size] = _CHECK.pack(_checksum(self._sequence + 2, body)) + body
        self._sequence += 2
        page[begin:middle] = _SEQUENCE.pack(self._sequence)


class ProgressReader:
    """An executor's side of a page, which need not be there yet; never waits, and does not mind what the file holds."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._descriptor = -1
        self._block = b""

    def read(self) -> Progress | None:
        """The newest that was written whole; None where there is no page of this version, or nothing on it."""
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                return None
        for _ in range(_READS):
            try:
                block = os.pread(self._descriptor, PAGE_BYTES, 0)
            except OSError:
                return None
            if (found := parse_page(block)) is not None:
                self._block = block
                return found
        return None

    def busy_since(self, said: Progress, before: int) -> list[int]:
        """Own times, where known, of the steps of this process after the first `before`; `said` is from `read`."""
        if said.busy_ns < 0 or len(self._block) < PAGE_BYTES:
            return []
        steps = range(max(before, said.steps_here - _RING, 0), said.steps_here)
        times = (_TIME.unpack_from(self._block, _RING_AT + _TIME.size * (step % _RING))[0] for step in steps)
        return [busy_ns for busy_ns in times if busy_ns >= 0]

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def create_page(path: str | os.PathLike[str]) -> None:
    """Make an empty page, with its place on the disk taken, so that no write to it can fail later.

    Raises:
        OSError: it cannot be made.
    """
    Path(path).unlink(missing_ok=True)
    _open_page(path).close()


def say_restored(environ: Mapping[str, str], step: int) -> None:
    """Write that this process goes on from a state of this step (0: there was none to restore).

    It neither numbers the steps of a script that does not, nor claims the page. Where none is read, or it cannot be
    written, nothing happens.
    """
    _say_number(environ, _RESTORED_AT, step)


def say_imported(environ: Mapping[str, str], took_ns: int) -> None:
    """Write after how long this process, a new Python, had imported torch; as `say_restored`."""
    _say_number(environ, _IMPORTED_AT, took_ns)


def say_checkpoints(environ: Mapping[str, str], text: str) -> None:
    """Write with how many checkpoints storage keeps up, if not with those that are asked for (empty: it does).

    It does not claim the page. Where none is read, or it cannot be written, nothing happens.
    """
    content = _cut(text, CHECKPOINTS_BYTES)
    _say(environ, _CHECKPOINTS_AT, _CHECKPOINTS.pack(_checksum_from_1(content), content))


def _say_number(environ: Mapping[str, str], at: int, number: int) -> None:
    _say(environ, at, _NUMBER.pack(number, _checksum_from_1(_TIME.pack(number))))


def _say(environ: Mapping[str, str], at: int, content: bytes) -> None:
    if path := environ.get(PROGRESS_VARIABLE):
        with contextlib.suppress(OSError), contextlib.closing(_open_page(path)) as page:
            page[at : at + len(content)] = content


def own_progress(environ: Mapping[str, str], attempt: int = 0) -> ProgressWriter | None:
    """The page of this rank, claimed for the script that calls; None where none is read.

    Raises:
        OSError: there is to be one, but it cannot be written.
    """
    path = environ.get(PROGRESS_VARIABLE)
    return ProgressWriter(path, attempt, claims=True) if path else None


def parse_page(block: bytes) -> Progress | None:
    """The newer of the whole slots in the bytes of a page."""
    if len(block) != PAGE_BYTES or _HEADER.unpack_from(block)[:3] != (_MAGIC, VERSION, _BODY.size):
        return None
    slots = [found for n in (0, 1) if (found := _parse_slot(block, _SLOTS_AT + n * _SLOT_BYTES))]
    return max(slots, key=lambda slot: slot[0])[1] if slots else None


def _checksum_from_1(content: bytes) -> int:
    return zlib.crc32(content, 1)  # from 1, so that it is never that of an empty page


def _parse_slot(block: bytes, begin: int) -> tuple[int, Progress] | None:
    (sequence,) = _SEQUENCE.unpack_from(block, begin)
    (check,) = _CHECK.unpack_from(block, begin + _SEQUENCE.size)
    start = begin + _SEQUENCE.size + _CHECK.size
    body = block[start : start + _BODY.size]
    if sequence == 0 or sequence % 2 or check != _checksum(sequence, body):
        return None
    *numbers, loss, known, phase, message = _BODY.unpack(body)
    text_check, text = _CHECKPOINTS.unpack_from(block, _CHECKPOINTS_AT)
    return sequence, Progress(
        **dict(zip(_NUMBERS, numbers, strict=True)),
        phase=phase.decode(errors="replace"),
        loss=loss if known else None,
        message=message.decode(errors="replace"),
        is_absolute=block[_NUMBERS_AT] != 0,
        restored=_number_at(block, _RESTORED_AT),
        imported_ns=_number_at(block, _IMPORTED_AT),
        checkpoints=text.decode(errors="replace") if text_check == _checksum_from_1(text) else "",
    )


def _number_at(block: bytes, at: int) -> int:
    number, check = _NUMBER.unpack_from(block, at)
    return number if number >= 0 and check == _checksum_from_1(_TIME.pack(number)) else UNKNOWN


def _checksum(sequence: int, body: bytes) -> int:
    # Of a slot that carries this number: an old body under a new number is torn too.
    return zlib.crc32(body, sequence & 0xFFFFFFFF)


def _last_sequence(block: bytes) -> int:
    """The highest even number that a slot began with, so that what is written next counts as newer."""
    numbers = [_SEQUENCE.unpack_from(block, _SLOTS_AT + n * _SLOT_BYTES)[0] for n in (0, 1)]
    return (max(numbers) + 1) // 2 * 2 if max(numbers) < 1 << 62 else 0


def _open_page(path: str | os.PathLike[str]) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size != PAGE_BYTES:
            os.ftruncate(descriptor, PAGE_BYTES)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)  # a mapped write that finds the disk full is a SIGBUS
        return mmap.mmap(descriptor, PAGE_BYTES)
    finally:
        os.close(descriptor)


def _cut(text: str, limit_bytes: int) -> bytes:
    """As much of `text` as fits, in whole characters."""
    return text.encode(errors="replace")[:limit_bytes].decode(errors="ignore").encode()
