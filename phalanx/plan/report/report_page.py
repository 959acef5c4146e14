"""Pages of a prediction, of what a search found, and of predictions beside published measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phalanx.core import units
from phalanx.figures.plan import (
    choice_costs,
    errors_by_row,
    memory_bars,
    pareto_scatter,
    pipeline_timeline,
    step_breakdown,
)
from phalanx.figures.style import Figure
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.timeline import Lengths, Timeline, simulate
from phalanx.plan.report.page_blocks import (
    Block,
    Bullets,
    Cards,
    Cell,
    Code,
    FigurePlace,
    Fold,
    Heading,
    PageTable,
    Paragraph,
    Sources,
    numbers,
    soft,
)
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
    batch_line,
    days_text,
    hours_text,
    layout_line,
    seconds_text,
    start_up_line,
    verdict_line,
)
from phalanx.plan.report.search_text import (
    axes_of,
    choices_text,
    limits_text,
    numbers_of,
    others_text,
    removed_lines,
    short_columns,
    short_text,
    split_columns,
    value_text,
)
from phalanx.plan.report.validation_text import (
    LEFT_OUT_COLUMNS,
    ablation_cells,
    after_comparing_lines,
    assumed_lines,
    left_out_cells,
    left_out_line,
    mean_and_most,
    places_shown,
    row_cells,
)
from phalanx.plan.search.frontier import memory_bytes
from phalanx.plan.search.search import SearchResult
from phalanx.plan.types import Part, Prediction, Strategy
from phalanx.plan.validate.compare import Change, TableResult
from phalanx.plan.validate.left_out import Judged

# Passes through stages that are drawn at most: with more, none could be seen.
_MOST_PASSES = 50_000


def prediction_sections(report: PredictionReport, heading: str = "") -> list[Block]:
    """A prediction as blocks; `prediction_figures` has the figures that belong into it.

    Args:
        heading: over it, on a page that has a title; else it has one of its own.
    """
    prediction = report.prediction
    sources = _SourceNumbers()
    blocks = [*_head(report, heading), *_cards(report), Heading("The step"), FigurePlace("step")]
    blocks.append(_parts_table(prediction, sources))
    if prediction.hidden:
        blocks += [Heading("Hidden behind other work, not in the sum", 3), _list_table(prediction.hidden, sources)]
    blocks += [Heading("Memory"), FigurePlace("memory")]
    if report.reliefs:
        blocks += [Heading("On the same ranks it fits with", 3), _reliefs_table(report)]
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
    rows = [
        {"pipeline_rank": rank.pipeline_rank, "kind": kind.replace("_", " "), "bytes": float(getattr(rank, kind))}
        for rank in prediction.memory
        for kind in MEMORY_KINDS
    ]
    figures["memory"] = memory_bars(rows, report.device_memory_bytes)
    if _is_drawn(prediction):
        figures["pipeline"] = _timeline(prediction)
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
    return prediction.stages is not None and count >= strategy.pipeline and passes <= _MOST_PASSES


def _timeline(prediction: Prediction) -> Figure:
    """The whole step as it was predicted, up to the last backward pass; its title has the figures of the table."""
    line = step_timeline(prediction)
    waits_s, step_s = prediction.seconds("pipeline"), prediction.step_s
    unit, per_unit = ("s", 1.0) if line.length >= 1 else ("ms", 1e-3)
    title = (
        f"{prediction.strategy.schedule}: the busiest rank waits {seconds_text(waits_s)} of the step's "
        f"{seconds_text(step_s)} for others ({100 * waits_s / step_s:.1f} %)"
    )
    return pipeline_timeline(line, title, unit, per_unit)


def step_timeline(prediction: Prediction) -> Timeline:
    """When each rank of a predicted pipeline computes, in seconds, up to the last backward pass."""
    strategy, times = prediction.strategy, prediction.stages
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
        cards.append((" to ".join(map(seconds_text, prediction.interval_s)), "8 of 10 such steps"))
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
        """A cell that says how a part is known, with the number of its source."""
        if part is None:
            return Cell("")
        return Cell(part.mark, source=self._numbers.setdefault(part.source, len(self._numbers) + 1))

    def listed(self) -> Sources:
        """All that were referred to."""
        return Sources(tuple(self._numbers))


def _parts_table(prediction: Prediction, sources: _SourceNumbers) -> PageTable:
    """The tree of parts, with how each is known."""
    root = make_tree(prediction.parts)
    unit, texts = printed(root)
    rows = []
    for depth, node in root.walk():
        if depth:
            name = Cell(node.name.replace("_", " "), f"d{min(depth - 1, 3)}")
            share = f"{100 * node.seconds / root.seconds:.1f} %"
            rows.append([name, *numbers((texts[id(node)], share)), sources.known(node.part)])
    heads = [Cell("part"), *numbers((unit, "share")), Cell("how known")]
    return PageTable(heads, rows, [Cell("step"), *numbers((texts[id(root)], "100.0 %")), Cell("")])


def _list_table(parts: Iterable[Part], sources: _SourceNumbers) -> PageTable:
    """Parts beside the step, the longest first."""
    rows = [
        [Cell(part.path), Cell(seconds_text(part.seconds), "n"), sources.known(part)]
        for part in sorted(parts, key=lambda part: -part.seconds)
        if part.seconds
    ]
    return PageTable([Cell("part"), Cell("time", "n"), Cell("how known")], rows)


def _reliefs_table(report: PredictionReport) -> PageTable:
    """Settings that make it fit, with what they cost."""
    rows = []
    for one in report.reliefs:
        gib = f"{max(rank.total for rank in one.memory) / 2**30:,.1f}"
        more = f"{100 * (one.step_s / report.prediction.step_s - 1):+.1f} %"
        settings = changed_settings(report.prediction.strategy, one.strategy)
        rows.append([*numbers((gib, f"{one.step_s:,.3f}", more)), Cell(settings, "first")])
    return PageTable([*numbers(("GiB", "step s", "longer")), Cell("settings")], rows, stacked=True)


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
    figures = {"pareto": pareto_scatter(list(layout_rows(result)), result.limit_bytes)}
    if result.sensitivities:
        figures["choices"] = choice_costs(list(choice_rows(result)))
    return figures


def layout_rows(result: SearchResult) -> Iterator[dict[str, object]]:
    """Every layout that was predicted and kept, once: `layout`, `step_s`, `bytes`, `mfu`, `front`."""
    front = set(map(_key, result.pareto))
    seen = set()
    for prediction in (*result.pareto, *result.best, *result.shapes):
        if _key(prediction) not in seen:
            seen.add(_key(prediction))
            yield {
                "layout": words_of(prediction.strategy),
                "step_s": float(prediction.step_s),
                "bytes": float(memory_bytes(prediction)),
                "mfu": float(prediction.mfu),
                "front": _key(prediction) in front,
            }


def choice_rows(result: SearchResult) -> Iterator[dict[str, object]]:
    """Every value of every choice that fits: `choice`, `value`, `more`."""
    best_s = result.best[0].step_s
    for choice in result.sensitivities:
        for outcome in choice.outcomes:
            if outcome.best is not None:
                more = outcome.best.step_s / best_s - 1
                value = value_text(choice.choice, outcome.value)
                yield {"choice": choice.choice.replace("_", " "), "value": value, "more": float(more)}


def words_of(strategy: Strategy) -> str:
    """A layout in one line: its axes and its choices that matter there."""
    _, names = split_columns([strategy])
    return f"{axes_of(strategy)}, {choices_text(strategy, names)}"


def _key(prediction: Prediction) -> str:
    return repr(prediction.strategy)


def _layouts(predictions: Sequence[Prediction], limit_bytes: float) -> list[Block]:
    """A row for each layout, with what limits it."""
    differing, same = short_columns([prediction.strategy for prediction in predictions])
    names = [Cell(name.replace("_", " ")) for name in differing]
    heads = [*numbers(("step s", "MFU", "GiB")), Cell("layout"), *names, Cell("limited by")]
    rows = [
        [
            *numbers(texts),
            Cell(axes_of(prediction.strategy), "first"),
            *(Cell(short_text(prediction.strategy, name)) for name in differing),
            Cell(limits_text(prediction, limit_bytes, 2), "source"),
        ]
        for prediction, texts in zip(predictions, numbers_of(predictions), strict=True)
    ]
    shared = choices_text(predictions[0].strategy, same)
    return [PageTable(heads, rows, stacked=True), *([soft(f"all: {shared}")] if shared else [])]


def _choices(result: SearchResult) -> PageTable:
    """Every choice: what the best has, and how much longer a step takes with its other values."""
    best_s = result.best[0].step_s
    rows = []
    for choice in result.sensitivities:
        if others := [each for each in choice.outcomes if each.value != choice.value]:
            value, words = value_text(choice.choice, choice.value), others_text(choice.choice, others, best_s)
            rows.append([Cell(choice.choice.replace("_", " "), "first"), Cell(value, "source"), Cell(words, "source")])
    return PageTable([Cell("choice"), Cell("best"), Cell("others")], rows, stacked=True)


def validation_sections(
    results: Sequence[TableResult], changes: Sequence[Change], left_out: Sequence[Judged] = (), *, all_rows: bool
) -> list[Block]:
    """All tables in short, the ablation, and every table with its rows; `validation_figures` has the figure.

    Args:
        all_rows: of long tables all rows, not the worst alone.
    """
    blocks: list[Block] = [FigurePlace("errors"), Heading("All tables"), _summary(results)]
    blocks += map(soft, after_comparing_lines(results))
    blocks.append(soft("The null model is fitted to all rows of a table but the one that it predicts."))
    if changes:
        columns = ("change", "predicted", "gain", "published", "published gain")
        gains = [(each.name, *ablation_cells(each, is_first=place == 0)) for place, each in enumerate(changes)]
        blocks += [Heading("MegaScale, table 3: points of MFU after each change"), _validation_table(columns, gains)]
    if left_out:
        rows = [(one.title, *left_out_cells(one)) for one in left_out]
        blocks += [Heading("Tables left out"), _validation_table(("table", *LEFT_OUT_COLUMNS), rows)]
        blocks.append(soft(left_out_line(left_out)))
    return [*blocks, Heading("Row by row"), *(_rows(result, all_rows) for result in results)]


def validation_figures(results: Sequence[TableResult]) -> dict[str, Figure]:
    """The figure of `validation_sections`."""
    rows = [
        {"table": each.setting.title, "row": one.row.row_id, "measured_s": one.row.step_s, "error": one.error}
        for each in results
        for one in each.compared
    ]
    return {"errors": errors_by_row(rows)}


def _summary(results: Sequence[TableResult]) -> PageTable:
    rows = [
        (
            result.setting.title,
            str(len(result.compared)),
            *mean_and_most(result.errors),
            *mean_and_most(result.null_errors),
        )
        for result in results
    ]
    return _validation_table(("table", "rows", "mean", "max", "null mean", "null max"), rows)


def _rows(result: TableResult, all_rows: bool) -> Fold:
    """A table that can be opened, with what is assumed for it."""
    mean, most = mean_and_most(result.errors)
    shown = places_shown(result, all_rows)
    left_out = len(result.compared) - len(shown)
    lines = [*([f"and {left_out} rows that are nearer"] if left_out else []), *assumed_lines(result)]
    names = ("row", "devices", "batch", "measured s", "predicted s", "error", "null model")
    table = _validation_table(names, [row_cells(result, number) for number in shown])
    return Fold(f"{result.setting.title}: mean {mean}, largest {most}", [table, *map(soft, lines)])


def _validation_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> PageTable:
    cells = [[Cell(first, "first"), *numbers(rest)] for first, *rest in rows]
    return PageTable([Cell(names[0]), *numbers(names[1:])], cells, stacked=True)
