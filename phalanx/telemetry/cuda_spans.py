"""Spans of work on a CUDA device: events on the stream where it runs, read when they are there, never waited for.

A span is two events of a pool, recorded on a stream by the thread that launches the work. After a step `resolve` asks
which are done, and gives those to the rank's recorder; what is not done yet waits in its queue. The pool is bounded:
where the device is so far behind that it is empty, spans are left out and counted.

A device has a clock of its own. Now and then an anchor, an event on a stream where nothing else is, is recorded and
asked for at once: the host's clock before and after says when it was. Offset and drift come from the anchors as those
of hosts do (`phalanx.telemetry.host_clocks`). Elapsed times are 32-bit floats of milliseconds: new anchors also keep
them exact, to a microsecond at 8 s. Each is recorded as a span ``device clock``, whose length is how well it is known.

Nothing is recorded while a CUDA graph is captured: it would become part of the graph.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from phalanx.telemetry.host_clocks import ClockExchange, ClockTracker
from phalanx.telemetry.spans import NONE, NotRecorded, Recorder, SpanType

MOST_EVENTS = 8192
"""Of a rank: 4096 spans that the device has not done. An event takes some hundred bytes of the host's memory."""

ANCHOR_S = 8.0
_FIRST_ANCHORS_S = (0.5, 1.0, 2.0, 4.0)  # between the first anchors, which find the drift
_ASKS = 64  # about 50 us
_ANCHORS = 4  # kept, for spans that were launched before the newest


class CudaSpan:
    """One span under way; made by `CudaSpans.begin`."""

    __slots__ = (
        "_begin",
        "_end",
        "_is_open",
        "_launched_ns",
        "_micro_batch",
        "_num_bytes",
        "_owner",
        "_peer",
        "_step",
        "_type",
    )

    def __init__(
        self, owner: CudaSpans, type_: SpanType, micro_batch: int, peer: int, num_bytes: int, begin: Any, end: Any
    ) -> None:
        self._owner, self._type, self._begin, self._end = owner, type_, begin, end
        self._micro_batch, self._peer, self._num_bytes = micro_batch, peer, num_bytes
        self._step, self._launched_ns, self._is_open = owner.recorder.step, owner.recorder.clock_ns(), True

    def end(self, stream: Any = None) -> None:
        """What comes next on the stream (None: the current one) is not of this span any more."""
        if self._is_open:
            self._is_open = False
            self._owner._ended(self, stream)

    def cancel(self) -> None:
        """It is not worth to be recorded."""
        if self._is_open:
            self._is_open = False
            self._owner._free.extend((self._begin, self._end))

    __del__ = cancel  # who dropped a collective never waits for it

    def __enter__(self) -> CudaSpan:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class CudaSpans:
    """A rank's spans on one device. Any thread may begin and end; one resolves, after each step.

    Args:
        recorder: where spans go when they are done.
        cuda: `torch.cuda`, which this module does not import.
        most_events: of the pool, two for a span.
        anchor_s: between two anchors.

    Attributes:
        dropped: spans that were left out, since the pool was empty.
        captured: spans that were left out, since a graph was captured.
        lost: spans that can no more be read, since the device has failed or recording has ended.
    """

    def __init__(
        self, recorder: Recorder, cuda: Any, *, most_events: int = MOST_EVENTS, anchor_s: float = ANCHOR_S
    ) -> None:
        self.recorder, self._cuda = recorder, cuda
        self.dropped = self.captured = self.lost = 0
        self._left, self._free = most_events, deque[Any]()
        self._pending: dict[Any, deque[CudaSpan]] = {}  # by stream, in the order of their ends
        self._lock, self._resolving = threading.Lock(), threading.Lock()
        self._has_failed = False
        self._clock = _DeviceClock(recorder, cuda, anchor_s)
        if not self._is_capturing():
            self._clock.anchor()  # nothing is under way yet: the device answers at once

    @property
    def error_ns(self) -> float | None:
        """How far the times of spans may be off the host's clock now; None: no anchor has been read yet."""
        return self._clock.error_ns()

    @property
    def pending(self) -> int:
        """Spans that have ended here and not on the device, as far as is known."""
        return sum(map(len, self._pending.values()))

    def begin(
        self, type_: SpanType, *, micro_batch: int = NONE, peer: int = NONE, num_bytes: int = 0, stream: Any = None
    ) -> CudaSpan | None:
        """Begin a span with what is launched next on `stream` (None: the current one); None: it is left out."""
        if self._has_failed:
            return None
        if self._is_capturing():
            self.captured += 1
            return None
        if (events := self._take_two()) is None:
            return None
        span = CudaSpan(self, type_, micro_batch, peer, num_bytes, *events)
        if not self._record(events[0], stream):
            return None
        return span

    def resolve(self) -> int:
        """Give the spans that are done to the recorder; how many. It does not wait for the device."""
        if self._has_failed or self._is_capturing() or not self._resolving.acquire(blocking=False):
            return 0
        try:
            self._clock.anchor_if_due()
            return sum(self._resolve_queue(queue) for queue in list(self._pending.values()))
        except RuntimeError:  # the device has failed: training says so, not this
            self._fail()
            return 0
        finally:
            self._resolving.release()

    def close(self) -> int:
        """Resolve what is done; spans that are lost, since the device has not done them. No more can begin."""
        self.resolve()
        left = self.pending
        self._fail()
        return left

    def end_with(self, span: CudaSpan | NotRecorded, work: Any) -> bool:
        """End a span when one of torch's collectives is done, on the stream where it runs; no: it does not say when.

        Args:
            work: of an NCCL group, just started. Its future is there at once; what is done then goes to a stream that
                waits for the collective's, so that neither compute nor the host waits.
        """
        try:
            work.get_future().then(lambda _: span.end())
        except (AttributeError, NotImplementedError, RuntimeError):  # gloo, and works of our own
            return False
        return True

    def _ended(self, span: CudaSpan, stream: Any) -> None:
        if self._has_failed:
            return
        if self._is_capturing():  # it began before the capture
            self.captured += 1
            self._free.extend((span._begin, span._end))
            return
        on = self._cuda.current_stream() if stream is None else stream
        if self._record(span._end, on):
            self._pending.setdefault(on.cuda_stream, deque()).append(span)

    def _resolve_queue(self, queue: deque[CudaSpan]) -> int:
        # A stream does one thing after the other: where the newest is done, all are. Threads that end spans on one
        # stream at once may change places, which `elapsed_time` finds out.
        count, is_whole = 0, bool(queue) and queue[-1]._end.query()
        for _ in range(len(queue)):
            span = queue[0]
            if not is_whole and not span._end.query():
                break
            try:
                start_ns, end_ns = self._clock.times_ns(span._begin, span._end, span._launched_ns)
            except RuntimeError:
                if span._end.query():
                    raise
                break
            self.recorder.record(
                span._type,
                start_ns,
                end_ns,
                micro_batch=span._micro_batch,
                peer=span._peer,
                num_bytes=span._num_bytes,
                step=span._step,
            )
            queue.popleft()
            self._free.extend((span._begin, span._end))
            count += 1
        return count

    def _take_two(self) -> tuple[Any, Any] | None:
        with self._lock:
            while len(self._free) < 2 and self._left > 0:
                self._free.append(self._cuda.Event(enable_timing=True))
                self._left -= 1
            if len(self._free) < 2:
                self.dropped += 1
                return None
            return self._free.popleft(), self._free.popleft()

    def _record(self, event: Any, stream: Any) -> bool:
        try:
            event.record(stream) if stream is not None else event.record()
        except RuntimeError:
            self._fail()
            return False
        return True

    def _is_capturing(self) -> bool:
        return bool(self._cuda.is_current_stream_capturing())

    def _fail(self) -> None:
        self._has_failed = True
        self.lost += self.pending
        self._pending = {}
        self._free.clear()


