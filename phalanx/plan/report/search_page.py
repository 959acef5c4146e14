"""What a search found, as sections of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from phalanx.figures.plan import choice_costs, pareto_scatter
from phalanx.figures.style import Figure
from phalanx.plan.report.page import place, table
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
from phalanx.plan.report.text import seconds_text
from phalanx.plan.search.keys import foreign, toml_keys
from phalanx.plan.search.result import SearchResult, memory_bytes
from phalanx.plan.types import Prediction, Strategy


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
