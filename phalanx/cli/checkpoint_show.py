"""`phalanx checkpoint show` and `verify`: what one checkpoint holds, and whether every byte of it is right."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.table import Table

from phalanx.checkpoint.format.checkpoint_files import check_file
from phalanx.checkpoint.format.manifest import Chunk, DamagedCheckpointError, TensorEntry
from phalanx.checkpoint.format.plain_dcp_index import PLAIN_INDEX
from phalanx.cli.checkpoint_paths import Place, bytes_bar, one_place, places, steps
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.files import StoreFailedError

if TYPE_CHECKING:
    from phalanx.checkpoint.format.stored_tensors import TensorHealth

_FILES_SHOWN = 8


@dataclass(frozen=True)
class Contents:
    """What is shown of a checkpoint, whatever wrote it; `others`: of plain DCP, where what is not a tensor lies."""

    place: Place
    tensors: Mapping[str, TensorEntry]
    facts: dict[str, str]
    config: Any = None
    state: Any = None
    others: Mapping[str, Chunk] = field(default_factory=dict)


@click.command("show")
@click.argument("path")
@click.option("--health", is_flag=True, help="Read all numbers: those not finite, range, mean, standard deviation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
@click.option("--config", is_flag=True, help="Print the resolved config it was written with, as JSON, and no more.")
@click.option("--state", is_flag=True, help="Print the saved state (position in the data …), as JSON, and no more.")
def show_command(path: str, health: bool, as_json: bool, config: bool, state: bool) -> None:
    """Show what the checkpoint PATH holds; of a run, its newest. PATH may be a folder of plain DCP (torchtitan)."""
    contents = contents_of(one_place(path))
    if config or state:
        click.echo(json.dumps(contents.config if config else contents.state, indent=1, ensure_ascii=False))
        return
    found: Mapping[str, TensorHealth] = {}
    if health:
        from phalanx.checkpoint.format.stored_tensors import Reader  # torch, only where numbers are read
        from phalanx.checkpoint.format.stored_tensors import health as health_of

        with Reader(contents.place.url, contents.tensors, contents.place.files.open) as reader:
            found = {name: health_of(reader, name) for name in steps(contents.tensors, "reading")}
    if as_json:
        click.echo(json.dumps(_tree(contents, found), indent=1, ensure_ascii=False))
        return
    console = make_console()
    console.print(_tensor_table(contents.tensors, found), "")
    console.print(_file_table(contents.tensors), "")
    table = Table(title="checkpoint", title_justify="left", box=None, pad_edge=False, show_header=False)
    for name, text in [("folder", contents.place.url), *contents.facts.items()]:
        table.add_row(name, escape(text))
    if found:
        bad = {name: figures.not_finite for name, figures in found.items() if figures.not_finite}
        numbers = f"[red]{sum(bad.values()):,} numbers are not finite, in {_names(list(bad))}[/red]"
        table.add_row("health", numbers if bad else "[green]all numbers are finite[/green]")
    console.print(table)


def contents_of(place: Place) -> Contents:
    """What `place` holds; raises where it is damaged at first sight, or of plain DCP whose index is refused."""
    if place.is_plain:
        index = place.index()
        facts = _size_facts(index.tensors) | {"other entries": _names(list(index.others))}
        return Contents(place, index.tensors, {"format": "plain DCP, without checksums"} | facts, others=index.others)
    m = place.examine()
    state = _names(list(m.state)) if isinstance(m.state, dict) else type(m.state).__name__
    facts = {
        "step": f"{m.step:,}",
        "written": f"{m.created} by attempt {m.attempt}",
        "layout": m.layout,
        "metrics": " ".join(f"{name}={value:.6g}" for name, value in m.metrics.items()),
        "versions": f"phalanx {m.phalanx_version}, torch {m.torch_version}",
        **_size_facts(m.tensors),
        "size": f"{units.size(m.size_bytes)} in {len(m.files)} files",
        "config": f"{m.config_sha256} (SHA-256)",
        "state": state,
    }
    return Contents(place, m.tensors, {name: text for name, text in facts.items() if text}, m.config, m.state)


def _tensor_table(tensors: Mapping[str, TensorEntry], found: Mapping[str, TensorHealth]) -> Table:
    numbers = ("not finite", "min", "max", "mean", "std") if found else ()
    columns = ("tensor", "dtype", "shape", "elements", "on disk", "chunks", *numbers)
    table = make_table(*columns, right=tuple(range(3, len(columns))), whole=(0,))
    for name, tensor in tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        stored = units.size(sum(chunk.length for chunk in tensor.chunks))
        cells = [escape(name), escape(tensor.dtype), shape, f"{tensor.elements:,}", stored, str(len(tensor.chunks))]
        if found:
            h = found[name]
            cells.append(f"[red]{h.not_finite:,}[/red]" if h.not_finite else "0")
            cells += ["" if value is None else f"{value:.4g}" for value in (h.minimum, h.maximum, h.mean, h.std)]
        table.add_row(*cells)
    return table


def _file_table(tensors: Mapping[str, TensorEntry]) -> Table:
    """How the tensors lie in files, one for each rank that wrote."""
    table = make_table("file", "chunks", "size of tensors", right=(1, 2))
    counts: Counter[str] = Counter(chunk.file for tensor in tensors.values() for chunk in tensor.chunks)
    sizes: Counter[str] = Counter()
    for chunk in (chunk for tensor in tensors.values() for chunk in tensor.chunks):
        sizes[chunk.file] += chunk.length
    names = sorted(counts, key=lambda name: (len(name), name))
    for name in names[:_FILES_SHOWN]:
        table.add_row(escape(name), f"{counts[name]:,}", units.size(sizes[name]))
    rest = names[_FILES_SHOWN:]
    if rest:
        chunks, stored = sum(counts[name] for name in rest), sum(sizes[name] for name in rest)
        table.add_row(f"and {len(rest)} more", f"{chunks:,}", units.size(stored))
    return table


def _size_facts(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    elements = sum(tensor.elements for tensor in tensors.values())
    chunks = sum(len(tensor.chunks) for tensor in tensors.values())
    return {"tensors": f"{len(tensors):,} with {units.count(elements)} elements in {chunks:,} chunks"}


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _FILES_SHOWN} more" if len(names) > _FILES_SHOWN else ""
    return ", ".join(names[:_FILES_SHOWN]) + more if names else "none"


def _tree(contents: Contents, found: Mapping[str, TensorHealth]) -> dict[str, Any]:
    tensors = {}
    for name, tensor in contents.tensors.items():
        tree: dict[str, Any] = {"dtype": tensor.dtype, "shape": tensor.shape, "elements": tensor.elements}
        tree |= {"bytes": sum(c.length for c in tensor.chunks), "chunks": [c.model_dump() for c in tensor.chunks]}
        if found:
            h = found[name]
            tree["health"] = {"not_finite": h.not_finite, "min": h.minimum, "max": h.maximum, "mean": h.mean}
            tree["health"]["std"] = h.std
        tensors[name] = tree
    return {"path": contents.place.url, **contents.facts, "tensors": tensors, "others": list(contents.others)}


_BEGINNING = b"PK\x03\x04"  # of an archive, which is a ZIP file
_END = b"PK\x05\x06"  # of its directory
_END_BYTES = 22


@click.command("verify")
@click.argument("path")
def verify_command(path: str) -> None:
    """Hold every byte of a checkpoint against its checksum, and its parts against each other.

    PATH is a checkpoint, or a run for all of its own. Checked are: the manifest and the list of checksums; every byte
    of every file; that each chunk begins and ends as an archive and overlaps no other; that DCP's own index says the
    same as the manifest. The exit status is 1 if one is damaged.
    """
    damaged = False
    for place in places(path):
        try:
            result = _verify_plain(place) if place.is_plain else _verify(place)
        except DamagedCheckpointError as damage:
            damaged = True
            result = f"damaged: {damage.reason}"
        click.echo(f"{place.name}: {result}")
    if damaged:
        raise click.exceptions.Exit(1)


def _verify(place: Place) -> str:
    manifest = place.examine()
    with bytes_bar(place.name, manifest.size_bytes) as done:
        for file in manifest.files:
            check_file(place.files, file)
            done(file.size_bytes)
    # What a writer may have done wrong although the bytes are still those it wrote.
    _check_archives(place, [chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks])
    if any(file.name == PLAIN_INDEX for file in manifest.files):
        index = place.index()
        for name in sorted(manifest.tensors.keys() | index.tensors.keys()):
            if _sorted(manifest.tensors.get(name)) != _sorted(index.tensors.get(name)):
                problem = f"{PLAIN_INDEX} says something else of {name} than its manifest"
                raise DamagedCheckpointError(place.url, problem)
    return f"whole ({units.size(manifest.size_bytes)} in {len(manifest.files)} files)"


def _sorted(entry: object) -> object:
    """A table entry whose chunks are in one order."""
    tree = entry.model_dump() if hasattr(entry, "model_dump") else None
    if tree is not None:
        tree["chunks"].sort(key=lambda chunk: (chunk["file"], chunk["offset"]))
    return tree


def _check_archives(place: Place, chunks: list[Chunk]) -> None:
    by_file: dict[str, list[Chunk]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        by_file.setdefault(chunk.file, []).append(chunk)
    for name, inside in by_file.items():
        for one, other in pairwise(inside):
            if one.offset + one.length > other.offset:
                raise DamagedCheckpointError(place.url, f"{name}: two chunks share the byte {other.offset}")
        with place.files.open(name) as file:
            for chunk in inside:
                file.seek(chunk.offset)
                begins = file.read(len(_BEGINNING)) == _BEGINNING
                file.seek(chunk.offset + max(0, chunk.length - _END_BYTES))
                if not begins or file.read(len(_END)) != _END:
                    raise DamagedCheckpointError(place.url, f"{name}: no archive of a tensor at byte {chunk.offset}")


def _verify_plain(place: Place) -> str:
    index = place.index()
    chunks = [chunk for tensor in index.tensors.values() for chunk in tensor.chunks]
    try:
        _check_archives(place, chunks)
    except StoreFailedError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(place.url, f"{error.filename} cannot be read ({error.strerror})") from None
    return f"{len(chunks):,} chunks are where its index says; plain DCP has no checksums to compare with"
