"""What benchmarks of starts share: scripts, when they had stepped, the command line, what is said in the end."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.harness import benchmark_parser, write_json

DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, waits = (sys.argv[1], False) if len(sys.argv) > 1 else ("", True)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
with open(os.path.join(folder, "stepped-" + os.environ["RANK"]), "w") as file:
    file.write(str(time.monotonic()))
while waits and not os.path.exists("enough"):
    time.sleep(0.1)
dist.destroy_process_group()
"""
"""Tells when it has stepped in the folder that it is given, and ends; without one it waits for a file ``enough``."""

SCRIPTS = {"ddp.py": DDP, "hugging_face.py": "from transformers import LlamaForCausalLM, Trainer\n" + DDP}


def have_stepped(folder: Path, ranks: int) -> bool:
    """Whether all ranks have said when they had done their first step."""
    files = [folder / f"stepped-{rank}" for rank in range(ranks)]
    return all(file.exists() and file.stat().st_size for file in files)


def stepped_at_s(folder: Path, ranks: int) -> float:
    """When the last rank had done its first step, on the host's monotonic clock."""
    return max(float((folder / f"stepped-{rank}").read_text()) for rank in range(ranks))


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """With what all of them take; ``--quick`` is one round of the DDP script."""
    quick = "one round of the DDP script, with the fewest ranks"
    parser = benchmark_parser(description, quick, as_json=True)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    return parser


def read_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line's."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.scripts = 1, ["ddp.py"]
    return arguments


def conclude(arguments: argparse.Namespace, starts: Iterable[Any], table: str) -> None:
    """Print the table, and keep every start where that is wanted."""
    print(f"{len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}, {arguments.rounds} rounds\n{table}")
    write_json(arguments.json, [asdict(start) for start in starts])
