"""A device whose time is the test's, in place of `torch.cuda`."""

from __future__ import annotations

import math

import numpy as np

US, MS, S = 1000, 10**6, 10**9


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        device.streams.append(self)
        self.cuda_stream, self.free_ns = len(device.streams), 0.0


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self.at_ns = device, math.inf
        device.events += 1

    def record(self, stream: FakeStream | None = None) -> None:
        device = self._device
        device.spend(1 * US)
        assert not device.is_capturing, "an event would become part of the graph"
        if device.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.at_ns = max(device.host_ns + device.latency_ns, (stream or device.current).free_ns)

    def query(self) -> bool:
        self._device.spend(500)
        self._device.queries += 1
        assert not self._device.is_capturing, "asking would end the capture"
        if self._device.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.at_ns <= self._device.host_ns

    def elapsed_time(self, other: FakeEvent) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(np.float32((other.at_ns - self.at_ns) * (1 + self._device.drift) / 1e6))


class FakeDevice:
    """Stands for `torch.cuda`, with the host's clock: work is done when the time of the test has come."""

    def __init__(self, drift: float = 0.0, latency_ns: int = 3 * US) -> None:
        self.host_ns, self.drift, self.latency_ns = 50 * S, drift, latency_ns
        self.streams: list[FakeStream] = []
        self.events = self.queries = 0
        self.is_capturing = self.has_failed = False
        self.current = FakeStream(self)

    def spend(self, nanoseconds: int) -> None:
        self.host_ns += nanoseconds

    def launch(self, duration_ns: float, stream: FakeStream | None = None) -> None:
        stream = stream or self.current
        stream.free_ns = max(stream.free_ns, self.host_ns + self.latency_ns) + duration_ns

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        return FakeEvent(self)

    def Stream(self) -> FakeStream:  # noqa: N802
        return FakeStream(self)

    def current_stream(self) -> FakeStream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing
