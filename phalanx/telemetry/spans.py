"""Spans: what a rank did from when to when, put into a bounded ring that never blocks and never waits for the device.

A rank owns one ring, a small file that it maps (`SpanRing`). The writer process of the host reads all rings of its
ranks (`phalanx.telemetry.span_writer`); where it falls behind by a whole ring, the oldest spans are overwritten and
counted as dropped. What a span always has in common (its kind, name, group, chunk) is a `SpanType`, described once in
the ring's header, so that one span costs one `struct.pack_into`: about half a microsecond. Whatever kills the rank, the
spans before it stay in the file.

    recorder = Recorder.open(path, rank=3)
    forward = recorder.type("forward", "chunk 0", chunk=0)
    with recorder.span(forward, micro_batch=2):
        ...

Record, little endian: start_ns, end_ns (monotonic clock of the host), bytes, step, peer (rank, -1: none),
type, micro_batch (-1: none), sequence (from 1). The sequence number comes last: a reader takes a record only where
it has the number that is next.

Behind the records lies, for each type of span, the newest that has begun and how many have (`Recorder.enter`): what a
rank that hangs is in can be read while it hangs, and after it was killed (`phalanx.telemetry.unfinished_spans`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import operator
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from phalanx.core.errors import UserError
from phalanx.ipc.processes import identity_of

if TYPE_CHECKING:
    from phalanx.telemetry.cuda_spans import CudaSpan, CudaSpans

Kind = Literal[
    "step",  # from batch to update; one per optimizer step
    "data",  # waiting for a batch
    "forward",  # of a model chunk and micro-batch
    "backward",  # the same; "input" and "weights" where the schedule splits it
    "collective",  # from its start until its result may be used
    "wait",  # the part of a collective that nothing hid: exposed communication
    "optimizer",  # clipping, the verdict on bad steps, the update
    "snapshot",  # copying state for a checkpoint while training stands still
    "persist",  # until a checkpoint is durable
    "evaluation",
    "startup",
    "user",  # of a script of somebody else
]
KINDS: tuple[Kind, ...] = get_args(Kind)

RING_RECORDS = 1 << 16
"""Spans that a ring holds: 3 MB. At 50 spans a step and 1,000 steps a second the writer has 1.3 s."""

NONE = -1
_MOST = (1 << 15) - 1
"""Of chunks, micro-batches and types of spans: a record holds 16 bits of each."""
MOST_RANK = (1 << 31) - 1
MOST_STEP = MOST_BYTES = (1 << 62) - 1

_MAGIC = b"PHLXSPAN"
_VERSION = 1
# magic, version, records, rank, attempt, pid, monotonic ns and Unix ns of the same instant, closed
_HEADER = struct.Struct("<8sIIIIQqqB")
_CLOSED_AT = _HEADER.size - 1
_TYPES_AT = 4096
_TYPES_BYTES = 1 << 18
_TYPES_LENGTH = struct.Struct("<I")
_RECORDS_AT = _TYPES_AT + _TYPES_BYTES

_PLACE = ".place"

_RECORD = struct.Struct("<qqqqihhQ")
RECORD_DTYPE = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("bytes", "<i8"),
        ("step", "<i8"),
        ("peer", "<i4"),
        ("type", "<i2"),
        ("micro_batch", "<i2"),
        ("sequence", "<u8"),
    ]
)
assert RECORD_DTYPE.itemsize == _RECORD.size

BEGUN_TYPES = 1024
"""Types of spans of which it is kept what has begun: the first of a ring."""
# start ns, step, how many have begun, peer, micro-batch, whether it is under way
_BEGUN = struct.Struct("<qqqihh")
_UNDER_WAY_AT = _BEGUN.size - 2


@dataclass(frozen=True)
class SpanType:
    """What spans of one place in the program have in common.

    Attributes:
        number: by which records name it, in this ring.
        kind: what was done.
        name: more closely, such as ``all_gather``.
        group: for collectives, the axes of the group, such as ``shard`` or ``shard·context``.
        ranks: its members; empty: not a collective.
        chunk: model chunk of the rank (interleaved schedules have several); -1: none.
    """

    number: int
    kind: Kind
    name: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    chunk: int = NONE


@dataclass
class Recorder:
    """A rank's side of its ring. Any thread may record; no call blocks, and none reads the device.

    Attributes:
        step: the optimizer step under way, which spans are noted under; the training loop sets it.
        device: spans of what a device does, by its own time; None: it does what the host does, when that does it.
    """

    _memory: Any
    step: int = 0
    clock_ns: Callable[[], int] = time.monotonic_ns
    device: CudaSpans | None = None
    _records: int = RING_RECORDS
    _begun: list[int] = field(default_factory=lambda: [0] * BEGUN_TYPES)
    _begun_at: int = 0
    _types: dict[tuple[Any, ...], SpanType] = field(default_factory=dict)
    _next: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def open(cls, path: Path, *, rank: int, attempt: int = 0, records: int = RING_RECORDS) -> Recorder:
        """Make the ring of a rank; one of an earlier process at `path` goes.

        Raises:
            OSError: the file cannot be made, such as on a full disk.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        size = _RECORDS_AT + records * _RECORD.size + BEGUN_TYPES * _BEGUN.size
        beside = path.with_suffix(f".{os.getpid()}")
        with beside.open("wb+") as file:
            # Reserved now: a file that is only made longer ends the process by SIGBUS when the disk is full later.
            os.posix_fallocate(file.fileno(), 0, size)
            memory = mmap.mmap(file.fileno(), size)
        now = _two_clocks_ns()
        memory[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, records, rank, attempt, os.getpid(), *now, 0)
        path.with_suffix(_PLACE).unlink(missing_ok=True)
        beside.rename(path)  # a reader never sees half a header
        return cls(memory, _records=records, _begun_at=_RECORDS_AT + records * _RECORD.size)

    def type(
        self, kind: Kind, name: str = "", *, group: str = "", ranks: Sequence[int] = (), chunk: int = NONE
    ) -> SpanType:
        """Describe spans once, to be recorded often; the same description gives the same type.

        Raises:
            UserError: the chunk is not a number that a span can hold.
        """
        require_number("chunk", chunk)
        key = (kind, name, group, tuple(ranks), chunk)
        found = self._types.get(key)
        if found is None and len(self._types) == _MOST:
            return SpanType(_MOST, kind, name)  # a name for each span: they are written without
        if found is None:
            found = self._types[key] = SpanType(len(self._types), kind, name, group, tuple(ranks), chunk)
            self._describe(found)
        return found

    def record(
        self,
        type_: SpanType,
        start_ns: int,
        end_ns: int,
        *,
        micro_batch: int = NONE,
        peer: int = NONE,
        num_bytes: int = 0,
        step: int | None = None,
    ) -> None:
        """Note a span that has ended; times by `clock_ns`."""
        if self._memory.closed:  # a step that its loop left open when it closed the recording
            return
        number = next(self._next)  # one C call: threads get different ones
        _RECORD.pack_into(
            self._memory,
            _RECORDS_AT + (number - 1) % self._records * 48,
            start_ns,
            end_ns,
            num_bytes,
            self.step if step is None else step,
            peer,
            type_.number,
            micro_batch,
            number,
        )

    def enter(
        self, type_: SpanType, start_ns: int, *, micro_batch: int = NONE, peer: int = NONE, number: int = 0
    ) -> int:
        """Note that a span has begun, beside the spans that have ended: it is what a rank that hangs is in.

        Args:
            number: among those of its type, as the one that this is the wait for; 0: the next one.

        Returns:
            Its number; 0: it is not kept, of too many types.
        """
        place = type_.number
        if place >= BEGUN_TYPES or self._memory.closed:
            return 0
        if not number:
            number = self._begun[place] = self._begun[place] + 1
        at = self._begun_at + place * 32
        _BEGUN.pack_into(self._memory, at, start_ns, self.step, number, peer, micro_batch, 1)
        return number

    def leave(self, type_: SpanType) -> None:
        """The newest span of this type that has begun will not be recorded; one that is recorded has ended by that."""
        if type_.number < BEGUN_TYPES and not self._memory.closed:
            self._memory[self._begun_at + type_.number * 32 + _UNDER_WAY_AT] = 0

    def span(self, type_: SpanType, *, micro_batch: int = NONE, peer: int = NONE, num_bytes: int = 0) -> Span:
        """Record the block of a `with`, also when it raises.

        Raises:
            UserError: the micro-batch is not a number that a span can hold.
        """
        if micro_batch.__class__ is not int or not NONE <= micro_batch <= _MOST:
            require_number("micro_batch", micro_batch)
        return Span(self, type_, micro_batch, peer, num_bytes)

    def begin(
        self, type_: SpanType, *, micro_batch: int = NONE, peer: int = NONE, num_bytes: int = 0
    ) -> Span | CudaSpan | NotRecorded:
        """Begin a span of what is computed, by the time of the `device` where there is one; its `end` ends it.

        It may be given to a `with`, which begins nothing anew and ends it. What is begun and not ended is not recorded.

        Raises:
            UserError: the micro-batch is not a number that a span can hold.
        """
        if micro_batch.__class__ is not int or not NONE <= micro_batch <= _MOST:
            require_number("micro_batch", micro_batch)
        if self.device is None:
            return Span(self, type_, micro_batch, peer, num_bytes).__enter__()
        span = self.device.begin(type_, micro_batch=micro_batch, peer=peer, num_bytes=num_bytes)
        return NOT_RECORDED if span is None else span

    def close(self) -> None:
        """No more spans come; the writer takes what is there and removes the ring."""
        if not self._memory.closed:
            self._memory[_CLOSED_AT] = 1
            self._memory.close()

    def _describe(self, type_: SpanType) -> None:
        (length,) = _TYPES_LENGTH.unpack_from(self._memory, _TYPES_AT)
        line = json.dumps(asdict(type_)).encode() + b"\n"
        at = _TYPES_AT + _TYPES_LENGTH.size + length
        if at + len(line) > _RECORDS_AT:
            return  # thousands of types; their spans are written without a name
        self._memory[at : at + len(line)] = line
        _TYPES_LENGTH.pack_into(self._memory, _TYPES_AT, length + len(line))


