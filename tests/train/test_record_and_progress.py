"""Step records, progress, signals and displays: the small values of the training loop."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from train_helpers import entries, run_all

from phalanx.data.prepare import Progress as PrepareProgress
from phalanx.ipc.stop_request import StopRequest
from phalanx.telemetry.run_log import RunLog
from phalanx.telemetry.run_log_lines import last_lines
from phalanx.train.reports.callbacks import StepReport
from phalanx.train.reports.display import LiveDisplay, PlainDisplay, fitting, format_step, make_display
from phalanx.train.reports.logged_display import LoggedDisplay
from phalanx.train.reports.preparation_progress import PrepareDisplay
from phalanx.train.reports.step_record import StepRecord
from phalanx.train.run_progress import RunProgress


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _add(record: StepRecord, step: int, loss: float, skipped: float = 0.0, tokens: int = 100) -> None:
    record.add(step, [torch.tensor(x) for x in (loss, 0.5, skipped, 1.0)], 1e-3, step * tokens, tokens)


def test_steps_are_reported_in_order_with_the_rate_over_all_of_them() -> None:
    clock = Clock()
    record = StepRecord(clock)
    for step in (1, 2, 3, 4):
        _add(record, step, float(step), skipped=float(step == 3))
    clock.now_s = 2.0
    reports = record.flush()
    assert [r.step for r in reports] == [1, 2, 3, 4]
    assert [r.loss for r in reports] == [1.0, 2.0, 3.0, 4.0]
    assert [r.skipped for r in reports] == [False, False, True, False]
    assert reports[0].tokens_per_s == pytest.approx(200.0)
    assert reports[0].step_s == pytest.approx(0.5)
    assert record.flush() == []


def test_what_is_still_to_come_is_told_by_all_steps_but_the_first() -> None:
    """The first one compiles for 40 s; those after it take half a second each."""
    clock = Clock()
    record = StepRecord(clock)
    clock.now_s = 40.0
    _add(record, 1, 1.0)
    for step in range(2, 11):
        clock.now_s += 0.5
        _add(record, step, 1.0)
    first = record.flush()[-1]
    assert first.step_s == pytest.approx(4.45)
    assert first.usual_s == pytest.approx(0.5)
    clock.now_s += 0.6
    _add(record, 11, 1.0)
    assert record.flush()[-1].usual_s == pytest.approx(0.6)


def test_the_first_step_alone_tells_nothing_of_the_rest() -> None:
    clock = Clock()
    record = StepRecord(clock)
    clock.now_s = 40.0
    _add(record, 1, 1.0)
    (report,) = record.flush()
    assert report.usual_s is None
    assert ("left", "n/a") in format_step(replace(report, total_steps=10, memory_bytes=2**30))


def test_time_outside_training_is_left_out_of_the_rate() -> None:
    clock = Clock()
    record = StepRecord(clock)
    clock.now_s = 10.0
    record.resume_clock()
    _add(record, 1, 1.0)
    clock.now_s = 11.0
    assert record.flush()[0].tokens_per_s == pytest.approx(100.0)


def test_progress_survives_json_and_ignores_what_it_does_not_know() -> None:
    progress = RunProgress(micro_batch=4)
    progress.advance(8, 64)
    progress.advance(16, 64)
    assert (progress.step, progress.samples, progress.tokens) == (2, 24, 24 * 64)
    assert RunProgress.from_json({**progress.to_json(), "from_the_future": 1}) == progress


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_ask_to_stop_and_are_given_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop
        assert stop.name == ""
        os.kill(os.getpid(), number)
        assert stop
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def _report(mfu: float | None = 0.4) -> StepReport:
    report = StepReport(5, 2.5, 0.7, 1e-3, False, 500, 1234.0, 0.1)
    return replace(report, total_steps=10, mfu=mfu, memory_bytes=2**30, left_s=75.0)


def test_plain_lines_carry_every_figure() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, width=200))
    assert isinstance(display, PlainDisplay)
    display.show(_report())
    for text in ("step 5/10", "loss 2.5000", "1,234", "40.0%", "1.00 GiB", "1m15s", "lr 1.00e-03", "grad norm 0.700"):
        assert text in out.getvalue()


def test_figures_of_a_run_stand_in_the_log_of_rank_0_alone(tmp_path: Path) -> None:
    """The rates of others are of their own clocks, which began elsewhere: two MFUs for one step."""
    for rank in (0, 1):
        log = RunLog(tmp_path / "logs" / f"rank-{rank}.here.log", rank, 1, file_bytes=1 << 20, files=2)
        display = LoggedDisplay(PlainDisplay(Console(quiet=True)), log, is_first=rank == 0)
        former, sys.stderr = sys.stderr, None  # type: ignore[assignment]
        display.show(_report(mfu=0.4 + rank / 10))
        sys.stderr = former
        log.close()
    first, other = (line.text for line in last_lines(tmp_path, 2))
    assert "MFU 40.0%" in first and other == "step 5/10"


def test_an_unknown_peak_gives_no_mfu() -> None:
    out = io.StringIO()
    PlainDisplay(Console(file=out, width=200)).show(_report(mfu=None))
    assert "MFU n/a" in out.getvalue()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_run_measures_the_device_if_mfu_is_wanted(tmp_path: Path, is_wanted: bool) -> None:
    said = run_all(tmp_path, {"train.steps": 1, "logging.mfu": is_wanted})
    (step,) = entries(tmp_path / "run")
    assert ("peak" in said, "mfu" in step, "MFU n/a" in said) == (is_wanted, is_wanted, not is_wanted)


def test_a_terminal_gets_a_live_table_and_notes_above_it() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, width=140, force_terminal=True))
    assert isinstance(display, LiveDisplay)
    display.show(_report())
    display.note("a [note] with brackets")
    display.close()
    assert "a [note] with brackets" in out.getvalue()
    assert "2.5000" in out.getvalue()


@pytest.mark.parametrize(("width", "gone"), [(140, set()), (60, {"memory"}), (30, {"lr", "grad norm"})])
def test_a_narrow_terminal_keeps_what_matters(width: int, gone: set[str]) -> None:
    every = format_step(_report())
    kept = fitting(every, width)
    assert {"step", "loss", "left"} <= {name for name, _ in kept}
    assert not gone & {name for name, _ in kept}
    assert [figure for figure in every if figure in kept] == kept
    if width == 140:
        assert kept == every
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, width=width, force_terminal=True))
    display.show(_report())
    display.close()
    assert "…" not in out.getvalue()


def _reported(console: Console) -> None:
    with PrepareDisplay(console) as display:
        display.show(PrepareProgress("corpus: looking"))
        display.show(PrepareProgress("corpus: tokenising", 0, 2048, 0))
        display.show(PrepareProgress("corpus: tokenising", 1024, 2048, 300))


def test_preparing_is_a_line_per_stage_in_a_file() -> None:
    out = io.StringIO()
    _reported(Console(file=out, width=100))
    assert out.getvalue() == "corpus: looking\ncorpus: tokenising\n"


def test_preparing_is_one_line_on_a_terminal() -> None:
    out = io.StringIO()
    _reported(Console(file=out, width=100, force_terminal=True))
    assert "1.00 KiB of 2.00 KiB, 300 tokens" in out.getvalue()
    assert "?" not in re.sub(r"\x1b\[\?", "", out.getvalue())
