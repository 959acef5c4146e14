"""Months as sections of a page.

What the network does to a step, in HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from phalanx.figures.months import choice_lines, run_histogram, straggler_lines, time_shares
from phalanx.figures.network import lost_bars, queue_lines
from phalanx.figures.style import Figure
from phalanx.plan.report.page import place, table
from phalanx.simulate.failure_formulas import closed_form
from phalanx.simulate.failure_model import DAY_S, Story
from phalanx.simulate.failure_report import MonthsReport, Tried, head_lines, notes, percent
from phalanx.simulate.failure_simulation import Estimate, with_interval, with_spares
from phalanx.simulate.network_report import fabric_line
from phalanx.simulate.network_simulation import CAUSES, Outcome, PhaseOutcome, Report
from phalanx.simulate.stragglers import Question, Waits, lines_of, rows_of, title_of

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


def network_sections(report: Report) -> list[str]:
    """A report in HTML; `network_figures` has the figures that belong into it."""
    first = report.outcomes[0].scenario
    hosts = report.devices // report.devices_per_host
    title = f"{report.devices:,} devices on {hosts:,} hosts, cluster {report.cluster}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(fabric_line(first.fabric))}</p>',
        f'<p class="soft">traffic: {escape(report.traffic_source)}, a step of {report.ideal_step_s:.3f} s on an ideal '
        "network</p>",
        "<h2>What if</h2>",
        place("lost"),
        *([place("down")] if any(outcome.scenario.flap_s for outcome in report.outcomes) else []),
        _scenarios(report),
        f"<h2>Phases of: {escape(first.name)}</h2>",
        _phases(report.outcomes[0].phases),
    ]
    if report.queues:
        sections += ["<h2>Congestion control</h2>", place("queues")]
    return [*sections, *(f'<p class="soft">{escape(note)}</p>' for note in report.notes)]


def network_figures(report: Report) -> dict[str, Figure]:
    """The figures of `network_sections`."""
    # Seconds of a link that is down would leave nothing to be seen of milliseconds beside them.
    whole = [_lost_row(outcome) for outcome in report.outcomes if not outcome.scenario.flap_s]
    down = [_lost_row(outcome) for outcome in report.outcomes if outcome.scenario.flap_s]
    figures = {name: lost_bars(rows, report.ideal_step_s) for name, rows in (("lost", whole), ("down", down)) if rows}
    if report.queues:
        curves = [{"control": one.control, "time_s": one.time_s, "queue_s": one.queue_s} for one in report.queues]
        figures["queues"] = queue_lines(curves, report.queues[0].connections)
    return figures


def _lost_row(outcome: Outcome) -> dict[str, object]:
    """Seconds of each cause; none of the flap where it ends the job."""
    lost: dict[str, object] = dict(outcome.lost_s)
    if outcome.ends_job:
        lost["flap"] = None
    return {"scenario": outcome.scenario.name, "why": outcome.why, **lost}


def _scenarios(report: Report) -> str:
    heads = '<th>scenario</th><th class="n">step s</th><th class="n">longer</th>'
    heads += "".join(f'<th class="n">{cause} ms</th>' for cause in CAUSES) + "<th>why</th>"
    return table(heads, [_scenario(report, outcome) for outcome in report.outcomes], stacked=True)


def _scenario(report: Report, outcome: Outcome) -> str:
    longer = 100 * (outcome.step_s / report.ideal_step_s - 1)
    step = ("never", "ends") if outcome.ends_job else (f"{outcome.step_s:.3f}", f"{longer:+.2f} %")
    lost = [1e3 * outcome.lost_s[cause] for cause in CAUSES]
    numbers = [*step, *(f"{milliseconds:,.1f}" if milliseconds else "" for milliseconds in lost)]
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    name, why = escape(outcome.scenario.name), escape(outcome.why)
    return f'<tr><td class="first">{name}</td>{cells}<td class="source">{why}</td></tr>'


def _phases(phases: tuple[PhaseOutcome, ...]) -> str:
    names = ("ideal s", "now s", "exposed s", "asked of fullest link", "queue µs", "paused", "of fair rate")
    heads = "<th>phase</th>" + "".join(f'<th class="n">{name}</th>' for name in names) + "<th>fullest link</th>"
    return table(heads, [_phase(phase) for phase in phases], stacked=True)


def _phase(phase: PhaseOutcome) -> str:
    cells = "".join(f'<td class="n">{text}</td>' for text in _numbers(phase))
    return f'<tr><td class="first">{escape(phase.name)}</td>{cells}<td>{escape(phase.hottest)}</td></tr>'


def _numbers(phase: PhaseOutcome) -> Iterator[str]:
    yield f"{phase.ideal_s:.3f}"
    yield f"{phase.now_s:.3f}"
    yield f"{phase.exposed_s:.4f}"
    yield f"{phase.overload:.2f} ×"
    yield f"{1e6 * phase.queue_s:.0f}"
    yield f"{100 * phase.paused_ratio:.1f} %"
    yield f"{100 * phase.efficiency:.1f} %"
