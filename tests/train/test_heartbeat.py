"""What a rank says of itself while it trains: step, phase, own time, loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.progress_pages import read_progress
from train_helpers import begin, configured, finish

from phalanx.core.progress import ATTEMPT_VARIABLE, PROGRESS_VARIABLE, Progress, ProgressWriter
from phalanx.train.heartbeat import NO_PULSE, Pulse, open_page

S = 1_000_000_000


class Bench:
    """A pulse with clocks that stand still until they are moved."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "page"
        self.now_ns = self.waited_ns = 0
        self.pulse = Pulse(
            ProgressWriter(self.path, 3, claims=True, clock_ns=self.clock), lambda: self.waited_ns, self.clock
        )

    def clock(self) -> int:
        return self.now_ns

    def go_on(self, seconds: float, waiting_s: float = 0.0) -> None:
        self.now_ns += int((seconds + waiting_s) * S)
        self.waited_ns += int(waiting_s * S)

    @property
    def said(self) -> Progress:
        found = read_progress(self.path)
        assert found is not None
        return found


def test_own_time_is_that_of_steps_without_waiting_and_without_what_is_done_aside(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.pulse.enter("start", 300.0)
    bench.go_on(50, waiting_s=7)
    assert (bench.said.phase, bench.said.expects_ns, bench.said.step) == ("start", 300 * S, 0)
    bench.pulse.begin_steps()
    bench.go_on(2, waiting_s=5)
    bench.pulse.step(41, 2.5)
    said = bench.said
    assert (said.phase, said.step, said.steps_here, said.busy_ns, said.loss) == ("step", 41, 1, 2 * S, 2.5)
    assert said.is_absolute and said.attempt == 3
    bench.go_on(1)
    with bench.pulse.aside("evaluate"):
        assert (bench.said.phase, bench.said.expects_ns) == ("evaluate", 0)  # it was not done before
        bench.go_on(20, waiting_s=4)
    bench.go_on(1.5, waiting_s=1)
    bench.pulse.step(42, None)
    assert (bench.said.phase, bench.said.busy_ns, bench.said.loss) == ("step", int(2.5 * S), None)
    with bench.pulse.aside("evaluate"):
        assert bench.said.expects_ns == (3 * 24 + 30) * S
    with bench.pulse.aside("checkpoint", 0.0):
        assert bench.said.expects_ns == 0
    with pytest.raises(OSError), bench.pulse.aside("checkpoint", 10.0):
        assert bench.said.expects_ns == 60 * S
        raise OSError
    assert bench.said.phase == "step"


def test_own_time_is_not_known_where_waiting_cannot_be_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.pulse.without_own_time()
    bench.pulse.begin_steps()
    bench.go_on(2)
    bench.pulse.step(1, None)
    assert bench.said.busy_ns == -1


def test_a_page_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    assert open_page({}) is None
    assert open_page({PROGRESS_VARIABLE: str(tmp_path / "no" / "page"), ATTEMPT_VARIABLE: "1"}) is None
    assert open_page({PROGRESS_VARIABLE: str(tmp_path / "page"), ATTEMPT_VARIABLE: "one"}) is None
    with NO_PULSE.aside("evaluate"):
        NO_PULSE.step(1, 1.0)
    assert not NO_PULSE.is_read


def test_training_tells_where_it_goes_on(tmp_path: Path) -> None:
    finish(begin(configured(tmp_path, {"train.steps": 6, "checkpoint.every_steps": 4})))
    run = begin(configured(tmp_path, {"train.steps": 8, "checkpoint.every_steps": 4, "run.resume": "changed"}))

    def fail(*ignored: Any) -> None:
        raise RuntimeError("in the first step after it went on")

    run.accumulate_gradients = fail  # type: ignore[method-assign, assignment]
    run.ranks.pulse = Pulse(ProgressWriter(tmp_path / "page", 2, claims=True))
    with pytest.raises(RuntimeError, match="in the first step"):
        finish(run)
    said = read_progress(tmp_path / "page")
    assert said is not None and (said.step, said.steps_here, said.is_absolute) == (6, 0, True)


def test_training_tells_its_steps_and_phases(tmp_path: Path) -> None:
    changes = {"train.steps": 6, "evaluate.every_steps": 3, "checkpoint.every_steps": 4}
    run = begin(configured(tmp_path, changes))
    told: list[tuple[Any, ...]] = []

    class Page(ProgressWriter):
        def step(self, step: int | None = None, *, busy_ns: int = -1, loss: float | None = None) -> None:
            super().step(step, busy_ns=busy_ns, loss=loss)
            told.append((step, busy_ns > 0, loss))

        def phase(self, name: str, expects_s: float = 0.0) -> None:
            super().phase(name, expects_s)
            if not told or told[-1] != name:
                told.append(name)  # type: ignore[arg-type]

    run.ranks.pulse = Pulse(Page(tmp_path / "page", 1, claims=True), lambda: run.ranks.waits.waited_ns)
    finish(run)
    assert [one[0] for one in told if isinstance(one, tuple)] == list(range(1, 7))
    assert all(one[1] for one in told if isinstance(one, tuple))
    phases = [one if isinstance(one, str) else one[0] for one in told]
    after = {
        step: [one for one in phases[phases.index(step) + 1 : phases.index(step + 1)] if one != "step"]
        for step in (3, 4)
    }
    assert after == {3: ["checkpoint", "evaluate"], 4: ["checkpoint"]}  # a kill meanwhile costs the evaluation alone
    assert phases[-1] == "end"
    last = read_progress(tmp_path / "page")
    assert last is not None and (last.step, last.phase, last.is_absolute) == (6, "end", True)
    losses = [one[2] for one in told if isinstance(one, tuple)]
    assert all(isinstance(loss, float) and torch.isfinite(torch.tensor(loss)) for loss in losses)
