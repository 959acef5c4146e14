from __future__ import annotations

import math
import random
import threading
from pathlib import Path

import pytest

from phalanx.dashboard import metrics_store
from phalanx.dashboard.metric_columns import parse_block, parse_entries
from phalanx.dashboard.metrics_store import MetricsStore
from phalanx.telemetry.loggers import metrics_line, parse_line


def write(path: Path, steps: range, mode: str = "ab", padding: int = 0) -> None:
    with path.open(mode) as file:
        for step in steps:
            file.write(metrics_line("step", step, {"loss": 1 / step, "tokens": step * 10, "pad": "x" * padding}))


def losses(store: MetricsStore, path: Path) -> list[float]:
    store.read([path], within_s=30)
    store.settle()
    return store.read([path])[path].block.steps["loss"].to_pylist()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 101))
    return path


def test_only_what_is_new_is_read_and_a_torn_line_waits(path: Path) -> None:
    store = MetricsStore()
    assert len(losses(store, path)) == 100
    whole = metrics_line("step", 101, {"loss": 7.0, "tokens": 1010})
    with path.open("ab") as file:
        file.write(whole[:20])
    assert len(losses(store, path)) == 100
    with path.open("ab") as file:
        file.write(whole[20:])
    assert losses(store, path)[-1] == 7.0
    store.close()


def test_a_file_that_was_replaced_is_read_anew(path: Path) -> None:
    store = MetricsStore()
    losses(store, path)
    beside = path.with_suffix(".new")
    write(beside, range(1, 51))
    write(beside, range(51, 160))
    beside.replace(path)
    assert losses(store, path) == pytest.approx([1 / step for step in range(1, 160)])
    # Written over in place, as an editor does: the bytes before the place are others.
    write(path, range(200, 500), "wb")
    assert losses(store, path)[0] == pytest.approx(1 / 200)
    store.close()


def test_a_later_start_maps_what_an_earlier_one_kept(tmp_path: Path) -> None:
    path, cache = tmp_path / "metrics.jsonl", tmp_path / "cache"
    write(path, range(1, 4001), padding=400)
    with path.open("ab") as file:
        file.write(metrics_line("evaluation", 4000, {"validation_loss": 0.5}))
        file.write(metrics_line("checkpoint", 4000, {"checkpoint/name": "step-4000"}))
    first = MetricsStore(cache)
    expected = losses(first, path)
    first.close()
    (kept,) = cache.iterdir()
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"loss": 0.5,', b'"loss": 0.6,', 1))  # the second line: never read again
    store = MetricsStore(cache)
    assert losses(store, path) == expected
    block = store.read([path])[path].block
    assert block.evaluations["validation_loss"].to_pylist() == [0.5]
    assert [mark["text"] for mark in block.marks] == ["step-4000"]
    write(path, range(4001, 4003))
    assert len(losses(store, path)) == 4002
    store.close()
    kept.write_bytes(b"damaged")
    store = MetricsStore(cache)
    assert losses(store, path)[1] == pytest.approx(0.6)
    store.close()


def test_a_large_file_is_shown_as_a_sample_until_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3001), padding=2000)
    store = MetricsStore(threads=1)
    released = threading.Event()
    blocker = store._pool.submit(released.wait, 60)  # the only thread is busy
    found = store.read([path], within_s=0, sample=50)[path]
    assert not found.is_whole
    steps = found.block.steps["step"].to_pylist()
    assert steps == sorted(set(steps))
    assert 25 <= len(steps) <= 60
    assert steps[-1] >= 2990
    before = store.progress([path])
    released.set()
    blocker.result()
    assert len(losses(store, path)) == 3000
    assert store.progress([path]) != before
    store.close()


def test_both_readers_of_lines_say_the_same() -> None:
    draw = random.Random(0)
    lines = [metrics_line("start", 0, {"startup/data_s": 1.0})]
    for step in range(1, 200):
        loss = draw.choice([1.5, math.nan, math.inf, 3.0])
        lines.append(metrics_line("step", step, {"loss": loss, "tokens": step * 4096, "skipped": int(step % 50 == 0)}))
        if step % 20 == 0:
            lines.append(metrics_line("evaluation", step, {"validation_loss": draw.random()}))
            lines.append(metrics_line("checkpoint", step, {"checkpoint/name": f"step-{step}"}))
    lines.append(metrics_line("start", 150, {}))
    fast = parse_block(b"".join(lines))
    slow = parse_entries(filter(None, map(parse_line, lines)))
    assert list(fast.marks) == list(slow.marks)
    assert {mark["kind"] for mark in fast.marks} == {"checkpoint", "resume", "skipped step"}
    for one, other in ((fast.steps, slow.steps), (fast.evaluations, slow.evaluations)):
        assert set(one.column_names) == set(other.column_names)
        for name in one.column_names:
            assert repr(one[name].to_pylist()) == repr(other[name].to_pylist())


@pytest.mark.parametrize(
    "strange",
    [
        b"not json\n",
        b"[1, 2]\n",
        b'{"kind": "step"}\n',
        b'{"kind": 5, "step": 1}\n',
        b'{"kind": "step", "step": "x"}\n',
        b'{"kind": "step", "step": 4, "loss": "text"}\n',
        b'{"kind": "step", "step": 4.5, "loss": 1}\n',
        b'{"kind": "step", "step": 99999999999999999999999, "loss": 1}\n',
        b"\xff\xfe\n",
        b"\n",
    ],
)
def test_strange_lines_are_left_out(strange: bytes) -> None:
    good = [metrics_line("step", step, {"loss": float(step)}) for step in (1, 2, 3)]
    block = parse_block(good[0] + strange + b"".join(good[1:]))
    assert [loss for loss in block.steps["loss"].to_pylist() if loss is not None] == [1, 2, 3]


@pytest.mark.parametrize(("within_s", "waits"), [(0.4, []), (0.6, [0.6])])
def test_nobody_waits_for_what_cannot_be_read_in_time(
    path: Path, monkeypatch: pytest.MonkeyPatch, within_s: float, waits: list[float]
) -> None:
    """Of many large files the first page shows samples at once."""
    waited: list[float] = []
    monkeypatch.setattr(metrics_store, "wait", lambda futures, timeout: waited.append(timeout))
    monkeypatch.setattr(metrics_store, "_READ_PER_S", path.stat().st_size)
    store = MetricsStore()
    store.read([path], within_s=within_s)
    store.close()
    assert waited == waits
