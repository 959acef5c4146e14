"""Pages of a prediction and of what a search found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phalanx.core import units
from phalanx.figures.pages.page_blocks import (
    Block,
    Bullets,
    Cards,
    Cell,
    Code,
    FigurePlace,
    Heading,
    PageTable,
    Paragraph,
    Sources,
    numbers,
    soft,
)
from phalanx.figures.pipeline import pipeline_timeline
from phalanx.figures.plan import (
    choice_costs,
    memory_bars,
    pareto_scatter,
    step_breakdown,
)
from phalanx.figures.style import Figure
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.timeline import Lengths, Timeline, simulate
from phalanx.plan.report.report_model import (
    MEMORY_KINDS,
    PredictionReport,
    changed_settings,
    foreign,
    make_tree,
    printed,
    toml_keys,
)
from phalanx.plan.report.report_text import (
    axes_of,
    batch_line,
    choices_text,
    days_text,
    hours_text,
    layout_line,
    limits_text,
    numbers_of,
    others_text,
    removed_lines,
    seconds_text,
    short_columns,
    short_text,
    split_columns,
    start_up_line,
    value_text,
    verdict_line,
)
from phalanx.plan.search.frontier import memory_bytes
from phalanx.plan.search.search import SearchResult
from phalanx.plan.types import Part, Prediction, Strategy

# Passes through stages that are drawn at most: with more, none could be seen.
_MOST_PASSES = 50_000


def prediction_sections(report: PredictionReport, heading: str = "") -> list[Block]:
    """A prediction as blocks; `prediction_figures` has the figures that belong into it.

    Args:
        heading: over it, on a page that has a title; else it has one of its own.
    """
    # Tables number their sources as they are built, so the list of sources is made last.
    prediction = report.prediction
    sources = _SourceNumbers()
    blocks = [*_head(report, heading), *_cards(report), Heading("The step"), FigurePlace("step")]
    blocks.append(_parts_table(prediction, sources))
    if prediction.hidden:
        blocks += [Heading("Hidden behind other work, not in the sum", 3), _list_table(prediction.hidden, sources)]
    blocks += [Heading("Memory"), FigurePlace("memory")]
    if report.reliefs:
        rows = []
        for one in report.reliefs:
            gib = f"{max(rank.total for rank in one.memory) / 2**30:,.1f}"
            more = f"{100 * (one.step_s / report.prediction.step_s - 1):+.1f} %"
            settings = changed_settings(report.prediction.strategy, one.strategy)
            rows.append([*numbers((gib, f"{one.step_s:,.3f}", more)), Cell(settings, "first")])
        blocks += [
            Heading("On the same ranks it fits with", 3),
            PageTable([*numbers(("GiB", "step s", "longer")), Cell("settings")], rows, stacked=True),
        ]
    if _is_drawn(prediction):
        blocks += [Heading("Pipeline"), FigurePlace("pipeline")]
    if prediction.start_up:
        blocks += [Heading("Start-up"), Paragraph(start_up_line(prediction)), _list_table(prediction.start_up, sources)]
    if notes := (*report.remarks, *prediction.notes):
        blocks += [Heading("Notes"), Bullets(notes)]
    return [*blocks, Heading("What the numbers rest on"), sources.listed()]


def prediction_figures(report: PredictionReport) -> dict[str, Figure]:
    """The figures of a prediction, by the id of their place."""
    prediction = report.prediction
    figures = {"step": step_breakdown(list(part_rows(prediction)))}
    # Every pipeline rank, where the terminal shows some: a figure has room for all.
    rows = [
        {"pipeline_rank": rank.pipeline_rank, "kind": kind.replace("_", " "), "bytes": float(getattr(rank, kind))}
        for rank in prediction.memory
        for kind in MEMORY_KINDS
    ]
    figures["memory"] = memory_bars(rows, report.device_memory_bytes)
    if _is_drawn(prediction):
        # The whole step as it was predicted, up to the last backward pass; its title has the figures of the table
        line = step_timeline(prediction)
        waits_s, step_s = prediction.seconds("pipeline"), prediction.step_s
        unit, per_unit = ("s", 1.0) if line.length >= 1 else ("ms", 1e-3)
        title = (
            f"{prediction.strategy.schedule}: the busiest rank waits {seconds_text(waits_s)} of the step's "
            f"{seconds_text(step_s)} for others ({100 * waits_s / step_s:.1f} %)"
        )
        figures["pipeline"] = pipeline_timeline(line, title, unit, per_unit)
    return figures


def part_rows(prediction: Prediction) -> Iterator[dict[str, object]]:
    """The parts of a step as a table: `path`, `seconds`, `mark`, `hidden`."""
    for parts, hidden in ((prediction.parts, False), (prediction.hidden, True)):
        for part in parts:
            if part.seconds:
                yield {"path": part.path, "seconds": float(part.seconds), "mark": part.mark, "hidden": hidden}


def _is_drawn(prediction: Prediction) -> bool:
    """Whether there is a pipeline, with passes that can be seen, and a schedule of ours for so few micro-batches."""
    strategy = prediction.strategy
    count = int(strategy.micro_batches(prediction.job.global_batch))
    passes = count * int(strategy.pipeline * strategy.chunks)
    # `make_table` refuses fewer micro-batches than ranks, though other programs can be predicted with them.
    return prediction.stages is not None and count >= strategy.pipeline and passes <= _MOST_PASSES


def step_timeline(prediction: Prediction) -> Timeline:
    """When each rank of a predicted pipeline computes, in seconds, up to the last backward pass."""
    strategy, times = prediction.strategy, prediction.stages
    # `_is_drawn` has been asked before: there are times of stages.
    assert times is not None
    seconds = {
        "F": times.forward_s,
        "B": times.backward_s,
        "I": times.backward_input_s,
        "W": times.backward_weight_s,
    }
    count = int(strategy.micro_batches(prediction.job.global_batch))
    table = make_table(strategy.schedule, int(strategy.pipeline), int(strategy.chunks), count)
    return simulate(table, Lengths(lambda action: seconds[action.kind][action.stage], times.send_s, times.blocking))


def _head(report: PredictionReport, heading: str) -> list[Block]:
    prediction = report.prediction
    on = f"{prediction.devices:,} × {report.device}, cluster {prediction.cluster}"
    title = f"{report.name}: {units.count(report.parameters)} parameters on {on}"
    return [
        Heading(heading) if heading else Heading(title, 1),
        soft(layout_line(prediction.strategy)),
        soft(f"{batch_line(prediction)}, {prediction.job.precision}, {prediction.job.optimizer}"),
    ]


def _cards(report: PredictionReport) -> list[Block]:
    prediction = report.prediction
    cards = [(seconds_text(prediction.step_s), "a step")]
    if prediction.interval_s:
        # The interval is that of `INTERVAL_SHARE`, 80 %.
        cards.append((" to ".join(map(seconds_text, prediction.interval_s)), "8 of 10 such steps"))
    elif prediction.unjudged:
        cards.append(("not judged", f"how far steps lie from it: {prediction.unjudged}"))
    cards += [(f"{prediction.tokens_per_s:,.0f}", "tokens/s"), (f"{100 * prediction.mfu:.1f} %", "MFU")]
    if report.run_s is not None:
        cards.append((days_text(report.run_s), f"{units.count(report.total_tokens)} tokens without a failure"))
    if report.device_hours is not None:
        cards.append((hours_text(report.device_hours), "device-hours for that"))
    if report.cost_usd is not None:
        cards.append((f"{report.cost_usd:,.0f}", f"USD, at {report.usd_per_device_hour:.2f} per device and hour"))
    return [Cards(cards), Paragraph(verdict_line(report), "good" if report.fits else "bad", strong=True)]


class _SourceNumbers:
    """What numbers rest on, each once, at the end of the page; tables refer to it by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def known(self, part: Part | None) -> Cell:
        if part is None:
            return Cell("")
        return Cell(part.mark, source=self._numbers.setdefault(part.source, len(self._numbers) + 1))

    def listed(self) -> Sources:
        return Sources(tuple(self._numbers))


