"""Step records, progress, signals and displays: the small values of the training loop."""

from __future__ import annotations

import io
import os
import re
import signal

import pytest
import torch
from rich.console import Console

from phalanx.data.prepare import Progress as PrepareProgress
from phalanx.train.reports.display import LiveDisplay, PlainDisplay, Status, fitting, format_status, make_display
from phalanx.train.reports.preparation_progress import PrepareDisplay
from phalanx.train.reports.step_record import StepRecord, StepReport
from phalanx.train.stop_request import StopRequest
from phalanx.train.training_run import Progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _add(record: StepRecord, step: int, loss: float, skipped: float = 0.0, tokens: int = 100) -> None:
    record.add(step, torch.tensor(loss), torch.tensor(0.5), torch.tensor(skipped), 1e-3, step * tokens, tokens)


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
    assert ("left", "n/a") in format_status(Status(report, 10, None, 2**30, None))


def test_time_outside_training_is_left_out_of_the_rate() -> None:
    clock = Clock()
    record = StepRecord(clock)
    clock.now_s = 10.0
    record.resume_clock()
    _add(record, 1, 1.0)
    clock.now_s = 11.0
    assert record.flush()[0].tokens_per_s == pytest.approx(100.0)


def test_progress_survives_json_and_ignores_what_it_does_not_know() -> None:
    progress = Progress(micro_batch=4)
    progress.advance(8, 64)
    progress.advance(16, 64)
    assert (progress.step, progress.samples, progress.tokens) == (2, 24, 24 * 64)
    assert Progress.from_json({**progress.to_json(), "from_the_future": 1}) == progress


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


def _status(mfu: float | None = 0.4) -> Status:
    report = StepReport(5, 2.5, 0.7, 1e-3, False, 500, 1234.0, 0.1)
    return Status(report, 10, mfu, 2**30, 75.0)


def test_plain_lines_carry_every_figure() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, width=200))
    assert isinstance(display, PlainDisplay)
    display.show(_status())
    for text in ("step 5/10", "loss 2.5000", "1,234", "40.0%", "1.00 GiB", "1m15s", "lr 1.00e-03", "grad norm 0.700"):
        assert text in out.getvalue()


def test_an_unknown_peak_gives_no_mfu() -> None:
    out = io.StringIO()
    PlainDisplay(Console(file=out, width=200)).show(_status(mfu=None))
    assert "MFU n/a" in out.getvalue()


def test_a_terminal_gets_a_live_table_and_notes_above_it() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, width=140, force_terminal=True))
    assert isinstance(display, LiveDisplay)
    display.show(_status())
    display.note("a [note] with brackets")
    display.close()
    assert "a [note] with brackets" in out.getvalue()
    assert "2.5000" in out.getvalue()


@pytest.mark.parametrize(("width", "gone"), [(140, set()), (60, {"memory"}), (30, {"lr", "grad norm"})])
def test_a_narrow_terminal_keeps_what_matters(width: int, gone: set[str]) -> None:
    every = format_status(_status())
    kept = fitting(every, width)
    assert {"step", "loss", "left"} <= {name for name, _ in kept}
    assert not gone & {name for name, _ in kept}
    assert [figure for figure in every if figure in kept] == kept
    if width == 140:
        assert kept == every
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, width=width, force_terminal=True))
    display.show(_status())
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
