"""Spans by CUDA events: against a device whose time is the test's, and a real one where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_events import MS, US, FakeDevice, FakeStream, S
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.telemetry.cuda_spans import CudaSpans
from phalanx.telemetry.spans import Recorder, RingReader


class Rank:
    """A recorder with its ring, and spans of a device."""

    def __init__(self, folder: Path, device: FakeDevice, **options: Any) -> None:
        self.recorder = Recorder.open(folder / "0.ring", rank=0, records=1 << 12)
        self.recorder.clock_ns = lambda: device.host_ns
        self.reader = RingReader(folder / "0.ring")
        self.compute = self.recorder.type("forward", "chunk 0", chunk=0)
        self.spans = CudaSpans(self.recorder, device, **options)

    def read(self) -> list[Any]:
        """New spans, but for the device's clock."""
        records = self.reader.read().records
        return [one for one in records if one["type"] == self.compute.number]


def begun(span: Any) -> Any:
    assert span is not None
    return span


def test_times_are_those_of_the_device_and_nobody_waits_for_it(tmp_path: Path) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device)
    rank.recorder.step = 4
    span = begun(rank.spans.begin(rank.compute, micro_batch=2, num_bytes=9, peer=1))
    begins_ns = device.host_ns
    device.launch(30 * MS)
    span.end()
    rank.recorder.step = 5
    assert device.host_ns - begins_ns < 1 * MS and rank.spans.resolve() == 0 and rank.read() == []
    device.spend(40 * MS)
    assert rank.spans.resolve() == 1 and rank.spans.pending == 0
    (found,) = rank.read()
    assert found["end_ns"] - found["start_ns"] == pytest.approx(30 * MS, abs=5 * US)
    error_ns = rank.spans.error_ns
    assert error_ns is not None and error_ns < 100 * US and abs(found["start_ns"] - begins_ns) <= error_ns
    assert (found["step"], found["micro_batch"], found["peer"], found["bytes"]) == (4, 2, 1, 9)


def test_streams_are_done_in_any_order(tmp_path: Path) -> None:
    device = FakeDevice()
    rank, side = Rank(tmp_path, device), FakeStream(device)
    spans = []
    for stream, duration_ns in ((device.current, 500 * MS), (side, 10 * MS), (device.current, 1 * MS), (side, 2 * MS)):
        spans.append(begun(rank.spans.begin(rank.compute, stream=stream)))
        device.launch(duration_ns, stream)
        spans[-1].end(stream)
    device.spend(20 * MS)
    assert rank.spans.resolve() == 2
    lengths_ms = [round((one["end_ns"] - one["start_ns"]) / MS) for one in rank.read()]
    assert lengths_ms == [10, 2] and rank.spans.pending == 2
    device.spend(600 * MS)
    assert rank.spans.resolve() == 2 and len(rank.read()) == 2


def test_many_done_spans_of_a_stream_are_asked_for_once(tmp_path: Path) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device)
    for _ in range(100):
        with begun(rank.spans.begin(rank.compute)):
            device.launch(1 * MS)
    device.spend(200 * MS)
    rank.spans._clock._due_ns = 10**18
    real, rank.spans._clock.times_ns = rank.spans._clock.times_ns, lambda *_: (0, 1)  # type: ignore
    before = device.queries
    assert rank.spans.resolve() == 100 and device.queries == before + 1
    rank.spans._clock.times_ns = real  # type: ignore


def test_a_pool_that_is_empty_drops_and_counts_and_is_used_again(tmp_path: Path) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device, most_events=8)
    for turn in range(3):
        for number in range(10):
            span = rank.spans.begin(rank.compute)
            assert (span is None) == (number >= 4)
            device.launch(1 * MS)
            if span is not None:
                span.end()
        assert rank.spans.dropped == 6 * (turn + 1) and rank.spans.resolve() == 0
        device.spend(20 * MS)
        assert rank.spans.resolve() == 4
    assert device.events <= 8 + 8  # and some anchors


