"""CPU time of one pipeline action beyond its arithmetic: our executor against torch's own schedules, over gloo.

Two processes run the same tiny stages (one matrix each) through both, in turn, in the same run; what the arithmetic
and autograd cost alone is measured beside them and taken off. Example:

    python benchmarks/pipeline.py --rounds 15
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from support.harness import benchmark_parser, in_turns
from support.store_port import port_of
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from phalanx.core.layout import Layout
from phalanx.parallel.config import Schedule
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.pipeline_executor import AutogradStage, PipelineExecutor
from phalanx.parallel.pipeline.schedules import Table, make_table
from phalanx.parallel.rendezvous import open_store

RANKS, ROWS, WIDTH = 2, 4, 16
CASES: dict[Schedule, tuple[int, Any]] = {
    "1f1b": (1, Schedule1F1B),
    "interleaved_1f1b": (2, ScheduleInterleaved1F1B),
    "zbv": (2, ScheduleZBVZeroBubble),
}
Step = Callable[[], None]


class Product(torch.autograd.Function):
    """x @ w, whose weight gradient may be put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.queue.deferring:
            ctx.queue.put(weight, lambda: x.T @ gradient)
            return gradient @ weight.T, None, None
        return gradient @ weight.T, x.T @ gradient, None


def square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def ours(mesh: Mesh, table: Table, rank: int, split: bool) -> Step:
    """A step of our executor; as torch's stages, the first one takes rows and the last one a target."""
    rows, target = torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)

    def runner(stage: int) -> AutogradStage:
        layer, queue = nn.Linear(WIDTH, WIDTH, bias=False), WeightQueue()

        def function(x: Tensor | None, _: int) -> Tensor:
            x = rows if x is None else x
            y: Tensor = Product.apply(x, layer.weight, queue) if split else layer(x)
            return square(y, target) if stage == table.placement.stages - 1 else y

        return AutogradStage(function, queue)

    runners = {stage: runner(stage) for stage in table.placement.stages_of(rank)}
    executor = PipelineExecutor(mesh, table.placement, runners)
    shapes = [(ROWS, WIDTH)] * table.micro_batches
    return lambda: void(executor.run(table, shapes))


def torchs(table: Table, rank: int, kind: Any) -> Step:
    """A step of torch's schedule over stages of the same layers."""
    count, stages = table.micro_batches, table.placement.stages
    made = [
        PipelineStage(nn.Linear(WIDTH, WIDTH, bias=False), stage, stages, torch.device("cpu"))
        for stage in table.placement.stages_of(rank)
    ]
    schedule = kind(made[0] if kind is Schedule1F1B else made, count, loss_fn=square, scale_grads=False)
    inputs = (torch.ones(count * ROWS, WIDTH),) if rank == table.placement.rank_of(0) else ()
    last = rank == table.placement.rank_of(stages - 1)
    options = {"target": torch.zeros(count * ROWS, WIDTH), "losses": []} if last else {}
    return lambda: void(schedule.step(*inputs, return_outputs=False, **options))


def alone(table: Table, rank: int) -> Step:
    """The same arithmetic and autograd without a pipeline."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in table.placement.stages_of(rank)]

    def step() -> None:
        for _ in range(table.micro_batches):
            for layer in layers:
                x = torch.ones(ROWS, WIDTH).requires_grad_()
                layer(x).backward(x.detach())

    return step


def void(_: object) -> None:
    """Only the time of it is wanted."""


def cpu_us(step: Step, steps: int, actions: int) -> float:
    """CPU microseconds per action, of all threads of this process."""
    dist.barrier()
    begin = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - begin) * 1e6 / steps / actions


def worker(rank: int, port: int, rounds: int, steps: int, count: int) -> None:
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port, rank, RANKS, is_host=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=RANKS)
    for schedule, (chunks, kind) in CASES.items():
        mesh = Mesh(Layout(pipeline=RANKS), rank, dist.PrefixStore(schedule, store), torch.device("cpu"))
        table = make_table(schedule, RANKS, chunks, count)
        contenders = {
            "alone": alone(table, rank),
            "ours": ours(mesh, table, rank, split=schedule == "zbv"),
            "torch": torchs(table, rank, kind),
        }
        report(schedule, rank, *measure(contenders, rounds, steps, len(table.actions[rank])))
        mesh.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(contenders: dict[str, Step], rounds: int, steps: int, actions: int) -> tuple[dict[str, float], float]:
    """Median CPU time per action of each, and the median over rounds of ours over torch's, both without `alone`."""
    times = in_turns({name: partial(cpu_us, step, steps, actions) for name, step in contenders.items()}, rounds)
    own = [(a - c) / (b - c) for a, b, c in zip(times["ours"], times["torch"], times["alone"], strict=True)]
    return {name: statistics.median(taken) for name, taken in times.items()}, statistics.median(own)


def report(schedule: str, rank: int, medians: dict[str, float], ratio: float) -> None:
    """One row, by the rank that has the first stage."""
    if rank == 0:
        shown = "".join(f"{medians[name]:>10.1f}" for name in ("alone", "ours", "torch"))
        overhead = medians["ours"] - medians["alone"], medians["torch"] - medians["alone"]
        print(f"{schedule:<18}{shown}{overhead[0]:>10.1f}{overhead[1]:>10.1f}{ratio:>8.2f}", flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__, quick="few rounds, to see that it works")
    parser.add_argument("--rounds", type=int, default=15, help="times that every contender is measured, in turn")
    parser.add_argument("--steps", type=int, default=10, help="pipeline steps in each")
    parser.add_argument("--micro-batches", type=int, default=8)
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = open_store("127.0.0.1", 0, 0, RANKS, is_host=True)
    print(f"{RANKS} ranks, {arguments.micro_batches} micro-batches; CPU microseconds per action on rank 0")
    heads = ("alone", "ours", "torch", "own", "torch own")
    print(f"{'schedule':<18}{''.join(f'{head:>10}' for head in heads)}{'ratio':>8}", flush=True)
    work = (port_of(store), rounds, arguments.steps, arguments.micro_batches)
    multiprocessing.start_processes(worker, work, nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
