"""Memory as the planner predicts it, beside the peak of the caching allocator, on one CUDA device.

    python benchmarks/plan_memory_gpu.py            # a few shapes up to 1.3B parameters, about two minutes
    python benchmarks/plan_memory_gpu.py --quick    # the smallest

Two training steps as `phalanx train` does them on a single device, in bf16, on random tokens; the second one counts.
*passes* is the most that was allocated in forward and backward passes, which is what is predicted (without
fragmentation); *step* is the same with the update; *held* is what the allocator had taken of the device by then.
Without a CUDA device it says so and ends.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from support.harness import benchmark_parser

from phalanx.data.batch import Batch
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.logical_parameters import initialise
from phalanx.optim.build import build_optimizer
from phalanx.optim.config import OptimConfig
from phalanx.parallel.config import ParallelConfig
from phalanx.plan.jobs import make_job, make_strategy, software_of
from phalanx.plan.memory.rank import rank_memory
from phalanx.plan.types import RankMemory
from phalanx.train.device import Device
from phalanx.train.trainer import LocalTrainer

_GIB = 1 << 30
_SMALL = {"layers": 12, "hidden": 768, "heads": 12}
_LARGE = {"layers": 24, "hidden": 2048, "heads": 16}
_GPT = {"activation": "gelu", "norm": "layer", "bias": "all", "position": "learned", "tie_embeddings": True}


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        micro_batches: in a step.
    """

    name: str
    model: Mapping[str, Any]
    micro_batch: int
    sequence: int = 2048
    micro_batches: int = 2
    recompute: Any = "none"
    optim: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "bf16"
    quick: bool = False

    @property
    def config(self) -> ModelConfig:
        """The model, with a vocabulary of GPT-2's size."""
        return ModelConfig(vocab_size=50257, max_sequence=self.sequence, **dict(self.model))

    def planned(self) -> RankMemory:
        """As the cost model has it."""
        precision = "bf16" if self.precision == "bf16" else "fp32"
        software = software_of(self.config, ParallelConfig(), precision, compiled=False, on_cpu=False, documents=False)
        job = make_job(
            self.config,
            sequence=self.sequence,
            global_batch=self.micro_batch * self.micro_batches,
            precision=precision,
            optimizer=OptimConfig(**dict(self.optim)).name,
            software=software,
        )
        strategy = make_strategy(ParallelConfig(), micro_batch=self.micro_batch, recompute=self.recompute)
        return rank_memory(job, strategy)[0]


CASES = (
    Case("124M", _SMALL, 8, quick=True),
    Case("124M, GELU, biases, tied", _SMALL | _GPT, 8, sequence=1024),
    Case("124M, dropout", _SMALL | _GPT | {"dropout": 0.1}, 16, sequence=1024),
    Case("124M, parallel block", _SMALL | {"block": "parallel"}, 8),
    Case("124M, one micro-batch", _SMALL, 16, micro_batches=1),
    Case("124M, fp32", _SMALL, 4, precision="fp32"),
    Case("124M, CAME", _SMALL, 8, optim={"name": "came"}),
    Case("124M, attention written", _SMALL | {"attention_backend": "math"}, 4, sequence=1024),
    Case("1.3B", _LARGE, 4),
    Case("1.3B, grouped heads", _LARGE | {"kv_heads": 4}, 4),
    Case("1.3B, recompute selective", _LARGE, 8, recompute="selective"),
    Case("1.3B, recompute full", _LARGE, 16, recompute="full"),
    Case("1.3B, long", _LARGE, 1, sequence=16384),
)


@dataclass(frozen=True)
class Peak:
    """Bytes: most allocated in the passes and in the whole step, and what the allocator held."""

    passes: int
    step: int
    held: int


def measure(case: Case, device: torch.device) -> Peak:
    """The second of two steps."""
    gc.collect()
    torch.cuda.empty_cache()
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    model = Decoder(case.config, device=device, compute_dtype=dtype)
    model.set_recompute(case.recompute)
    initialise(model, 0)
    trainer = LocalTrainer(model, Device(device, "cuda", dtype, 1))
    optimizer = build_optimizer(OptimConfig(**dict(case.optim)), trainer.parameters)
    rows = case.micro_batch * case.micro_batches
    tokens = torch.randint(50257, (rows, case.sequence + 1))
    ones = torch.ones(rows, case.sequence)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), ones, None, torch.arange(rows))
    passes = 0
    for step in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        trainer.accumulate_gradients(batch, micro_batch=case.micro_batch, seed=0, step=step)
        passes = torch.cuda.max_memory_allocated(device)
        _, scale = optimizer.clip()
        optimizer.step(grad_scale=scale)
        trainer.zero_grad()
    return Peak(passes, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def main() -> None:
    """Measure, and print the table."""
    parser = benchmark_parser(__doc__, quick="the smallest")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    arguments = parser.parse_args()
    console = Console(width=160)
    if not torch.cuda.is_available():
        console.print("no CUDA device is here: nothing was measured")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    table = Table("case", "predicted", "passes", "error", "step", "held", "held / step", "parts", header_style="bold",
                  title=f"GiB on {torch.cuda.get_device_name(device)}, torch {torch.__version__}")  # fmt: skip
    errors = []
    for case in CASES:
        if arguments.only not in case.name or (arguments.quick and not case.quick):
            continue
        planned, peak = case.planned(), measure(case, device)
        predicted = planned.total - planned.fragmentation
        errors.append(abs(predicted / peak.passes - 1))
        parts = (planned.parameters, planned.gradients, planned.optimizer, planned.activations, planned.loss_head)
        cells = [predicted, peak.passes, peak.step, peak.held]
        gib = [f"{size / _GIB:.3f}" for size in cells]
        shown = " ".join(f"{size / _GIB:.2f}" for size in (*parts, planned.workspace))
        held = f"{peak.held / peak.step:.3f}"
        table.add_row(case.name, *gib[:2], f"{predicted / peak.passes - 1:+.1%}", *gib[2:], held, shown)
    console.print(table)
    console.print(f"mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