def require_number(field: str, value: int, most: int = _MOST, *, least: int = NONE) -> None:
    """One that fits a record, before it is in the ring: what cannot be written would end recording, or training.

    Raises:
        UserError: it is none.
    """
    if value.__class__ is int and least <= value <= most:
        return
    try:
        fits = least <= operator.index(value) <= most
    except TypeError:
        fits = False
    if not fits:
        cure = f"give a whole number from {max(least, 0)} to {most:,}"
        raise UserError("is not kept of a span", cure=cure, field=field, value=repr(value)[:80])


class Span:
    """One `with` block that is recorded; see `Recorder.span`."""

    __slots__ = ("_micro_batch", "_num_bytes", "_peer", "_recorder", "_start_ns", "_type")

    def __init__(self, recorder: Recorder, type_: SpanType, micro_batch: int, peer: int, num_bytes: int) -> None:
        self._recorder, self._type = recorder, type_
        self._micro_batch, self._peer, self._num_bytes = micro_batch, peer, num_bytes
        self._start_ns: int | None = None

    def __enter__(self) -> Span:
        if self._start_ns is not None:  # by `Recorder.begin`: it began there
            return self
        recorder = self._recorder
        self._start_ns = start_ns = recorder.clock_ns()
        recorder.enter(self._type, start_ns, micro_batch=self._micro_batch, peer=self._peer)
        return self

    def cancel(self) -> None:
        """It is not worth to be recorded, and `end` does not record it any more."""
        if self._start_ns is not None:
            self._start_ns = None
            self._recorder.leave(self._type)

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Record it, once; what has not begun, or has ended, is left alone."""
        recorder, start_ns = self._recorder, self._start_ns
        if start_ns is None:
            return
        self._start_ns = None
        recorder.record(
            self._type,
            start_ns,
            recorder.clock_ns(),
            micro_batch=self._micro_batch,
            peer=self._peer,
            num_bytes=self._num_bytes,
        )


class NotRecorded:
    """A span that is left out, such as while a CUDA graph is captured."""

    def end(self) -> None:
        """Nothing is recorded."""

    cancel = end

    def __enter__(self) -> NotRecorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


NOT_RECORDED = NotRecorded()


def _two_clocks_ns() -> tuple[int, int]:
    """Monotonic and Unix nanoseconds of the same instant, but for a fraction of a microsecond: the closest of a few
    readings, since a process may lose its core between two."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(8)]
    before_ns, unix_ns, after_ns = min(readings, key=lambda one: one[2] - one[0])
    return (before_ns + after_ns) // 2, unix_ns


