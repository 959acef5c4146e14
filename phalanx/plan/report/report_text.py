"""A prediction, and what a search found, for a person at a terminal. Nothing in it needs colour to be understood."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.core import units
from phalanx.core.layout import Layout
from phalanx.figures.style import thinned
from phalanx.plan.memory.rank import is_reserved_known
from phalanx.plan.overheads import OWN_SPREAD
from phalanx.plan.report.report_model import (
    MEMORY_KINDS,
    Node,
    PredictionReport,
    changed_settings,
    foreign,
    limits_of,
    make_tree,
    marks_of,
    pipeline_ranks_shown,
    precision_of,
    printed,
    pruned,
    toml_keys,
)
from phalanx.plan.search.frontier import memory_bytes
from phalanx.plan.search.search import ChoiceOutcome, SearchResult, Sensitivity
from phalanx.plan.types import INTERVAL_SHARE, Part, Prediction, Strategy

# Columns: of a bar; of a terminal from which sources stand beside the numbers; and up to which lines are filled, since
# longer ones are hard to read. Below `_SMALL` of a step parts are printed as one.
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
    by_rank = " by pipeline rank" if len(report.prediction.memory) > 1 else ""
    pieces += ["", title(f"memory{by_rank}, {_memory_unit(report)[0]}"), _memory_table(report)]
    if prediction.start_up:
        pieces += ["", Text(wrapped(start_up_line(prediction), width))]
    if report.reliefs:
        table = make_columns(("GiB", "right"), ("step s", "right"), ("longer", "right"), ("settings", "left"))
        # The settings come last and may be long: they alone may fold.
        table.columns[-1].no_wrap = False
        for one in report.reliefs:
            full = max(rank.total for rank in one.memory) / 2**30
            more = f"{100 * (one.step_s / report.prediction.step_s - 1):+.1f} %"
            table.add_row(
                f"{full:,.1f}", f"{one.step_s:,.3f}", more, changed_settings(report.prediction.strategy, one.strategy)
            )
        pieces += ["", title("on the same ranks it fits with"), table]
    if notes := (*report.remarks, *prediction.notes):
        pieces += ["", *(Text(wrapped(f"- {note}", width, "  ")) for note in notes)]
    if sources:
        # Where every number comes from, in full: each source once, with the parts that rest on it
        by_source: dict[tuple[str, str], list[str]] = {}
        for part in (*prediction.parts, *prediction.hidden, *prediction.start_up):
            paths = by_source.setdefault((part.mark, part.source), [])
            if part.path not in paths:
                paths.append(part.path)
        pieces += [
            "",
            title("what the numbers rest on"),
            *[
                Text(wrapped(f"{mark}: {source}", width) + "\n" + wrapped(f"    {', '.join(paths)}", width, "    "))
                for (mark, source), paths in by_source.items()
            ],
        ]
    return Group(*pieces)


def layout_line(strategy: Strategy) -> str:
    """``pipeline 8 x shard 16 x tensor 8, interleaved_1f1b with 6 chunks, ZeRO 1``."""
    axes = ("pipeline", "replicate", "shard", "context", "tensor")
    used = [f"{axis} {getattr(strategy, axis)}" for axis in axes if getattr(strategy, axis) > 1]
    # What has no effect in this layout is left out, such as a ZeRO stage where nothing is split.
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


def run_line(report: PredictionReport) -> str:
    """``300B tokens: 14.4 days · 355,000 device-hours · 710,000 USD at 2.00 USD an hour``; empty where not known."""
    if report.run_s is None or report.device_hours is None:
        return ""
    parts = [days_text(report.run_s), f"{hours_text(report.device_hours)} device-hours"]
    if report.cost_usd is not None:
        # Cents matter only in small sums.
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
        # Python writes "85%"; everywhere else a space stands before the unit.
        fits = "fits" if is_reserved_known(report.prediction.job.software) else "fits by its tensors"
        return f"{fits}: {of}{where} ({full.total / limit:.0%})".replace("%", " %")
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
    named = ((part.path.rpartition("/")[2].replace("_", " "), part.seconds) for part in prediction.start_up)
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in named)
    return f"start-up {seconds_text(total_s)}: {parts}"


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Text in lines of `width` columns; a number and its unit stay together."""
    # textwrap breaks lines only at ASCII white space, so a no-break space holds number and unit together.
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
    speed = f"{prediction.tokens_per_s:,.0f} tokens/s · MFU {100 * prediction.mfu:.1f} %"
    yield Text(wrapped(f"step {seconds_text(prediction.step_s)} · {speed}", width), style="bold")
    if prediction.interval_s is not None:
        low, high = map(seconds_text, prediction.interval_s)
        # An interval is the caller's own where an efficiency was given, else that of published steps.
        given = prediction.job.added.spread == OWN_SPREAD
        known = "by how far steps of one program and cluster lie apart" if given else "by published steps left out"
        yield Text(wrapped(f"{INTERVAL_SHARE * 10:.0f} of 10 such steps: {low} to {high}, {known}", width))
    elif prediction.unjudged:
        yield Text(wrapped(f"how far steps lie from it: not judged ({prediction.unjudged})", width))
    if run := run_line(report):
        yield Text(wrapped(run, width))
    yield Text(wrapped(verdict_line(report), width), style="green" if report.fits else "bold red")


