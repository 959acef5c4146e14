"""Writing the tables that `phalanx.plan.hardware` reads: every number with its mark and its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from phalanx.plan.types import Mark

Value: TypeAlias = "float | Sequence[float] | Sequence[Sequence[float]]"


def marked(key: str, value: Value, mark: Mark, source: str) -> str:
    """A line ``key = { value = .., mark = .., source = .. }``; `source` names one of `sources`."""
    return f'{key} = {{ value = {_text(value)}, mark = "{mark}", source = "{source}" }}'


def source(name: str, text: str, date: str) -> str:
    """What a source stands for."""
    return f"[sources.{name}]\ntext = {quoted(text)}\ndate = {quoted(date)}\n"


def quoted(text: str) -> str:
    """A TOML string."""
    plain = "".join(character if character >= " " else " " for character in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _text(value: Value) -> str:
    if isinstance(value, Sequence):
        return "[" + ", ".join(_text(each) for each in value) + "]"
    return f"{value:.5g}" if value != int(value) or abs(value) >= 1e15 else str(int(value))
