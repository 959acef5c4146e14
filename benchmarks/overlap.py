"""Communication hidden behind computation, between two processes of one core each.

    python benchmarks/overlap.py [--rate 400] [--chunks 2 3 4] [--repeats 15] [--quick] [--json FILE]

Two namespaces joined by a link of limited rate (`tc tbf`) stand for two hosts, so that communication takes about as
long as computation and takes no processor; that needs root, and without it only loopback is measured. Every contender
is run in turns with the others. Where other work shares the processors, `--priority -19` (root) puts the ranks before
it, for some seconds. The measure is Flux's (arXiv 2406.06858, section 5): the *effective communication time* of
a way of doing things is its time less that of the best unsplit products, ECT; its overlap efficiency is
``E = 1 - ECT / ECT of the plain way``. On loopback, where communication takes processor time itself, only the ratio
of times is of use.

A part of the benchmark is an entry of `PARTS`: a function that measures on one rank, called on both. It gives a list of
cases, each with its name, shape, direction and median seconds: of the `products` alone, of `plain`, of what overlaps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from support import namespaces
from support.harness import benchmark_parser, timed, write_json
from support.pair import in_turns, join, run_pair
from torch import Tensor, nn

from phalanx.kernels.host_memory import keep_freed_memory
from phalanx.kernels.linear import project
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.parallel_linear import Spread, gather_products, products_scatter
from phalanx.parallel.tensor.tensor_parallel import make_overlap

Result = dict[str, Any]


def fastest_product(x: Tensor, matrix: Tensor) -> Callable[[], Tensor]:
    """The unsplit product in the faster of the ways to make it."""

    def by_mm() -> Tensor:
        return torch.mm(x, matrix)

    def by_project() -> Tensor:
        with torch.no_grad():
            return project(x, matrix)

    ways = [by_mm, by_project]
    return min(ways, key=lambda way: min(timed(way) for _ in range(4)))


class Projection:
    """A projection of a tensor-parallel layer, forward and backward, by each back end.

    Args:
        gathers: an input projection (gather, multiply); else an output projection (multiply, scatter).
    """

    def __init__(self, group: Group, gathers: bool, tokens: int, hidden: int, width: int) -> None:
        rows = tokens // group.size
        self.group, self.gathers = group, gathers
        self.weight = nn.Parameter(torch.randn(width, hidden))
        self.x = torch.randn(*((rows, hidden) if gathers else (tokens, width)), requires_grad=True)
        self.grad = torch.randn(*((tokens, width) if gathers else (rows, hidden)))
        whole = torch.randn(tokens, hidden), torch.randn(tokens, width)
        weight = self.weight.detach()
        wide, narrow = (fastest_product(whole[0], weight.t()), fastest_product(whole[1], weight))
        self._forward, self._dgrad = (wide, narrow) if gathers else (narrow, wide)
        self._wgrad = fastest_product(whole[1].t(), whole[0])

    def forward(self, kind: str, chunks: int) -> Tensor:
        spread = Spread(make_overlap(kind, self.group, chunks), torch.float32)  # type: ignore[arg-type]
        if self.gathers:
            return gather_products(spread, self.x, [self.weight], [None])[0]
        return products_scatter(spread, [self.x], [self.weight])

    def forward_seconds(self, kind: str, chunks: int) -> float:
        return timed(lambda: self.forward(kind, chunks))

    def backward_seconds(self, kind: str, chunks: int) -> float:
        out = self.forward(kind, chunks)
        self.group.barrier()
        return timed(lambda: torch.autograd.grad(out, [self.x, self.weight], self.grad))

    def products_seconds(self, backward: bool) -> float:
        return timed(lambda: (self._dgrad(), self._wgrad())) if backward else timed(self._forward)


def tensor_part(group: Group, arguments: argparse.Namespace) -> list[Result]:
    """Input and output projections, forward and backward; each chunk count against the plain back end."""
    results = []
    for tokens, hidden, width in arguments.shapes[: 1 if arguments.quick else None]:
        for gathers in (True, False):
            projection = Projection(group, gathers, tokens, hidden, width)
            for backward in (False, True):
                name = f"{'gather, multiply' if gathers else 'multiply, scatter'}{' backward' * backward}"
                results.append(
                    {
                        "case": name,
                        "shape": [tokens, hidden, width],
                        "backward": backward,
                        "seconds": measure_projection(group, projection, backward, arguments),
                    }
                )
    return results


def measure_projection(
    group: Group, projection: Projection, backward: bool, arguments: argparse.Namespace
) -> dict[str, float]:
    """Medians, in seconds, of the products alone, of plain, and of each chunk count."""
    run = projection.backward_seconds if backward else projection.forward_seconds
    contenders = {"products": lambda: projection.products_seconds(backward), "plain": lambda: run("none", 1)}
    for chunks in arguments.chunks:
        contenders[f"{chunks} chunks"] = lambda chunks=chunks: run("chunked", chunks)
    seconds = in_turns(group, contenders, arguments.repeats)
    return {name: statistics.median(values) for name, values in seconds.items()}


PARTS: dict[str, Callable[[Group, argparse.Namespace], list[Result]]] = {"tensor": tensor_part}
SHAPES = ((1024, 1024, 2048), (2048, 1024, 2048))
"""Tokens, hidden width, and rows of the weight on each rank."""


def with_totals(results: list[Result]) -> list[Result]:
    """The results, and for each shape the sums of its forward and of its backward cases."""
    totals = []
    for sizes in dict.fromkeys(tuple(result["shape"]) for result in results):
        for direction in ("forward", "backward"):
            own = [r for r in results if tuple(r["shape"]) == sizes and (direction == "backward") == r["backward"]]
            seconds = {name: sum(r["seconds"][name] for r in own) for name in own[0]["seconds"]}
            totals.append({"case": f"all {direction}", "shape": sizes, "seconds": seconds})
    return [*results, *totals]


def report(title: str, results: list[Result], limited: bool) -> None:
    """Print one line per case and contender."""
    print(f"\n{title}")
    for result in with_totals(results):
        seconds = dict(result["seconds"])
        products, plain = seconds.pop("products"), seconds["plain"]
        print(f"  {result['case']}, {'x'.join(map(str, result['shape']))}: products alone {1e3 * products:.1f} ms")
        for name, value in seconds.items():
            exposed, before = value - products, plain - products
            hidden = f", hides {100 * (1 - exposed / before):4.0f} %" if limited and name != "plain" else ""
            speed = f", {plain / value:.2f}x of plain" if name != "plain" else ""
            print(f"    {name:10} {1e3 * value:7.1f} ms, exposed {1e3 * exposed:6.1f} ms{speed}{hidden}")


def shape(text: str) -> tuple[int, ...]:
    """Tokens, hidden width and rows of a weight, of ``TxDxN``."""
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 3:
        raise ValueError(text)
    return sizes


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, quick="one shape, three turns", repeats=15, as_json=True)
    parser.add_argument("--part", choices=[*PARTS], default="tensor", help="what to measure")
    parser.add_argument("--rate", type=float, default=400.0, help="of the link in each direction, Mbit/s")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 3, 4], help="of the chunked back end")
    parser.add_argument("--priority", type=int, default=0, help="nice value of the ranks; below 0 needs root")
    parser.add_argument("--where", choices=["both", "link", "loopback"], default="both")
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, help="such as 1024x1024x2048")
    for hidden in ("--rank", "--core"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.repeats = min(3, arguments.repeats) if arguments.quick else arguments.repeats
    return arguments


def put_before_others(priority: int) -> None:
    """Give this process, and its session where the kernel schedules by sessions, a nice value."""
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    session = Path("/proc/self/autogroup")
    if priority and session.exists():
        session.write_text(str(priority))


def run_rank(arguments: argparse.Namespace) -> None:
    """One of the two ranks: measure, and print the figures."""
    put_before_others(arguments.priority)
    keep_freed_memory()  # As training does.
    group = join(arguments.rank, arguments.address, arguments.core, ("tensor",))
    print(json.dumps(PARTS[arguments.part](group, arguments)))


def run_where(arguments: argparse.Namespace, title: str, place: AbstractContextManager[Any]) -> list[Result]:
    """Measure on two hosts and print."""
    options = ["--part", arguments.part, "--repeats", str(arguments.repeats), "--priority", str(arguments.priority)]
    options += ["--shapes", *("x".join(map(str, sizes)) for sizes in arguments.shapes)]
    options += ["--chunks", *map(str, arguments.chunks)] + ["--quick"] * arguments.quick
    with place as hosts:
        results: list[Result] = run_pair(hosts, Path(__file__).resolve(), options, timeout_s=900.0)
    report(title, results, limited=hosts[0].interface != "lo")
    return results


def main() -> None:
    arguments = parse()
    if arguments.rank is not None:
        return run_rank(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the namespaces are removed then too.
    figures = {}
    if arguments.where != "loopback":
        reason = namespaces.cannot()
        if reason is None:
            title = f"two namespaces, {arguments.rate:g} Mbit/s each way"
            figures["link"] = run_where(arguments, title, namespaces.two_hosts(arguments.rate))
        else:
            print(f"the limited link was not measured: {reason}")
    if arguments.where != "link":
        figures["loopback"] = run_where(arguments, "loopback", namespaces.loopback())
    write_json(arguments.json, figures)
    return None


if __name__ == "__main__":
    main()
