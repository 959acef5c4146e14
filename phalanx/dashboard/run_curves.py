"""Figures of runs over their steps: what can be shown, and the curves of several, from columns that were read once."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.metric_columns import Block
from phalanx.dashboard.metrics_store import Figures, MetricsStore
from phalanx.figures.curves import X, curves
from phalanx.figures.series import unpacked
from phalanx.figures.style import PALETTE, Figure, Row, empty
from phalanx.run.incidents.incident_pages import incidents_folder, listed, load
from phalanx.run.incidents.report import Lost, Seen
from phalanx.telemetry.run_list import read_config

X_NAMES: Mapping[X, str] = {"step": "steps", "tokens": "tokens", "time_s": "time", "flops": "FLOPs"}
assert set(X_NAMES) == set(get_args(X))

UNITS = {
    "loss": "nats",
    "validation_loss": "nats",
    "validation_bits_per_byte": "bits",
    "tokens_per_s": "1/s",
    "step_s": "s",
}
TITLES = {
    "validation_loss": "held-out loss",
    "validation_bits_per_byte": "held-out bits per byte",
    "validation_perplexity": "held-out perplexity",
    "grad_norm": "norm of the gradient",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
    "step_s": "seconds of a step",
    "mfu": "MFU",
    "memory_bytes": "memory in use, bytes",
}
"""What columns are called where their names are short for something."""

FIRST = ("loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "mfu")
"""Columns that people look at most; others follow by name."""

_NOT_SHOWN = ("step", "skipped", "untrained", "tokens", "samples", "validation_tokens")
SMALL_PIXELS = 210
_FLAT_SHARE = 1e-4
_MARKED_IN_SMALL = ("resume", "skipped step", "incident", "not finite")
_POINTS_IN_ALL = 40_000
_MOST_POINTS = 2000
_USUAL_STEPS = 50
_MOST_MARKED = 8
"""With more curves, marks would be all that is seen."""


@dataclass(frozen=True)
class Axes:
    """How curves are drawn. `span`: of the moving average, in steps; 1: none."""

    column: str = "loss"
    x: X = "step"
    span: float = 1.0
    is_log: bool = False


def metrics_path(run: Run) -> Path | None:
    """Where its figures stand."""
    return None if run.folder is None else run.folder / "metrics.jsonl"


def metrics_paths(runs: Sequence[Run]) -> list[Path]:
    """Where those of several stand."""
    return [path for run in runs if (path := metrics_path(run)) is not None]


def columns_in(figures: Sequence[Figures], runs: Sequence[Run] = ()) -> list[str]:
    """Columns that can be drawn, the usual ones first; samples have no evaluations, of which rows of `runs` tell."""
    names = {name for one in figures for name in one.block.column_names} - set(_NOT_SHOWN)
    names |= {"validation_loss" for run in runs if run.row.validation_loss is not None}
    return [name for name in FIRST if name in names] + sorted(names - set(FIRST))


def color_of_place(place: int) -> str:
    """Colour of the curve of the run in that place."""
    return PALETTE[place % len(PALETTE)]


def overlay(store: MetricsStore, runs: Sequence[Run], axes: Axes, *, within_s: float = 0.3) -> Figure:
    """One column of several runs over one axis; runs of which large files are still being read come as samples."""
    if not runs:
        return empty(axes.column, "no run is chosen: tick some below")
    by_path = {path: run for run in runs if (path := metrics_path(run)) is not None and path.exists()}
    if not by_path:
        return empty(axes.column, "no chosen run has figures yet" if len(runs) > 1 else "no figures yet")
    points = int(np.clip(_POINTS_IN_ALL // len(runs), 200, _MOST_POINTS))
    found = store.read(list(by_path), within_s=within_s, sample=int(np.clip(8000 // len(runs), 40, 256)))
    names = _names(list(by_path.values()))
    tables = {
        names[by_path[path].id]: _with_flops(one.block.table_with(axes.column), by_path[path], axes.x)
        for path, one in found.items()
    }
    marks: list[Row] = []
    if len(runs) <= _MOST_MARKED:
        for path, one in found.items():
            run = by_path[path]
            kept = [mark for mark in one.block.marks if len(runs) == 1 or mark["kind"] != "checkpoint"]
            marks += [{"run": names[run.id], **mark} for mark in (*kept, *incident_marks(run))]
    figure = curves(
        tables,
        axes.column,
        unit=UNITS.get(axes.column, ""),
        x=axes.x,
        span=axes.span,
        points=points,
        marks=marks,
        is_log=axes.is_log,
    )
    sampled = sum(not one.is_whole for one in found.values())
    if sampled:
        title = figure["layout"]["title"]
        title["text"] += f" — sampled, {sampled} large file{'s are' if sampled > 1 else ' is'} being read"
    return figure


def held_out_beside(store: MetricsStore, run: Run, axes: Axes) -> Figure:
    """The loss of one run while training and on held-out text, as two curves."""
    path = metrics_path(run)
    found = store.read([path]) if path is not None else {}
    if path is None or path not in found:
        return empty("loss", "no figures yet")
    block = found[path].block
    shown = {"training": _with_flops(block.steps, run, axes.x)}
    if "validation_loss" in block.evaluations.column_names:
        table = _with_flops(block.table_with("validation_loss"), run, axes.x)
        kept = [name for name in table.column_names if name != "loss"]
        renamed = ["loss" if name == "validation_loss" else name for name in kept]
        shown["held-out"] = table.select(kept).rename_columns(renamed)
    marks = [{"run": "training", **mark} for mark in (*block.marks, *incident_marks(run))]
    figure = curves(shown, "loss", unit="nats", x=axes.x, span=axes.span, marks=marks, is_log=axes.is_log)
    smoothing = f", smoothed over {axes.span:g} steps" if axes.span > 1 else ""
    figure["layout"]["title"]["text"] = f"loss{smoothing}"
    return figure


def small_curve(store: MetricsStore, run: Run, axes: Axes) -> Figure:
    """One column of one run, as one of many small figures: without what the others say as well."""
    figure = overlay(store, [run], axes)
    layout = figure["layout"]
    # One curve needs no symbols to be told apart, and checkpoints stand on the curve of the loss.
    figure["data"] = [
        trace for trace in figure["data"] if trace.get("mode") != "markers" or trace["name"] in _MARKED_IN_SMALL
    ]
    layout["title"]["text"] = title_of(axes.column)
    layout["title"]["font"] = {"size": 13}
    layout |= {"height": SMALL_PIXELS, "showlegend": False}
    for axis in ("xaxis", "yaxis"):
        if "title" in layout.get(axis, {}):
            layout[axis]["title"]["text"] = ""
    layout["margin"] = {**layout["margin"], "t": 32}
    lines = [unpacked(trace["y"]) for trace in figure["data"] if trace.get("mode") == "lines"]
    known = np.concatenate([line[np.isfinite(line)] for line in lines]) if lines else np.zeros(0)
    if known.size and np.ptp(known) < _FLAT_SHARE * abs(float(known.mean())):
        # Else a constant fills the figure with the rounding of its last digits.
        layout["yaxis"]["range"] = sorted((0.9 * float(known.mean()), 1.1 * float(known.mean())))
    return figure


def title_of(column: str) -> str:
    """What a column is called."""
    return TITLES.get(column, column.replace("_", " "))


def seconds_left(run: Run, block: Block) -> float | None:
    """Until the last step, by the time of the newest ones; None: not known."""
    row = run.row
    if row.step is None or row.total_steps is None or "step_s" not in block.steps.column_names:
        return None
    newest = block.steps["step_s"].slice(max(block.steps.num_rows - _USUAL_STEPS, 0)).to_numpy(zero_copy_only=False)
    known = newest[np.isfinite(newest)]
    return float(np.median(known)) * max(row.total_steps - row.step, 0) if known.size else None


def incident_marks(run: Run) -> list[dict[str, Any]]:
    """Incidents of a job that say at which step they were."""
    if run.folder is None or run.card is None:
        return []
    return [dict(mark) for mark in _incident_marks(run.folder, _stamp(incidents_folder(run.folder)))]


@functools.lru_cache(maxsize=64)
def _incident_marks(folder: Path, stamp: int) -> tuple[Mapping[str, Any], ...]:
    marks = []
    for summary in listed(folder):
        if summary.result == "unreadable":
            continue
        steps = [-1]
        for fact in load(folder, summary.number).facts:
            if isinstance(fact, Seen):
                steps.append(fact.step)
            elif isinstance(fact, Lost):
                steps.append(fact.from_step)
        if max(steps) >= 0:
            text = f"incident {summary.number}: {summary.title}"
            marks.append({"kind": "incident", "step": max(steps), "text": text})
    return tuple(marks)


def flops_per_token(run: Run) -> float | None:
    """Forward and backward, as the model's shapes have it; None: its settings do not tell."""
    return None if run.folder is None else _flops_per_token(run.folder, _stamp(run.folder / "config.json"))


