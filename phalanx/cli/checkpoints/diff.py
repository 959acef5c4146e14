"""`phalanx checkpoint diff`: where two checkpoints differ, in tensors, config and state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from phalanx.checkpoint.format.stored_tensors import Reader, difference
from phalanx.cli.checkpoints.checkpoint_paths import one_place, steps
from phalanx.cli.checkpoints.show import Contents, contents_of
from phalanx.cli.tables import make_console, make_table


@dataclass
class Outcome:
    """All differences.

    Attributes:
        equal: number of tensors that are the same to the last value.
        only_a, only_b: names on one side.
        reshaped: name -> both shapes; such tensors are not compared further.
        recast: name -> both dtypes; their values are compared.
        changed: name -> elements, differing, max_abs, relative (None where A is all zero).
        config, state: dotted key -> both values; None stands for absent.
    """

    equal: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    reshaped: dict[str, list[list[int]]] = field(default_factory=dict)
    recast: dict[str, list[str]] = field(default_factory=dict)
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, list[Any]] = field(default_factory=dict)
    state: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether there is no difference at all."""
        parts = (self.only_a, self.only_b, self.reshaped, self.recast, self.changed, self.config, self.state)
        return not any(parts)


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
@click.option("--tensors-only", is_flag=True, help="Leave out config and state.")
def diff_command(a: str, b: str, as_json: bool, tensors_only: bool) -> None:
    """Compare the checkpoints A and B (of a run, its newest). Exit status 0: the same; 1: they differ.

    However large they are, a few megabytes of each are in memory at a time. Layouts and files do not count: what is
    compared are whole tensors. `relative` is the largest difference as a share of the largest value in A.
    """
    left, right = contents_of(one_place(a)), contents_of(one_place(b))
    outcome = compare(left, right)
    if tensors_only:
        outcome.config, outcome.state = {}, {}
    if as_json:
        click.echo(json.dumps(vars(outcome) | {"same": outcome.same}, indent=1, ensure_ascii=False))
    else:
        _print(outcome, left, right, make_console())
    if not outcome.same:
        raise click.exceptions.Exit(1)


def compare(left: Contents, right: Contents) -> Outcome:
    """All differences between two checkpoints.

    Raises:
        DamagedCheckpointError: the files of one are not what its table says.
    """
    outcome = Outcome(
        only_a=[name for name in left.tensors if name not in right.tensors],
        only_b=[name for name in right.tensors if name not in left.tensors],
        config=_differences(left.config, right.config),
        state=_differences(left.state, right.state),
    )
    shared = [name for name in left.tensors if name in right.tensors]
    with _reader(left) as here, _reader(right) as there:
        for name in steps(shared, "comparing"):
            _compare_tensor(outcome, name, here, there)
    return outcome


def _reader(contents: Contents) -> Reader:
    return Reader(contents.place.url, contents.tensors, contents.place.open)


def _compare_tensor(outcome: Outcome, name: str, here: Reader, there: Reader) -> None:
    a, b = here.tensors[name], there.tensors[name]
    if a.shape != b.shape:
        outcome.reshaped[name] = [a.shape, b.shape]
        return
    if a.dtype != b.dtype:
        outcome.recast[name] = [a.dtype, b.dtype]
    found = difference(here, there, name)
    if found.differing:
        figures = {"elements": found.elements, "differing": found.differing, "max_abs": found.max_abs}
        outcome.changed[name] = {**figures, "relative": found.relative if found.scale else None}
    elif a.dtype == b.dtype:
        outcome.equal += 1


def _differences(left: Any, right: Any) -> dict[str, list[Any]]:
    a, b = dict(_leaves("", left)), dict(_leaves("", right))
    keys = [*a, *(key for key in b if key not in a)]
    return {key: [a.get(key), b.get(key)] for key in keys if json.dumps(a.get(key)) != json.dumps(b.get(key))}


def _leaves(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{where}.{key}" if where else str(key), inner)
    elif value is not None or where:
        yield where, value


def _print(outcome: Outcome, left: Contents, right: Contents, console: Console) -> None:
    console.print(f"A  {escape(left.place.url)}\nB  {escape(right.place.url)}\n", highlight=False)
    table = make_table("tensor", "difference", "elements", "max abs", "relative", right=(2, 3, 4), whole=(0,))
    for names, said in ((outcome.only_a, "only in A"), (outcome.only_b, "only in B")):
        for name in names:
            table.add_row(escape(name), said)
    for name, (a, b) in outcome.reshaped.items():
        table.add_row(escape(name), escape(f"shape {a} -> {b}"))
    for name in dict.fromkeys([*outcome.recast, *outcome.changed]):
        table.add_row(escape(name), *_cells(outcome, name))
    if table.row_count:
        console.print(table, "")
    for what, differences in (("config", outcome.config), ("state", outcome.state)):
        if differences:
            console.print(_values_table(what, differences), "")
    console.print(_summary(outcome), highlight=False)


def _cells(outcome: Outcome, name: str) -> list[str]:
    recast = outcome.recast.get(name)
    said = f"{recast[0]} -> {recast[1]}" if recast else "values"
    found = outcome.changed.get(name)
    if found is None:
        return [said, "0", "0", "0"]
    places = f"{found['differing']:,} of {found['elements']:,}"
    relative = "" if found["relative"] is None else f"{found['relative']:.3g}"
    return [said, places, f"{found['max_abs']:.3g}", relative]


def _values_table(what: str, differences: dict[str, list[Any]]) -> Any:
    table = make_table(what, "A", "B")
    for key, (a, b) in differences.items():
        table.add_row(escape(key), *(escape("" if value is None else _short(value)) for value in (a, b)))
    return table


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _summary(outcome: Outcome) -> str:
    if outcome.same:
        return f"[green]the same: {outcome.equal:,} equal tensors[/green]"
    one_sided = len(outcome.only_a) + len(outcome.only_b)
    changed = len(outcome.reshaped) + len({*outcome.recast, *outcome.changed})
    parts = [f"{outcome.equal:,} tensors are equal", f"{changed:,} differ", f"{one_sided:,} are on one side only"]
    settings = [f"{len(d):,} values of the {what} differ" for what, d in _settings(outcome) if d]
    return ", ".join(parts + settings)


def _settings(outcome: Outcome) -> tuple[tuple[str, dict[str, list[Any]]], ...]:
    return ("config", outcome.config), ("state", outcome.state)