def _parts_table(prediction: Prediction, sources: _SourceNumbers) -> PageTable:
    root = make_tree(prediction.parts)
    unit, texts = printed(root)
    rows = []
    for depth, node in root.walk():
        if depth:
            # Depth 0 is the step itself, which is the foot of the table. The page indents three levels.
            name = Cell(node.name.replace("_", " "), f"d{min(depth - 1, 3)}")
            share = f"{100 * node.seconds / root.seconds:.1f} %"
            rows.append([name, *numbers((texts[id(node)], share)), sources.known(node.part)])
    heads = [Cell("part"), *numbers((unit, "share")), Cell("how known")]
    return PageTable(heads, rows, [Cell("step"), *numbers((texts[id(root)], "100.0 %")), Cell("")])


def _list_table(parts: Iterable[Part], sources: _SourceNumbers) -> PageTable:
    rows = [
        [Cell(part.path), Cell(seconds_text(part.seconds), "n"), sources.known(part)]
        # These do not follow each other, so the longest comes first.
        for part in sorted(parts, key=lambda part: -part.seconds)
        if part.seconds
    ]
    return PageTable([Cell("part"), Cell("time", "n"), Cell("how known")], rows)


def search_sections(result: SearchResult) -> list[Block]:
    """A search as blocks; `search_figures` has the figures that belong into it."""
    best = result.best[0]
    counts = (
        f"{result.candidates:,} layouts by the rules, {result.fitting:,} fit; {result.predicted:,} predicted in full, "
        f"the others bounded away in {seconds_text(result.seconds)}{'' if result.proven else '; not proven'}"
    )
    blocks: list[Block] = [Heading("The fastest layouts"), soft(counts), *_layouts(result.best, result.limit_bytes)]
    if len(result.shapes) > 1:
        blocks += [Heading("The best of each way to share the devices", 3)]
        blocks += _layouts(result.shapes, result.limit_bytes)
    blocks += [Heading("Memory and time"), FigurePlace("pareto")]
    if result.sensitivities:
        blocks += [Heading("Choices"), FigurePlace("choices"), _choices(result)]
    blocks += [Heading("To paste into the config"), Code(toml_keys(best.job, best.strategy))]
    blocks += [Paragraph(f"Not possible yet: {words}") for words in foreign(best.strategy)]
    if lines := removed_lines(result):
        blocks += [Heading("What the rules took away"), Bullets(lines)]
    return blocks


