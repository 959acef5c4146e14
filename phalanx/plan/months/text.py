"""Months for a person at a terminal. Nothing in it needs colour to be understood."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.core import units
from phalanx.plan.months.outcome import Estimate, Outcome
from phalanx.plan.months.report import MonthsReport, Tried
from phalanx.plan.months.values import DAY_S, HOUR_S, Story

FormatNumber: TypeAlias = Callable[[float], str]

_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def months_text(report: MonthsReport) -> RenderableType:
    """All of a report."""
    pieces: list[RenderableType] = [*_head(report), "", _heading("what comes of it"), _results(report)]
    pieces += ["", _heading("where the time goes"), _parts(report.outcome)]
    pieces += ["", _heading("what happens in a run"), _counts(report.outcome)]
    pieces += ["", _heading("interval between durable checkpoints"), _choices(report.intervals, _interval_text)]
    pieces += ["", _heading("spares"), _choices(report.spares, lambda value: f"{value:.0f}")]
    return Group(*pieces, "", _listed(notes(report)))


def _listed(lines: Iterator[str]) -> Table:
    """A list; what does not fit goes on below its own beginning."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row("-", line)
    return table


def percent(ratio: float, digits: int = 2) -> str:
    """``0.1234`` as ``12.34 %``."""
    return f"{100 * ratio + 0.0:.{digits}f} %"


def head_lines(report: MonthsReport) -> list[str]:
    """What is played, in three lines."""
    story = report.story
    work, pool, form = story.work, story.pool, report.form
    beside = "".join([f", {pool.spares:,} spare" if pool.spares else "", f", {pool.cold:,} cold" if pool.cold else ""])
    goal = f"{work.steps:,} steps of {work.step_s:g} s" if work.steps else f"{work.days:g} days"
    often = "nothing stops it" if math.isinf(form.mtbf_s) else f"stopped once in {units.duration(form.mtbf_s)}"
    runs = len(report.outcome.samples.wall_s)
    return [
        f"{work.hosts * work.devices_per_host:,} devices on {work.hosts:,} hosts{beside}: {goal}, {runs:,} runs, "
        f"seed {report.outcome.seed}",
        f"failures: {report.source}; {often}",
        checkpoint_line(story),
    ]


def checkpoint_line(story: Story) -> str:
    """When state is saved and what follows a failure, in a line."""
    saved, recovery = story.checkpoints, story.recovery
    memory = f", in memory every {units.duration(saved.memory_interval_s)}" if saved.memory_interval_s else ""
    return (
        f"checkpoints: every {units.duration(saved.interval_s)} (stall {units.duration(saved.stall_s)}){memory}; "
        f"a failure is noticed in {units.duration(recovery.detection_s)}, a restart takes "
        f"{units.duration(recovery.restart_s + recovery.load_s)}"
    )


def notes(report: MonthsReport) -> Iterator[str]:
    """Limits that a reader should know of."""
    outcome, work = report.outcome, report.story.work
    yield "formulas are of the long run, of failures without memory; Meta's has enough hosts, and is linear in the rate"
    if report.is_recorded:
        yield "formulas and other choices know the rates of what was recorded, and not that much of it came together"
    else:
        yield "failures come one by one here; where they come together, more spares are needed (see --trace)"
    if work.steps and outcome.finished < 1:
        yield f"{percent(1 - outcome.finished, 1)} of the runs did not finish in {work.days:g} days"
    if report.form.enough_hosts < 0.99:
        yield (
            f"in the long run hosts are missing for {percent(1 - report.form.enough_hosts, 1)} of the time: "
            f"{report.form.away_hosts:.1f} are away on average"
        )
    if outcome.ettr.mean < 0.5:
        yield "less than half of the time trains: save more often, restart faster, or have more spares"


def _head(report: MonthsReport) -> list[RenderableType]:
    first, *rest = head_lines(report)
    lines = Table.grid(padding=(0, 1, 0, 0))
    for line in rest:
        name, _, words = line.partition(" ")
        lines.add_row(name, words)
    return [Text(first, style="bold"), lines]


def _heading(text: str) -> Text:
    return Text(text, style="bold underline")


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _results(report: MonthsReport) -> Table:
    outcome, work = report.outcome, report.story.work
    table = _table(("", "left"), ("mean", "right"), ("± 95 %", "right"), ("95 % of the runs", "left"))
    _add(table, "effective time (ETTR)", outcome.ettr, lambda value: percent(value))
    _add(table, "goodput, of all paid", outcome.goodput, lambda value: percent(value))
    if work.steps:
        _add(table, "days to finish", outcome.days, lambda value: f"{value:,.2f}")
    else:
        _add(table, "steps that count", outcome.steps, lambda value: f"{value:,.0f}")
    _add(table, "device-hours", outcome.device_hours, lambda value: f"{value:,.0f}")
    if work.price_per_device_hour:
        _add(table, "cost", outcome.cost, lambda value: f"{value:,.0f}")
    table.add_row("ETTR by formula", percent(report.form.ettr))
    table.add_row("ETTR by Meta's formula", percent(report.form.meta_ettr))
    return table


def _add(table: Table, name: str, estimate: Estimate, shown: FormatNumber) -> None:
    if math.isinf(estimate.mean):
        middle = "never" if math.isinf(estimate.median) else shown(estimate.median)
        table.add_row(name, middle, "median", f"{shown(estimate.least)} …")
        return
    half = estimate.high - estimate.mean
    around = "" if math.isinf(half) else shown(half)
    table.add_row(name, shown(estimate.mean), around, f"{shown(estimate.least)} … {shown(estimate.most)}")


def _parts(outcome: Outcome) -> Table:
    table = _table(("", "left"), ("share", "right"), ("hours", "right"), ("95 % of the runs", "right"), ("", "left"))
    wall_h = float(outcome.samples.wall_s.mean()) / HOUR_S
    for name, share in outcome.shares.items():
        if share.most > 1e-9 or name == "training":
            spread = f"{percent(share.least)} … {percent(share.most)}"
            table.add_row(name, percent(share.mean), f"{share.mean * wall_h:,.1f}", spread, bar(share.mean))
    table.add_row("all", percent(1.0), f"{wall_h:,.1f}", "", "", style="bold")
    return table


def bar(share: float) -> str:
    """A bar of eighths of a character."""
    eighths = round(max(share, 0.0) * _BAR * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8].strip() if eighths % 8 else "")


def _counts(outcome: Outcome) -> Table:
    table = _table(("", "left"), ("mean", "right"), ("95 % of the runs", "left"))
    for name, count in {**outcome.counts, "hosts away at once, at most": outcome.most_out}.items():
        if count.most > 0:
            table.add_row(name, f"{count.mean:,.1f}", f"{count.least:,.0f} … {count.most:,.0f}")
    return table


def _interval_text(seconds: float) -> str:
    return units.duration(seconds) if seconds < 30 * DAY_S else f"{seconds / DAY_S:.0f}d"


def _choices(tried: tuple[Tried, ...], shown: FormatNumber) -> Table:
    is_played = any(one.played for one in tried)
    columns = [("", "left"), ("", "right"), ("effective", "right"), ("goodput", "right")]
    table = _table(*columns, *([("played", "right"), ("gain, same failures", "right")] if is_played else []))
    for one in tried:
        cells = [one.why, shown(one.value), percent(one.ettr), percent(one.goodput)]
        if one.played:
            gain, ettr = one.played.gain, one.played.outcome.ettr.mean
            cells += [percent(ettr), f"{100 * gain.mean:+.2f} ± {100 * (gain.high - gain.mean):.2f}"]
        table.add_row(*cells)
    return table
