"""Collectives that a loop of somebody else records: groups, members, numbers, and spans that are begun once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx.telemetry
from phalanx.core.errors import UserError
from phalanx.detect.stragglers.straggler_run import judge_run
from phalanx.telemetry import Trace, record_spans
from phalanx.telemetry.collective_spans import CollectiveSpan, described, types_of
from phalanx.telemetry.recording import Recording
from phalanx.telemetry.span_writer import HostWriter
from phalanx.telemetry.spans import Recorder, RingReader, SpanType
from phalanx.telemetry.writer_place import WriterSettings


@pytest.fixture
def groups() -> Iterator[dict[str, Any]]:
    """Groups of torch, of a job of four of which this is rank 1; none of them talks to anybody."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        yield {
            "all": dist.group.WORLD,
            "named": dist.new_group([1, 3], group_desc="data"),
            "plain": dist.new_group([0, 1]),
        }
    finally:
        dist.destroy_process_group()


def test_groups_are_known_by_name_and_members(groups: dict[str, Any]) -> None:
    assert described(groups["all"], ()) == ("all", (0, 1, 2, 3))
    assert described(groups["named"], ()) == ("data", (1, 3))
    assert described(groups["plain"], ()) == ("ranks 0, 1", (0, 1))
    mesh = SimpleNamespace(get_group=lambda: groups["named"], mesh_dim_names=("dp",))
    assert described(mesh, ()) == ("data", (1, 3))


@pytest.mark.parametrize(
    ("group", "ranks", "found"),
    [
        ("tensor", (3, 2), ("tensor", (2, 3))),
        ("world", (), ("all", ())),
        ([5, 4, 6], (), ("ranks 4-6", (4, 5, 6))),
        (None, [0, 2], ("ranks 0, 2", (0, 2))),
        (range(0, 20, 2), (), ("ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more", tuple(range(0, 20, 2)))),
    ],
)
def test_names_and_members_are_taken_as_they_are_written(group: Any, ranks: Any, found: Any) -> None:
    assert described(group, ranks) == found


