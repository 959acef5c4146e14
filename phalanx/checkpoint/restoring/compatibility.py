"""Whether what was saved fits what is asked for, and which parts of it fill the blocks of this rank.

All ranks agree that it fits before a byte is written. A `ReadItem` is where a saved block and a wanted one meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.checkpoint.all_ranks import at_first, collected
from phalanx.checkpoint.format.dcp import Block, SavedTensor, misfits, narrow, torch_dtype
from phalanx.checkpoint.format.manifest import overlap
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers

_SHOWN = 8
CURE = "use the config it was written with, or train.init_from to take over weights only"
_SHOWN_PREFIXES = 12
_SHOWN_NAMES = 3
_PREFIX_PARTS = 2


class Words(NamedTuple):
    """What messages call the place where it was saved: "missing `within`", "has shape (3,) here and (2,) `there`"."""

    within: str
    there: str


CHECKPOINT = Words("in the checkpoint", "in the checkpoint")
SOURCE = Words("in it", "there")  # where the message has named it before


@dataclass(frozen=True)
class Differences:
    """Names on one side only, after a load that was not strict.

    Attributes:
        missing: asked for on this rank and not saved.
        unexpected: saved and asked for on no rank.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For people: names grouped by how they begin, with counts and the first few of each group."""
        return [
            *_grouped("not in the checkpoint, left as they were", self.missing),
            *_grouped("only in the checkpoint", self.unexpected),
        ]


def require_fit(
    what: str,
    saved: Mapping[str, SavedTensor],
    blocks: Mapping[str, Block],
    peers: Peers,
    *,
    strict: bool,
    cast: bool,
    select: Callable[[str], bool] | None = None,
    misses_empty: bool,
    words: Words,
    cure: str = CURE,
) -> Differences:
    """The names on one side only (none where `strict`); called by all ranks together.

    Args:
        what, words, cure: for messages.
        blocks: what this rank asks for.
        strict: every name must be on both sides. Names of which another rank has a part are on both sides.
        cast: dtypes may differ.
        select: of the saved tensors only those count whose name it accepts.
        misses_empty: whether tensors without elements have to be among `saved` too.

    Raises:
        UserError: listing what is missing, unexpected, or of another shape or dtype.
    """
    counted = [name for name in saved if select is None or select(name)]
    missing = [
        name for name, block in blocks.items() if name not in saved and (misses_empty or 0 not in block.shard.shape)
    ]

    def offer() -> list[Any]:
        asked = [(n, saved[n], b) for n, b in blocks.items() if n in saved]
        problems = [p for each in asked for p in misfits(*each, cast=cast, there=words.there)]
        return [problems[:_SHOWN], missing[:_SHOWN], len(missing), names_to_bits(counted, blocks)]

    offers = collected(peers, offer) or []

    def judge() -> list[list[str]]:
        unexpected = names_on_no_rank(counted, [bits for *_, bits in offers])
        problems: list[str] = []
        for rank, (wrong, names, count, _) in enumerate(offers):
            here = wrong + (listed(f"missing {words.within}", names, count) if strict else [])
            problems += [f"rank {rank}: {problem}" if len(offers) > 1 else problem for problem in here]
        if strict:
            problems += listed(f"only {words.within}", unexpected, len(unexpected))
        return [problems[:_SHOWN], list(unexpected)]

    problems, unexpected = at_first(peers, judge)
    if problems:
        raise UserError("does not fit: " + "; ".join(problems), cure=cure, field=what)
    return Differences(tuple(missing), tuple(unexpected))


def names_to_bits(order: Iterable[str], names: Container[str]) -> str:
    """Which of `order` are among `names`, one bit each: what many ranks have fits into a few hundred bytes."""
    return hex(int("1" + "".join("1" if name in names else "0" for name in order), 2))


def names_on_no_rank(order: Iterable[str], bits: Iterable[str]) -> tuple[str, ...]:
    """Those of `order` that are in none of the answers of `names_to_bits`."""
    some = bin(reduce(or_, (int(one, 16) for one in bits)))[3:]
    return tuple(name for name, bit in zip(order, some, strict=True) if bit == "0")


def listed(what: str, names: Sequence[str], count: int) -> list[str]:
    """``3 missing: a, b, c`` in a list, of the first names and the count of all; empty where there are none."""
    if not names:
        return []
    more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
    return [f"{count} {what}: {', '.join(names[:_SHOWN])}{more}"]


def _grouped(what: str, names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[:_PREFIX_PARTS]), []).append(name)
    lines = [f"{len(names)} {what}:"]
    for prefix, members in list(groups.items())[:_SHOWN_PREFIXES]:
        more = f" and {len(members) - _SHOWN_NAMES} more" if len(members) > _SHOWN_NAMES else ""
        lines.append(f"  {prefix} ({len(members)}): {', '.join(members[:_SHOWN_NAMES])}{more}")
    if len(groups) > _SHOWN_PREFIXES:
        lines.append(f"  and {len(groups) - _SHOWN_PREFIXES} groups more")
    return lines


@dataclass(frozen=True)
class SavedBlock:
    """A block of a saved tensor, and where its bytes are: elements in the memory of a shard (`holder` is its rank), or
    an archive in a file (`holder` is its number)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    holder: int
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class SavedBlocks:
    """A tensor that was saved: dtype as in torch without the prefix, global shape, and the blocks that fill it."""

    dtype: str
    shape: tuple[int, ...]
    blocks: list[SavedBlock]


@dataclass(frozen=True)
class ReadItem:
    """The box of a saved block, of the shape of `out` and beginning at `start` in it, that goes to `out`."""

    name: str
    block: SavedBlock
    dtype: torch.dtype
    start: tuple[int, ...]
    out: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of what is wanted, as it was saved."""
        return self.out.numel() * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (along the first dimension) of the saved block."""
        return math.prod(self.block.sizes[1:]) * self.dtype.itemsize

    @property
    def run(self) -> tuple[int, int]:
        """First byte and end of the rows needed, in memory in which the block lies in order."""
        if not self.block.sizes:
            return self.block.start_bytes, self.block.start_bytes + self.dtype.itemsize
        first = self.block.start_bytes + self.start[0] * self.row_bytes
        return first, first + self.out.shape[0] * self.row_bytes

    def split(self, limit_bytes: int) -> Iterator[ReadItem]:
        """In runs of rows that take at most `limit_bytes`, or one row."""
        if not self.start or self.nbytes <= limit_bytes:
            yield self
            return
        rows = max(1, limit_bytes // max(1, self.row_bytes))
        for first in range(0, self.out.shape[0], rows):
            start = (self.start[0] + first, *self.start[1:])
            yield ReadItem(self.name, self.block, self.dtype, start, self.out[first : first + rows])


def read_items(saved: Mapping[str, SavedBlocks], wanted: Mapping[str, Block]) -> list[ReadItem]:
    """All that fills the blocks in `wanted` of those in `saved`, in the order of the holders' bytes."""
    found = []
    for name in (name for name in wanted if name in saved):
        target, dtype = wanted[name], torch_dtype(saved[name].dtype)
        for block in saved[name].blocks:
            shared = overlap(block, target.shard)
            if shared is not None:
                offsets, sizes = shared
                start = tuple(o - b for o, b in zip(offsets, block.offsets, strict=True))
                place = [o - first for o, first in zip(offsets, target.shard.offsets, strict=True)]
                found.append(ReadItem(name, block, dtype, start, narrow(target.tensor, place, sizes)))
    return sorted(found, key=lambda part: (part.block.holder, part.block.start_bytes, part.start))
