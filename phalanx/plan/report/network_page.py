"""What the network does to a step, in HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from phalanx.figures.simulate import lost_bars, queue_lines
from phalanx.figures.style import Figure
from phalanx.plan.network.outcome import CAUSES, Outcome, PhaseOutcome, Report
from phalanx.plan.network.text import fabric_line
from phalanx.plan.report.page import place, table


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
