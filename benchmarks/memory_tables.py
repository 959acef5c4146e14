"""Tables of docs/memory.md: what recompute keeps, where memory goes, and the largest model on one card. All predicted.

    python benchmarks/memory_tables.py

Nothing is measured: the numbers are those of `phalanx.plan.memory`, on which a run's own choice rests. Of a GPU, in
bf16. A test holds the page against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from train_gpu import SHAPES

from phalanx.model.config import ModelConfig
from phalanx.parallel.config import ParallelConfig
from phalanx.plan.jobs import make_job, make_strategy, software_of
from phalanx.plan.memory import rank_memory
from phalanx.plan.memory.pieces import pieces_of
from phalanx.plan.types import Job, RankMemory, Strategy
from phalanx.plan.work.layer import layer
from phalanx.plan.work.local import local_of
from phalanx.plan.work.operations import Product
from phalanx.train.derived.fit import GPU_MEMORY_SHARE, LEVELS, Level

_GIB, _MIB = 1 << 30, 1 << 20
_CARD_BYTES = 79.1 * _GIB  # what an H100 of 80 GB reports
_LAYER = SHAPES["llama-8b-4-layers"].model  # of Llama 3 8B
_SEQUENCE = 8192
_EIGHT_BIT = 2 / 8
"""Bytes of AdamW's state in 8 bit over those in fp32."""


def job_of(model: ModelConfig, sequences: int, *, compiled: bool = False) -> Job:
    """A step of `sequences` on one GPU."""
    software = software_of(model, ParallelConfig(), "bf16", compiled=compiled, on_cpu=False)
    return make_job(
        model, sequence=_SEQUENCE, global_batch=sequences, precision="bf16", optimizer="adamw", software=software
    )


def strategy_of(level: Level, micro_batch: int = 2, offload: float = 0.0) -> Strategy:
    """One process."""
    return make_strategy(ParallelConfig(), micro_batch=micro_batch, recompute=level, offload=offload)


def levels() -> Iterator[str]:
    """What a layer keeps, and what its backward pass makes again."""
    yield "| `train.recompute` | kept of a layer | products made again | their share of the layer's forward products |"
    yield "|---|--:|--:|--:|"
    for level in LEVELS:
        job, strategy = job_of(_LAYER, 2), strategy_of(level)
        products = [each for each in layer(local_of(job, strategy), 0, False) if isinstance(each, Product)]
        flops = [each.m * each.n * each.k for each in products]
        again = [each for each, product in zip(flops, products, strict=True) if strategy.recompute in product.again]
        kept = pieces_of(job, strategy).kept[0].chosen / _MIB
        yield f"| `{level}` | {kept:,.0f} MiB | {len(again)} of {len(flops)} | {sum(again) / sum(flops):.0%} |"


def parts() -> Iterator[str]:
    """Where the memory of four layers of Llama 3 8B goes at the fullest moment of a step."""
    yield "| GiB | weights | optimizer | gradients | activations | loss head | workspace | together |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for level in LEVELS:
        for compiled in (False, True):
            found = rank_memory(job_of(_LAYER, 2, compiled=compiled), strategy_of(level))[0]
            cells = (found.parameters, found.optimizer, found.gradients, found.activations, found.loss_head)
            total = found.total - found.fragmentation
            shown = " | ".join(f"{size / _GIB:.2f}" for size in (*cells, found.workspace, total))
            yield f"| `{level}`, {'compiled' if compiled else 'eager'} | {shown} |"


def largest(level: Level, offload: float, state: float) -> tuple[int, float]:
    """Layers of Llama 3 8B's shape that fit onto one card, and parameters of that model in billions.

    Args:
        state: bytes of the optimizer's state over those in fp32.
    """
    layers = 0
    while _total(rank_memory(*_grown(layers + 1, level, offload))[0], state) <= GPU_MEMORY_SHARE * _CARD_BYTES:
        layers += 1
    weights = rank_memory(*_grown(max(layers, 1), level, offload))[0].parameters / 4
    return layers, weights / 1e9


def _grown(layers: int, level: Level, offload: float) -> tuple[Job, Strategy]:
    model = _LAYER.model_copy(update={"layers": layers})
    return job_of(model, 8), strategy_of(level, micro_batch=1, offload=offload)


def _total(found: RankMemory, state: float) -> float:
    return replace(found, optimizer=found.optimizer * state).total


def cards() -> Iterator[str]:
    """The largest model for each way to save memory."""
    yield "| `train.recompute` | AdamW, fp32 states | the same, offload 1 | 8-bit states | the same, offload 1 |"
    yield "|---|--:|--:|--:|--:|"
    for level in LEVELS:
        cells = []
        for state in (1.0, _EIGHT_BIT):
            for offload in (0.0, 1.0):
                layers, billions = largest(level, offload, state)
                cells.append(f"{billions:.1f}B, {layers} layers")
        yield f"| `{level}` | {' | '.join(cells)} |"


def main() -> None:
    """Print all tables."""
    for table in (levels, parts, cards):
        print("\n".join(table()), end="\n\n")


if __name__ == "__main__":
    main()
