"""A prediction for a person at a terminal. Nothing in it needs colour to be understood."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.core import units
from phalanx.plan.overheads import OWN_SPREAD
from phalanx.plan.report.report_model import (
    MEMORY_KINDS,
    Node,
    PredictionReport,
    changed_settings,
    make_tree,
    marks_of,
    pipeline_ranks_shown,
    precision_of,
    printed,
    pruned,
)
from phalanx.plan.types import INTERVAL_SHARE, Part, Prediction, Strategy

_BAR = 12
_WIDE = 110
_WIDEST = 160
_SMALL = 0.005
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNIT = re.compile(r"(\d) (s|ms|µs|%|GiB|MiB|TiB|KiB|days|tokens/s)(?!\w)")


def prediction_text(report: PredictionReport, *, width: int = 80, sources: bool = False) -> RenderableType:
    """All of a prediction.

    Args:
        width: columns of the terminal; a wide one has the source of each number beside it.
        sources: print every part, however small, and the sources in full, below.
    """
    prediction = report.prediction
    pieces: list[RenderableType] = [*_head(report, width), "", title("where the step goes")]
    pieces.append(_step_table(prediction, width, 0.0 if sources else _SMALL))
    if prediction.hidden:
        pieces += ["", title("hidden behind other work, not in the sum"), _hidden_table(prediction.hidden, width)]
    pieces += ["", title(_memory_title(report)), _memory_table(report)]
    if prediction.start_up:
        pieces += ["", Text(wrapped(start_up_line(prediction), width))]
    if report.reliefs:
        pieces += ["", title("on the same ranks it fits with"), _relief_table(report)]
    if notes := (*report.remarks, *prediction.notes):
        pieces += ["", *(Text(wrapped(f"- {note}", width, "  ")) for note in notes)]
    if sources:
        pieces += ["", title("what the numbers rest on"), *sources_lines(prediction, width)]
    return Group(*pieces)


def layout_line(strategy: Strategy) -> str:
    """``pipeline 8 x shard 16 x tensor 8, interleaved_1f1b with 6 chunks, ZeRO 1``."""
    axes = ("pipeline", "replicate", "shard", "context", "tensor")
    used = [f"{axis} {getattr(strategy, axis)}" for axis in axes if getattr(strategy, axis) > 1]
    parts = [" x ".join(used) or "one device"]
    if strategy.pipeline > 1:
        chunks = f" with {strategy.chunks} chunks" if strategy.chunks > 1 else ""
        parts.append(f"{strategy.schedule}{chunks}")
    if strategy.shard > 1:
        parts.append(f"ZeRO {strategy.zero}")
    if strategy.expert > 1:
        parts.append(f"expert {strategy.expert}")
    if strategy.tensor > 1 and strategy.tensor_overlap != "none":
        parts.append(f"tensor overlap {strategy.tensor_overlap}")
    if strategy.recompute != "none":
        parts.append(f"recompute {strategy.recompute}")
    return ", ".join(parts)


def batch_line(prediction: Prediction) -> str:
    """``768 sequences of 2,048 tokens a step: 48 micro-batches of 1 on each of 16 data-parallel ranks``."""
    job, strategy = prediction.job, prediction.strategy
    count, data = strategy.micro_batches(job.global_batch), strategy.data
    each = f" on each of {data:,} data-parallel ranks" if data > 1 else ""
    return (
        f"{job.global_batch:,} sequences of {job.sequence:,} tokens a step: {count} micro-batch{'es' * (count > 1)} "
        f"of {strategy.micro_batch}{each}"
    )


def step_line(report: PredictionReport) -> str:
    """``step 6.54 s · 240,500 tokens/s · MFU 53.1 %``."""
    prediction = report.prediction
    speed = f"{prediction.tokens_per_s:,.0f} tokens/s · MFU {100 * prediction.mfu:.1f} %"
    return f"step {seconds_text(prediction.step_s)} · {speed}"


def interval_line(prediction: Prediction) -> str:
    """Where a step lies in 8 of 10 cases, and by whose steps that is known; empty where it is not."""
    if prediction.interval_s is None:
        return ""
    low, high = map(seconds_text, prediction.interval_s)
    given = prediction.job.added.spread == OWN_SPREAD
    known = "by how far steps of one program and cluster lie apart" if given else "by published steps left out"
    return f"{INTERVAL_SHARE * 10:.0f} of 10 such steps: {low} to {high}, {known}"


def run_line(report: PredictionReport) -> str:
    """``300B tokens: 14.4 days · 355,000 device-hours · 710,000 USD at 2.00 USD an hour``; empty where not known."""
    if report.run_s is None or report.device_hours is None:
        return ""
    parts = [days_text(report.run_s), f"{hours_text(report.device_hours)} device-hours"]
    if report.cost_usd is not None:
        digits = 0 if report.cost_usd >= 100 else 2
        parts.append(f"{report.cost_usd:,.{digits}f} USD at {report.usd_per_device_hour:.2f} USD an hour")
    return f"{units.count(report.total_tokens)} tokens: {' · '.join(parts)}"


def hours_text(hours: float) -> str:
    """Whole hours, or two digits of few."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}"


def verdict_line(report: PredictionReport) -> str:
    """Whether it fits, and how full the fullest rank is."""
    full, limit = report.fullest, report.device_memory_bytes
    of = f"{units.size(full.total)} of {units.size(limit)} on the fullest rank"
    where = f", pipeline rank {full.pipeline_rank}" if len(report.prediction.memory) > 1 else ""
    if report.fits:
        return f"fits: {of}{where} ({full.total / limit:.0%})".replace("%", " %")
    return f"does not fit: {of}{where}, {units.size(full.total - limit)} too much"


def seconds_text(seconds: float) -> str:
    """Three digits with the unit that suits: ``6.54 s``, ``12.3 ms``, ``45.0 µs``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            value = seconds * scale
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f} {unit}"
    raise AssertionError


def days_text(seconds: float) -> str:
    """``14.4 days``, or shorter times as usual."""
    return f"{seconds / 86400:,.1f} days" if seconds >= 2 * 86400 else units.duration(seconds)


def start_up_line(prediction: Prediction) -> str:
    """How long it takes until the first step, and what of."""
    total_s = sum(part.seconds for part in prediction.start_up)
    parts = ", ".join(f"{_leaf(part.path)} {seconds_text(part.seconds)}" for part in prediction.start_up)
    return f"start-up {seconds_text(total_s)}: {parts}"


def sources_lines(prediction: Prediction, width: int) -> list[Text]:
    """Where every number comes from, in full: each source once, with the parts that rest on it."""
    by_source: dict[tuple[str, str], list[str]] = {}
    for part in (*prediction.parts, *prediction.hidden, *prediction.start_up):
        paths = by_source.setdefault((part.mark, part.source), [])
        if part.path not in paths:
            paths.append(part.path)
    return [
        Text(wrapped(f"{mark}: {source}", width) + "\n" + wrapped(f"    {', '.join(paths)}", width, "    "))
        for (mark, source), paths in by_source.items()
    ]


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Text in lines of `width` columns; a number and its unit stay together."""
    kept = _UNIT.sub("\\1\u00a0\\2", text)
    return textwrap.fill(kept, width, subsequent_indent=indent, break_on_hyphens=False).replace("\u00a0", " ")


def _head(report: PredictionReport, width: int) -> Iterator[Text]:
    prediction = report.prediction
    name = (
        f"{report.name}: {units.count(report.parameters)} parameters on {prediction.devices:,} x {report.device} "
        f"(cluster {prediction.cluster})"
    )
    yield Text(wrapped(name, width), style="bold")
    yield Text(wrapped(f"layout: {layout_line(prediction.strategy)}", width, " " * 8))
    batch = f"batch:  {batch_line(prediction)}, {prediction.job.precision}, {prediction.job.optimizer}"
    yield Text(wrapped(batch, width, " " * 8))
    yield Text("")
    yield Text(wrapped(step_line(report), width), style="bold")
    if between := interval_line(prediction):
        yield Text(wrapped(between, width))
    if run := run_line(report):
        yield Text(wrapped(run, width))
    yield Text(wrapped(verdict_line(report), width), style="green" if report.fits else "bold red")


def title(text: str) -> Text:
    """The line above a table."""
    return Text(text, style="bold underline")


def _step_table(prediction: Prediction, width: int, small: float) -> Table:
    """The tree of parts; printed numbers add up to the step. Parts with less than the share `small` are one."""
    root = make_tree(prediction.parts)
    root = pruned(root, small * root.seconds)
    unit, texts = printed(root)
    labels = {id(node): "  " * (depth - 1) + node.name.replace("_", " ") for depth, node in root.walk() if depth}
    room = _room(labels.values(), 9 + 9 + _BAR + 2 + 11, width)
    table = make_columns(("", "left"), (unit, "right"), ("share", "right"), ("", "left"), *_known(room))
    for depth, node in root.walk():
        if depth:
            share = node.seconds / root.seconds
            cells = [labels[id(node)], texts[id(node)], f"{100 * share:.1f} %", bar(share, _BAR)]
            table.add_row(*cells, *_how_known(node, room), style="bold" if depth == 1 else "")
    table.add_row("step", texts[id(root)], "100.0 %", style="bold")
    return table


def _hidden_table(parts: tuple[Part, ...], width: int) -> Table:
    root = make_tree(parts)
    unit, scale, decimals = precision_of(root.seconds)
    room = _room([part.path for part in parts], 9 + 11, width)
    table = make_columns(("", "left"), (unit, "right"), *_known(room))
    for _, node in root.walk():
        if node.part is not None:
            table.add_row(node.path, f"{node.seconds * scale:,.{decimals}f}", *_how_known(node, room))
    return table


def _memory_title(report: PredictionReport) -> str:
    by_rank = " by pipeline rank" if len(report.prediction.memory) > 1 else ""
    return f"memory{by_rank}, {_memory_unit(report)[0]}"


def _memory_unit(report: PredictionReport) -> tuple[str, int]:
    """The unit that suits the fullest rank, and its bytes."""
    return ("GiB", 2**30) if report.fullest.total >= 2**30 else ("MiB", 2**20)


def _memory_table(report: PredictionReport) -> Table:
    ranks = report.prediction.memory
    shown = pipeline_ranks_shown(ranks)
    unit = _memory_unit(report)[1]
    heads = [f"{rank.pipeline_rank}{' (fullest)' if rank is report.fullest else ''}" for rank in shown]
    table = make_columns(("", "left"), *((head, "right") for head in (heads if len(ranks) > 1 else [""])))
    for kind in MEMORY_KINDS:
        values = [getattr(rank, kind) for rank in shown]
        if any(values):
            table.add_row(kind.replace("_", " "), *(f"{value / unit:,.2f}" for value in values))
    table.add_row("in all", *(f"{rank.total / unit:,.2f}" for rank in shown), style="bold")
    shares = (rank.total / report.device_memory_bytes for rank in shown)
    table.add_row(f"of {report.device_memory_bytes / unit:,.1f}", *(f"{100 * share:.0f} %" for share in shares))
    table.show_header = len(ranks) > 1
    return table


def _relief_table(report: PredictionReport) -> Table:
    """Settings that make it fit, with what they cost."""
    table = make_columns(("GiB", "right"), ("step s", "right"), ("longer", "right"), ("settings", "left"))
    table.columns[-1].no_wrap = False
    for one in report.reliefs:
        full = max(rank.total for rank in one.memory) / 2**30
        more = f"{100 * (one.step_s / report.prediction.step_s - 1):+.1f} %"
        table.add_row(
            f"{full:,.1f}", f"{one.step_s:,.3f}", more, changed_settings(report.prediction.strategy, one.strategy)
        )
    return table


def make_columns(*columns: tuple[str, str]) -> Table:
    """An empty table without lines; columns by name and side, none of them folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", header_style="")  # type: ignore[arg-type]
    return table


def _room(labels: Iterable[str], others: int, width: int) -> int:
    """Columns that are left for sources beside the labels and `others`; 0 where the terminal is not wide.

    Into a file or a pipe, where lines may have any length, they are bounded all the same: it is people who read them.
    """
    left = min(width, _WIDEST) - max(map(len, labels)) - 2 - others
    return max(left, 0) if width >= _WIDE else 0


def _known(room: int) -> list[tuple[str, str]]:
    return [("how known", "left"), *([("rests on", "left")] if room else [])]


def _how_known(node: Node, room: int) -> list[str]:
    """The mark of a part, or of the weakest in a group, and what it rests on, as far as there is room."""
    if node.part is None:
        return []
    weak = "assumed" if "assumed" in marks_of(node) else node.part.mark
    source = node.part.source
    return [weak, *([source if len(source) <= room else f"{source[: room - 1]}…"] if room else [])]


def bar(share: float, width: int) -> str:
    """A bar of blocks, in eighths of a column."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _leaf(path: str) -> str:
    return path.rpartition("/")[2].replace("_", " ")
