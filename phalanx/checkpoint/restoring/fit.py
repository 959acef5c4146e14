"""Whether what was saved fits what is asked for: agreed by all ranks before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.checkpoint.format.blocks import Block
from phalanx.checkpoint.format.dcp import dtype_name, torch_dtype
from phalanx.checkpoint.format.tables import names_on_no_rank, names_to_bits
from phalanx.checkpoint.restoring.parts import SavedTensor
from phalanx.checkpoint.restoring.restored import Differences
from phalanx.checkpoint.together import everywhere
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers

_SHOWN = 8


def require_fit(
    what: str,
    saved: Mapping[str, SavedTensor],
    blocks: Mapping[str, Block],
    peers: Peers,
    *,
    strict: bool,
    cast: bool,
    select: Callable[[str], bool] | None,
) -> Differences:
    """Called by all ranks together; the names on one side only (both none where `strict`).

    Args:
        what: for messages.
        select: of the saved tensors only those count whose name it accepts.

    Raises:
        UserError: listing what is missing, unexpected, or of another shape or dtype.
    """
    counted = [name for name in saved if select is None or select(name)]
    # A tensor without elements has no bytes in a snapshot, so it is not missed.
    missing = [name for name, block in blocks.items() if name not in saved and 0 not in block.shard.shape]

    def offer() -> list[Any]:
        problems = [p for n, b in blocks.items() if n in saved for p in _misfits(n, saved[n], b, cast)]
        return [problems[:_SHOWN], missing[:_SHOWN], len(missing), names_to_bits(counted, blocks)]

    offers = everywhere(peers, offer)
    unexpected = names_on_no_rank(counted, [bits for *_, bits in offers])
    problems: list[str] = []
    for rank, (misfits, names, count, _) in enumerate(offers):
        here = misfits + (_listed("missing in it", names, count) if strict else [])
        problems += [f"rank {rank}: {problem}" if len(offers) > 1 else problem for problem in here]
    if strict:
        problems += _listed("only in it", unexpected, len(unexpected))
    if problems:
        cure = "use the config it was written with, or train.init_from to take over weights only"
        raise UserError("does not fit: " + "; ".join(problems[:_SHOWN]), cure=cure, field=what)
    return Differences(tuple(missing), unexpected)


def _misfits(name: str, saved: SavedTensor, block: Block, cast: bool) -> list[str]:
    if block.shard.shape != saved.shape:
        return [f"{name} has shape {block.shard.shape} here and {saved.shape} there"]
    if not cast and block.tensor.dtype != torch_dtype(saved.dtype):
        return [f"{name} has dtype {dtype_name(block.tensor)} here and {saved.dtype} there"]
    return []


def _listed(what: str, names: Sequence[str], count: int) -> list[str]:
    if not names:
        return []
    more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
    return [f"{count} {what}: {', '.join(names[:_SHOWN])}{more}"]
