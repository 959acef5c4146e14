"""Time one optimizer step over many parameters on a CPU: torch's AdamW against LAMB, CAME and Muon.

Every round times all optimizers once, in turn, so that a busy machine slows them alike; ratios are medians over rounds
of the time relative to fused AdamW in the same round. Example:

    python benchmarks/optimizers.py --params 100e6 --rounds 15 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.core.units import count, duration, size
from phalanx.optim.came import CAME
from phalanx.optim.lamb import LAMB

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "LAMB eager": lambda ps: LAMB(ps),
    "LAMB compiled": lambda ps: LAMB(ps, compile=True),
    "CAME eager": lambda ps: CAME(ps),
    "CAME compiled": lambda ps: CAME(ps, compile=True),
}
REFERENCE = "AdamW fused"


@dataclass
class Timed:
    """One optimizer and the seconds of its steps, wall and CPU."""

    optimizer: torch.optim.Optimizer
    first_s: float
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.optimizer.step()
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)

    def state_bytes(self) -> int:
        tensors = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def decoder_shapes(parameters: float) -> list[tuple[int, ...]]:
    """The logical matrices of a decoder with about so many parameters: 12 layers, a head size of 64, SwiGLU."""
    layers = 12
    # per layer: 4 D² of attention and 3 D (8/3 D) of the MLP; 8 D² more for embedding of 8 D rows
    width = max(64, round((parameters / (12 * layers + 8)) ** 0.5 / 64) * 64)
    inner = round(width * 8 / 3 / 64) * 64
    block: list[tuple[int, ...]] = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)] + [(width,)] * 2
    return [(8 * width, width), *(block * layers), (width,)]


def make_parameters(shapes: Iterable[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator).mul_(0.02)) for s in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).mul_(0.01)
    return parameters


def prepare(name: str, shapes: list[tuple[int, ...]]) -> Timed:
    """Make one optimizer with its own parameters and take its first step, which compiles."""
    optimizer = OPTIMIZERS[name](make_parameters(shapes))
    start = time.perf_counter()
    optimizer.step()
    return Timed(optimizer, time.perf_counter() - start)


def measure(names: list[str], shapes: list[tuple[int, ...]], rounds: int) -> dict[str, Timed]:
    timed = {name: prepare(name, shapes) for name in names}
    for _ in range(2 + rounds):
        for one in timed.values():
            one.step()
    for one in timed.values():
        one.wall_s, one.cpu_s = one.wall_s[2:], one.cpu_s[2:]
    return timed


def ratio(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def table(timed: dict[str, Timed]) -> str:
    reference = timed[REFERENCE]
    lines = [
        f"{'optimizer':16}{'wall':>9}{'CPU':>9}{'wall x':>8}{'CPU x':>8}{'state':>12}{'state x':>9}{'first step':>12}"
    ]
    for name, one in timed.items():
        wall, cpu = ratio(one.wall_s, reference.wall_s), ratio(one.cpu_s, reference.cpu_s)
        medians = [duration(statistics.median(times)) for times in (one.wall_s, one.cpu_s)]
        state, share = one.state_bytes(), one.state_bytes() / reference.state_bytes()
        lines.append(
            f"{name:16}{medians[0]:>9}{medians[1]:>9}{wall:>8.2f}{cpu:>8.2f}{size(state):>12}{share:>9.3f}"
            f"{duration(one.first_s):>12}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=10e6, help="number of parameters, about")
    parser.add_argument("--rounds", type=int, default=11, help="timed steps of each optimizer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params, arguments.rounds = 2e6, 3
    torch.set_num_threads(arguments.threads)
    names = [REFERENCE, *(name for name in arguments.only if name != REFERENCE)]
    shapes = decoder_shapes(arguments.params)
    total = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"torch {torch.__version__}, {count(total)} parameters in {len(shapes)} tensors, {arguments.threads} threads")
    print(table(measure(names, shapes, arguments.rounds)))


if __name__ == "__main__":
    main()