@pytest.mark.parametrize(
    ("group", "ranks", "problem"),
    [
        ("data", (1, 1), "are no ranks"),
        ("data", (-1,), "are no ranks"),
        ([0, "x"], (), "are no ranks"),
        ([0, 1], (2,), "is given twice"),
        (object(), (), "is no group"),
        (object(), (1,), "are known by the group"),
        (SimpleNamespace(get_group=lambda: None, mesh_dim_names=("dp", "tp")), (), "is a mesh of 2 dimensions"),
    ],
)
def test_what_is_no_group_is_refused(group: Any, ranks: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        described(group, ranks)


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    found = record_spans(tmp_path, environ={}, settings=WriterSettings(period_s=0.05))
    yield found
    found.close()


def begun(recording: Recording) -> list[tuple[str, str, str, int, bool]]:
    reader = RingReader(recording._ring)
    return [(one.type.kind, one.type.name, one.type.group, one.number, one.is_under_way) for one in reader.begun()]


def test_a_collective_says_in_which_of_its_kind_a_rank_waits(recording: Recording) -> None:
    for number in (1, 2):
        with phalanx.telemetry.span("all-reduce", group="data", ranks=[0, 1], bytes=64):
            assert begun(recording)[-2:] == [
                ("collective", "all-reduce", "data", number, True),
                ("wait", "all-reduce", "data", number, True),
            ]
    assert not any(under_way for *_, under_way in begun(recording))
    with recording.span("all-reduce", kind="wait", group="data", ranks=[0, 1]):
        assert begun(recording)[-1][:3] == ("wait", "all-reduce", "data")


def test_a_collective_is_communication_that_nothing_hid(tmp_path: Path) -> None:
    recording = record_spans(tmp_path, environ={}, settings=WriterSettings(period_s=0.05))
    with recording.step(1):
        for _ in range(3):
            with recording.span("all-reduce", group=[0, 1], bytes=64):
                pass
        with pytest.raises(ZeroDivisionError), recording.span("send x", group="pipeline", ranks=[0, 1], peer=1):
            raise ZeroDivisionError
    recording.close()
    until_s = time.monotonic() + 120
    while recording._ring.exists() and time.monotonic() < until_s:  # on a busy machine its writer may still be starting
        time.sleep(0.02)
    trace = Trace.open(tmp_path)
    rows = trace.sql('select kind, name, "group" g, peer, bytes, count(*) n from spans group by all order by all')
    assert [tuple(row.values()) for row in rows.to_pylist()] == [
        ("collective", "all-reduce", "ranks 0, 1", -1, 64, 3),
        ("collective", "send x", "pipeline", 1, 0, 1),
        ("step", "", "", -1, 0, 1),
        ("wait", "all-reduce", "ranks 0, 1", -1, 0, 3),
        ("wait", "send x", "pipeline", 1, 0, 1),
    ]
    ranks = trace.sql('select distinct "group" g, ranks from groups order by g').to_pylist()
    assert [row["ranks"] for row in ranks] == [[0, 1], [0, 1]]


def test_what_has_no_group_is_refused_with_one(recording: Recording) -> None:
    with pytest.raises(UserError, match="is a kind of span without a group"):
        recording.span("forward", group="data")
    assert isinstance(recording.span("forward", kind="collective", group="data"), CollectiveSpan)


# Spans that are begun and ended once


@pytest.fixture
def ring(tmp_path: Path) -> tuple[Recorder, RingReader, SpanType]:
    recorder = Recorder.open(tmp_path / "0.ring", rank=0)
    return recorder, RingReader(tmp_path / "0.ring"), recorder.type("forward")


@pytest.mark.parametrize("use", ["with", "end", "both", "end twice"])
def test_what_is_begun_and_given_to_a_with_is_one_span(ring: tuple[Recorder, RingReader, SpanType], use: str) -> None:
    recorder, reader, forward = ring
    span = recorder.begin(forward)
    if use in ("with", "both"):
        with span as same:
            assert same is span
            assert [(one.number, one.is_under_way) for one in reader.begun()] == [(1, True)]
    for _ in range({"with": 0, "end": 1, "both": 1, "end twice": 2}[use]):
        span.end()
    assert [one.number for one in reader.begun()] == [1] and len(reader.read().records) == 1


def test_a_span_may_be_entered_again_when_it_has_ended(ring: tuple[Recorder, RingReader, SpanType]) -> None:
    recorder, reader, forward = ring
    span = recorder.span(forward)
    span.end()  # it has not begun
    for _ in range(2):
        with span:
            pass
    assert [one.number for one in reader.begun()] == [2] and len(reader.read().records) == 2


@pytest.mark.parametrize("way", [lambda span: span.cancel(), lambda span: (span.cancel(), span.end())])
def test_what_is_cancelled_is_not_recorded(
    ring: tuple[Recorder, RingReader, SpanType], way: Callable[[Any], object]
) -> None:
    recorder, reader, forward = ring
    way(recorder.begin(forward))
    assert not len(reader.read().records) and not any(one.is_under_way for one in reader.begun())


def test_who_comes_late_to_a_group_of_somebody_s_own_loop_is_a_straggler(tmp_path: Path) -> None:
    """Four ranks, one of which computes half as long again; the others wait for it in the group that they name."""
    now_ns = [0]
    recorders = [Recorder.open(tmp_path / "rings" / f"{rank}.ring", rank=rank) for rank in range(4)]
    for recorder in recorders:
        recorder.clock_ns = lambda: now_ns[0]
    for step in range(1, 25):
        begin_ns = step * 100_000_000
        for rank, recorder in enumerate(recorders):
            jitter_ns = (7 * step + 3 * rank) % 5 * 100_000
            recorder.step, now_ns[0] = step, begin_ns
            with recorder.span(recorder.type("step")):
                for kind, usual_ns in (("forward", 10_000_000), ("backward", 20_000_000)):
                    with recorder.span(recorder.type(kind), micro_batch=0):  # type: ignore[arg-type]
                        now_ns[0] += round(usual_ns * (1.5 if rank == 2 else 1.0)) + jitter_ns
                with CollectiveSpan(recorder, types_of(recorder, "all-reduce", "data", (0, 1, 2, 3)), 64, -1, -1):
                    now_ns[0] = begin_ns + 47_000_000
    for recorder in recorders:
        recorder.close()
    writer = HostWriter(tmp_path / "rings", tmp_path / "telemetry", "h")
    while writer.tick():
        pass
    writer.close_part()
    waits = {row["group"]: row for row in Trace.open(tmp_path).exposed_communication().to_pylist()}
    assert waits["data"]["exposed_s"] > 0.005
    verdict = judge_run(tmp_path)
    assert verdict.blamed_ranks == (2,) and "they wait for it" in " ".join(verdict.detections[0].why)
