"""Months as sections of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from phalanx.figures.simulate import choice_lines, run_histogram, straggler_lines, time_shares
from phalanx.figures.style import Figure
from phalanx.plan.months.best import with_interval, with_spares
from phalanx.plan.months.closed import closed_form
from phalanx.plan.months.outcome import Estimate
from phalanx.plan.months.report import MonthsReport, Tried
from phalanx.plan.months.stragglers import Question, Waits
from phalanx.plan.months.stragglers_report import lines_of, rows_of, title_of
from phalanx.plan.months.text import head_lines, notes, percent
from phalanx.plan.months.values import DAY_S, Story
from phalanx.plan.report.page import place, table

_POINTS = 60


def months_sections(report: MonthsReport) -> list[str]:
    """A report in HTML; `months_figures` has the figures that belong into it."""
    outcome, (first, *rest) = report.outcome, head_lines(report)
    cards = [
        (percent(outcome.ettr.mean, 1), "of the time trains (ETTR)"),
        (percent(outcome.goodput.mean, 1), "of all that is paid"),
        (percent(report.form.ettr, 1), "ETTR by formula"),
    ]
    if report.story.work.steps:
        cards.append((_number(outcome.days.median), "days to finish, median"))
    if report.story.work.price_per_device_hour:
        cards.append((f"{outcome.cost.mean:,.0f}", "cost"))
    cells = [f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in cards]
    sections = [f"<h1>{escape(first)}</h1>", *(f'<p class="soft">{escape(line)}</p>' for line in rest)]
    sections += [f'<div class="cards">{"".join(cells)}</div>', "<h2>Where the time goes</h2>", place("parts")]
    sections += [_estimates(outcome.shares, "part", lambda value: percent(value)), "<h2>Runs</h2>", place("runs")]
    sections += [place("days")] if report.story.work.steps else []
    sections.append(_estimates(outcome.counts, "in a run", lambda value: f"{value:,.1f}"))
    sections += ["<h2>Interval between checkpoints</h2>", place("intervals"), _choices(report.intervals, "seconds")]
    sections += ["<h2>Spares</h2>", place("spares"), _choices(report.spares, "hosts")]
    return [*sections, "<h2>Notes</h2>", "<ul>", *(f"<li>{escape(note)}</li>" for note in notes(report)), "</ul>"]


def months_figures(report: MonthsReport) -> dict[str, Figure]:
    """The figures of a report, by the id of their place."""
    outcome, story = report.outcome, report.story
    shares = [
        {"part": name, "share": share.mean, "least": share.least, "most": share.most}
        for name, share in outcome.shares.items()
    ]
    ettr = (100 * outcome.samples.ettr).tolist()
    figures = {
        "parts": time_shares(shares),
        "runs": run_histogram(ettr, "Effective time of the runs", "per cent of the time", 100 * report.form.ettr),
        "intervals": choice_lines(
            list(_rows(story, _interval_values(report), with_interval)),
            list(_played(report.intervals)),
            "How often to save",
            "seconds of training between durable checkpoints",
            is_log=True,
        ),
        "spares": choice_lines(
            list(_rows(story, _spare_values(report), lambda one, value: with_spares(one, int(value)))),
            list(_played(report.spares)),
            "How many hosts to keep ready",
            "spares",
        ),
    }
    finished = outcome.samples.wall_s[outcome.samples.finished] / DAY_S
    if story.work.steps:
        figures["days"] = run_histogram(finished.tolist(), "When the work is done", "days")
    return figures


def _interval_values(report: MonthsReport) -> list[float]:
    """Around all that were tried, as far as they can be."""
    values = [tried.value for tried in report.intervals]
    checkpoints = report.story.checkpoints
    low = max(min(values) / 4, checkpoints.persist_s, checkpoints.memory_interval_s, 1e-3)
    high = max(max(values) * 4, low)
    return [low * (high / low) ** (k / _POINTS) for k in range(_POINTS + 1)]


def _spare_values(report: MonthsReport) -> list[float]:
    most = max(tried.value for tried in report.spares)
    return [float(k) for k in sorted({round(k * max(most, 8) / _POINTS) for k in range(_POINTS + 1)})]


def _rows(
    story: Story, values: Sequence[float], changed: Callable[[Story, float], Story]
) -> Iterator[dict[str, float]]:
    for value in values:
        other = changed(story, value)
        form = closed_form(other)
        paid = other.work.hosts + other.pool.spares
        yield {"value": value, "ettr": form.ettr, "goodput": form.ettr * other.work.hosts / paid}


def _played(choices: Sequence[Tried]) -> Iterator[dict[str, float]]:
    for tried in choices:
        if tried.played is not None:
            ettr = tried.played.outcome.ettr
            yield {"value": tried.value, "ettr": ettr.mean, "low": ettr.low, "high": ettr.high}


def _number(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:,.1f}"


def _estimates(estimates: Mapping[str, Estimate], name: str, shown: Callable[[float], str]) -> str:
    rows = [
        f'<tr><td>{escape(what)}</td><td class="n">{shown(one.mean)}</td><td class="n">{shown(one.least)}</td>'
        f'<td class="n">{shown(one.most)}</td></tr>'
        for what, one in estimates.items()
        if one.most > 1e-9
    ]
    return table(f'<th>{name}</th><th class="n">mean</th><th class="n">2.5 %</th><th class="n">97.5 %</th>', rows)


def _choices(choices: Sequence[Tried], unit: str) -> str:
    rows = [
        f'<tr><td>{escape(tried.why)}</td><td class="n">{tried.value:,.0f}</td><td class="n">{percent(tried.ettr)}</td>'
        f'<td class="n">{percent(tried.goodput)}</td></tr>'
        for tried in choices
    ]
    heads = f'<th>by formula</th><th class="n">{unit}</th><th class="n">effective</th><th class="n">goodput</th>'
    return table(heads, rows)


def stragglers_sections(question: Question, rows: Sequence[Waits]) -> list[str]:
    """What waiting costs, in HTML; `stragglers_figures` has the figure that belongs into it."""
    lines = [f'<p class="soft">{escape(line)}</p>' for line in lines_of(question, rows)]
    return [f"<h1>{escape(title_of(question))}</h1>", *lines, place("stragglers"), _waits(rows)]


def _waits(rows: Sequence[Waits]) -> str:
    names = ("hosts", "no slow ones", "never found", "± by run", "found", "restarts", "gained")
    heads = '<th class="n"></th>' + "".join(f'<th class="n">{name}</th>' for name in names)
    lines = []
    for row in rows:
        ratios = (row.alike, row.unfound, row.unfound_run_sigma, row.found, row.restarts, row.gained)
        cells = "".join(f'<td class="n">{text}</td>' for text in (f"{row.hosts:,}", *map(percent, ratios)))
        lines.append(f'<tr><td class="n first">{row.devices:,} devices</td>{cells}</tr>')
    return table(heads, lines, stacked=True)


def stragglers_figures(rows: Sequence[Waits]) -> dict[str, Figure]:
    """The figure of what waiting costs, by the id of its place."""
    return {"stragglers": straggler_lines(rows_of(rows))}