def search_figures(result: SearchResult) -> dict[str, Figure]:
    """The figures of a search, by the id of their place."""
    # One layout may be among the best, the shapes and the front at once, each time with a prediction of its own: it is
    # drawn once.
    front = {repr(prediction.strategy) for prediction in result.pareto}
    kept = {repr(one.strategy): one for one in (*result.shapes, *result.best, *result.pareto)}
    ordered = dict.fromkeys(repr(one.strategy) for one in (*result.pareto, *result.best, *result.shapes))
    layouts: list[dict[str, object]] = [
        {
            "layout": words_of(kept[key].strategy),
            "step_s": float(kept[key].step_s),
            "bytes": float(memory_bytes(kept[key])),
            "mfu": float(kept[key].mfu),
            "front": key in front,
        }
        for key in ordered
    ]
    choices: list[dict[str, object]] = [
        {
            "choice": choice.choice.replace("_", " "),
            "value": value_text(choice.choice, outcome.value),
            "more": float(outcome.best.step_s / result.best[0].step_s - 1),
        }
        for choice in result.sensitivities
        for outcome in choice.outcomes
        # Where nothing fits there is no time to draw; the table of choices names these values.
        if outcome.best is not None
    ]
    figures = {"pareto": pareto_scatter(layouts, result.limit_bytes)}
    if result.sensitivities:
        figures["choices"] = choice_costs(choices)
    return figures


def words_of(strategy: Strategy) -> str:
    """A layout in one line: its axes and its choices that matter there."""
    _, names = split_columns([strategy])
    return f"{axes_of(strategy)}, {choices_text(strategy, names)}"


def _layouts(predictions: Sequence[Prediction], limit_bytes: float) -> list[Block]:
    differing, same = short_columns([prediction.strategy for prediction in predictions])
    names = [Cell(name.replace("_", " ")) for name in differing]
    heads = [*numbers(("step s", "MFU", "GiB")), Cell("layout"), *names, Cell("limited by")]
    rows = [
        [
            *numbers(texts),
            Cell(axes_of(prediction.strategy), "first"),
            *(Cell(short_text(prediction.strategy, name)) for name in differing),
            # A page has room for the two largest limits, a terminal for one.
            Cell(limits_text(prediction, limit_bytes, 2), "source"),
        ]
        for prediction, texts in zip(predictions, numbers_of(predictions), strict=True)
    ]
    shared = choices_text(predictions[0].strategy, same)
    return [PageTable(heads, rows, stacked=True), *([soft(f"all: {shared}")] if shared else [])]


def _choices(result: SearchResult) -> PageTable:
    best_s = result.best[0].step_s
    rows = []
    for choice in result.sensitivities:
        if others := [each for each in choice.outcomes if each.value != choice.value]:
            value, words = value_text(choice.choice, choice.value), others_text(choice.choice, others, best_s)
            rows.append([Cell(choice.choice.replace("_", " "), "first"), Cell(value, "source"), Cell(words, "source")])
    return PageTable([Cell("choice"), Cell("best"), Cell("others")], rows, stacked=True)
