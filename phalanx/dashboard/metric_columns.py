"""Lines of a metrics.jsonl as columns: megabytes at a time by Arrow's reader, line by line where that cannot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from phalanx.telemetry.loggers import parse_line

WIDE = ("tokens", "samples", "flops", "time_s")
"""Sums over a run need 64 bits; 32 are enough for what is measured."""

_BLOCK_BYTES = 1 << 22
_STRANGE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _no_rows() -> pa.Table:
    return pa.table({"step": pa.array([], pa.int64())})


@dataclass(frozen=True)
class Block:
    """Some lines: `step` (int64) and figures (floats, null where a line has none) of steps, and those of evaluations.

    Attributes:
        marks: `kind`, `step` and `text` of what happened.
    """

    steps: pa.Table = field(default_factory=_no_rows)
    evaluations: pa.Table = field(default_factory=_no_rows)
    marks: Sequence[Mapping[str, Any]] = ()

    @property
    def column_names(self) -> list[str]:
        """Of all figures."""
        return list(dict.fromkeys((*self.steps.column_names, *self.evaluations.column_names)))

    def table_with(self, column: str) -> pa.Table:
        """Steps, or evaluations where those have the column; with the tokens and the time of the step before each."""
        if column in self.steps.column_names or column not in self.evaluations.column_names:
            return self.steps
        if not self.steps.num_rows:
            return self.evaluations
        table = self.evaluations
        steps = self.steps["step"].to_numpy()
        places = np.searchsorted(steps, table["step"].to_numpy(), side="right") - 1
        known = places >= 0
        for name, values in self._places():
            if name not in table.column_names:
                of_each = pa.array(values[np.maximum(places, 0)], pa.float64(), mask=~known)
                table = table.append_column(name, of_each)
        return table

    def _places(self) -> Iterator[tuple[str, np.ndarray]]:
        """Of each step on axes other than steps."""
        for name in ("tokens", "samples", "time_s", "flops"):
            if name in self.steps.column_names:
                yield name, self.steps[name].to_numpy(zero_copy_only=False)
            elif name == "time_s" and "step_s" in self.steps.column_names:
                yield name, np.nancumsum(self.steps["step_s"].to_numpy(zero_copy_only=False), dtype=float)


def parse_block(text: bytes) -> Block:
    """Whole lines of a metrics.jsonl; those that are torn or foreign are left out."""
    try:
        options = arrow_json.ReadOptions(block_size=max(_BLOCK_BYTES, text.find(b"\n") + 1))
        raw = arrow_json.read_json(pa.BufferReader(text), read_options=options)
        if not (pa.types.is_string(raw.schema.field("kind").type) and pa.types.is_int64(raw.schema.field("step").type)):
            raise pa.ArrowInvalid("kind or step is of another type")
    except (pa.ArrowException, KeyError):
        # Torn or foreign lines, or a column that is a number here and a text there.
        return parse_entries(filter(None, map(parse_line, text.splitlines(keepends=True))))
    raw = raw.filter(pc.and_(pc.is_valid(raw["kind"]), pc.is_valid(raw["step"])))
    steps, evaluations = (_columns(raw.filter(pc.equal(raw["kind"], kind))) for kind in ("step", "evaluation"))
    return Block(steps, evaluations, _marks(raw))


def parse_entries(entries: Iterable[dict[str, Any]]) -> Block:
    """The same, of lines that were decoded already."""
    kept = [entry for entry in entries if entry["step"].bit_length() < 63]
    kinds = ("step", "evaluation")
    steps, evaluations = (_table_of([entry for entry in kept if entry["kind"] == kind]) for kind in kinds)
    return Block(steps, evaluations, [mark for entry in kept if (mark := _mark(entry))])


def _table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in (*row, *_strange(row)))
    columns = {"step": pa.array([row["step"] for row in rows], pa.int64())}
    for name in names:
        if name in ("step", "kind", "not_finite"):
            continue
        values = [_number(row, name) for row in rows]
        if any(value is not None for value in values):
            columns[name] = pa.array(values, _type_of(name))
    return pa.table(columns)


def joined(blocks: Sequence[Block]) -> Block:
    """Blocks that follow each other, as one."""
    steps, evaluations = (_stacked([getattr(block, name) for block in blocks]) for name in ("steps", "evaluations"))
    return Block(steps, evaluations, [mark for block in blocks for mark in block.marks])


def _stacked(tables: Sequence[pa.Table]) -> pa.Table:
    kept = [table for table in tables if table.num_rows]
    if len(kept) > 1:
        return pa.concat_tables(kept, promote_options="default").combine_chunks()
    return kept[0] if kept else _no_rows()


def _columns(rows: pa.Table) -> pa.Table:
    strange = _strange_columns(rows)
    columns = {"step": rows["step"].combine_chunks().cast(pa.int64())}
    for name in dict.fromkeys((*rows.column_names, *strange)):
        if name in ("step", "kind", "not_finite"):
            continue
        kind = rows.schema.field(name).type if name in rows.column_names else pa.null()
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            if name not in strange:
                continue
            values = pa.nulls(rows.num_rows, _type_of(name))
        else:
            as_number = rows[name].combine_chunks()
            values = (as_number.cast(pa.int8()) if pa.types.is_boolean(kind) else as_number).cast(
                _type_of(name), safe=False
            )
        if name in strange:
            places, found = strange[name]
            mask = np.zeros(rows.num_rows, bool)
            mask[places] = True
            values = pc.replace_with_mask(values, pa.array(mask), pa.array(found, _type_of(name)))
        if values.null_count < len(values):
            columns[name] = values
    return pa.table(columns)


def _strange_columns(rows: pa.Table) -> dict[str, tuple[list[int], list[float]]]:
    """Numbers that JSON has not, by column: the rows and the values there."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    if "not_finite" not in rows.column_names:
        return found
    column = rows["not_finite"].combine_chunks()
    if not pa.types.is_struct(column.type):
        return found
    places = np.flatnonzero(column.is_valid().to_numpy(False))
    for place, texts in zip(places.tolist(), column.take(pa.array(places)).to_pylist(), strict=True):
        for name, text in texts.items():
            if text in _STRANGE:
                of_column = found.setdefault(name, ([], []))
                of_column[0].append(place)
                of_column[1].append(_STRANGE[text])
    return found


