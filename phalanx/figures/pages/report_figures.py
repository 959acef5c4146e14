"""The figures of a report of a run, each from its tables; what cannot be drawn is left out, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pyarrow as pa

from phalanx.core.errors import UserError
from phalanx.figures.curves import columns_of, curves, marks_of
from phalanx.figures.merged_timeline import merged_timeline
from phalanx.figures.norms import layer_norms
from phalanx.figures.rank_heatmap import rank_heatmap
from phalanx.figures.recovery_history import effective_time, recovery_history
from phalanx.figures.step_parts import expected_beside_measured
from phalanx.figures.style import Figure
from phalanx.telemetry.evidence import Evidence
from phalanx.telemetry.layer_norms import QUANTITIES, read_norms
from phalanx.telemetry.loggers import read_json_lines
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.verdict import Verdict

_LANES = 8
_MOST_BARS = 1500
_POINTS = 1000
"""Of a curve: with 2,000 a page of four curves grows by 100 KB, and nobody sees more."""

_EXPECTED = {
    "passes": "passes",
    "waiting": "wait",
    "optimizer": "optimizer",
    "loader": "data",
    "between_steps": "other",
}
"""Parts that training predicts, and what spans call them."""

_ATTEMPTS = """
select attempt, min(end_ns - step_ns) / 1e9 as start_s, max(end_ns) / 1e9 as end_s,
    min(step) as first_step, max(step) as last_step
from all_steps where step_ns > 0 group by attempt order by start_s
"""


class Recoveries(Protocol):
    """What the reports of a driver tell of a job."""

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """As `recovery_history` takes them."""

    @property
    def incidents(self) -> Sequence[Mapping[str, Any]]:
        """The same, with ``number`` and ``result``."""

    @property
    def parts(self) -> Sequence[Mapping[str, Any]]:
        """As `effective_time` takes them."""


@dataclass(frozen=True)
class RunFigures:
    """What was drawn.

    Attributes:
        figures: by name.
        absent: by name, why there is none.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def draw_run(run: Path, evidence: Evidence, verdict: Verdict, told: Recoveries | None = None) -> RunFigures:
    """All figures of a run that its files have the numbers for: ``parts``, ``ranks``, ``timeline``, ``recovery``,
    ``loss``, ``step_s`` and norms by quantity.

    Args:
        told: by the reports of the job's driver, for ``recovery`` and ``effective``; None: there are none.
    """
    drawn = RunFigures()

    def draw(name: str, make: Callable[[], Figure | str]) -> None:
        try:
            made = make()
        except (UserError, duckdb.Error, pa.ArrowException, OSError, ValueError, KeyError) as error:
            made = str(error).strip().partition("\n")[0]
        if isinstance(made, str):
            drawn.absent[name] = made
        else:
            drawn.figures[name] = made

    draw("parts", lambda: _parts(run, evidence))
    draw("ranks", lambda: _ranks(evidence))
    draw("timeline", lambda: _timeline(run, evidence, verdict))
    draw("recovery", lambda: _recovery(run, evidence) if told is None else _told_recovery(told))
    if told is not None and told.parts:
        draw("effective", lambda: effective_time(told.parts))
    try:
        entries = list(read_json_lines(run / "metrics.jsonl"))
    except OSError:
        entries = []
    title = run.resolve().name
    columns, marks = {title: columns_of(entries)}, marks_of(title, entries) + _incident_marks(title, evidence)
    for name, unit in (("loss", "nats"), ("validation_loss", "nats"), ("grad_norm", ""), ("step_s", "s")):
        if name in columns[title].column_names:
            draw(name, lambda name=name, unit=unit: curves(columns, name, unit=unit, points=_POINTS, marks=marks))  # type: ignore[misc]
    norms = read_norms(run)
    written = set(norms["quantity"].to_pylist())
    for quantity in (name for name in QUANTITIES if name in written):
        draw(f"norms_{quantity}", lambda quantity=quantity: layer_norms(norms, quantity, most_columns=300))  # type: ignore[misc]
    return drawn


