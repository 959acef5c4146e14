"""A report of the network for a person at a terminal. Nothing in it needs colour to be understood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.figures.simulate import lost_bars, queue_lines
from phalanx.figures.style import Figure
from phalanx.plan.report.page_blocks import Block, Cell, FigurePlace, Heading, PageTable, numbers, soft
from phalanx.simulate.fabric import Fabric
from phalanx.simulate.network_simulation import CAUSES, Conflicts, Outcome, PhaseOutcome, Report

_BAR = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEAST_FULL = 0.01
"""A bar is full from so much on: where nothing matters, nothing looks as if it did."""
_NARROW = 100
_WIDE = 130


def report_text(report: Report, *, width: int = 100) -> RenderableType:
    """All of a report: the fabric, each scenario with what it costs and why, the phases of the first, collisions."""
    pieces: list[RenderableType] = [*_head(report), "", _scenarios(report, width), ""]
    pieces += [_phases(report.outcomes[0])]
    if report.conflicts is not None:
        pieces += ["", *_conflict_lines(report.conflicts)]
    pieces += ["", *(Text(note, style="dim") for note in (*report.notes, _foot(report)))]
    return Group(*pieces)


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


def _head(report: Report) -> Iterator[RenderableType]:
    fabric = report.outcomes[0].scenario.fabric
    hosts = report.devices // report.devices_per_host
    of_all = f" of {fabric.hosts:,}" if fabric.hosts > hosts else ""
    yield Text(f"{report.devices:,} devices on {hosts:,}{of_all} hosts (cluster {report.cluster})", style="bold")
    lines = Table.grid(padding=(0, 1, 0, 0))  # what does not fit goes on below its own beginning
    lines.add_row("fabric:", fabric_line(fabric))
    lines.add_row("traffic:", f"{report.traffic_source}, a step of {report.ideal_step_s:.3f} s on an ideal network")
    yield lines


def _scenarios(report: Report, width: int) -> Table:
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
        name, step, longer, bar, spread, why = _cells(report, outcome, most)
        middle = [spread] if width >= _WIDE else []
        table.add_row(name, step, longer, bar, *middle, why, style="bold" if place == 0 else "")
    return table


def _cells(report: Report, outcome: Outcome, most: float) -> tuple[str | Text, ...]:
    name = Text(outcome.scenario.name)
    if outcome.ends_job:
        return name, "never", "ends", Text("█" * _BAR, style="red"), "", outcome.why
    longer = _longer(report, outcome)
    spread = "" if outcome.high_s - outcome.low_s < 1e-3 else f"{outcome.low_s:.3f} to {outcome.high_s:.3f}"
    style = "red" if longer > 0.1 else "yellow" if longer > 0.01 else "green"
    bar = Text(_bar(longer / most), style=style)
    return name, f"{outcome.step_s:.3f}", f"{100 * longer:+.2f} %", bar, spread, outcome.why


def _longer(report: Report, outcome: Outcome) -> float:
    return round(outcome.step_s / report.ideal_step_s - 1, 9) + 0.0


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * _BAR * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def _phases(outcome: Outcome) -> Table:
    table = Table(
        title=f"phases of: {outcome.scenario.name}", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    heads = ("ideal s", "now s", "exposed s", "asked of fullest link", "queue µs", "paused", "of fair rate")
    table.add_column("phase", no_wrap=True)
    for head in heads:
        # Neither a word nor a number is folded.
        least = max(len("100.0 %") * (head in ("paused", "of fair rate")), *map(len, head.split()))
        table.add_column(head, justify="right", min_width=least, overflow="fold")
    table.add_column("fullest link", overflow="fold")
    for phase in outcome.phases:
        table.add_row(*_phase_cells(phase))
    causes = ", ".join(f"{cause} {1e3 * outcome.lost_s[cause]:+.1f} ms" for cause in CAUSES if outcome.lost_s[cause])
    table.caption = f"lost by cause: {causes}" if causes else "nothing is lost"
    table.caption_justify = "left"
    return table


def _phase_cells(phase: PhaseOutcome) -> Iterator[str]:
    yield phase.name
    yield f"{phase.ideal_s:.3f}"
    yield f"{phase.now_s:.3f}"
    yield f"{phase.exposed_s:.4f}"
    yield f"{phase.overload:.2f} x"
    yield f"{phase.queue_s * 1e6:.0f}"
    yield f"{100 * phase.paused_ratio:.1f} %"
    yield f"{100 * phase.efficiency:.1f} %"
    yield phase.hottest


def _conflict_lines(conflicts: Conflicts) -> Iterator[Text]:
    yield Text("collisions of hashes", style="bold")
    yield Text(
        f"a full ToR: {conflicts.flows} connections choose among {conflicts.links} uplinks; each gets "
        f"{conflicts.expected_share:.1%} of its rate on average, {conflicts.free_probability:.1%} get all, the fullest "
        f"uplink has {conflicts.expected_fullest:.1f} of them".replace("%", " %")
    )
    low, lowest, mean = (f"{100 * conflicts.shares[name]:.1f} %" for name in ("p1", "lowest", "mean"))
    alone = f"flows of {conflicts.phase}, if they did not wait for each other"
    yield Text(f"{alone}: {mean} of a NIC's rate, {low} at the 1st percentile, {lowest} the slowest (max-min fair)")


def _foot(report: Report) -> str:
    draws = f"{report.draws} draw{'s' * (report.draws > 1)} of hashes and places"
    return f"{draws}; a step waits for its slowest message; computed in {report.wall_s:.1f} s"


def network_sections(report: Report) -> list[Block]:
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
    blocks += [_scenario_table(report), Heading(f"Phases of: {first.name}"), _phase_table(report.outcomes[0].phases)]
    if report.queues:
        blocks += [Heading("Congestion control"), FigurePlace("queues")]
    return [*blocks, *map(soft, report.notes)]


def _scenario_table(report: Report) -> PageTable:
    rows = []
    for outcome in report.outcomes:
        longer = 100 * (outcome.step_s / report.ideal_step_s - 1)
        step = ("never", "ends") if outcome.ends_job else (f"{outcome.step_s:.3f}", f"{longer:+.2f} %")
        lost = [1e3 * outcome.lost_s[cause] for cause in CAUSES]
        texts = [*step, *(f"{milliseconds:,.1f}" if milliseconds else "" for milliseconds in lost)]
        rows.append([Cell(outcome.scenario.name, "first"), *numbers(texts), Cell(outcome.why, "source")])
    columns = ("step s", "longer", *(f"{cause} ms" for cause in CAUSES))
    return PageTable([Cell("scenario"), *numbers(columns), Cell("why")], rows, stacked=True)


def _phase_table(phases: Sequence[PhaseOutcome]) -> PageTable:
    columns = ("ideal s", "now s", "exposed s", "asked of fullest link", "queue µs", "paused", "of fair rate")
    heads = [Cell("phase"), *numbers(columns), Cell("fullest link")]
    rows = [[Cell(one.name, "first"), *numbers(_phase_numbers(one)), Cell(one.hottest)] for one in phases]
    return PageTable(heads, rows, stacked=True)


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


def _phase_numbers(phase: PhaseOutcome) -> Iterator[str]:
    yield f"{phase.ideal_s:.3f}"
    yield f"{phase.now_s:.3f}"
    yield f"{phase.exposed_s:.4f}"
    yield f"{phase.overload:.2f} ×"
    yield f"{1e6 * phase.queue_s:.0f}"
    yield f"{100 * phase.paused_ratio:.1f} %"
    yield f"{100 * phase.efficiency:.1f} %"