def _marks(raw: pa.Table) -> list[dict[str, Any]]:
    others = pc.invert(pc.is_in(raw["kind"], pa.array(["step", "evaluation", "snapshot"])))
    if "skipped" in raw.column_names and not pa.types.is_null(raw.schema.field("skipped").type):
        skipped = pc.fill_null(pc.not_equal(raw["skipped"].cast(pa.int64(), safe=False), 0), False)
        others = pc.or_(others, skipped)
    names = [name for name in ("kind", "step", "skipped", "checkpoint/name") if name in raw.column_names]
    return [mark for entry in raw.select(names).filter(others).to_pylist() if (mark := _mark(entry))]


def _mark(entry: dict[str, Any]) -> dict[str, Any] | None:
    kind, step = entry["kind"], entry["step"]
    if kind == "checkpoint":
        return {"kind": "checkpoint", "step": step, "text": str(entry.get("checkpoint/name") or "")}
    if kind == "start" and step:
        return {"kind": "resume", "step": step, "text": f"went on from step {step}"}
    if kind == "step" and entry.get("skipped"):
        return {"kind": "skipped step", "step": step, "text": "update left out as bad"}
    return None


def _type_of(name: str) -> pa.DataType:
    return pa.float64() if name in WIDE else pa.float32()


def _number(row: dict[str, Any], name: str) -> float | None:
    value = row.get(name)
    if isinstance(value, bool | int | float):
        return float(value) if abs(value) < 1e300 else math.nan
    return _STRANGE.get(str(_strange(row).get(name)))


def _strange(row: dict[str, Any]) -> dict[str, Any]:
    found = row.get("not_finite")
    return found if isinstance(found, dict) else {}
