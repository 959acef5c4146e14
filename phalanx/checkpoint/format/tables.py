"""What each rank wrote where, as short text to gather, and put together into the tensors of a manifest. Torch-free."""

from __future__ import annotations

import base64
import heapq
import json
import zlib
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from phalanx.checkpoint.format.manifest import Chunk, FileEntry, TensorEntry, cover_fault


@dataclass(frozen=True)
class Written:
    """What one rank wrote.

    Attributes:
        file: its file; None if it had nothing to write.
        tensors: by name: dtype, global shape and this rank's chunk of it (None where the whole tensor is empty).
        left: tensors whose first element this rank holds and leaves to another rank to write.
    """

    file: FileEntry | None
    tensors: dict[str, tuple[str, list[int], Chunk | None]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def pack(value: Any) -> str:
    """A JSON value as compressed text: gathered from ten thousand ranks, its length counts."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode())).decode()


def unpack(text: str) -> Any:
    """The value given to `pack`."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def to_text(written: Written) -> str:
    """For `peers.gather`."""
    file = None if written.file is None else list(written.file.model_dump().values())
    tensors = {
        name: [dtype, shape, None if c is None else [c.offsets, c.sizes, c.offset, c.length]]
        for name, (dtype, shape, c) in written.tensors.items()
    }
    return pack([file, tensors, written.left])


def from_text(text: str) -> Written:
    """The reverse of `to_text`."""
    file, tensors, left = unpack(text)
    entry = None if file is None else FileEntry(**dict(zip(FileEntry.model_fields, file, strict=True)))
    table = {n: (dtype, shape, c and _chunk(entry, *c)) for n, (dtype, shape, c) in tensors.items()}
    return Written(entry, table, left)


def merge(parts: Collection[Written]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint from what its ranks wrote, by name.

    Raises:
        RuntimeError: ranks disagree about a tensor, or do not cover it exactly once: the shards were made wrongly.
    """
    found: dict[str, tuple[str, list[int], list[Chunk]]] = {}
    for part in parts:
        for name, (dtype, shape, chunk) in part.tensors.items():
            known = found.setdefault(name, (dtype, shape, []))
            if known[:2] != (dtype, shape):
                raise RuntimeError(f"{name} is {known[0]} {known[1]} on one rank and {dtype} {shape} on another")
            known[2].extend([] if chunk is None else [chunk])
    lost = sorted({name for part in parts for name in part.left} - found.keys())
    if lost:
        raise RuntimeError(f"{', '.join(lost[:8])}: held, but written by no rank; none of the shards has an owner")
    return {name: _entry(name, *found[name]) for name in sorted(found)}


def names_to_bits(order: Iterable[str], names: Container[str]) -> str:
    """Which of `order` are among `names`, one bit each: many ranks can say what they have in a few hundred bytes."""
    return hex(int("1" + "".join("1" if name in names else "0" for name in order), 2))


def names_on_no_rank(order: Iterable[str], bits: Iterable[str]) -> tuple[str, ...]:
    """Those of `order` that are in none of the answers of `names_to_bits`."""
    some = bin(reduce(or_, (int(one, 16) for one in bits)))[3:]
    return tuple(name for name, bit in zip(order, some, strict=True) if bit == "0")


def share_out(files: Mapping[str, int], workers: int) -> list[list[str]]:
    """Divide files (name -> bytes) among `workers` so that all read about as many bytes; the same answer everywhere."""
    shares: list[list[str]] = [[] for _ in range(workers)]
    loads = [(0, index) for index in range(workers)]
    for name, size_bytes in sorted(files.items(), key=lambda item: (-item[1], item[0])):
        load, index = loads[0]
        shares[index].append(name)
        heapq.heapreplace(loads, (load + size_bytes, index))
    return shares


def _entry(name: str, dtype: str, shape: list[int], chunks: list[Chunk]) -> TensorEntry:
    fault = cover_fault(shape, chunks)
    if fault is not None:
        files = ", ".join(sorted({chunk.file for chunk in chunks})[:8])
        raise RuntimeError(f"{name}, of shape {shape}, cannot be saved: {fault} (in {files}); its shards are wrong")
    return TensorEntry(dtype=dtype, shape=shape, chunks=chunks)


def _chunk(file: FileEntry | None, offsets: list[int], sizes: list[int], offset: int, length: int) -> Chunk:
    assert file is not None, "a chunk without a file"
    return Chunk(offsets=offsets, sizes=sizes, file=file.name, offset=offset, length=length)
