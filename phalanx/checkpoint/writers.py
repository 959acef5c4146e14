"""Which rank writes which blocks of a checkpoint: agreed by all of them, so that each element is written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.checkpoint.format import dcp
from phalanx.checkpoint.format.blocks import Block, held
from phalanx.checkpoint.together import everywhere
from phalanx.core.layout import Shard
from phalanx.core.peers import Peers


@dataclass(frozen=True)
class Agreed:
    """What one rank knows after `agree`.

    Attributes:
        blocks: all that it holds, by name.
        mine: those of them that it writes.
        needed_bytes: about what the files of all ranks together will take.
    """

    blocks: Mapping[str, Block]
    mine: Mapping[str, Block]
    needed_bytes: int

    @property
    def left(self) -> list[str]:
        """Names of tensors whose first element is held here and which another rank has to write."""
        return sorted(name for name, block in self.blocks.items() if name not in self.mine and _has_first(block.shard))


def agree(
    tensors: Mapping[str, Tensor], shards: Mapping[str, Shard], peers: Peers, check: Callable[[], None] | None = None
) -> Agreed:
    """Called by all ranks together: owners write their blocks; what has no shard is written by the first that has it.

    Args:
        tensors: by logical name, as far as this rank has them.
        shards: which block of its logical tensor each of `tensors` is, and whether this rank writes it.
        peers: the ranks that save together.
        check: done first, here; if it fails on one rank, nothing is agreed on any.

    Raises:
        ValueError: a shard has not the size of its tensor. UserError: that is so on another rank.
    """
    unsharded = [name for name in tensors if name not in shards]
    of_first = peers.broadcast(unsharded)
    extra = sorted(set(unsharded).difference(of_first))
    blocks: dict[str, Block] = {}

    def offer() -> list[Any]:
        if check is not None:
            check()
        blocks.update(held(tensors, shards))
        mine = _owned(blocks, shards) | set(unsharded if peers.rank == 0 else extra)
        return [dcp.bytes_needed({name: blocks[name] for name in mine}), extra]

    offers = everywhere(peers, offer)
    earlier = {name for _, names in offers[: peers.rank] for name in names}.union(of_first if peers.rank else ())
    names = _owned(blocks, shards) | set(unsharded).difference(earlier)
    mine = {name: block for name, block in blocks.items() if name in names}
    return Agreed(blocks, mine, sum(needed_bytes for needed_bytes, _ in offers))


def _owned(blocks: Mapping[str, Block], shards: Mapping[str, Shard]) -> set[str]:
    return {name for name, shard in shards.items() if shard.owner and name in blocks}


def _has_first(shard: Shard) -> bool:
    return not any(shard.offsets) and (shard.numel > 0 or 0 in shard.shape)
