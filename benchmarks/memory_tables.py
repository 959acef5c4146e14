"""Tables of docs/memory.md: what recompute keeps, where memory goes, and the largest model on one card. All predicted.

    python benchmarks/memory_tables.py
    python benchmarks/memory_tables.py --quick      # the first table

Nothing is measured: the numbers are those of `phalanx.plan.memory`, on which a run's own choice rests. Of a GPU, in
bf16. A test holds the page against them.
"""

from __future__ import annotations

from collections.abc import Iterator

from support.harness import benchmark_parser

from phalanx.model.config import ModelConfig
from phalanx.model.shapes import num_parameters
from phalanx.parallel.config import ParallelConfig
from phalanx.plan.jobs import make_job, make_strategy, software_of
from phalanx.plan.layer import layer
from phalanx.plan.memory.rank import pieces_of, rank_memory
from phalanx.plan.operations import Product, local_of
from phalanx.plan.types import Job, StateBits, Strategy
from phalanx.train.derived.memory_fit import GPU_MEMORY_SHARE, LEVELS, Level

_GIB, _MIB = 1 << 30, 1 << 20
_CARD_BYTES = 79.1 * _GIB  # what an H100 of 80 GB reports
_SEQUENCE = 8192
_LAYER = ModelConfig(  # of Llama 3 8B, four of them
    vocab_size=128256,
    layers=4,
    hidden=4096,
    heads=32,
    kv_heads=8,
    mlp_hidden=14336,
    max_sequence=_SEQUENCE,
    rope_theta=500000.0,
)


def job_of(model: ModelConfig, sequences: int, *, compiled: bool = False, state_bits: StateBits = 32) -> Job:
    """A step of `sequences` on one GPU."""
    software = software_of(model, ParallelConfig(), "bf16", compiled=compiled, on_cpu=False)
    return make_job(
        model,
        sequence=_SEQUENCE,
        global_batch=sequences,
        precision="bf16",
        optimizer="adamw",
        state_bits=state_bits,
        software=software,
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


def largest(level: Level, offload: float, state_bits: StateBits) -> tuple[int, float]:
    """Layers of Llama 3 8B's shape that fit onto one card, and parameters of that model in billions."""
    layers = 0
    while _total_bytes(layers + 1, level, offload, state_bits) <= GPU_MEMORY_SHARE * _CARD_BYTES:
        layers += 1
    return layers, num_parameters(_grown(max(layers, 1))) / 1e9


def _grown(layers: int) -> ModelConfig:
    return _LAYER.model_copy(update={"layers": layers})


def _total_bytes(layers: int, level: Level, offload: float, state_bits: StateBits) -> float:
    job, strategy = job_of(_grown(layers), 8, state_bits=state_bits), strategy_of(level, micro_batch=1, offload=offload)
    return float(rank_memory(job, strategy)[0].total)


def cards() -> Iterator[str]:
    """The largest model for each way to save memory."""
    yield "| `train.recompute` | AdamW, fp32 states | the same, offload 1 | 8-bit states | the same, offload 1 |"
    yield "|---|--:|--:|--:|--:|"
    for level in LEVELS:
        cells = []
        choices: tuple[StateBits, ...] = (32, 8)
        for state_bits in choices:
            for offload in (0.0, 1.0):
                layers, billions = largest(level, offload, state_bits)
                cells.append(f"{billions:.1f}B, {layers} layers")
        yield f"| `{level}` | {' | '.join(cells)} |"


def main() -> None:
    """Print the tables."""
    parser = benchmark_parser(__doc__, quick="the first table")
    for table in (levels,) if parser.parse_args().quick else (levels, parts, cards):
        print("\n".join(table()), end="\n\n")


if __name__ == "__main__":
    main()
