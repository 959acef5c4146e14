"""The report of simulated months: what came of the runs, formulas beside, and what other choices would bring.

As text for a terminal, in which nothing needs colour; as plain values for JSON, with stable keys, units in their names
and null for what is infinite; and as a page with figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.figures.pages.page_blocks import (
    Block,
    Bullets,
    Cards,
    Cell,
    FigurePlace,
    Heading,
    PageTable,
    numbers,
    soft,
)
from phalanx.figures.simulate import choice_lines, run_histogram, time_shares
from phalanx.figures.style import Figure
from phalanx.plan.report.report_model import finite
from phalanx.plan.report.report_text import bar, make_columns, title
from phalanx.simulate.failure_formulas import ClosedForm, away_ratio, closed_form, standby
from phalanx.simulate.failure_model import DAY_S, HOUR_S, FailureScenario
from phalanx.simulate.failure_simulation import (
    Estimate,
    PlayedChoice,
    RunsOutcome,
    best_interval,
    best_spares,
    play_intervals,
    play_spares,
    with_interval,
    with_spares,
)

_FACTORS = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True)
class Tried:
    """A choice by the closed form."""

    why: str
    value: float  # seconds between checkpoints, or spares
    ettr: float
    goodput: float
    # The same choice with the same failures as the scenario, where that was asked for.
    played: PlayedChoice | None = None


@dataclass(frozen=True)
class FailureReport:
    """Everything that is reported about a scenario."""

    outcome: RunsOutcome
    form: ClosedForm  # formulas, for failures without memory, in the long run
    # Choices, those of the scenario first.
    intervals: tuple[Tried, ...]
    spares: tuple[Tried, ...]
    source: str
    is_recorded: bool = False  # they are recorded ones, or drawn from them with what came together

    @property
    def scenario(self) -> FailureScenario:
        """What was played."""
        return self.outcome.scenario


def make_report(
    outcome: RunsOutcome, source: str, compare_runs: int = 0, *, is_recorded: bool = False
) -> FailureReport:
    """The report of `outcome`.

    Args:
        compare_runs: of every other choice, to be played with the same failures; 0: formulas only.
    """
    scenario = outcome.scenario
    intervals, spares = list(_intervals(scenario)), list(_spares(scenario))
    if compare_runs:
        # Shorter and longer ones than the best, too.
        best = intervals[-1].value
        others = [_possible(scenario, best * factor) for factor in _FACTORS]
        intervals += [_interval(scenario, f"best x {f:g}", s) for f, s in zip(_FACTORS, others, strict=True)]
        played = play_intervals(scenario, [tried.value for tried in intervals], compare_runs, outcome.seed)
        intervals = [replace(tried, played=choice) for tried, choice in zip(intervals, played, strict=True)]
        played = play_spares(scenario, [int(tried.value) for tried in spares], compare_runs, outcome.seed)
        spares = [replace(tried, played=choice) for tried, choice in zip(spares, played, strict=True)]
    return FailureReport(outcome, closed_form(scenario), tuple(intervals), tuple(spares), source, is_recorded)


def _interval(scenario: FailureScenario, why: str, interval_s: float) -> Tried:
    form = closed_form(with_interval(scenario, interval_s))
    paid = scenario.work.hosts + scenario.pool.spares
    return Tried(why, interval_s, form.ettr, form.ettr * scenario.work.hosts / paid)


def _possible(scenario: FailureScenario, interval_s: float) -> float:
    least_s = max(scenario.checkpoints.persist_s, scenario.checkpoints.memory_interval_s, scenario.work.step_s)
    return min(max(interval_s, least_s), max(scenario.work.days * DAY_S, least_s))


def _intervals(scenario: FailureScenario) -> Iterator[Tried]:
    """The scenario's own, Young's, Daly's, and the best by the exact formula; intervals that can be."""
    form = closed_form(scenario)
    yield _interval(scenario, "this one", scenario.checkpoints.interval_s)
    for why, interval_s in (("Young 1974", form.young_s), ("Daly 2006", form.daly_s)):
        if math.isfinite(interval_s) and interval_s > 0 and _possible(scenario, interval_s) == interval_s:
            yield _interval(scenario, why, interval_s)
    yield _interval(scenario, "best", best_interval(scenario))


