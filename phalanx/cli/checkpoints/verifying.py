"""`phalanx checkpoint verify`: every byte against its checksum, and the parts against each other. Torch-free."""

from __future__ import annotations

from itertools import pairwise

import click

from phalanx.checkpoint.format.manifest import Chunk, DamagedCheckpointError, Manifest
from phalanx.checkpoint.format.plain_index import PLAIN_INDEX
from phalanx.checkpoint.format.verify import check_file
from phalanx.cli.checkpoints.places import Place, places
from phalanx.cli.checkpoints.progress import bytes_bar
from phalanx.core import units

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
            said = _verify_plain(place) if place.is_plain else _verify(place)
        except DamagedCheckpointError as damage:
            damaged = True
            said = f"damaged: {damage.reason}"
        click.echo(f"{place.name}: {said}")
    if damaged:
        raise click.exceptions.Exit(1)


def _verify(place: Place) -> str:
    manifest = place.examine()
    with bytes_bar(place.name, manifest.size_bytes) as done:
        for file in manifest.files:
            check_file(place, file)
            done(file.size_bytes)
    _check_structure(place, manifest)
    return f"whole ({units.size(manifest.size_bytes)} in {len(manifest.files)} files)"


def _check_structure(place: Place, manifest: Manifest) -> None:
    """What a writer may have done wrong although the bytes are still those it wrote."""
    _check_archives(place, [chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks])
    if any(file.name == PLAIN_INDEX for file in manifest.files):
        index = place.index()
        for name in sorted(manifest.tensors.keys() | index.tensors.keys()):
            if _sorted(manifest.tensors.get(name)) != _sorted(index.tensors.get(name)):
                raise DamagedCheckpointError(
                    place.url, f"{PLAIN_INDEX} says something else of {name} than its manifest"
                )


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
        with place.open(name) as file:
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
    except OSError as error:
        raise DamagedCheckpointError(place.url, f"{error.filename} cannot be read ({error.strerror})") from None
    return f"{len(chunks):,} chunks are where its index says; plain DCP has no checksums to compare with"