Noted = Callable[[int], AbstractContextManager[Any]]
"""Takes a micro-batch, and gives what records the block of a `with`."""


class Passes(NamedTuple):
    """What records the passes of one model chunk; without a recorder it costs next to nothing.

    Attributes:
        backward: whole passes; `inputs` and `weights`: the two parts of those that a schedule splits.
    """

    forward: Noted = nullcontext
    backward: Noted = nullcontext
    inputs: Noted = nullcontext
    weights: Noted = nullcontext

    @classmethod
    def of(cls, recorder: Recorder | None, chunk: int = NONE) -> Passes:
        """Those of a chunk, by a recorder; None: nothing is recorded."""
        if recorder is None:
            return cls()

        def noted(kind: Kind, name: str = "") -> Noted:
            type_ = recorder.type(kind, name, chunk=chunk)

            def begin(micro_batch: int) -> AbstractContextManager[Any]:
                if recorder.device is None:
                    return Span(recorder, type_, micro_batch, NONE, 0)
                return recorder.begin(type_, micro_batch=micro_batch)

            return begin

        return cls(noted("forward"), noted("backward"), noted("backward", "input"), noted("backward", "weights"))


@dataclass(frozen=True)
class BegunSpan:
    """The newest span of a type that a rank has begun.

    Attributes:
        start_ns: by the monotonic clock of the host.
        number: how many of the type have begun; of a wait, the number of what is waited for.
        is_under_way: it has not ended; not known of collectives, whose waits say it.
    """

    type: SpanType
    start_ns: int
    step: int
    number: int
    peer: int
    micro_batch: int
    is_under_way: bool


