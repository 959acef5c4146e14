"""What waiting for slow hosts costs over time: those that nobody finds, and those that are found and replaced.

How long a step waits for its slowest rank is in `phalanx.plan.overheads`: ranks that differ for good, passes that
differ each time, and a share of hosts that are slow. Where hosts get slow at a rate and are replaced when they are
found, that share is rate times the time until then; each replacement is a restart of the whole job.

MegaScale (arXiv 2402.15627, section 5) found about 0.5 % of hosts to be some 10 % slower; without them MFU was 0.7
points higher (1.3 %). Where all hosts wait for each other, one slow host among them makes every step 10 % longer: that
is what 1,536 hosts would lose; of jobs on 32 hosts one in seven has a slow one, and they lose 1.2 % on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.figures.pages.page_blocks import Block, Cell, FigurePlace, Heading, PageTable, numbers, soft
from phalanx.figures.simulate import straggler_lines
from phalanx.figures.style import Figure
from phalanx.parallel.config import Schedule
from phalanx.plan.overheads import Spread, Waiting, waiting
from phalanx.plan.report.report_text import make_columns, title
from phalanx.simulate.failure_model import DAY_S, require


@dataclass(frozen=True)
class StragglerScenario:
    """A job whose hosts are not alike."""

    spread: Spread
    devices: int  # of the job; pipelines of `pipeline` x `tensor` devices side by side, each with `micro_batches`
    devices_per_host: int = 8
    tensor: int = 8
    pipeline: int = 1
    chunks: int = 1
    schedule: Schedule = "1f1b"
    micro_batches: int = 1
    compute_s: float = 1.0  # of one rank in a step, without waiting
    slow_per_host_day: float = 0.0  # how often a host gets slow
    find_s: float = 0.0  # until it is found and replaced
    restart_s: float = 0.0  # for which the job stands still for that

    def __post_init__(self) -> None:
        for name in ("pass_sigma", "lasting_sigma"):
            require(name, getattr(self.spread, name), 0, 1)
        require("slow_share", self.spread.slow_share, 0, 1)
        require("slow_excess", self.spread.slow_excess, 0, 1000)
        for name in ("devices", "devices_per_host", "tensor", "pipeline", "micro_batches"):
            require(name, getattr(self, name), 1, 10_000_000)
        require("chunks", self.chunks, 1, 1_000)
        require("compute_s", self.compute_s, 1e-6, 1e9)
        require("slow_per_host_day", self.slow_per_host_day, 0, 1e6)
        require("find_s", self.find_s)
        require("restart_s", self.restart_s)
        if self.devices % self.block:
            cure = f"give a multiple of {self.block} (pipeline x tensor)"
            raise UserError("they fill no whole number of pipelines", cure=cure, field="devices", value=self.devices)
        only = {"1f1b": 1, "zbv": 2}.get(self.schedule, self.chunks)
        if self.chunks != only:
            cure = f"give {only}, or another schedule, such as interleaved_1f1b"
            raise UserError(f"{self.schedule} has {only} on each rank", cure=cure, field="chunks", value=self.chunks)
        if self.micro_batches < self.pipeline:
            cure = f"give {self.pipeline} at least, one for each pipeline rank"
            raise UserError("some ranks never compute", cure=cure, field="micro_batches", value=self.micro_batches)

    @property
    def block(self) -> int:
        """Devices of one pipeline."""
        return self.pipeline * self.tensor

    @property
    def share_found(self) -> float:
        """Hosts that are slow at any time, of all, where they are found and replaced."""
        slow = self.slow_per_host_day * self.find_s / DAY_S
        return slow / (1 + slow)


@dataclass(frozen=True)
class Waits:
    """By how much longer a step is on so many devices, ratios of `compute_s`."""

    devices: int
    hosts: int
    alike: float  # because ranks and passes differ, without slow hosts
    unfound: float  # with as many slow hosts as there are where nobody looks for them
    unfound_run_sigma: float  # standard deviation of that from one choice of hosts to another
    unfound_step_sigma: float  # and from step to step on the same hosts
    found: float  # where they are found and replaced
    restarts: float  # time of the restarts for that, over all time

    @property
    def gained(self) -> float:
        """Time that finding them saves, of all time, ratio."""
        return 1 - (1 + self.found) / (1 + self.unfound) / (1 - self.restarts)


def waits_by_size(question: StragglerScenario) -> tuple[Waits, ...]:
    """One pipeline, four, sixteen … side by side, and all of the job last; micro-batches of each as many."""
    most = question.devices // question.block
    groups = [*(4**k for k in range(14) if 4**k < most), most]
    return tuple(_waits(question, number) for number in groups)


def _waits(question: StragglerScenario, groups: int) -> Waits:
    devices = groups * question.block
    job = (question.schedule, question.pipeline, question.chunks, question.micro_batches, groups, devices)
    per_host = min(question.devices_per_host, devices)

    def waits(spread: Spread) -> Waiting:
        return waiting(spread, *job, per_host, question.compute_s)

    hosts = -(-devices // question.devices_per_host)
    spread = question.spread
    stopped = hosts * question.slow_per_host_day * question.restart_s / DAY_S
    # The share of slow hosts that steps see: fewer steps are made while one is slow.
    some = 1 - (1 - question.share_found) ** hosts
    slowed = some / (1 + question.spread.slow_excess)
    of_steps = slowed / (slowed + 1 - some)
    found = replace(spread, slow_share=(float(-math.expm1(math.log1p(-of_steps) / hosts)) if of_steps < 1 else 1.0))
    unfound = waits(spread)
    return Waits(
        devices=devices,
        hosts=hosts,
        alike=float(waits(spread.screened()).mean_s) / question.compute_s,
        unfound=float(unfound.mean_s) / question.compute_s,
        unfound_run_sigma=float(unfound.run_sigma_s) / question.compute_s,
        unfound_step_sigma=float(unfound.step_sigma_s) / question.compute_s,
        found=float(waits(found).mean_s) / question.compute_s,
        restarts=stopped / (1 + stopped),
    )


VERSION = 1  # grows when a key goes or changes its meaning; new keys leave it as it is


def title_of(question: StragglerScenario) -> str:
    """What is asked."""
    hosts = -(-question.devices // question.devices_per_host)
    many = f"{question.micro_batches} micro-batch{'es' * (question.micro_batches > 1)}"
    return (
        f"{question.devices:,} devices on {hosts:,} hosts: pipeline {question.pipeline} x tensor {question.tensor}, "
        f"{many} ({question.schedule}), {question.compute_s:g} s of computing in a step"
    )


def stragglers_json(question: StragglerScenario, rows: Sequence[Waits]) -> dict[str, Any]:
    """Plain values, with units in their names."""
    plain = asdict(question)
    return {"version": VERSION, **plain, "share_found_ratio": question.share_found, "by_size": rows_of(rows)}


def rows_of(rows: Sequence[Waits]) -> list[dict[str, float]]:
    """Rows as a table."""
    return [
        {
            "devices": row.devices,
            "hosts": row.hosts,
            "alike_ratio": row.alike,
            "unfound_ratio": row.unfound,
            "unfound_run_sigma_ratio": row.unfound_run_sigma,
            "unfound_step_sigma_ratio": row.unfound_step_sigma,
            "found_ratio": row.found,
            "restarts_ratio": row.restarts,
            "gained_ratio": row.gained,
        }
        for row in rows
    ]


def _gain_line(gained: float) -> str:
    if gained < 0:
        return f"finding them costs {-100 * gained:.2f} % more time, as restarts take longer than slow hosts do"
    return f"{100 * gained:.2f} % of the time is gained"


def lines_of(question: StragglerScenario, rows: Sequence[Waits]) -> list[str]:
    """What is assumed, and what comes of it."""
    spread, own = question.spread, rows[-1]
    step_s = question.compute_s
    return [
        f"ranks differ by {100 * spread.lasting_sigma:g} % for good, passes of one by {100 * spread.pass_sigma:g} % "
        "(standard deviations)",
        f"slow hosts: {100 * spread.slow_share:g} % of them by {100 * spread.slow_excess:g} %; found in "
        f"{units.duration(question.find_s)} there are {100 * question.share_found:.2g} %",
        f"{step_s:g} s of computing take {step_s * (1 + own.alike):.4g} s without slow hosts, "
        f"{step_s * (1 + own.unfound):.4g} s with them, {step_s * (1 + own.found):.4g} s where they are found: "
        + _gain_line(own.gained),
        f"where nobody finds them, runs on other hosts differ by {100 * own.unfound_run_sigma:.2f} %, steps of one by "
        f"{100 * own.unfound_step_sigma:.2f} % (standard deviations)",
    ]


def stragglers_text(question: StragglerScenario, rows: Sequence[Waits]) -> RenderableType:
    """For a person at a terminal."""
    *assumed, result, differs = lines_of(question, rows)
    note = (
        "- all ranks wait for the slowest; MegaScale gained 0.7 points of MFU by leaving out 0.5 % of hosts that were "
        "10 % slower"
    )
    table = make_columns(("devices", "right"), *((name, "right") for name in _COLUMNS))
    for row in rows:
        table.add_row(f"{row.devices:,}", *_cells(row), style="bold" if row is rows[-1] else "")
    head = [Text(title_of(question), style="bold"), *map(Text, assumed)]
    heading = title("how much longer a step is")
    return Group(*head, Text(), heading, table, Text(), Text(result), Text(differs), Text(note))


_COLUMNS = ("hosts", "no slow ones", "never found", "± by run", "found", "restarts", "gained")


def _cells(row: Waits) -> list[str]:
    ratios = (row.alike, row.unfound, row.unfound_run_sigma, row.found, row.restarts, row.gained)
    return [f"{row.hosts:,}", *(f"{100 * ratio + 0.0:.2f} %" for ratio in ratios)]


def stragglers_sections(question: StragglerScenario, rows: Sequence[Waits]) -> list[Block]:
    """What waiting costs, as blocks of a page; `stragglers_figures` has the figure that belongs into it."""
    lines = map(soft, lines_of(question, rows))
    cells = [[Cell(f"{row.devices:,} devices", "n first"), *numbers(_cells(row))] for row in rows]
    table = PageTable(numbers(("", *_COLUMNS)), cells, stacked=True)
    return [Heading(title_of(question), 1), *lines, FigurePlace("stragglers"), table]


def stragglers_figures(rows: Sequence[Waits]) -> dict[str, Figure]:
    """The figure of what waiting costs, by the name of its place."""
    return {"stragglers": straggler_lines(rows_of(rows))}