class _DeviceClock:
    """When an event was, by the host's monotonic clock."""

    def __init__(self, recorder: Recorder, cuda: Any, anchor_s: float) -> None:
        self._recorder, self._cuda, self._anchor_s = recorder, cuda, anchor_s
        self._type = recorder.type("user", "device clock")
        self._stream = cuda.Stream()
        self._tracker = ClockTracker()
        # Event, when it was recorded (host), and when it was (device, from the first one on), nanoseconds.
        self._anchors: deque[tuple[Any, int, int]] = deque(maxlen=_ANCHORS)
        self._late: list[Any] = []
        self._waits_s = iter(_FIRST_ANCHORS_S)
        self._due_ns = 0

    def error_ns(self) -> float | None:
        """How far times may be off now."""
        estimate = self._tracker.estimate
        return None if estimate is None else estimate.at(self._recorder.clock_ns())[1]

    def anchor_if_due(self) -> None:
        """A new anchor, if the last one is old."""
        if self._recorder.clock_ns() >= self._due_ns:
            self.anchor()

    def anchor(self) -> None:
        """Try to make one; where the device does not answer at once, it is tried again after the next step."""
        clock_ns = self._recorder.clock_ns
        event = self._late.pop() if self._late else self._cuda.Event(enable_timing=True)
        before_ns = clock_ns()
        event.record(self._stream)
        is_there = any(event.query() for _ in range(_ASKS))
        after_ns = clock_ns()
        if not is_there:
            self._late.append(event)
            return
        device_ns = 0
        if self._anchors:
            last, _, last_ns = self._anchors[-1]
            device_ns = last_ns + round(last.elapsed_time(event) * 1e6)
        if self._tracker.add([ClockExchange(before_ns, device_ns, device_ns, after_ns)]).bend_ns:
            self._waits_s = iter(_FIRST_ANCHORS_S)
        if len(self._anchors) == _ANCHORS:
            self._late.append(self._anchors[0][0])
        self._anchors.append((event, before_ns, device_ns))
        self._due_ns = after_ns + round(min(next(self._waits_s, self._anchor_s), self._anchor_s) * 1e9)
        self._recorder.record(self._type, before_ns, after_ns)

    def times_ns(self, begin: Any, end: Any, launched_ns: int) -> tuple[int, int]:
        """From when to when, between two events that are done. RuntimeError: one is not, or the device has failed."""
        length_ns = round(begin.elapsed_time(end) * 1e6)
        estimate = self._tracker.estimate
        if estimate is None:  # the device was never free to answer: as near as is known
            return launched_ns, launched_ns + length_ns
        # From the newest anchor that was before: elapsed times are exact over short times.
        anchor, _, anchor_ns = next((one for one in reversed(self._anchors) if one[1] <= launched_ns), self._anchors[0])
        device_ns = anchor_ns + round(anchor.elapsed_time(begin) * 1e6)
        offset_ns, _ = estimate.at(device_ns + estimate.offset_ns)
        start_ns = max(launched_ns, device_ns + round(offset_ns))  # nothing runs before it is launched
        return start_ns, start_ns + length_ns
