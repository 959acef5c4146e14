"""What waiting costs, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.core import units
from phalanx.plan.months.stragglers import Question, Waits

VERSION = 1
"""Grows when a key goes or changes its meaning; new keys leave it as it is."""


def title_of(question: Question) -> str:
    """What is asked."""
    hosts = -(-question.devices // question.devices_per_host)
    many = f"{question.micro_batches} micro-batch{'es' * (question.micro_batches > 1)}"
    return (
        f"{question.devices:,} devices on {hosts:,} hosts: pipeline {question.pipeline} x tensor {question.tensor}, "
        f"{many} ({question.schedule}), {question.compute_s:g} s of computing in a step"
    )


def stragglers_json(question: Question, rows: Sequence[Waits]) -> dict[str, Any]:
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


def lines_of(question: Question, rows: Sequence[Waits]) -> list[str]:
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
        f"{100 * own.gained:.2f} % of the time is gained",
        f"where nobody finds them, runs on other hosts differ by {100 * own.unfound_run_sigma:.2f} %, steps of one by "
        f"{100 * own.unfound_step_sigma:.2f} % (standard deviations)",
    ]


def stragglers_text(question: Question, rows: Sequence[Waits]) -> RenderableType:
    """For a person at a terminal."""
    *assumed, result, differs = lines_of(question, rows)
    note = (
        "- all ranks wait for the slowest; MegaScale gained 0.7 points of MFU by leaving out 0.5 % of hosts that were "
        "10 % slower"
    )
    heading = Text("how much longer a step is", style="bold underline")
    head = [Text(title_of(question), style="bold"), *map(Text, assumed)]
    return Group(*head, Text(), heading, _table(rows), Text(), Text(result), Text(differs), Text(note))


def _table(rows: Sequence[Waits]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    names = ("devices", "hosts", "no slow ones", "never found", "± by run", "found", "restarts", "gained")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratios = (row.alike, row.unfound, row.unfound_run_sigma, row.found, row.restarts, row.gained)
        cells = [f"{100 * ratio + 0.0:.2f} %" for ratio in ratios]
        table.add_row(f"{row.devices:,}", f"{row.hosts:,}", *cells, style="bold" if row is rows[-1] else "")
    return table