@dataclass(frozen=True)
class RingState:
    """What a reader found in a ring.

    Attributes:
        records: new ones, in order (`RECORD_DTYPE`).
        dropped: spans that were overwritten before anybody read them, since the last look.
        is_closed: its rank has said that no more come.
    """

    records: np.ndarray
    dropped: int
    is_closed: bool


class RingReader:
    """The writer's side of a ring, which it only reads; how far it is lies beside the ring, for the next writer.

    Raises:
        ValueError: the file is not a ring of this version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        magic, version, count, rank, attempt, pid, monotonic_ns, unix_ns, _ = _HEADER.unpack_from(self._memory, 0)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"{path} is not a ring of spans of version {_VERSION}")
        self.rank, self.attempt, self.pid = rank, attempt, pid
        self.unix_offset_ns, self.opened_unix_ns = unix_ns - monotonic_ns, unix_ns
        self._records = np.frombuffer(self._memory, RECORD_DTYPE, count, _RECORDS_AT)
        self.place = path.with_suffix(_PLACE)
        self._taken = int.from_bytes(self.place.read_bytes() or b"\0", "little") if self.place.exists() else 0
        self._began = identity_of(pid)
        self._waits_for = NONE
        self._types: list[SpanType] = []
        self._types_read = 0

    @property
    def is_closed(self) -> bool:
        """Whether its rank has said that no more come."""
        return bool(self._memory[_CLOSED_AT])

    @property
    def is_half_full(self) -> bool:
        """Whether so much has come since the last read that the ring may be lapped before the next one."""
        count = len(self._records)
        return bool(self._records["sequence"][(self._taken + count // 2) % count] > self._taken)

    @property
    def is_orphan(self) -> bool:
        """Whether the process that records here has ended."""
        return self._began is None or identity_of(self.pid) != self._began

    @property
    def taken(self) -> int:
        """Records that were read, or lost, since the ring began."""
        return self._taken

    def go_on_from(self, taken: int) -> None:
        """What comes before this lies in a stream already, whose writer was killed before it could keep its place."""
        self._taken = max(self._taken, taken)
        self.keep_place()

    def keep_place(self) -> None:
        """What was read is in safety: a writer that comes after this one goes on behind it."""
        with contextlib.suppress(OSError):
            self.place.write_bytes(self._taken.to_bytes(8, "little"))

    def read(self) -> RingState:
        """What has come since the last call."""
        is_closed = self.is_closed
        count = len(self._records)
        newest = int(self._records["sequence"].max())
        dropped = max(0, newest - count - self._taken)
        first = self._taken + dropped
        places = np.arange(first, newest) % count
        records = self._records[places]
        # Who writes meanwhile overwrites the oldest first, and a record is whole only where it has its own number
        # before and after the copy. From the first one that is not there yet on, everything is left for the next call.
        whole = (records["sequence"] == np.arange(first + 1, newest + 1)) & (
            self._records["sequence"][places] == records["sequence"]
        )
        overwritten = records["sequence"] > np.arange(first + 1, newest + 1)
        missing = ~whole & ~overwritten
        end = int(missing.argmax()) if missing.any() else len(records)
        if missing.any() and first + end == self._waits_for:
            # Not there at the last look either, though later ones are: its thread died between number and record.
            missing[end] = False
            end = int(missing.argmax()) if missing.any() else len(records)
        self._waits_for = first + end if end < len(records) else NONE
        dropped += int((~whole[:end]).sum())
        self._taken = first + end
        return RingState(records[:end][whole[:end]], dropped, is_closed and end == len(records))

    def begun(self) -> list[BegunSpan]:
        """Of each type the newest span that has begun; those that were begun last come last."""
        begin = _RECORDS_AT + len(self._records) * _RECORD.size
        if len(self._memory) < begin + BEGUN_TYPES * _BEGUN.size:
            return []  # of an older version
        types = self.types()[:BEGUN_TYPES]
        records = self._records[self._records["sequence"] > 0]
        newest_ns = np.full(_MOST + 1, -1)
        np.maximum.at(newest_ns, records["type"], records["start_ns"])
        # Of what began before the oldest span that is still here, the end may have been overwritten.
        oldest_ns = int(records["end_ns"].min()) if len(records) == len(self._records) else -1
        found = []
        for type_ in types:
            at = begin + type_.number * _BEGUN.size
            start_ns, step, number, peer, micro_batch, flag = _BEGUN.unpack_from(self._memory, at)
            if number:
                is_under_way = bool(flag) and start_ns > max(int(newest_ns[type_.number]), oldest_ns)
                found.append(BegunSpan(type_, start_ns, step, number, peer, micro_batch, is_under_way))
        return sorted(found, key=lambda one: one.start_ns)

    def newest_end_ns(self) -> int:
        """When the newest span that has ended did so, by the host's monotonic clock; 0: none has."""
        return int(self._records["end_ns"].max(initial=0, where=self._records["sequence"] > 0))

    def usual_step_ns(self) -> int:
        """Median length of the steps that are in the ring; 0: there is none."""
        steps = [type_.number for type_ in self.types() if type_.kind == "step"]
        here = np.isin(self._records["type"], steps) & (self._records["sequence"] > 0)
        return int(np.median((self._records["end_ns"] - self._records["start_ns"])[here])) if here.any() else 0

    def types(self) -> list[SpanType]:
        """All types that are described until now, by number."""
        (length,) = _TYPES_LENGTH.unpack_from(self._memory, _TYPES_AT)
        if length > self._types_read:
            begin = _TYPES_AT + _TYPES_LENGTH.size
            for line in self._memory[begin + self._types_read : begin + length].splitlines():
                found = json.loads(line)
                self._types.append(SpanType(**{**found, "ranks": tuple(found["ranks"])}))
            self._types_read = length
        return self._types

    def remove(self) -> None:
        """Let go of the ring, of which all is written, and of its file."""
        self.close()
        self.path.unlink(missing_ok=True)
        self.place.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the memory."""
        del self._records
        with contextlib.suppress(BufferError):
            self._memory.close()
