"""How what was saved of a tensor can differ from what is asked for, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.checkpoint.format.blocks import Block
from phalanx.checkpoint.format.dcp import dtype_name, torch_dtype


class SavedTensor(Protocol):
    """What has to be known of a tensor that was saved: dtype as in torch without the prefix, and global shape."""

    @property
    def dtype(self) -> str:
        """Such as ``float32``."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        ...


def misfits(name: str, saved: SavedTensor, block: Block, *, cast: bool, there: str = "there") -> list[str]:
    """What keeps `saved` from being read into `block`; empty: nothing.

    Args:
        cast: dtypes may differ.
        there: how to call the place where it was saved.
    """
    shape = tuple(saved.shape)
    if block.shard.shape != shape:
        return [f"{name} has shape {block.shard.shape} here and {shape} {there}"]
    if not cast and block.tensor.dtype != torch_dtype(saved.dtype):
        return [f"{name} has dtype {dtype_name(block.tensor)} here and {saved.dtype} {there}"]
    return []