def _spares(scenario: FailureScenario) -> Iterator[Tried]:
    almost_always = standby(scenario.all_hosts, away_ratio(scenario), 0.99)
    numbers = {"this many": scenario.pool.spares, "none": 0, "enough for 99 %": almost_always}
    try:
        best = best_spares(scenario)
    except UserError:  # no number is enough
        best = scenario.pool.spares
    else:
        numbers |= {"half of the best": best // 2, "best": best, "twice the best": 2 * best}
    seen = set()
    for why, number in numbers.items():
        if number not in seen or why == "best":
            form = closed_form(with_spares(scenario, number))
            yield Tried(why, number, form.ettr, form.ettr * scenario.work.hosts / (scenario.work.hosts + number))
            seen.add(number)


VERSION = 1  # grows when a key goes or changes its meaning; new keys leave it as it is


def months_json(report: FailureReport) -> dict[str, Any]:
    """Everything that is known of a scenario. `shares` sum to 1."""
    outcome, scenario, form = report.outcome, report.scenario, report.form
    classes = [{**asdict(each), "repair_mean_s": each.repair.mean_s} for each in scenario.failures.classes]
    for each in classes:
        del each["repair"]
    plain = {
        "version": VERSION,
        "runs": len(outcome.samples.wall_s),
        "seed": outcome.seed,
        "failures_source": report.source,
        "failures_are_recorded": report.is_recorded,
        "work": asdict(scenario.work),
        "recovery": asdict(scenario.recovery),
        "checkpoints": asdict(scenario.checkpoints),
        "pool": asdict(scenario.pool),
        "failure_classes": classes,
        "ettr_ratio": asdict(outcome.ettr),
        "goodput_ratio": asdict(outcome.goodput),
        "days": asdict(outcome.days),
        "steps": asdict(outcome.steps),
        "device_hours": asdict(outcome.device_hours),
        "cost": asdict(outcome.cost),
        "finished_ratio": outcome.finished,
        "shares_ratio": {name: asdict(share) for name, share in outcome.shares.items()},
        "counts": {name: asdict(count) for name, count in outcome.counts.items()},
        "most_hosts_away": asdict(outcome.most_out),
        "formulas": {
            "ettr_ratio": form.ettr,
            "meta_ettr_ratio": form.meta_ettr,
            "mtbf_s": form.mtbf_s,
            "young_s": form.young_s,
            "daly_s": form.daly_s,
            "enough_hosts_ratio": form.enough_hosts,
            "hosts_away": form.away_hosts,
        },
        "intervals": [_tried(tried, "interval_s") for tried in report.intervals],
        "spares": [_tried(tried, "spares") for tried in report.spares],
    }
    cleaned: dict[str, Any] = finite(plain)
    return cleaned


def _tried(tried: Tried, key: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"why": tried.why, key: tried.value}
    plain |= {"ettr_ratio": tried.ettr, "goodput_ratio": tried.goodput}
    if tried.played is not None:
        gain: Estimate = tried.played.gain
        plain |= {"played_ettr_ratio": asdict(tried.played.outcome.ettr), "gain_ratio": asdict(gain)}
    return plain


FormatNumber: TypeAlias = Callable[[float], str]

_BAR = 24
_FIGURE_POINTS = 60


def months_text(report: FailureReport) -> RenderableType:
    """All of a report."""
    first, *rest = head_lines(report)
    lines, listed = Table.grid(padding=(0, 1, 0, 0)), Table.grid(padding=(0, 1, 0, 0))
    for line in rest:
        name, _, words = line.partition(" ")
        lines.add_row(name, words)
    for line in notes(report):
        listed.add_row("-", line)
    pieces: list[RenderableType] = [Text(first, style="bold"), lines, "", title("what comes of it"), _results(report)]
    pieces += ["", title("where the time goes"), _parts(report.outcome)]
    pieces += ["", title("what happens in a run"), _counts(report.outcome)]
    pieces += ["", title("interval between durable checkpoints"), _choices(report.intervals, _interval_text)]
    pieces += ["", title("spares"), _choices(report.spares, lambda value: f"{value:.0f}")]
    return Group(*pieces, "", listed)


def percent(ratio: float, digits: int = 2) -> str:
    """``0.1234`` as ``12.34 %``."""
    return f"{100 * ratio + 0.0:.{digits}f} %"


def head_lines(report: FailureReport) -> list[str]:
    """What is played, in three lines."""
    scenario = report.scenario
    work, pool, form = scenario.work, scenario.pool, report.form
    beside = "".join([f", {pool.spares:,} spare" if pool.spares else "", f", {pool.cold:,} cold" if pool.cold else ""])
    goal = f"{work.steps:,} steps of {work.step_s:g} s" if work.steps else f"{work.days:g} days"
    often = "nothing stops it" if math.isinf(form.mtbf_s) else f"stopped once in {units.duration(form.mtbf_s)}"
    runs = len(report.outcome.samples.wall_s)
    saved, recovery = scenario.checkpoints, scenario.recovery
    memory = f", in memory every {units.duration(saved.memory_interval_s)}" if saved.memory_interval_s else ""
    return [
        f"{work.hosts * work.devices_per_host:,} devices on {work.hosts:,} hosts{beside}: {goal}, {runs:,} runs, "
        f"seed {report.outcome.seed}",
        f"failures: {report.source}; {often}",
        f"checkpoints: every {units.duration(saved.interval_s)} (stall {units.duration(saved.stall_s)}){memory}; "
        f"a failure is noticed in {units.duration(recovery.detection_s)}, a restart takes "
        f"{units.duration(recovery.restart_s + recovery.load_s)}",
    ]


def notes(report: FailureReport) -> Iterator[str]:
    """Limits that a reader should know of."""
    outcome, work = report.outcome, report.scenario.work
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


def _results(report: FailureReport) -> Table:
    outcome, work = report.outcome, report.scenario.work
    table = make_columns(("", "left"), ("mean", "right"), ("± 95 %", "right"), ("95 % of the runs", "left"))
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


def _parts(outcome: RunsOutcome) -> Table:
    names = (("", "left"), ("share", "right"), ("hours", "right"), ("95 % of the runs", "right"), ("", "left"))
    table = make_columns(*names)
    wall_h = float(outcome.samples.wall_s.mean()) / HOUR_S
    for name, share in outcome.shares.items():
        if share.most > 1e-9 or name == "training":
            spread = f"{percent(share.least)} … {percent(share.most)}"
            table.add_row(name, percent(share.mean), f"{share.mean * wall_h:,.1f}", spread, bar(share.mean, _BAR))
    table.add_row("all", percent(1.0), f"{wall_h:,.1f}", "", "", style="bold")
    return table


def _counts(outcome: RunsOutcome) -> Table:
    table = make_columns(("", "left"), ("mean", "right"), ("95 % of the runs", "left"))
    for name, count in {**outcome.counts, "hosts away at once, at most": outcome.most_out}.items():
        if count.most > 0:
            table.add_row(name, f"{count.mean:,.1f}", f"{count.least:,.0f} … {count.most:,.0f}")
    return table


def _interval_text(seconds: float) -> str:
    return units.duration(seconds) if seconds < 30 * DAY_S else f"{seconds / DAY_S:.0f}d"


def _choices(tried: tuple[Tried, ...], shown: FormatNumber) -> Table:
    is_played = any(one.played for one in tried)
    columns = [("", "left"), ("", "right"), ("effective", "right"), ("goodput", "right")]
    table = make_columns(*columns, *([("played", "right"), ("gain, same failures", "right")] if is_played else []))
    for one in tried:
        cells = [one.why, shown(one.value), percent(one.ettr), percent(one.goodput)]
        if one.played:
            gain, ettr = one.played.gain, one.played.outcome.ettr.mean
            cells += [percent(ettr), f"{100 * gain.mean:+.2f} ± {100 * (gain.high - gain.mean):.2f}"]
        table.add_row(*cells)
    return table


def months_sections(report: FailureReport) -> list[Block]:
    """A report as blocks of a page; `months_figures` has the figures that belong into it."""
    outcome, (first, *rest) = report.outcome, head_lines(report)
    cards = [
        (percent(outcome.ettr.mean, 1), "of the time trains (ETTR)"),
        (percent(outcome.goodput.mean, 1), "of all that is paid"),
        (percent(report.form.ettr, 1), "ETTR by formula"),
    ]
    if report.scenario.work.steps:
        days = outcome.days.median
        cards.append(("never" if math.isinf(days) else f"{days:,.1f}", "days to finish, median"))
    if report.scenario.work.price_per_device_hour:
        cards.append((f"{outcome.cost.mean:,.0f}", "cost"))
    return [
        Heading(first, 1),
        *map(soft, rest),
        Cards(cards),
        Heading("Where the time goes"),
        FigurePlace("parts"),
        _estimates(outcome.shares, "part", lambda value: percent(value)),
        Heading("Runs"),
        FigurePlace("runs"),
        *([FigurePlace("days")] if report.scenario.work.steps else []),
        _estimates(outcome.counts, "in a run", lambda value: f"{value:,.1f}"),
        Heading("Interval between checkpoints"),
        FigurePlace("intervals"),
        _choice_table(report.intervals, "seconds"),
        Heading("Spares"),
        FigurePlace("spares"),
        _choice_table(report.spares, "hosts"),
        Heading("Notes"),
        Bullets(tuple(notes(report))),
    ]


def months_figures(report: FailureReport) -> dict[str, Figure]:
    """The figures of a report, by the id of their place."""
    outcome, scenario = report.outcome, report.scenario
    shares = [
        {"part": name, "share": share.mean, "least": share.least, "most": share.most}
        for name, share in outcome.shares.items()
    ]
    ettr = (100 * outcome.samples.ettr).tolist()
    # Around all that were tried, as far as they can be.
    values, checkpoints = [tried.value for tried in report.intervals], scenario.checkpoints
    low = max(min(values) / 4, checkpoints.persist_s, checkpoints.memory_interval_s, 1e-3)
    high = max(max(values) * 4, low)
    intervals = [low * (high / low) ** (k / _FIGURE_POINTS) for k in range(_FIGURE_POINTS + 1)]
    most = max(8, *(tried.value for tried in report.spares))
    spares = sorted({round(k * most / _FIGURE_POINTS) for k in range(_FIGURE_POINTS + 1)})
    figures = {
        "parts": time_shares(shares),
        "runs": run_histogram(ettr, "Effective time of the runs", "per cent of the time", 100 * report.form.ettr),
        "intervals": choice_lines(
            list(_formula_rows(scenario, intervals, with_interval)),
            list(_played(report.intervals)),
            "How often to save",
            "seconds of training between durable checkpoints",
            is_log=True,
        ),
        "spares": choice_lines(
            list(_formula_rows(scenario, list(map(float, spares)), lambda one, value: with_spares(one, int(value)))),
            list(_played(report.spares)),
            "How many hosts to keep ready",
            "spares",
        ),
    }
    finished = outcome.samples.wall_s[outcome.samples.finished] / DAY_S
    if scenario.work.steps:
        figures["days"] = run_histogram(finished.tolist(), "When the work is done", "days")
    return figures


def _formula_rows(
    scenario: FailureScenario, values: Sequence[float], changed: Callable[[FailureScenario, float], FailureScenario]
) -> Iterator[dict[str, float]]:
    for value in values:
        other = changed(scenario, value)
        form = closed_form(other)
        paid = other.work.hosts + other.pool.spares
        yield {"value": value, "ettr": form.ettr, "goodput": form.ettr * other.work.hosts / paid}


def _played(choices: Sequence[Tried]) -> Iterator[dict[str, float]]:
    for tried in choices:
        if tried.played is not None:
            ettr = tried.played.outcome.ettr
            yield {"value": tried.value, "ettr": ettr.mean, "low": ettr.low, "high": ettr.high}


def _estimates(estimates: Mapping[str, Estimate], name: str, shown: Callable[[float], str]) -> PageTable:
    rows = [
        [Cell(what), *numbers((shown(one.mean), shown(one.least), shown(one.most)))]
        for what, one in estimates.items()
        if one.most > 1e-9
    ]
    return PageTable([Cell(name), *numbers(("mean", "2.5 %", "97.5 %"))], rows)


def _choice_table(choices: Sequence[Tried], unit: str) -> PageTable:
    rows = [
        [Cell(tried.why), *numbers((f"{tried.value:,.0f}", percent(tried.ettr), percent(tried.goodput)))]
        for tried in choices
    ]
    return PageTable([Cell("by formula"), *numbers((unit, "effective", "goodput"))], rows)