@functools.lru_cache(maxsize=1024)
def _flops_per_token(folder: Path, stamp: int) -> float | None:
    from phalanx.data.tokenizers.spec import open_saved_tokenizer
    from phalanx.model.config import ModelConfig
    from phalanx.model.shapes import flops_per_token

    try:
        settings = read_config(folder)
        length = int(settings["data"]["sequence_length"])
        model = dict(settings["model"])
        model["max_sequence"] = model.get("max_sequence") or length
        model["vocab_size"] = model.get("vocab_size") or open_saved_tokenizer(folder / "tokenizer").vocab_size
        return flops_per_token(ModelConfig.model_validate(model), length).total
    except (UserError, KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _with_flops(table: pa.Table, run: Run, x: X) -> pa.Table:
    if x != "flops" or "tokens" not in table.column_names or "flops" in table.column_names:
        return table
    each = flops_per_token(run)
    if each is None:
        return table
    tokens = table["tokens"].combine_chunks().to_numpy(zero_copy_only=False)
    return table.append_column("flops", pa.array(tokens * each, from_pandas=True))


def _names(runs: Sequence[Run]) -> dict[str, str]:
    """What curves are called; of runs that people gave one name, the id says which is which."""
    named: dict[str, list[str]] = {}
    for run in runs:
        named.setdefault(run.name, []).append(run.id)
    return {one: name if len(ids) == 1 else f"{name} ({one})" for name, ids in named.items() for one in ids}


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def difference(runs: Sequence[Run]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Settings in which runs differ, a text for each run, and what could not be read."""
    from phalanx.telemetry.run_list import flattened

    settings, problems = [], []
    for run in runs:
        try:
            settings.append(dict(flattened(read_config(run.folder))) if run.folder is not None else {})
        except UserError as error:
            settings.append({})
            problems.append(f"{run.name}: {error.problem}")
    rows = []
    for key in dict.fromkeys(key for one in settings for key in one):
        texts = [json.dumps(one[key], ensure_ascii=False) if key in one else "" for one in settings]
        if len(set(texts)) > 1:
            rows.append((key, texts))
    return rows, problems