def test_what_never_ends_holds_no_other_stream_up_and_is_counted_at_the_end(tmp_path: Path) -> None:
    device = FakeDevice()
    rank, stuck = Rank(tmp_path, device), FakeStream(device)
    hung = begun(rank.spans.begin(rank.compute, stream=stuck))
    device.launch(math.inf, stuck)
    hung.end(stuck)
    with begun(rank.spans.begin(rank.compute)):
        device.launch(1 * MS)
    for _ in range(3):
        device.spend(100 * S)
        rank.spans.resolve()
    assert len(rank.read()) == 1 and rank.spans.pending == 1
    assert rank.spans.close() == 1 and rank.spans.lost == 1 and rank.spans.begin(rank.compute) is None


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured(tmp_path: Path) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device)
    before = begun(rank.spans.begin(rank.compute))
    device.is_capturing = True
    assert rank.spans.begin(rank.compute) is None and rank.spans.resolve() == 0
    before.end()
    device.is_capturing = False
    assert rank.spans.captured == 2 and rank.spans.pending == 0
    with begun(rank.spans.begin(rank.compute)):
        device.launch(1 * MS)
    device.spend(5 * MS)
    assert rank.spans.resolve() == 1


def test_a_device_that_fails_is_left_to_training(tmp_path: Path) -> None:
    device = FakeDevice()
    rank = Rank(tmp_path, device)
    under_way = begun(rank.spans.begin(rank.compute))
    with begun(rank.spans.begin(rank.compute)):
        device.launch(1 * MS)
    device.has_failed = True
    assert rank.spans.resolve() == 0 and rank.spans.lost == 1
    under_way.end()
    assert rank.spans.begin(rank.compute) is None and rank.spans.close() == 0


def test_a_busy_device_keeps_the_last_anchor_and_says_how_much_it_is_worth(tmp_path: Path) -> None:
    """With one queue for all streams, an anchor waits behind compute: it is given up, and tried after the next step."""
    device = FakeDevice(drift=2e-5)
    rank = Rank(tmp_path, device)
    for _ in range(4):
        device.spend(1 * S)
        rank.spans.resolve()
    good_ns = rank.spans.error_ns
    assert good_ns is not None
    device.latency_ns = 10 * MS
    for _ in range(10):
        device.spend(8 * S)
        rank.spans.resolve()
    bad_ns = rank.spans.error_ns
    assert bad_ns is not None and bad_ns > 5 * good_ns
    device.latency_ns = 2 * US
    rank.spans.resolve()
    assert (rank.spans.error_ns or 0) < 2 * good_ns + 20 * US


def test_a_device_that_never_answers_at_once_still_gives_lengths(tmp_path: Path) -> None:
    device = FakeDevice(latency_ns=10 * MS)
    rank = Rank(tmp_path, device)
    launched_ns = device.host_ns
    with begun(rank.spans.begin(rank.compute)):
        device.launch(5 * MS)
    device.spend(100 * MS)
    assert rank.spans.error_ns is None and rank.spans.resolve() == 1
    (found,) = rank.read()
    assert found["end_ns"] - found["start_ns"] == pytest.approx(5 * MS, abs=10 * US)
    assert found["start_ns"] - launched_ns < 1 * MS


