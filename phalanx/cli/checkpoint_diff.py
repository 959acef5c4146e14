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
from phalanx.cli.checkpoint_paths import one_place, steps
from phalanx.cli.checkpoint_show import Contents, contents_of
from phalanx.cli.tables import make_console, make_table


@dataclass
class Differences:
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
    found = compare_contents(left, right)
    if tensors_only:
        found.config, found.state = {}, {}
    if as_json:
        click.echo(json.dumps(vars(found) | {"same": found.same}, indent=1, ensure_ascii=False))
    else:
        _print(found, left, right, make_console())
    if not found.same:
        raise click.exceptions.Exit(1)


def compare_contents(left: Contents, right: Contents) -> Differences:
    """Compare tensors, config and state; a bar shows how far it is."""
    found = Differences(
        only_a=[name for name in left.tensors if name not in right.tensors],
        only_b=[name for name in right.tensors if name not in left.tensors],
        config=_differences(left.config, right.config),
        state=_differences(left.state, right.state),
    )
    shared = [name for name in left.tensors if name in right.tensors]
    with (
        Reader(left.place.url, left.tensors, left.place.files.open) as here,
        Reader(right.place.url, right.tensors, right.place.files.open) as there,
    ):
        for name in steps(shared, "comparing"):
            a, b = left.tensors[name], right.tensors[name]
            if a.shape != b.shape:
                found.reshaped[name] = [a.shape, b.shape]
                continue
            if a.dtype != b.dtype:
                found.recast[name] = [a.dtype, b.dtype]
            values = difference(here, there, name)
            if values.differing:
                figures = {"elements": values.elements, "differing": values.differing, "max_abs": values.max_abs}
                found.changed[name] = {**figures, "relative": values.relative if values.scale else None}
            elif a.dtype == b.dtype:
                found.equal += 1
    return found


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


def _print(found: Differences, left: Contents, right: Contents, console: Console) -> None:
    console.print(f"A  {escape(left.place.url)}\nB  {escape(right.place.url)}\n", highlight=False)
    table = make_table("tensor", "difference", "elements", "max abs", "relative", right=(2, 3, 4), whole=(0,))
    for names, side in ((found.only_a, "only in A"), (found.only_b, "only in B")):
        for name in names:
            table.add_row(escape(name), side)
    for name, (a, b) in found.reshaped.items():
        table.add_row(escape(name), escape(f"shape {a} -> {b}"))
    changed = dict.fromkeys([*found.recast, *found.changed])
    for name in changed:
        kind = " -> ".join(found.recast[name]) if name in found.recast else "values"
        values = found.changed.get(name)
        if values is None:
            table.add_row(escape(name), kind, "0", "0", "0")
            continue
        places = f"{values['differing']:,} of {values['elements']:,}"
        relative = "" if values["relative"] is None else f"{values['relative']:.3g}"
        table.add_row(escape(name), kind, places, f"{values['max_abs']:.3g}", relative)
    if table.row_count:
        console.print(table, "")
    settings = [(what, values) for what, values in (("config", found.config), ("state", found.state)) if values]
    for what, differences in settings:
        table = make_table(what, "A", "B")
        for key, (a, b) in differences.items():
            table.add_row(escape(key), *(escape("" if value is None else _short(value)) for value in (a, b)))
        console.print(table, "")
    if found.same:
        console.print(f"[green]the same: {found.equal:,} equal tensors[/green]", highlight=False)
        return
    one_sided = len(found.only_a) + len(found.only_b)
    parts = [f"{found.equal:,} tensors are equal", f"{len(found.reshaped) + len(changed):,} differ"]
    parts.append(f"{one_sided:,} are on one side only")
    parts += [f"{len(differences):,} values of the {what} differ" for what, differences in settings]
    console.print(", ".join(parts), highlight=False)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
