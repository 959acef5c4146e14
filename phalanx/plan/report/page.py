"""A prediction as one HTML file that needs nothing else: tables, and figures by the plotly.js that is put into it.

What a search found, as sections of a page.

Predictions held against published measurements, as sections of a page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.figures.pipelines import pipeline_timeline
from phalanx.figures.predictions import memory_bars, step_breakdown
from phalanx.figures.searches import choice_costs, pareto_scatter
from phalanx.figures.style import Figure
from phalanx.figures.validations import errors_by_row
from phalanx.parallel.pipeline.tables import make_table
from phalanx.parallel.pipeline.timeline import Lengths, Timeline, simulate
from phalanx.plan.report.model import MEMORY_KINDS, Report, changed_settings, foreign, make_tree, printed, toml_keys
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
from phalanx.plan.report.text import (
    batch_line,
    days_text,
    hours_text,
    layout_line,
    seconds_text,
    start_up_line,
    verdict_line,
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

_TEMPLATE = Path(__file__).with_name("page.html")
# Passes through stages that are drawn at most: with more, none could be seen.
_MOST_PASSES = 50_000


def write_page(path: Path, title: str, sections: Sequence[str], figures: Mapping[str, Figure]) -> None:
    """Write a page of `sections` in HTML; each figure goes where an element has its name for an id.

    Raises:
        UserError: the package that brings plotly.js is not there, or the file cannot be written.
    """
    text = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        body="\n".join(sections),
        plotly=_plotly_js(),
        # Within a script, nothing may look like its end.
        figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
    )
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", cure="give another file", value=str(path)) from None


def prediction_sections(report: Report, heading: str = "") -> list[str]:
    """A prediction in HTML; `prediction_figures` has the figures that belong into it.

    Args:
        heading: over it, on a page that has a title; else it has one of its own.
    """
    prediction = report.prediction
    sources = _Sources()
    sections = [*_head(report, heading), _cards(report), "<h2>The step</h2>", place("step")]
    sections.append(_parts_table(prediction, sources))
    if prediction.hidden:
        sections += ["<h3>Hidden behind other work, not in the sum</h3>", _list_table(prediction.hidden, sources)]
    sections += ["<h2>Memory</h2>", place("memory")]
    if report.reliefs:
        sections += ["<h3>On the same ranks it fits with</h3>", _reliefs_table(report)]
    if _is_drawn(prediction):
        sections += ["<h2>Pipeline</h2>", place("pipeline")]
    if prediction.start_up:
        sections += ["<h2>Start-up</h2>", f"<p>{escape(start_up_line(prediction))}</p>"]
        sections.append(_list_table(prediction.start_up, sources))
    if notes := (*report.remarks, *prediction.notes):
        sections += ["<h2>Notes</h2>", "<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
    return [*sections, "<h2>What the numbers rest on</h2>", sources.listed()]


def prediction_figures(report: Report) -> dict[str, Figure]:
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


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        cure = "install it with: pip install 'phalanx-train[report]'"
        raise UserError("a page needs the package plotly, which is not installed", cure=cure) from None
    return str(get_plotlyjs())


def place(name: str) -> str:
    """Where a figure goes."""
    return f'<div class="figure" id="{name}"></div>'


def _head(report: Report, heading: str) -> list[str]:
    prediction = report.prediction
    on = f"{prediction.devices:,} × {report.device}, cluster {prediction.cluster}"
    batch = f"{batch_line(prediction)}, {prediction.job.precision}, {prediction.job.optimizer}"
    title = f"<h1>{escape(report.name)}: {units.count(report.parameters)} parameters on {escape(on)}</h1>"
    return [
        f"<h2>{escape(heading)}</h2>" if heading else title,
        f'<p class="soft">{escape(layout_line(prediction.strategy))}</p>',
        f'<p class="soft">{escape(batch)}</p>',
    ]


def _cards(report: Report) -> str:
    prediction = report.prediction
    cards = [
        (seconds_text(prediction.step_s), "a step"),
        *(
            [(" to ".join(map(seconds_text, prediction.interval_s)), "8 of 10 such steps")]
            if prediction.interval_s
            else []
        ),
        (f"{prediction.tokens_per_s:,.0f}", "tokens/s"),
        (f"{100 * prediction.mfu:.1f} %", "MFU"),
    ]
    if report.run_s is not None:
        cards.append((days_text(report.run_s), f"{units.count(report.total_tokens)} tokens without a failure"))
    if report.device_hours is not None:
        cards.append((hours_text(report.device_hours), "device-hours for that"))
    if report.cost_usd is not None:
        cards.append((f"{report.cost_usd:,.0f}", f"USD, at {report.usd_per_device_hour:.2f} per device and hour"))
    cells = [f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in cards]
    verdict = f'<p class="{"good" if report.fits else "bad"}"><b>{escape(verdict_line(report))}</b></p>'
    return f'<div class="cards">{"".join(cells)}</div>\n{verdict}'


class _Sources:
    """What numbers rest on, each told once, at the end of the page; tables refer to it by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def known(self, part: Part | None) -> str:
        """A cell that says how a part is known, with the number of its source."""
        if part is None:
            return "<td></td>"
        number = self._numbers.setdefault(part.source, len(self._numbers) + 1)
        return f'<td>{part.mark} <sup><a href="#source-{number}">{number}</a></sup></td>'

    def listed(self) -> str:
        """All that were referred to."""
        rows = (f'<li id="source-{number}">{escape(source)}</li>' for source, number in self._numbers.items())
        return f'<ol class="soft sources">{"".join(rows)}</ol>'


