"""What a search found, for a person at a terminal: the best layouts, what limits them, what hangs on each choice."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.core.layout import Layout
from phalanx.plan.report.report_model import foreign, limits_of, toml_keys
from phalanx.plan.report.report_text import make_columns, seconds_text, title, wrapped
from phalanx.plan.search.frontier import memory_bytes
from phalanx.plan.search.search import ChoiceOutcome, SearchResult, Sensitivity
from phalanx.plan.types import Prediction, Strategy

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
    """All of a search.

    Args:
        name: of the model and the cluster.
        run: what training on all tokens takes with the fastest.
        width: columns of the terminal.
    """
    best = result.best[0]
    pieces: list[RenderableType] = [
        *_head(result, name, width),
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
        pieces += ["", title("less memory for more time"), *_layouts(thinned(result.pareto), result.limit_bytes, width)]
    if result.sensitivities:
        pieces += ["", title("what hangs on each choice, the others being free"), _sensitivities(result, width)]
    pieces += ["", title("to paste into the config")]
    pieces += [Text(toml_keys(best.job, best.strategy).rstrip())]
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


def outcome_text(outcome: ChoiceOutcome, best_s: float) -> str:
    """``+3.1 %``: how much longer a step takes with a value, everything else being at its best."""
    if outcome.best is None:
        return f"at least {100 * max(outcome.lower_s / best_s - 1, 0.0):+.1f} %, if it fits"
    more = outcome.best.step_s / best_s - 1
    about = "" if outcome.proven else "at most "
    return "same" if abs(more) < 5e-4 else f"{about}{100 * more:+.1f} %"


def others_text(name: str, outcomes: Sequence[ChoiceOutcome], best_s: float) -> str:
    """What other values of a choice cost, and last, together, those with which nothing fits."""
    known = [each for each in outcomes if each.best is not None or not each.proven]
    words = [f"{value_text(name, each.value)}: {outcome_text(each, best_s)}" for each in known]
    too_full = [value_text(name, each.value) for each in outcomes if each not in known]
    if too_full:
        words.append(f"do not fit: {', '.join(too_full)}" if len(too_full) > 1 else f"does not fit: {too_full[0]}")
    return ", ".join(words)


def thinned(predictions: Sequence[Prediction], most: int = _MOST_PARETO) -> list[Prediction]:
    """At most `most` of them, evenly spread, with the first and the last."""
    if len(predictions) <= most:
        return list(predictions)
    places = {round(step * (len(predictions) - 1) / (most - 1)) for step in range(most)}
    return [predictions[place] for place in sorted(places)]


def _head(result: SearchResult, name: str, width: int) -> list[Text]:
    best, machine = result.best[0], result.machine
    proof = "exact" if result.proven else f"not proven: no other is faster than {seconds_text(result.lower_s)}"
    counts = (
        f"{result.candidates:,} layouts by the rules, {result.fitting:,} of them fit into "
        f"{result.limit_bytes / 2**30:,.1f} GiB {_of_each(machine.devices)}; {result.predicted:,} predicted "
        f"in full, the others bounded away in {seconds_text(result.seconds)} ({proof})"
    )
    line = f"best: {axes_of(best.strategy)}, step {seconds_text(best.step_s)}, MFU {100 * best.mfu:.1f} %"
    return [Text(wrapped(name, width), style="bold"), Text(wrapped(counts, width)), Text(line, style="bold")]


def _of_each(devices: int) -> str:
    return f"of each of {devices:,} devices" if devices > 1 else "of the device"


def _layouts(predictions: Sequence[Prediction], limit_bytes: float, width: int) -> list[RenderableType]:
    """A row for each layout; what all have in common is said below, once.

    Where the terminal has no room for a column of each choice, they are one column of words.
    """
    differing, same = short_columns([prediction.strategy for prediction in predictions])
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
    digits = next(digits for digits, least in ((1, 10.0), (2, 1.0), (3, 0.0)) if max(sizes) >= least)
    return [
        (f"{one.step_s:.3f}", f"{100 * one.mfu:.1f} %", f"{size:.{digits}f}")
        for one, size in zip(predictions, sizes, strict=True)
    ]


def _natural_width(rows: Sequence[Sequence[str]]) -> int:
    """Columns of a terminal that a table takes if nothing is folded."""
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
    """Whether a choice has any effect in a layout."""
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
    """The other values, those nearest to the best's where they are many."""
    here = next((place for place, outcome in enumerate(choice.outcomes) if outcome.value == choice.value), 0)
    places = [place for place in range(len(choice.outcomes)) if choice.outcomes[place].value != choice.value]
    nearest = sorted(sorted(places, key=lambda place: abs(place - here))[:_MOST_OUTCOMES])
    return [choice.outcomes[place] for place in nearest]
