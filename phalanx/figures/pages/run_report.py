"""A report of a run as a page to attach to a mail: the verdict, the evidence, what to do next, what is not known."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx.figures.pages.page_blocks import (
    Block,
    Bullets,
    Cards,
    Cell,
    FigurePlace,
    Heading,
    PageTable,
    Paragraph,
    ToDo,
    numbers,
    soft,
    write_page,
)
from phalanx.figures.pages.page_blocks import Verdict as VerdictBlock
from phalanx.figures.pages.report_figures import Recoveries, RunFigures, draw_run, looked_at
from phalanx.figures.style import described
from phalanx.telemetry.evidence import Evidence, gather
from phalanx.telemetry.queries import place_of
from phalanx.telemetry.run_list import RunRow, read_run
from phalanx.telemetry.summaries import BREAKDOWN
from phalanx.telemetry.verdict import Verdict, judge

_MOST_ROWS = 10
_NAMES = {"wait": "exposed communication", "other": "between spans", "data": "waiting for data"}
_COSTS = ("detect_s", "restart_s", "again_s")
_CURVES = ("loss", "validation_loss", "grad_norm", "step_s")


def write_report(
    run: str | Path,
    path: Path,
    first: int | None = None,
    last: int | None = None,
    *,
    told: Recoveries | None = None,
) -> Verdict:
    """Write the report of steps `first` to `last` (included; None: all but the first) to `path`.

    Args:
        run: its folder, or its URL in object storage, where it has telemetry and no figures of its own.
        told: by the reports of the driver of its job; None: there are none.

    Raises:
        UserError: the run has neither spans nor figures, plotly is not installed, or `path` cannot be written.
    """
    place = place_of(run)
    evidence = gather(place, first, last)
    verdict = judge(evidence)
    drawn = draw_run(place, evidence, verdict, told)
    row = read_run(place) if getattr(place, "fs", None) is None else _row_of_storage(place)
    blocks = report_blocks(row, evidence, verdict, drawn, told)
    write_page(path, f"{row.name}: {verdict.sentence}", blocks, drawn.figures)
    return verdict


def _row_of_storage(place: Path) -> RunRow:
    """What is known of a run of which only telemetry lies in object storage."""
    figures = dict.fromkeys(("step", "total_steps", "tokens", "loss", "validation_loss", "tokens_per_s"))
    return RunRow(name=place.name, folder=str(place), state="unknown", written=0.0, why="", note="", tags=(), **figures)


def report_blocks(
    row: RunRow, evidence: Evidence, verdict: Verdict, drawn: RunFigures, told: Recoveries | None = None
) -> list[Block]:
    """The page as blocks."""
    return [
        *_head(row, evidence, verdict),
        Heading("What it rests on"),
        *_findings(verdict),
        *_step(evidence, drawn),
        *_ranks(evidence, drawn),
        *_timeline(evidence, verdict, drawn),
        *_communication(evidence),
        *_data(evidence),
        *_incidents(evidence, drawn, told),
        *_curves(drawn),
        Heading("What to do next"),
        ToDo([(action.text, action.command) for action in verdict.actions]),
        *_missing(verdict, drawn),
        Heading("About this page"),
        Bullets(
            [
                "Costs are what a step would be shorter by at most, and overlap: do not add them up.",
                "A rank is compared with those of its pipeline stage, by forward and backward without waiting in them.",
                f"Written by phalanx {_version()} on {time.strftime('%Y-%m-%d at %H:%M UTC', time.gmtime())}; it"
                " needs nothing else and fetches nothing.",
            ]
        ),
    ]


def _head(row: RunRow, evidence: Evidence, verdict: Verdict) -> Iterator[Block]:
    yield Heading(row.name, 1)
    is_known = row.step is not None or not evidence.steps
    told = [row.state if is_known else "", row.why, row.note, *(f"#{tag}" for tag in row.tags)]
    if evidence.steps:
        told.append(f"steps {evidence.first_step:,} to {evidence.last_step:,}")
        told.append(f"{_many(evidence.ranks, 'rank')} on {_many(evidence.hosts, 'host')}")
    yield soft(" · ".join(filter(None, told)))
    if verdict.abstains:
        yield VerdictBlock(verdict.sentence, "It abstains", "what is missing, and how to get it, is said below")
    else:
        style = "good" if verdict.limit is None else "bad"
        yield VerdictBlock(verdict.sentence, verdict.sureness.capitalize(), verdict.why_sure, style)
    cards = []
    if evidence.steps:
        cards.append((f"{evidence.step_s:.4g} s", "median step"))
    if row.tokens_per_s is not None:
        cards.append((f"{row.tokens_per_s:,.0f}", "tokens/s"))
    if mfu := [one["mfu"] for one in evidence.mfu if one["mfu"] is not None]:
        cards.append((f"{sum(mfu) / len(mfu):.1%}", "MFU"))
    if step_s := evidence.breakdown.get("step"):
        own = evidence.breakdown.get("forward", 0.0) + evidence.breakdown.get("backward", 0.0)
        cards.append((f"{own / step_s:.0%}", "forward and backward"))
        cards.append((f"{evidence.breakdown.get('wait', 0.0) / step_s:.0%}", "exposed communication"))
    if row.loss is not None:
        cards.append((f"{row.loss:.4f}", "last loss, nats"))
    if cards:
        yield Cards(cards)


def _findings(verdict: Verdict) -> Iterator[Block]:
    if not verdict.findings:
        yield Paragraph("No cause that costs a hundredth of a step was found.")
        return
    rows = [
        [
            Cell(finding.sentence[:1].upper() + finding.sentence[1:], "first"),
            *numbers((f"{finding.lost_s:.3g} s" if finding.lost_s == finding.lost_s else "", f"{finding.share:.1%}")),
            Cell(finding.sureness),
            Cell("; ".join(finding.because), "source"),
        ]
        for finding in verdict.findings
    ]
    yield PageTable(
        [Cell("cause"), *numbers(("costs a step", "of it")), Cell("sure"), Cell("because")], rows, stacked=True
    )


def _step(evidence: Evidence, drawn: RunFigures) -> Iterator[Block]:
    yield Heading("Where a step's time went", 3)
    yield from _figure(drawn, "parts")
    parts = evidence.breakdown
    if parts.get("step"):
        rows = [
            [Cell(_NAMES.get(kind, kind)), *numbers((f"{parts[kind]:.4g}", f"{parts[kind] / parts['step']:.1%}"))]
            for kind in BREAKDOWN
            if parts.get(kind)
        ]
        foot = [Cell("step"), *numbers((f"{parts['step']:.4g}", "100.0%"))]
        yield PageTable([Cell("part"), *numbers(("s", "share"))], rows, foot)


def _ranks(evidence: Evidence, drawn: RunFigures) -> Iterator[Block]:
    yield Heading("Ranks", 3)
    yield from _figure(drawn, "ranks")
    if evidence.slow is not None and evidence.slow.ranked:
        yield Paragraph(evidence.slow.verdict)
        rows = [
            [
                Cell(f"rank {one['rank']}", "first"),
                Cell(one["host"]),
                *numbers((str(one["stage"]), f"{one['own_s']:.4g}", f"{one['peers_s']:.4g}", f"{one['excess']:+.1%}")),
            ]
            for one in evidence.slow.ranked[:_MOST_ROWS]
        ]
        heads = [Cell("slowest"), Cell("host"), *numbers(("stage", "own s", "stage's s", "excess"))]
        yield PageTable(heads, rows, stacked=True)


def _timeline(evidence: Evidence, verdict: Verdict, drawn: RunFigures) -> Iterator[Block]:
    if evidence.times:
        yield Heading(f"Step {looked_at(evidence, verdict)[0]:,}, which shows it best", 3)
        yield from _figure(drawn, "timeline")


def _communication(evidence: Evidence) -> Iterator[Block]:
    if evidence.waits:
        yield Heading("Communication that nothing hid", 3)
        by_group: dict[str, list[dict[str, Any]]] = {}
        for one in evidence.waits:
            by_group.setdefault(one["group"], []).append(one)
        rows = []
        for group, each in by_group.items():
            mean_s = sum(one["mean_s"] for one in each) / len(each)
            least_s = sum(one["least_s"] for one in each) / len(each)
            shares = (_seconds(seconds) for seconds in (mean_s, least_s, max(0.0, mean_s - least_s)))
            rows.append([Cell(group or "(no group)", "first"), *numbers((str(len(each)), *shares))])
        yield PageTable([Cell("groups"), *numbers(("how many", "waits s", "for bytes s", "for late ranks s"))], rows)
    if evidence.skew:
        yield Heading("Launch skew", 3)
        rows = [
            [
                Cell(one["group"] or "(no group)", "first"),
                *numbers((f"{one['collectives']:,}", _seconds(one["mean_s"]), _seconds(one["largest_s"]))),
                Cell(f"rank {one['last_rank']}: {one['last_share']:.0%} of it"),
                *numbers(("unknown" if one["error_s"] is None else f"± {one['error_s']:.2g} s",)),
            ]
            for one in evidence.skew
        ]
        heads = [Cell("groups"), *numbers(("collectives", "mean s", "largest s")), Cell("last"), *numbers(("clocks",))]
        yield PageTable(heads, rows, stacked=True)


def _data(evidence: Evidence) -> Iterator[Block]:
    if evidence.averages is None or not len(evidence.averages) or not evidence.breakdown.get("step"):
        return
    each = sorted(
        zip(evidence.averages["data_s"].to_pylist(), evidence.averages["rank"].to_pylist(), strict=True), reverse=True
    )
    yield Heading("Waiting for data", 3)
    if not each[0][0]:
        yield soft("No rank waited for a batch, or the waits were not recorded.")
        return
    mean_s = sum(seconds or 0.0 for seconds, _ in each) / len(each)
    yield Paragraph(
        f"{mean_s:.4g} s of a step ({mean_s / evidence.breakdown['step']:.1%}) in the mean of ranks; longest on rank"
        f" {each[0][1]}, {each[0][0] or 0.0:.4g} s."
    )


def _incidents(evidence: Evidence, drawn: RunFigures, told: Recoveries | None) -> Iterator[Block]:
    yield Heading("Incidents and recovery", 3)
    if told is not None:
        yield _reports(told)
    if evidence.incidents:
        rows = [
            [
                Cell(_utc(one["at_ns"] / 1e9), "first"),
                *numbers(("" if one["step"] is None else f"{one['step']:,}",)),
                Cell(one["kind"]),
            ]
            for one in evidence.incidents[-_MOST_ROWS:]
        ]
        yield PageTable([Cell("UTC"), *numbers(("step",)), Cell("what")], rows)
    elif told is None:
        yield Paragraph("No incident was noted.")
    if "recovery" in drawn.figures:
        yield from _figure(drawn, "recovery")
    else:
        yield soft(f"Recovery history: {drawn.absent.get('recovery', 'not known')}.")
    if "effective" in drawn.figures:
        yield from _figure(drawn, "effective")


def _reports(told: Recoveries) -> Block:
    """What the driver of the job did about each incident, and what that cost."""
    rows = [
        [
            Cell(_utc(one["at_s"]), "first"),
            Cell(f"{one['number']}. {one['what'].replace('&lt;', '<')}"),
            Cell(one["result"]),
            *numbers("" if one[name] is None else f"{one[name]:.1f}" for name in _COSTS),
            *numbers(("–" if one["lost_steps"] is None else f"{one['lost_steps']:,}",)),
        ]
        for one in told.incidents[-_MOST_ROWS:]
    ]
    costs = numbers(("until noticed s", "until training s", "made again s", "lost steps"))
    return PageTable([Cell("UTC"), Cell("incident of the job"), Cell("result"), *costs], rows, stacked=True)


def _utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))


def _curves(drawn: RunFigures) -> Iterator[Block]:
    names = [name for name in _CURVES if name in drawn.figures]
    yield Heading("Curves", 3)
    if not names:
        yield soft("metrics.jsonl has no figures of steps.")
    for name in names:
        yield from _figure(drawn, name)
    norms = [name for name in drawn.figures if name.startswith("norms_")]
    if norms:
        yield Heading("Norms by layer", 3)
        for name in norms:
            yield from _figure(drawn, name)


def _figure(drawn: RunFigures, name: str) -> Sequence[Block]:
    if name not in drawn.figures:
        return [soft(f"Not drawn: {drawn.absent.get(name, 'no numbers')}.")]
    figure = drawn.figures[name]
    return [FigurePlace(name, figure["layout"]["title"]["text"], described(figure))]


def _missing(verdict: Verdict, drawn: RunFigures) -> Iterator[Block]:
    yield Heading("What is not known")
    absent = [
        (f"figure of {name}", why) for name, why in drawn.absent.items() if name != "recovery" and verdict.missing
    ]
    rows = [(one.what, f"{one.how} {one.command}".strip()) for one in verdict.missing] + absent
    if not rows:
        yield Paragraph("Nothing that this page asks for was missing.")
        return
    yield PageTable(
        [Cell("evidence"), Cell("how to get it, or why it is not there")],
        [[Cell(what, "first"), Cell(how)] for what, how in rows],
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g}" if seconds >= 0.01 else f"{seconds:.5f}"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _version() -> str:
    try:
        return version("phalanx-train")
    except PackageNotFoundError:  # a source tree that was not installed
        return "(source)"