def _parts_table(prediction: Prediction, sources: _Sources) -> str:
    """The tree of parts, with how each is known."""
    root = make_tree(prediction.parts)
    unit, texts = printed(root)
    rows = []
    for depth, node in root.walk():
        if depth:
            name = f'<td class="d{min(depth - 1, 3)}">{escape(node.name.replace("_", " "))}</td>'
            share = f"{100 * node.seconds / root.seconds:.1f} %"
            numbers = f'<td class="n">{texts[id(node)]}</td><td class="n">{share}</td>'
            rows.append(f"<tr>{name}{numbers}{sources.known(node.part)}</tr>")
    in_all = f'<td class="n">{texts[id(root)]}</td><td class="n">100.0 %</td>'
    heads = f'<th>part</th><th class="n">{unit}</th><th class="n">share</th><th>how known</th>'
    return table(heads, rows, f"<td>step</td>{in_all}<td></td>")


def _list_table(parts: Iterable[Part], sources: _Sources) -> str:
    """Parts beside the step, the longest first."""
    rows = [
        f'<tr><td>{escape(part.path)}</td><td class="n">{seconds_text(part.seconds)}</td>{sources.known(part)}</tr>'
        for part in sorted(parts, key=lambda part: -part.seconds)
        if part.seconds
    ]
    return table('<th>part</th><th class="n">time</th><th>how known</th>', rows)


def _reliefs_table(report: Report) -> str:
    """Settings that make it fit, with what they cost."""
    rows = []
    for one in report.reliefs:
        more = f"{100 * (one.step_s / report.prediction.step_s - 1):+.1f} %"
        numbers = (f"{max(rank.total for rank in one.memory) / 2**30:,.1f}", f"{one.step_s:,.3f}", more)
        cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
        settings = escape(changed_settings(report.prediction.strategy, one.strategy))
        rows.append(f'<tr>{cells}<td class="first">{settings}</td></tr>')
    heads = "".join(f'<th class="n">{name}</th>' for name in ("GiB", "step s", "longer"))
    return table(f"{heads}<th>settings</th>", rows, stacked=True)


def table(heads: str, rows: Sequence[str], foot: str = "", *, stacked: bool = False) -> str:
    """A table of ready cells and rows.

    Args:
        stacked: it has many columns: on a narrow screen each row is a block, under its cell of the class ``first``;
            else the table can be pushed sideways there.
    """
    ending = f"<tfoot><tr>{foot}</tr></tfoot>" if foot else ""
    kind = ' class="stack"' if stacked else ""
    head = f"<table{kind}><thead><tr>{heads}</tr></thead>"
    return f'<div class="wide">{head}<tbody>{"".join(rows)}</tbody>{ending}</table></div>'


def search_sections(result: SearchResult) -> list[str]:
    """A search in HTML; `search_figures` has the figures that belong into it."""
    best = result.best[0]
    counts = (
        f"{result.candidates:,} layouts by the rules, {result.fitting:,} fit; {result.predicted:,} predicted in full, "
        f"the others bounded away in {seconds_text(result.seconds)}{'' if result.proven else '; not proven'}"
    )
    sections = ["<h2>The fastest layouts</h2>", f'<p class="soft">{escape(counts)}</p>']
    sections.append(_layouts(result.best, result.limit_bytes))
    if len(result.shapes) > 1:
        sections += ["<h3>The best of each way to share the devices</h3>", _layouts(result.shapes, result.limit_bytes)]
    sections += ["<h2>Memory and time</h2>", place("pareto")]
    if result.sensitivities:
        sections += ["<h2>Choices</h2>", place("choices"), _choices(result)]
    sections += ["<h2>To paste into the config</h2>", f"<pre>{escape(toml_keys(best.job, best.strategy))}</pre>"]
    sections += [f"<p>Not possible yet: {escape(words)}</p>" for words in foreign(best.strategy)]
    if lines := removed_lines(result):
        sections += [
            "<h2>What the rules took away</h2>",
            "<ul>",
            *(f"<li>{escape(line)}</li>" for line in lines),
            "</ul>",
        ]
    return sections


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


