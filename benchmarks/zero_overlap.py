"""Communication of ZeRO hidden behind computation, between two processes of one core each.

    python benchmarks/zero_overlap.py [--rate 400] [--repeats 7] [--zero 1 2] [--bucket-bytes 1000000] [--quick]

Two namespaces joined by a link of limited rate stand for two hosts (`support/namespaces.py`; needs root). A step is a
forward and a backward pass with the gather before and the reduction after it, without the update. *Alone* is the same
step without another rank; *plain* waits for all weights before the forward pass and starts to reduce after the backward
pass; *overlapped* does as training does. Hidden is the share of what plain exposes: ``1 - (overlapped - alone) /
(plain - alone)``. The steps are run in turns; medians, of the slower rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from support import namespaces
from support.chunk_memory import wait_for_weights
from support.harness import benchmark_parser
from support.pair import in_turns, join, run_pair

from phalanx.core.layout import Axis, Layout, Shard
from phalanx.kernels.host_memory import keep_freed_memory
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.logical_parameters import initial_values
from phalanx.model.shapes import num_parameters, parameter_table
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.group import Group
from phalanx.parallel.zero.chunk import ShardedChunk

MODEL = ModelConfig(vocab_size=256, layers=6, hidden=384, heads=6, max_sequence=256)


class OneGroup:
    """The groups of a layout with one axis."""

    def __init__(self, layout: Layout, group: Group) -> None:
        self.layout, self.rank, self._group = layout, group.index, group

    def group(self, *_axes: Axis) -> Group:
        return self._group

    def named(self, name: str, _ranks: Sequence[int], _axes: Sequence[Axis] = ()) -> Group:
        raise AssertionError(f"no group {name} is needed here")


class Step:
    """One training step without its update, in several ways."""

    def __init__(self, layout: Layout, group: Group, config: ParallelConfig, sequences: int) -> None:
        table = parameter_table(MODEL)

        def initial(name: str, shard: Shard) -> torch.Tensor:
            return initial_values(MODEL, table[name], 0, offsets=shard.offsets, shape=shard.sizes)

        whole = {name: Shard.whole(parameter.shape) for name, parameter in table.items()}
        self.part = Decoder(MODEL, device="meta")
        self.chunk = ShardedChunk(self.part, whole, OneGroup(layout, group), config, initial=initial)
        self.tokens = torch.randint(256, (2, sequences, 256), generator=torch.Generator().manual_seed(group.index))

    def seconds(self, overlapped: bool) -> float:
        start = time.perf_counter()
        self.chunk.gather()
        if not overlapped:
            wait_for_weights(self.chunk)
        loss = sum(self.part.loss(self.part(self.tokens[0]), self.tokens[1]))
        if overlapped:
            self.chunk.last_backward()
        torch.autograd.backward(loss)
        self.chunk.finish()
        taken = time.perf_counter() - start
        self.chunk.zero_grad()
        return taken


def run_rank(arguments: argparse.Namespace) -> None:
    """One of the two ranks: measure, and print the figures."""
    keep_freed_memory()  # As training does.
    group = join(arguments.rank, arguments.address, arguments.core, ("shard",))
    alone = Step(Layout(), Group.alone(), ParallelConfig(), arguments.sequences)
    contenders = {"alone": lambda: alone.seconds(False)}
    for zero in arguments.zero:
        config = ParallelConfig(shard=2, zero=zero, bucket_bytes=arguments.bucket_bytes)
        step = Step(Layout(shard=2), group, config, arguments.sequences)
        contenders[f"ZeRO-{zero} plain"] = lambda step=step: step.seconds(False)
        contenders[f"ZeRO-{zero} overlapped"] = lambda step=step: step.seconds(True)
    seconds = in_turns(group, contenders, arguments.repeats)
    print(json.dumps({name: statistics.median(values) for name, values in seconds.items()}), flush=True)
    os._exit(0)  # The threads of a group that hooks still hold cannot be joined while the interpreter ends.


def report(seconds: dict[str, float], zeros: Sequence[int]) -> None:
    """Print one line per contender."""
    alone = seconds["alone"]
    print(f"  alone {1e3 * alone:.0f} ms")
    for zero in zeros:
        plain, overlapped = (seconds[f"ZeRO-{zero} {way}"] for way in ("plain", "overlapped"))
        hidden = 1 - (overlapped - alone) / (plain - alone)
        print(
            f"  ZeRO-{zero}: plain {1e3 * plain:.0f} ms, overlapped {1e3 * overlapped:.0f} ms "
            f"({plain / overlapped:.2f}x), hides {100 * hidden:.0f} %"
        )


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, quick="two turns", repeats=7)
    parser.add_argument("--rate", type=float, default=400.0, help="of the link in each direction, Mbit/s")
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 2], choices=[1, 2], help="stages")
    parser.add_argument("--sequences", type=int, default=8, help="of 256 tokens, on each rank")
    parser.add_argument("--bucket-bytes", type=int, default=1_000_000, help="as parallel.bucket_bytes")
    parser.add_argument("--where", choices=["link", "loopback"], default="link")
    for hidden in ("--rank", "--core"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.repeats = min(2, arguments.repeats) if arguments.quick else arguments.repeats
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.rank is not None:
        return run_rank(arguments)
    if arguments.where == "link" and (reason := namespaces.cannot()) is not None:
        print(f"the limited link was not measured: {reason}")
        return None
    place = namespaces.two_hosts(arguments.rate) if arguments.where == "link" else namespaces.loopback()
    options = ["--repeats", str(arguments.repeats), "--zero", *map(str, arguments.zero)]
    options += ["--sequences", str(arguments.sequences), "--bucket-bytes", str(arguments.bucket_bytes)]
    with place as hosts:
        seconds = run_pair(hosts, Path(__file__).resolve(), options, timeout_s=600.0)
    where = f"a link of {arguments.rate:g} Mbit/s" if arguments.where == "link" else "loopback"
    print(f"{num_parameters(MODEL) / 1e6:.1f}M parameters over {where}, {256 * arguments.sequences} tokens a rank")
    report(seconds, arguments.zero)
    return None


if __name__ == "__main__":
    main()
