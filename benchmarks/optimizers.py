"""Time one optimizer step over many parameters: torch's AdamW against ours of fewer bits, LAMB, CAME and Muon.

Every round times all optimizers once, in turn, so that a busy machine slows them alike; ratios are medians over rounds
of the time relative to fused AdamW in the same round. Example:

    python benchmarks/optimizers.py --params 100e6 --rounds 15 --threads 2
    python benchmarks/optimizers.py --device cuda --params 1.3e9

On a GPU a step ends when its queue is empty; every optimizer has its turn alone there, so that parameters of one are in
memory at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from support.harness import benchmark_parser, ratio, synchronize
from torch import Tensor

from phalanx.core.units import count, duration, size
from phalanx.optim.adamw import AdamW
from phalanx.optim.came import CAME
from phalanx.optim.lamb import LAMB
from phalanx.optim.muon import Muon

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "AdamW, ours, 32": lambda ps: AdamW(_groups(ps, 32), state_bits=32),
    "AdamW, ours, 16": lambda ps: AdamW(_groups(ps, 16), state_bits=32),
    "AdamW, ours, 8": lambda ps: AdamW(_groups(ps, 8), state_bits=32),
    "Muon": lambda ps: Muon([p for p in ps if p.dim() == 2]),
    "LAMB eager": lambda ps: LAMB(ps),
    "LAMB compiled": lambda ps: LAMB(ps, compile=True),
    "CAME eager": lambda ps: CAME(ps),
    "CAME compiled": lambda ps: CAME(ps, compile=True),
}
REFERENCE = "AdamW fused"


def _groups(parameters: list[torch.nn.Parameter], bits: int) -> list[dict[str, Any]]:
    """Matrices with moments of so many bits, vectors with 32."""
    matrices, vectors = ([p for p in parameters if (p.dim() == 2) is whole] for whole in (True, False))
    return [{"params": matrices, "state_bits": bits}, {"params": vectors, "state_bits": 32}]


@dataclass
class Timed:
    """One optimizer and the seconds of its steps, wall and CPU."""

    optimizer: torch.optim.Optimizer | None
    first_s: float
    state_size_bytes: int = 0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        assert self.optimizer is not None
        synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        self.optimizer.step()
        synchronize()
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)

    def state_bytes(self) -> int:
        assert self.optimizer is not None
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


def make_parameters(shapes: Iterable[tuple[int, ...]], device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)

    def drawn(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(scale)

    parameters = [torch.nn.Parameter(drawn(shape, 0.02)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = drawn(tuple(parameter.shape), 0.01)
    return parameters


def prepare(name: str, shapes: list[tuple[int, ...]], device: str) -> Timed:
    """Make one optimizer with its own parameters and take its first step, which compiles."""
    optimizer = OPTIMIZERS[name](make_parameters(shapes, device))
    start = time.perf_counter()
    optimizer.step()
    synchronize()
    one = Timed(optimizer, time.perf_counter() - start)
    one.state_size_bytes = one.state_bytes()
    return one


def measure(names: list[str], shapes: list[tuple[int, ...]], rounds: int, device: str) -> dict[str, Timed]:
    """All in turn, round by round; on a GPU one after the other."""
    together = [names] if device == "cpu" else [[name] for name in names]
    found: dict[str, Timed] = {}
    for group in together:
        timed = {name: prepare(name, shapes, device) for name in group}
        for _ in range(2 + rounds):
            for one in timed.values():
                one.step()
        for one in timed.values():
            one.wall_s, one.cpu_s = one.wall_s[2:], one.cpu_s[2:]
            one.optimizer = None
        found |= timed
    return found


def table(timed: dict[str, Timed]) -> str:
    reference = timed[REFERENCE]
    lines = [
        f"{'optimizer':16}{'wall':>9}{'CPU':>9}{'wall x':>8}{'CPU x':>8}{'state':>12}{'state x':>9}{'first step':>12}"
    ]
    for name, one in timed.items():
        wall, cpu = ratio(one.wall_s, reference.wall_s), ratio(one.cpu_s, reference.cpu_s)
        medians = [duration(statistics.median(times)) for times in (one.wall_s, one.cpu_s)]
        state, share = one.state_size_bytes, one.state_size_bytes / reference.state_size_bytes
        lines.append(
            f"{name:16}{medians[0]:>9}{medians[1]:>9}{wall:>8.2f}{cpu:>8.2f}{size(state):>12}{share:>9.3f}"
            f"{duration(one.first_s):>12}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = benchmark_parser(__doc__, quick="a small model and few steps, to see that it works")
    parser.add_argument("--params", type=float, default=10e6, help="number of parameters, about")
    parser.add_argument("--rounds", type=int, default=11, help="timed steps of each optimizer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params, arguments.rounds = 2e6, 3
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible: nothing was measured")
        return
    torch.set_num_threads(arguments.threads)
    names = [REFERENCE, *(name for name in arguments.only if name != REFERENCE)]
    shapes = decoder_shapes(arguments.params)
    total = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"torch {torch.__version__}, {count(total)} parameters in {len(shapes)} tensors, {arguments.threads} threads")
    if arguments.device == "cuda":
        torch.cuda.init()
        print(torch.cuda.get_device_name())
    print(table(measure(names, shapes, arguments.rounds, arguments.device)))


if __name__ == "__main__":
    main()
