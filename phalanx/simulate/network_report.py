"""A report of the network for a person at a terminal. Nothing in it needs colour to be understood."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.figures.pages.page_blocks import Block, Cell, FigurePlace, Heading, PageTable, numbers, soft
from phalanx.figures.simulate import lost_bars, queue_lines
from phalanx.figures.style import Figure
from phalanx.plan.report.report_text import bar
from phalanx.simulate.fabric import Fabric
from phalanx.simulate.network_simulation import CAUSES, NetworkReport, PhaseOutcome, ScenarioOutcome

_BAR = 10
_LEAST_FULL = 0.01  # A bar is full from so much on: where nothing matters, nothing looks as if it did
_NARROW = 100
_WIDE = 130
_PHASE = ("ideal s", "now s", "exposed s", "asked of fullest link", "queue µs", "paused", "of fair rate")


def report_text(report: NetworkReport, *, width: int = 100) -> RenderableType:
    """All of a report: the fabric, each scenario with what it costs and why, the phases of the first, collisions."""
    pieces: list[RenderableType] = [*_head(report), "", _scenarios(report, width), ""]
    pieces += [_phases(report.outcomes[0])]
    if (conflicts := report.conflicts) is not None:
        low, lowest, mean = (f"{100 * conflicts.shares[name]:.1f} %" for name in ("p1", "lowest", "mean"))
        full = (
            f"a full ToR: {conflicts.flows} connections choose among {conflicts.links} uplinks; each gets "
            f"{100 * conflicts.expected_share:.1f} % of its rate on average, {100 * conflicts.free_probability:.1f} % "
            f"get all, the fullest uplink has {conflicts.expected_fullest:.1f} of them"
        )
        alone = f"flows of {conflicts.phase}, if they did not wait for each other"
        fair = f"{alone}: {mean} of a NIC's rate, {low} at the 1st percentile, {lowest} the slowest (max-min fair)"
        pieces += ["", Text("collisions of hashes", style="bold"), Text(full), Text(fair)]
    draws = f"{report.draws} draw{'s' * (report.draws > 1)} of hashes and places"
    foot = f"{draws}; a step waits for its slowest message; computed in {report.wall_s:.1f} s"
    return Group(*pieces, "", *(Text(note, style="dim") for note in (*report.notes, foot)))


def fabric_line(fabric: Fabric) -> str:
    """``24 ToR groups of 64 hosts in 6 pods, 3 layers of 64-port switches, rail-optimised, uplinks 2.0 x a NIC``."""
    rails = "rail-optimised" if fabric.rail_optimised else "one ToR for all NICs of a host"
    ratios = f"{fabric.tor_oversubscription:g}:1 at ToRs"
    if fabric.layers == 3:
        ratios += f", {fabric.aggregation_oversubscription:g}:1 above"
    speed = fabric.uplink_bytes_per_s / fabric.nic_bytes_per_s
    groups = f"{_many(fabric.groups, 'ToR group')} of {fabric.hosts_per_group} hosts in {_many(fabric.pods, 'pod')}"
    switches = f"{fabric.layers} layers of {fabric.radix}-port switches"
    return f"{groups}, {switches}, {rails}, {ratios}, uplinks {speed:.3g} x a NIC"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _head(report: NetworkReport) -> Iterator[RenderableType]:
    fabric = report.outcomes[0].scenario.fabric
    hosts = report.devices // report.devices_per_host
    of_all = f" of {fabric.hosts:,}" if fabric.hosts > hosts else ""
    yield Text(f"{report.devices:,} devices on {hosts:,}{of_all} hosts (cluster {report.cluster})", style="bold")
    lines = Table.grid(padding=(0, 1, 0, 0))  # what does not fit goes on below its own beginning
    lines.add_row("fabric:", fabric_line(fabric))
    lines.add_row("traffic:", f"{report.traffic_source}, a step of {report.ideal_step_s:.3f} s on an ideal network")
    yield lines


def _scenarios(report: NetworkReport, width: int) -> Table:
    """What is asked, how long a step takes, what of it is lost, and why."""
    table = Table(title="what if", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("scenario", no_wrap=width >= _NARROW)
    table.add_column("step s", justify="right", no_wrap=True)
    table.add_column("longer", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    if width >= _WIDE:
        table.add_column("9 of 10 jobs", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    table.add_row("an ideal network", f"{report.ideal_step_s:.3f}", style="dim")
    # A link that is down costs so much more than all else that bars of the rest would vanish beside it.
    longest = max((_longer(report, one) for one in report.outcomes if not one.scenario.flap_s), default=0.0)
    most = max(longest, _LEAST_FULL)
    for place, outcome in enumerate(report.outcomes):
        *cells, spread, why = _cells(report, outcome, most)
        middle = [spread] if width >= _WIDE else []
        table.add_row(*cells, *middle, why, style="bold" if place == 0 else "")
    return table


def _cells(report: NetworkReport, outcome: ScenarioOutcome, most: float) -> tuple[str | Text, ...]:
    name = Text(outcome.scenario.name)
    if outcome.ends_job:
        return name, "never", "ends", Text("█" * _BAR, style="red"), "", outcome.why
    longer = _longer(report, outcome)
    spread = "" if outcome.high_s - outcome.low_s < 1e-3 else f"{outcome.low_s:.3f} to {outcome.high_s:.3f}"
    style = "red" if longer > 0.1 else "yellow" if longer > 0.01 else "green"
    drawn = Text(bar(longer / most, _BAR), style=style)
    return name, f"{outcome.step_s:.3f}", f"{100 * longer:+.2f} %", drawn, spread, outcome.why


def _longer(report: NetworkReport, outcome: ScenarioOutcome) -> float:
    return round(outcome.step_s / report.ideal_step_s - 1, 9) + 0.0


def _phases(outcome: ScenarioOutcome) -> Table:
    table = Table(
        title=f"phases of: {outcome.scenario.name}", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("phase", no_wrap=True)
    for head in _PHASE:
        # Neither a word nor a number is folded.
        least = max(len("100.0 %") * (head in ("paused", "of fair rate")), *map(len, head.split()))
        table.add_column(head, justify="right", min_width=least, overflow="fold")
    table.add_column("fullest link", overflow="fold")
    for phase in outcome.phases:
        table.add_row(phase.name, *_phase_numbers(phase, "x"), phase.hottest)
    causes = ", ".join(f"{cause} {1e3 * outcome.lost_s[cause]:+.1f} ms" for cause in CAUSES if outcome.lost_s[cause])
    table.caption = f"lost by cause: {causes}" if causes else "nothing is lost"
    table.caption_justify = "left"
    return table


def network_sections(report: NetworkReport) -> list[Block]:
    """A report as blocks of a page; `network_figures` has the figures that belong into it."""
    first = report.outcomes[0].scenario
    hosts = report.devices // report.devices_per_host
    blocks: list[Block] = [
        Heading(f"{report.devices:,} devices on {hosts:,} hosts, cluster {report.cluster}", 1),
        soft(fabric_line(first.fabric)),
        soft(f"traffic: {report.traffic_source}, a step of {report.ideal_step_s:.3f} s on an ideal network"),
        Heading("What if"),
        FigurePlace("lost"),
    ]
    if any(outcome.scenario.flap_s for outcome in report.outcomes):
        blocks.append(FigurePlace("down"))
    heads = [Cell("phase"), *numbers(_PHASE), Cell("fullest link")]
    rows = [
        [Cell(one.name, "first"), *numbers(_phase_numbers(one, "×")), Cell(one.hottest)]
        for one in report.outcomes[0].phases
    ]
    blocks += [_scenario_table(report), Heading(f"Phases of: {first.name}"), PageTable(heads, rows, stacked=True)]
    if report.queues:
        blocks += [Heading("Congestion control"), FigurePlace("queues")]
    return [*blocks, *map(soft, report.notes)]


def _scenario_table(report: NetworkReport) -> PageTable:
    rows = []
    for outcome in report.outcomes:
        longer = 100 * (outcome.step_s / report.ideal_step_s - 1)
        step = ("never", "ends") if outcome.ends_job else (f"{outcome.step_s:.3f}", f"{longer:+.2f} %")
        lost = [1e3 * outcome.lost_s[cause] for cause in CAUSES]
        texts = [*step, *(f"{milliseconds:,.1f}" if milliseconds else "" for milliseconds in lost)]
        rows.append([Cell(outcome.scenario.name, "first"), *numbers(texts), Cell(outcome.why, "source")])
    columns = ("step s", "longer", *(f"{cause} ms" for cause in CAUSES))
    return PageTable([Cell("scenario"), *numbers(columns), Cell("why")], rows, stacked=True)


def network_figures(report: NetworkReport) -> dict[str, Figure]:
    """The figures of `network_sections`."""
    # Seconds of a link that is down would leave nothing to be seen of milliseconds beside them.
    whole = [_lost_row(outcome) for outcome in report.outcomes if not outcome.scenario.flap_s]
    down = [_lost_row(outcome) for outcome in report.outcomes if outcome.scenario.flap_s]
    figures = {name: lost_bars(rows, report.ideal_step_s) for name, rows in (("lost", whole), ("down", down)) if rows}
    if report.queues:
        curves = [{"control": one.control, "time_s": one.time_s, "queue_s": one.queue_s} for one in report.queues]
        figures["queues"] = queue_lines(curves, report.queues[0].connections)
    return figures


def _lost_row(outcome: ScenarioOutcome) -> dict[str, object]:
    lost: dict[str, object] = dict(outcome.lost_s)
    if outcome.ends_job:
        lost["flap"] = None
    return {"scenario": outcome.scenario.name, "why": outcome.why, **lost}


def _phase_numbers(phase: PhaseOutcome, times: str) -> tuple[str, ...]:
    return (
        f"{phase.ideal_s:.3f}",
        f"{phase.now_s:.3f}",
        f"{phase.exposed_s:.4f}",
        f"{phase.overload:.2f} {times}",
        f"{1e6 * phase.queue_s:.0f}",
        f"{100 * phase.paused_ratio:.1f} %",
        f"{100 * phase.efficiency:.1f} %",
    )