def _parts(run: Path, evidence: Evidence) -> Figure | str:
    """A step's parts beside what ``prediction.json`` of the run expects of it."""
    measured = dict(evidence.breakdown)
    try:
        found = json.loads((run / "prediction.json").read_text())["expected"]
        told = {_EXPECTED[name.removesuffix("_s")]: seconds for name, seconds in found["parts"].items()}
        expected = {**told, "step": found["step_s"]}
    except (OSError, ValueError, KeyError, TypeError):
        expected = {}
    if not measured and not expected:
        return "no spans say what a step went on"
    if expected and measured:
        measured["passes"] = measured.pop("forward", 0.0) + measured.pop("backward", 0.0)
    table = pa.Table.from_pylist([{f"{name}_s": seconds for name, seconds in measured.items()}] if measured else [])
    return expected_beside_measured(expected, table)


def _ranks(evidence: Evidence) -> Figure | str:
    if evidence.averages is None or not len(evidence.averages):
        return "no spans of ranks"
    stages = [evidence.stages.get(rank, 0) for rank in evidence.averages["rank"].to_pylist()]
    if evidence.slow is None:
        return rank_heatmap(evidence.averages, alike=stages)
    slow = [one["rank"] for one in evidence.slow.slow]
    return rank_heatmap(evidence.averages, alike=stages, slow=slow, doubt=evidence.slow.doubt)


def looked_at(evidence: Evidence, verdict: Verdict) -> tuple[int, list[int]]:
    """The step and the ranks whose timeline says most: those to blame, and some of those alike beside them."""
    longest = max(evidence.times, key=lambda row: row["slowest_s"])
    step = next(iter(verdict.limit.steps), longest["step"]) if verdict.limit else longest["step"]
    known = {row["step"] for row in evidence.times}
    step = step if step in known else longest["step"]
    blamed = list(verdict.limit.ranks[: _LANES // 2]) if verdict.limit else []
    first = blamed[0] if blamed else longest["slowest_rank"]
    stage = evidence.stages.get(first, 0)
    ranks = sorted(evidence.host_of)
    alike = [rank for rank in ranks if evidence.stages.get(rank, 0) == stage and rank not in blamed]
    others: list[int] = []
    for rank in ranks:  # of each other stage its first
        if evidence.stages.get(rank, 0) not in {stage, *(evidence.stages.get(other, 0) for other in others)}:
            others.append(rank)
    chosen = list(dict.fromkeys([*(blamed or [first]), *alike[:2], *others, *alike[2:]]))
    return int(step), sorted(chosen[:_LANES])


def _timeline(run: Path, evidence: Evidence, verdict: Verdict) -> Figure | str:
    if not evidence.times:
        return "no spans of ranks"
    step, ranks = looked_at(evidence, verdict)
    spans = Trace.open(run).timeline(step, step, ranks=ranks)
    if not spans.num_rows:
        return f"single spans of step {step} are not kept any more; they are for half an hour, and around incidents"
    return merged_timeline(spans, most_bars=_MOST_BARS)


def _recovery(run: Path, evidence: Evidence) -> Figure | str:
    """Attempts, and between them what each start over cost."""
    attempts = Trace.open(run).connect().sql(_ATTEMPTS).to_arrow_table().to_pylist()
    if len(attempts) < 2:
        return "one attempt: nothing was recovered"
    incidents = []
    for before, after in pairwise(attempts):
        near = [one for one in evidence.incidents if before["start_s"] <= one["at_ns"] / 1e9 <= after["start_s"]]
        ended_s = near[-1]["at_ns"] / 1e9 if near else before["end_s"]
        again = max(0, before["last_step"] - after["first_step"] + 1)
        incidents.append(
            {
                "at_s": ended_s,
                "what": near[-1]["kind"] if near else f"attempt {before['attempt']} ended",
                "detect_s": None,
                "restart_s": max(0.0, after["start_s"] - ended_s),
                "again_s": again * evidence.step_s,
                "lost_steps": again,
            }
        )
    return recovery_history(attempts, incidents)


def _told_recovery(told: Recoveries) -> Figure | str:
    if not told.attempts:
        return "attempts are known from the spans of their steps, and none were recorded"
    return recovery_history(told.attempts, told.incidents)


def _incident_marks(run: str, evidence: Evidence) -> list[dict[str, Any]]:
    found: Sequence[dict[str, Any]] = [one for one in evidence.incidents if one["step"] is not None]
    return [{"run": run, "kind": "incident", "step": one["step"], "text": one["kind"]} for one in found]