def title(text: str) -> Text:
    """The line above a table."""
    return Text(text, style="bold underline")


def _step_table(prediction: Prediction, width: int, small: float) -> Table:
    """The tree of parts; printed numbers add up to the step. Parts with less than the share `small` are one."""
    root = make_tree(prediction.parts)
    # Pruned before it is rounded, so that what is printed adds up to the step.
    root = pruned(root, small * root.seconds)
    unit, texts = printed(root)
    # By node, not by name: parts of different groups are called alike.
    labels = {id(node): "  " * (depth - 1) + node.name.replace("_", " ") for depth, node in root.walk() if depth}
    # 9 columns for the time, 9 for the share, the bar with its gap, 11 for how it is known.
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


def _memory_unit(report: PredictionReport) -> tuple[str, int]:
    # One unit for the whole table, so that ranks can be compared.
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


def make_columns(*columns: tuple[str, str]) -> Table:
    """An empty table without lines; columns by name and side, none of them folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", header_style="")  # type: ignore[arg-type]
    return table


def _room(labels: Iterable[str], others: int, width: int) -> int:
    """Columns that are left for sources beside the labels and `others`; 0 where the terminal is not wide.

    Into a file or a pipe, where lines may have any length, they are bounded all the same, since people read them.
    """
    left = min(width, _WIDEST) - max(map(len, labels)) - 2 - others
    return max(left, 0) if width >= _WIDE else 0


def _known(room: int) -> list[tuple[str, str]]:
    return [("how known", "left"), *([("rests on", "left")] if room else [])]


def _how_known(node: Node, room: int) -> list[str]:
    """The mark of a part, or of the weakest in a group, and what it rests on, as far as there is room."""
    if node.part is None:
        return []
    # A sum is known no better than its least certain part.
    weak = "assumed" if "assumed" in marks_of(node) else node.part.mark
    source = node.part.source
    return [weak, *([source if len(source) <= room else f"{source[: room - 1]}…"] if room else [])]


def bar(share: float, width: int) -> str:
    """A bar of blocks, in eighths of a column."""
    # A share can lie outside of 0 to 1: a rank that does not fit fills more than its memory.
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


_MOST_PARETO = 10
_MOST_OUTCOMES = 5

_NUMBER = re.compile(r" (?=\d)")
_HEADS = {"micro_batch": "mb", "tensor_overlap": "overlap", "context_method": "context"}
_LIMITS = {
    "waiting for the slowest rank": "slowest rank",
    "tensor-parallel communication": "tensor",
    "context-parallel communication": "context",
    "exchange between experts": "experts",
    "data-parallel tail": "data tail",
}
_SCHEDULES = {"1f1b": "1f1b", "interleaved_1f1b": "1f1b", "interleaved_zero_bubble": "zero bubble", "zbv": "zbv"}

VARYING = (
    "micro_batch",
    "schedule",
    "chunks",
    "zero",
    "recompute",
    "tensor_overlap",
    "context_method",
    "sequence_parallel",
    "expert",
    "bucket_bytes",
)
"""What a layout has besides its axes."""


def search_text(result: SearchResult, name: str, *, run: str = "", width: int = 80) -> RenderableType:
    """All of a search. `run`: what training on all tokens takes with the fastest."""
    best = result.best[0]
    pieces: list[RenderableType] = [
        *_search_head(result, name, width),
        *([Text(wrapped(run, width))] if run else []),
        "",
        title("the fastest layouts (mb: micro-batch, x: model chunks)"),
    ]
    pieces += _layouts(result.best, result.limit_bytes, width)
    if len(result.shapes) > 1:
        pieces += ["", title("the best of each way to share the devices")]
        pieces += _layouts(result.shapes, result.limit_bytes, width)
    pieces += ["", title("what limits the fastest"), *_limits(result, width)]
    if len(result.pareto) > 1:
        leaner = thinned(result.pareto, _MOST_PARETO)
        pieces += ["", title("less memory for more time"), *_layouts(leaner, result.limit_bytes, width)]
    if result.sensitivities:
        pieces += ["", title("what hangs on each choice, the others being free"), _sensitivities(result, width)]
    pieces += ["", title("to paste into the config")]
    pieces += [Text(toml_keys(best.job, best.strategy).rstrip())]
    # As comments, so that the whole block can be pasted.
    pieces += [Text(wrapped(f"# not possible yet: {words}", width, "# ")) for words in foreign(best.strategy)]
    return Group(*pieces)


def axes_of(strategy: Strategy) -> str:
    """``pp8·fs16·tp8``, as layouts are written elsewhere."""
    if strategy.world_size == 1:
        return "one device"
    return str(Layout(*(int(getattr(strategy, axis)) for axis in Layout.__dataclass_fields__)))


def value_text(name: str, value: object) -> str:
    """A choice as it is printed."""
    if name == "bucket_bytes":
        return "a chunk" if value == 0 else f"{int(value) / 1e6:g} MB"  # type: ignore[call-overload]
    return str(value).lower() if isinstance(value, bool) else str(value)


def split_columns(strategies: Sequence[Strategy]) -> tuple[list[str], list[str]]:
    """Which choices differ between layouts, and which are the same in all and matter there."""
    values = {name: {getattr(strategy, name) for strategy in strategies} for name in VARYING}
    differing = [name for name in VARYING if len(values[name]) > 1]
    same = [name for name in VARYING if len(values[name]) == 1 and _matters(strategies[0], name)]
    return differing, same


def short_columns(strategies: Sequence[Strategy]) -> tuple[list[str], list[str]]:
    """As `split_columns`, with the number of chunks shown with the schedule."""
    differing, same = split_columns(strategies)
    differing = list(dict.fromkeys("schedule" if name == "chunks" else name for name in differing))
    hidden = {"schedule", "chunks"} if "schedule" in differing else set()
    return differing, [name for name in same if name not in hidden]


def choices_text(strategy: Strategy, names: Sequence[str]) -> str:
    """``micro batch 1, schedule 1f1b``."""
    return ", ".join(f"{name.replace('_', ' ')} {value_text(name, getattr(strategy, name))}" for name in names)


def removed_lines(result: SearchResult) -> list[str]:
    """What each rule took away: ``tensor divides 128 heads: 12 of 96 ways to share the devices``."""
    return [f"{rule.rule}: {rule.removed:,} of {rule.before:,} {rule.of}" for rule in result.removed if rule.removed]


def limits_text(prediction: Prediction, limit_bytes: float, count: int) -> str:
    """What limits a layout, in short: ``pipeline bubble 4.0 %, optimizer 0.6 %``."""
    limits = ((_NUMBER.split(one.words)[0], one.share) for one in limits_of(prediction, limit_bytes, count)[:count])
    return ", ".join(f"{_LIMITS.get(name, name)} {100 * share:.1f} %" for name, share in limits)


def others_text(name: str, outcomes: Sequence[ChoiceOutcome], best_s: float) -> str:
    """How much longer a step takes with other values of a choice; last, together, those with which nothing fits."""
    words, too_full = [], []
    for each in outcomes:
        value = value_text(name, each.value)
        if each.best is not None:
            more = each.best.step_s / best_s - 1
            about = "" if each.proven else "at most "
            # A difference below 0.05 % would be printed as +0.0 %.
            words.append(f"{value}: same" if abs(more) < 5e-4 else f"{value}: {about}{100 * more:+.1f} %")
        elif not each.proven:
            words.append(f"{value}: at least {100 * max(each.lower_s / best_s - 1, 0.0):+.1f} %, if it fits")
        else:
            too_full.append(value)
    if too_full:
        words.append(f"do not fit: {', '.join(too_full)}" if len(too_full) > 1 else f"does not fit: {too_full[0]}")
    return ", ".join(words)


def _search_head(result: SearchResult, name: str, width: int) -> list[Text]:
    best, machine = result.best[0], result.machine
    devices = f"each of {machine.devices:,} devices" if machine.devices > 1 else "the device"
    proof = "exact" if result.proven else f"not proven: no other is faster than {seconds_text(result.lower_s)}"
    counts = (
        f"{result.candidates:,} layouts by the rules, {result.fitting:,} of them fit into "
        f"{result.limit_bytes / 2**30:,.1f} GiB of {devices}; {result.predicted:,} predicted "
        f"in full, the others bounded away in {seconds_text(result.seconds)} ({proof})"
    )
    line = f"best: {axes_of(best.strategy)}, step {seconds_text(best.step_s)}, MFU {100 * best.mfu:.1f} %"
    return [Text(wrapped(name, width), style="bold"), Text(wrapped(counts, width)), Text(line, style="bold")]


def _layouts(predictions: Sequence[Prediction], limit_bytes: float, width: int) -> list[RenderableType]:
    """A row for each layout; what all have in common stands below, once.

    Where the terminal has no room for a column of each choice, they are one column of words.
    """
    differing, same = short_columns([prediction.strategy for prediction in predictions])
    # The widest form that the terminal has room for: a column for each choice and what limits the layout; without the
    # latter; all choices in one column of words.
    heads = ["step s", "MFU", "GiB", "layout", *(_HEADS.get(name, name.replace("_", " ")) for name in differing)]
    rows = [
        [*numbers, axes_of(one.strategy), *(short_text(one.strategy, name) for name in differing)]
        for numbers, one in zip(numbers_of(predictions), predictions, strict=True)
    ]
    limited = [limits_text(one, limit_bytes, 1) for one in predictions]
    if (
        _natural_width([[*heads, "limited by"], *([*row, words] for row, words in zip(rows, limited, strict=True))])
        <= width
    ):
        heads.append("limited by")
        rows = [[*row, words] for row, words in zip(rows, limited, strict=True)]
    elif _natural_width([heads, *rows]) > width:
        heads = [*heads[:4], "with"]
        rows = [[*row[:4], _in_words(one.strategy, differing)] for row, one in zip(rows, predictions, strict=True)]
    table = make_columns(*((head, "right" if place < 3 else "left") for place, head in enumerate(heads)))
    table.columns[-1].no_wrap = heads[-1] != "with"
    for row in rows:
        table.add_row(*row)
    shared = choices_text(predictions[0].strategy, same)
    return [table, Text(wrapped(f"all: {shared}", width, "     "), style="dim")] if shared else [table]


def numbers_of(predictions: Sequence[Prediction]) -> list[tuple[str, str, str]]:
    """Seconds, MFU and GiB of layouts, the latter with as many digits as the largest of them needs."""
    sizes = [memory_bytes(one) / 2**30 for one in predictions]
    # One number of digits for the whole column, so that sizes can be compared at a glance.
    digits = next(digits for digits, least in ((1, 10.0), (2, 1.0), (3, 0.0)) if max(sizes) >= least)
    return [
        (f"{one.step_s:.3f}", f"{100 * one.mfu:.1f} %", f"{size:.{digits}f}")
        for one, size in zip(predictions, sizes, strict=True)
    ]


def _natural_width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))


def _in_words(strategy: Strategy, names: Sequence[str]) -> str:
    """Choices, one after the other: ``mb 3, zero bubble x24, zero 2, recompute full``; none without effect."""
    words = []
    for name in names:
        text, head = short_text(strategy, name), _HEADS.get(name, name.replace("_", " "))
        if text not in ("-", "none"):
            words.append(text if name == "schedule" else f"{head} {text}")
    return ", ".join(words)


def short_text(strategy: Strategy, name: str) -> str:
    """A choice in a narrow column; a schedule with its chunks."""
    if not _matters(strategy, name):
        return "-"
    if name == "schedule":
        chunks = f" x{strategy.chunks}" if strategy.chunks > 1 else ""
        return f"{_SCHEDULES[strategy.schedule]}{chunks}"
    return value_text(name, getattr(strategy, name))


def _matters(strategy: Strategy, name: str) -> bool:
    needs = {
        "schedule": strategy.pipeline > 1,
        "chunks": strategy.pipeline > 1,
        "zero": strategy.shard > 1,
        "tensor_overlap": strategy.tensor > 1,
        "sequence_parallel": strategy.tensor > 1,
        "context_method": strategy.context > 1,
        "expert": strategy.expert > 1,
        "bucket_bytes": False,
    }
    return bool(needs.get(name, True))


def _limits(result: SearchResult, width: int) -> list[Text]:
    best = result.best[0]
    lines = [f"{limit.words} ({100 * limit.share:.1f} %)" for limit in limits_of(best, result.limit_bytes)]
    faster = 1 - result.unlimited.step_s / best.step_s
    # Less than that would be printed as 0.0 %.
    if faster > 5e-4:
        lines.append(
            f"memory: with more of it, {axes_of(result.unlimited.strategy)} would be {100 * faster:.1f} % faster "
            f"({memory_bytes(result.unlimited) / 2**30:.1f} GiB)"
        )
    return [Text(wrapped(f"- {line}", width, "  ")) for line in lines]


def _sensitivities(result: SearchResult, width: int) -> Table:
    """Every choice: what the best has, and how much longer a step takes with other values."""
    best_s = result.best[0].step_s
    rows = []
    for choice in result.sensitivities:
        name = choice.choice
        others = others_text(name, _nearest(choice), best_s)
        rows += [(name.replace("_", " "), value_text(name, choice.value), others)] if others else []
    room = width - sum(max(len(row[column]) for row in rows) + 2 for column in (0, 1)) - 2 if rows else width
    table = make_columns(("choice", "left"), ("best", "left"), ("others", "left"))
    for name, value, others in rows:
        table.add_row(name, value, wrapped(others, max(room, 20)))
    return table


def _nearest(choice: Sensitivity) -> list[ChoiceOutcome]:
    here = next((place for place, outcome in enumerate(choice.outcomes) if outcome.value == choice.value), 0)
    places = [place for place in range(len(choice.outcomes)) if choice.outcomes[place].value != choice.value]
    # The nearest values say most about a choice; they are printed in their own order again.
    nearest = sorted(sorted(places, key=lambda place: abs(place - here))[:_MOST_OUTCOMES])
    return [choice.outcomes[place] for place in nearest]