@given(
    drift=st.floats(-2e-4, 2e-4),
    latency_us=st.integers(1, 20),
    moves=st.lists(
        st.tuples(st.sampled_from(["span", "wait", "resolve"]), st.integers(0, 2), st.floats(0.001, 5000.0)),
        min_size=5,
        max_size=60,
    ),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_device_does_times_are_within_the_error(
    drift: float,
    latency_us: int,
    moves: list[tuple[str, int, float]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    device = FakeDevice(drift, latency_us * US)
    rank = Rank(tmp_path_factory.mktemp("ring"), device, most_events=32)
    streams = [device.current, FakeStream(device), FakeStream(device)]
    truth, seen, errors_ns = [], 0, {}
    for what, which, amount_ms in moves:
        if what == "span":
            span = rank.spans.begin(rank.compute, stream=streams[which], micro_batch=len(truth))
            if span is None:
                continue
            starts_ns = max(device.host_ns, streams[which].free_ns)
            device.launch(amount_ms * MS, streams[which])
            span.end(streams[which])
            truth.append((starts_ns, streams[which].free_ns))
        elif what == "wait":
            device.spend(round(amount_ms * MS))
        else:
            rank.spans.resolve()
            for found in rank.read():
                seen += 1
                errors_ns[int(found["micro_batch"])] = found, rank.spans.error_ns
    device.spend(10**12)
    rank.spans._clock._due_ns = 10**18  # 1000 s after the last anchor: only counted
    seen += rank.spans.resolve()
    assert seen == len(truth) and rank.spans.pending == 0
    for number, (found, error_ns) in errors_ns.items():
        # Events happen a latency after their record, and 32-bit floats of up to a minute are exact to 4 us.
        slack_ns = 2 * latency_us * US + 10 * US + 1e-3 * (truth[number][1] - truth[number][0])
        assert error_ns is not None and abs(int(found["start_ns"]) - truth[number][0]) <= error_ns + slack_ns
        length_ns = int(found["end_ns"]) - int(found["start_ns"])
        assert abs(length_ns - (truth[number][1] - truth[number][0])) <= slack_ns


def test_a_collective_ends_on_the_stream_that_its_future_names(tmp_path: Path) -> None:
    device = FakeDevice()
    rank, communication = Rank(tmp_path, device), FakeStream(device)

    class Future:
        def then(self, call: Callable[[Any], Any]) -> None:
            compute, device.current = device.current, communication
            call(self)
            device.current = compute

    span = begun(rank.spans.begin(rank.compute))
    device.launch(20 * MS, communication)
    device.launch(90 * MS)
    assert rank.spans.end_with(span, SimpleNamespace(get_future=Future))
    assert not rank.spans.end_with(begun(rank.spans.begin(rank.compute)), object())
    device.spend(30 * MS)
    assert rank.spans.resolve() == 1
    (found,) = rank.read()
    assert found["end_ns"] - found["start_ns"] == pytest.approx(20 * MS, abs=20 * US)


@pytest.mark.gpu
def test_on_a_real_device_a_product_takes_as_long_as_it_takes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    reader, product = RingReader(tmp_path / "0.ring"), recorder.type("forward", "product")
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    torch.cuda.synchronize()
    spans = CudaSpans(recorder, torch.cuda)
    side = torch.cuda.Stream()
    before_ns = recorder.clock_ns()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            span = begun(spans.begin(product))
            for _ in range(20):
                x @ x
            span.end()
    launched_ns = recorder.clock_ns()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    done_ns = recorder.clock_ns()
    assert spans.resolve() == 2 and done_ns - before_ns > launched_ns - before_ns
    records = [one for one in reader.read().records if one["type"] == product.number]
    assert spans.error_ns is not None and spans.error_ns < 5e6
    for one in records:
        assert before_ns <= one["start_ns"] < one["end_ns"] <= done_ns + spans.error_ns
    with torch.cuda.graph(graph):
        assert spans.begin(product) is None
        y = x @ x
    graph.replay()
    torch.cuda.synchronize()
    assert spans.captured == 1 and y.isfinite().all()


@pytest.mark.gpu
def test_on_a_real_device_a_collective_ends_when_nccl_is_done(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        pytest.skip("no CUDA device with NCCL")
    from datetime import timedelta

    options = torch.distributed.ProcessGroupNCCL.Options()
    store = torch.distributed.HashStore()
    group = torch.distributed.ProcessGroupNCCL(store, 0, 1, options)
    x = torch.ones(1 << 20, device="cuda")
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    reader, reduce = RingReader(tmp_path / "0.ring"), recorder.type("collective", "all_reduce")
    spans = CudaSpans(recorder, torch.cuda)
    span = begun(spans.begin(reduce))
    work = group.allreduce([x], torch._C._distributed_c10d.AllreduceOptions())
    assert spans.end_with(span, work)
    work.wait(timedelta(seconds=60))
    torch.cuda.synchronize()
    assert spans.resolve() == 1
    (found,) = [one for one in reader.read().records if one["type"] == reduce.number]
    assert 0 <= found["end_ns"] - found["start_ns"] < 10**9
