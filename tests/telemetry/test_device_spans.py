"""Where training records by a device's time: passes, collectives, and a step whose parts add up on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_events import MS, US, FakeDevice, FakeStream

from phalanx.parallel.group import Group
from phalanx.telemetry.cuda_spans import CudaSpans
from phalanx.telemetry.spans import Passes, Recorder, RingReader
from phalanx.train.step_spans import StepSpans


class Rank:
    """A recorder with its ring, with or without a device."""

    def __init__(self, folder: Path, device: FakeDevice, *, is_host: bool = False) -> None:
        self.recorder = Recorder.open(folder / "0.ring", rank=0)
        self.recorder.clock_ns = lambda: device.host_ns
        self.reader = RingReader(folder / "0.ring")
        if not is_host:
            self.recorder.device = CudaSpans(self.recorder, device)

    def read(self) -> list[tuple[str, str, int, float, float]]:
        """New spans: kind, name, step, begin and end in milliseconds."""
        records, types = self.reader.read().records, self.reader.types()
        found = [(types[one["type"]], one) for one in records]
        return [
            (kind.kind, kind.name, int(one["step"]), float(one["start_ns"]) / MS, float(one["end_ns"]) / MS)
            for kind, one in found
            if kind.name != "device clock"
        ]


def lengths(spans: list[tuple[str, str, int, float, float]], step: int) -> dict[str, float]:
    """Milliseconds of a step by kind."""
    return {kind: round(end - begin) for kind, _, of, begin, end in spans if of == step}


def test_a_step_is_that_of_the_device_and_a_batch_it_does_not_wait_for_costs_nothing(tmp_path: Path) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device)
    spans, passes = StepSpans(rank.recorder), Passes.of(rank.recorder, 0)

    def batches() -> Iterator[int]:
        for waits_ms in (5, 40, 400):  # the device computes for 210 ms a step
            device.spend(waits_ms * MS)
            yield waits_ms

    for _ in spans.over(batches(), 1):
        for number in range(2):
            with passes.forward(number):
                device.launch(30 * MS)
            with passes.backward(number):
                device.launch(60 * MS)
        spans.begin_update()
        device.launch(30 * MS)
        spans.end_update()
        with spans.snapshot():
            pass
        spans.end_step()
    device.spend(2000 * MS)
    assert rank.recorder.device is not None
    rank.recorder.device.resolve()
    found = rank.read()
    assert lengths(found, 1) == {"data": 5, "forward": 30, "backward": 60, "optimizer": 30, "step": 215}
    assert lengths(found, 2) == {"data": 0, "forward": 30, "backward": 60, "optimizer": 30, "step": 210}
    waited_ms = lengths(found, 3)["data"]
    assert 0 < waited_ms < 100 and lengths(found, 3)["step"] == pytest.approx(210 + waited_ms, abs=1)
    for step in (1, 2, 3):
        parts = [(begin, end) for kind, _, of, begin, end in found if of == step and kind != "step"]
        (whole,) = [(begin, end) for kind, _, of, begin, end in found if of == step and kind == "step"]
        assert sum(end - begin for begin, end in parts) == pytest.approx(whole[1] - whole[0], abs=0.2)
        assert all(whole[0] - 0.1 <= begin and end <= whole[1] + 0.1 for begin, end in parts)
    assert rank.recorder.device.dropped == rank.recorder.device.pending == 0


def test_without_a_device_spans_are_the_hosts(tmp_path: Path) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device, is_host=True)
    spans, passes = StepSpans(rank.recorder), Passes.of(rank.recorder, 0)
    for _ in spans.over(iter([1]), 7):
        with passes.forward(0):
            device.spend(30 * MS)
        spans.begin_update()
        device.spend(10 * MS)
        spans.end_update()
        with spans.snapshot():
            device.spend(2 * MS)
        spans.end_step()
    expected = {"data": 0, "forward": 30, "optimizer": 10, "snapshot": 2, "step": 42}
    assert lengths(rank.read(), 7) == expected


class FakeBackend:
    """Collectives of 20 ms on a stream of their own, which the current stream waits for where `wait` is called."""

    def __init__(self, device: FakeDevice, *, has_futures: bool) -> None:
        self.device, self.stream, self.has_futures = device, FakeStream(device), has_futures

    def allreduce(self, tensors: list[Any], options: Any) -> Any:
        device, stream = self.device, self.stream
        stream.free_ns = max(stream.free_ns, device.current.free_ns)
        device.launch(20 * MS, stream)
        done_ns = stream.free_ns

        class Work:
            def wait(self) -> None:
                device.current.free_ns = max(device.current.free_ns, done_ns)

            def is_completed(self) -> bool:
                return True

        if self.has_futures:

            class Future:
                def then(self, call: Callable[[Any], Any]) -> None:
                    compute, device.current = device.current, stream
                    call(self)
                    device.current = compute

            Work.get_future = lambda self: Future()  # type: ignore[attr-defined]
        return Work()


@pytest.mark.parametrize("has_futures", [True, False])
def test_a_collective_runs_beside_compute_and_what_nothing_hid_is_the_wait(tmp_path: Path, has_futures: bool) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device)
    backend = FakeBackend(device, has_futures=has_futures)
    group = Group((0, 1), 0, lambda: backend, ("shard",), recorder=rank.recorder)
    rank.recorder.step = 3
    for hidden_ms in (5, 50):
        work = group.all_reduce(torch.ones(4))
        device.launch(hidden_ms * MS)
        work.wait()
        work.wait()
        device.launch(1 * MS)
    group.all_reduce(torch.ones(4))  # whose result nobody waits for
    device.spend(500 * MS)
    assert rank.recorder.device is not None
    rank.recorder.device.resolve()
    found = rank.read()
    runs = [round(end - begin) for kind, _, _, begin, end in found if kind == "collective"]
    waits = [round(end - begin) for kind, _, _, begin, end in found if kind == "wait"]
    assert waits == [15, 0] and {step for _, _, step, *_ in found} == {3}
    assert sorted(runs) == ([20, 20, 20] if has_futures else [20, 50])
    assert rank.recorder.device.pending == 0
    assert [name for kind, name, *_ in found if kind == "wait"] == ["all_reduce", "all_reduce"]


def test_events_of_spans_that_are_dropped_are_used_again(tmp_path: Path) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device)
    rank.recorder.device = CudaSpans(rank.recorder, device, most_events=4)
    kind = rank.recorder.type("forward")
    for _ in range(20):
        rank.recorder.begin(kind)  # never ended
        rank.recorder.begin(kind).cancel()
    with rank.recorder.begin(kind):
        device.launch(100 * US)
    device.spend(5 * MS)
    assert rank.recorder.device.resolve() == 1 and rank.recorder.device.dropped == 0