def _layouts(predictions: Sequence[Prediction], limit_bytes: float) -> str:
    """A row for each layout, with what limits it."""
    differing, same = short_columns([prediction.strategy for prediction in predictions])
    names = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in differing)
    first = "".join(f'<th class="n">{name}</th>' for name in ("step s", "MFU", "GiB"))
    heads = f"{first}<th>layout</th>{names}<th>limited by</th>"
    rows = [
        _row(prediction, numbers, differing, limit_bytes)
        for prediction, numbers in zip(predictions, numbers_of(predictions), strict=True)
    ]
    shared = choices_text(predictions[0].strategy, same)
    return table(heads, rows, stacked=True) + (f'<p class="soft">all: {escape(shared)}</p>' if shared else "")


def _choices(result: SearchResult) -> str:
    """Every choice: what the best has, and how much longer a step takes with its other values."""
    best_s = result.best[0].step_s
    rows = []
    for choice in result.sensitivities:
        others = [each for each in choice.outcomes if each.value != choice.value]
        words = others_text(choice.choice, others, best_s)
        name, value = choice.choice.replace("_", " "), value_text(choice.choice, choice.value)
        if others:
            cells = f'<td class="first">{escape(name)}</td><td class="source">{escape(value)}</td>'
            rows.append(f'<tr>{cells}<td class="source">{escape(words)}</td></tr>')
    return table("<th>choice</th><th>best</th><th>others</th>", rows, stacked=True)


def _row(prediction: Prediction, numbers: Sequence[str], differing: Sequence[str], limit_bytes: float) -> str:
    strategy = prediction.strategy
    choices = (escape(short_text(strategy, name)) for name in differing)
    cells = [f'<td class="n">{text}</td>' for text in numbers]
    cells += [f'<td class="first">{axes_of(strategy)}</td>', *(f"<td>{text}</td>" for text in choices)]
    return f'<tr>{"".join(cells)}<td class="source">{escape(limits_text(prediction, limit_bytes, 2))}</td></tr>'


def validation_sections(
    results: Sequence[TableResult], changes: Sequence[Change], left_out: Sequence[Judged] = (), *, all_rows: bool
) -> list[str]:
    """All tables in short, the ablation, and every table with its rows; `validation_figures` has the figure.

    Args:
        all_rows: of long tables all rows, not the worst alone.
    """
    sections = [place("errors"), "<h2>All tables</h2>", _summary(results)]
    sections += [f'<p class="soft">{escape(line)}</p>' for line in after_comparing_lines(results)]
    sections.append('<p class="soft">The null model is fitted to all rows of a table but the one that it predicts.</p>')
    if changes:
        sections += ["<h2>MegaScale, table 3: points of MFU after each change</h2>", _ablation(changes)]
    if left_out:
        sections += ["<h2>Tables left out</h2>", _left_out(left_out)]
        sections.append(f'<p class="soft">{escape(left_out_line(left_out))}</p>')
    return [*sections, "<h2>Row by row</h2>", *(_rows(result, all_rows) for result in results)]


def validation_figures(results: Sequence[TableResult]) -> dict[str, Figure]:
    """The figure of `validation_sections`."""
    rows = [
        {"table": each.setting.title, "row": one.row.row_id, "measured_s": one.row.step_s, "error": one.error}
        for each in results
        for one in each.compared
    ]
    return {"errors": errors_by_row(rows)}


def _summary(results: Sequence[TableResult]) -> str:
    rows = [
        _validation_row(
            result.setting.title,
            str(len(result.compared)),
            *mean_and_most(result.errors),
            *mean_and_most(result.null_errors),
        )
        for result in results
    ]
    return _table(("table", "rows", "mean", "max", "null mean", "null max"), rows)


def _left_out(left_out: Sequence[Judged]) -> str:
    return _table(("table", *LEFT_OUT_COLUMNS), [_validation_row(one.title, *left_out_cells(one)) for one in left_out])


def _ablation(changes: Sequence[Change]) -> str:
    rows = [
        _validation_row(change.name, *ablation_cells(change, is_first=number == 0))
        for number, change in enumerate(changes)
    ]
    return _table(("change", "predicted", "gain", "published", "published gain"), rows)


def _rows(result: TableResult, all_rows: bool) -> str:
    """A table that can be opened, with what is assumed for it."""
    mean, most = mean_and_most(result.errors)
    shown = places_shown(result, all_rows)
    left_out = len(result.compared) - len(shown)
    lines = [*([f"and {left_out} rows that are nearer"] if left_out else []), *assumed_lines(result)]
    names = ("row", "devices", "batch", "measured s", "predicted s", "error", "null model")
    head = f"<summary>{escape(result.setting.title)}: mean {mean}, largest {most}</summary>"
    body = _table(names, [_validation_row(*row_cells(result, number)) for number in shown])
    return f"<details>{head}{body}{''.join(f'<p class=soft>{escape(line)}</p>' for line in lines)}</details>"


def _table(names: Sequence[str], rows: Sequence[str]) -> str:
    heads = f"<th>{names[0]}</th>" + "".join(f'<th class="n">{name}</th>' for name in names[1:])
    return table(heads, rows, stacked=True)


def _validation_row(first: str, *numbers: str) -> str:
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    return f'<tr><td class="first">{escape(first)}</td>{cells}</tr>'
