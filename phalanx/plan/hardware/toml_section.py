"""Tables of TOML in which every number says how it is known: read one key at a time, refusing what nobody asked for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

from phalanx.core.errors import UserError
from phalanx.plan.toml_tree import read_tree
from phalanx.plan.types import Mark, Number

_RANGES: Mapping[str, tuple[float, float]] = {
    # The longest ending that a key has says its unit, and between which values a number of that unit makes sense:
    # someone who writes gigabytes or microseconds falls out of it.
    "flops_per_s": (1e7, 1e18),
    "bytes_per_s": (1e5, 1e15),
    "flops": (1, 1e18),
    "bytes": (1, 1e18),
    "usd_per_device_hour": (0, 1e4),
    "s": (0, 1e5),
    "ratio": (0, 100),
}

_AT_ONCE = (0, 1.0)
_OWN: Mapping[str, tuple[float, float]] = {
    # Where a unit in general allows what cannot be right for this key, or cannot be computed with.
    "memory_bytes": (1e8, 1e18),
    **dict.fromkeys(("kernel_s", "kernel_gap_s", "host_launch_s", "launch_s", "latency_s"), _AT_ONCE),
    "host_compiled_launch_s": _AT_ONCE,
    **dict.fromkeys(("send_latency_s", "start_s", "hop_s", "inside_hop_s", "hop_latency_s"), _AT_ONCE),
    **dict.fromkeys(("clock_from_s", "clock_to_s", "time_s"), (1e-9, 1e5)),
    **dict.fromkeys(("achieved_ratio", "share_ratio"), (0.001, 1)),
    **dict.fromkeys(("rank_sigma_ratio", "slow_host_share_ratio"), (0, 1)),
    **dict.fromkeys(("weight_gradient_ratio", "correction_ratio"), (0.001, 100)),
    "memory_ratio": (0.01, 2),
    "efficiency_ratio": (0.1, 2),
    "softness": (1, 100),
}


_LONG = 80  # characters of a value that a message shows


def unit_of(key: str) -> str:
    """The unit that the ending of `key` names; ``count`` where it names none."""
    for unit in _RANGES:
        if key == unit or key.endswith("_" + unit):
            return unit
    return "count"


@dataclass
class Section:
    """One table of a file.

    Attributes:
        tree: the keys, as tomllib read them.
        path: where the table stands, such as ``gemm.bf16``; empty for the whole file.
        sources: what ``source = "id"`` stands for: text with date.
    """

    file: str
    tree: Mapping[str, Any]
    path: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)

    def where(self, key: str = "") -> str:
        """File and dotted key, for messages."""
        return f"{self.file}: {'.'.join(part for part in (self.path, key) if part)}"

    def has(self, key: str) -> bool:
        """Whether `key` is there."""
        return key in self.tree

    def expect(self, *keys: str) -> None:
        """Say which keys will be asked for, so that one that is missing is not confused with them."""
        self._asked.update(keys)

    def raw(self, key: str) -> Any:
        """The value of `key`, unchecked.

        Raises:
            UserError: it is missing.
        """
        self._asked.add(key)
        if key not in self.tree:
            raise UserError("is missing", cure=self._cure_missing(key), field=self.where(key))
        return self.tree[key]

    def text(self, key: str) -> str:
        """A string.

        Raises:
            UserError: it is missing or none.
        """
        value = self.raw(key)
        if not isinstance(value, str):
            raise self.refusal("is no text", "write it in quotes", key, value)
        return value

    def sub(self, key: str) -> Section:
        """The table under `key`.

        Raises:
            UserError: it is missing or no table.
        """
        value = self.raw(key)
        if not isinstance(value, dict):
            cure = f"write [{'.'.join(part for part in (self.path, key) if part)}] with its keys below"
            raise self.refusal("is no table", cure, key, value)
        path = f"{self.path}.{key}" if self.path else key
        return Section(self.file, value, path, self.sources)

    def number(self, key: str) -> Number:
        """A number with mark, source and date; its unit is the ending of its key.

        Raises:
            UserError: it is missing, has no mark, source or date, or cannot be right in its unit.
        """
        value, mark, source = self._marked(key)
        return Number(self._plausible(key, value), unit_of(key), mark, source)

    def numbers(self, key: str) -> tuple[tuple[float, ...], Mark, str]:
        """A list of numbers under one mark and source.

        Raises:
            UserError: as `number` does, or it is no list.
        """
        values, mark, source = self._marked(key)
        if not isinstance(values, list) or not values:
            raise self.refusal("is no list", "write value = [.., ..]", key, values)
        return tuple(self._plausible(key, value) for value in values), mark, source

    def axis(self, key: str, least: int = 1) -> tuple[float, ...]:
        """Sizes that something was measured at: a list of `least` numbers or more, above 0 and ascending.

        Raises:
            UserError: as `numbers` does, or they are not.
        """
        values, _, _ = self.numbers(key)
        if values[0] <= 0 or any(after <= before for before, after in pairwise(values)):
            raise self.refusal("does not ascend from above 0", "sort it, with each value once", key, list(values))
        if len(values) < least:
            raise self.refusal("is too short to draw a line", f"give {least} values at least", key, list(values))
        return values

    def counts(self, key: str) -> tuple[int, ...]:
        """An axis of whole numbers.

        Raises:
            UserError: as `axis` does, or they are none.
        """
        values = self.axis(key)
        if any(value != int(value) for value in values):
            raise self.refusal("are no whole numbers", "count them", key, list(values))
        return tuple(int(value) for value in values)

    def rows(self, key: str) -> tuple[tuple[tuple[float, ...], ...], Mark, str]:
        """Rows of numbers of the same length under one mark and source.

        Raises:
            UserError: as `number` does, or rows differ in length.
        """
        values, mark, source = self._marked(key)
        is_rows = isinstance(values, list) and values and all(isinstance(row, list) and row for row in values)
        if not is_rows or len({len(row) for row in values}) > 1:
            cure = "write value = [[.., ..], [.., ..]], every row as long as the others"
            raise self.refusal("is no list of equal rows", cure, key, values)
        return tuple(tuple(self._plausible(key, value) for value in row) for row in values), mark, source

    def grid(self, key: str, height: int, width: int, of: str) -> tuple[tuple[tuple[float, ...], ...], Mark, str]:
        """Rows as `rows` has them, of which there are as many as the axes say that they were measured over.

        Args:
            of: what there is a row for, in words.

        Raises:
            UserError: as `rows` does, or there are more or fewer.
        """
        rows, mark, source = self.rows(key)
        if (len(rows), len(rows[0])) != (height, width):
            cure = f"write {height} rows of {width}: a row for each of {of}"
            raise UserError("does not fit its axes", cure=cure, field=self.where(key))
        return rows, mark, source

    def done(self) -> None:
        """Refuse keys that nothing asked for.

        Raises:
            UserError: there is one.
        """
        for key in self.tree:
            if key not in self._asked:
                close = difflib.get_close_matches(key, self._asked, n=1, cutoff=0.5)
                cure = f"did you mean {close[0]}?" if close else f"take it out; known: {', '.join(sorted(self._asked))}"
                raise self.refusal("is no known key", cure, key, self.tree[key])

    def refusal(self, problem: str, cure: str, key: str, value: object) -> UserError:
        """The error for what stands under `key`; tables and long lists are not printed."""
        if isinstance(value, dict | list) and len(repr(value)) > _LONG:
            return UserError(problem, cure=cure, field=self.where(key))
        return UserError(problem, cure=cure, field=self.where(key), value=value)

    def _cure_missing(self, key: str) -> str:
        close = difflib.get_close_matches(key, [k for k in self.tree if k not in self._asked], n=1, cutoff=0.5)
        hint = f" ({close[0]} is no known key: its name or unit is another)" if close else ""
        return f"add it in {unit_of(key)}{hint}" if unit_of(key) != "count" else f"add it{hint}"

    def _marked(self, key: str) -> tuple[Any, Mark, str]:
        table = self.raw(key)
        shape = '{ value = .., mark = "measured|derived|assumed", source = ".." }'
        if not isinstance(table, dict):
            raise self.refusal("says not how it is known", f"write {shape}", key, table)
        inner = self.sub(key)
        value, mark, source = inner.raw("value"), inner.text("mark"), inner.text("source")
        date = inner.text("date") if inner.has("date") else ""
        inner.done()
        if mark not in get_args(Mark):
            raise UserError("is no mark", cure=f"write {shape}", field=inner.where("mark"), value=mark)
        return value, cast(Mark, mark), self._dated(inner, source, date)

    def _dated(self, inner: Section, source: str, date: str) -> str:
        if date:
            return f"{source} ({date})"
        if source in self.sources:
            return self.sources[source]
        known = ", ".join(sorted(self.sources)) or "none"
        cure = f'add date = "YYYY-MM", or name one of [sources]: {known}'
        raise UserError("has no date and is not in [sources]", cure=cure, field=inner.where("source"), value=source)

    def _plausible(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal("is no number", "write it as a number", key, value)
        unit = unit_of(key)
        least, most = _OWN.get(key) or _RANGES.get(unit, (-1e18, 1e18))
        if not least <= value <= most:
            cure = f"give it in {unit}: between {least:g} and {most:g}"
            raise self.refusal(f"cannot be right in {unit}", cure, key, value)
        return float(value)


def read(path: Path) -> Section:
    """The whole file at `path`, its sources read.

    Raises:
        UserError: it cannot be read, is no TOML, or a source has no date.
    """
    top = Section(path.name, read_tree(path))
    if top.has("sources"):
        listed = top.sub("sources")
        for key in listed.tree:
            source = listed.sub(key)
            top.sources = {**top.sources, key: f"{source.text('text')} ({source.text('date')})"}
            source.done()
    return top
