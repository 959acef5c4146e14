"""Seconds from the order to start an attempt until its ranks have all done their first optimizer step.

Two gloo ranks of an unmodified DDP script, and of one that imports Hugging Face's Trainer too, are started as new
Pythons (cold), by torchrun, by a template that has imported torch (warm), and by one that has learnt the script's
imports as well (learnt). Every round does each case once, in turn. Example:

    python benchmarks/run_warm_start.py --rounds 5
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support.harness import median_and_range
from support.leaving import nothing_left
from support.starts import SCRIPTS, conclude, parser_of, read_arguments, stepped_at_s

from phalanx.launch.cores import Share
from phalanx.launch.launch_messages import Exited
from phalanx.launch.rendezvous_store import open_store_socket, store_spec
from phalanx.launch.user_script import Group, Places, Script, rank_specs, torchrun_environment
from phalanx.launch.warm_template import AttemptReport, WarmTemplate

RANKS = 2
LOOPBACK = "127.0.0.1"
CASES = ("cold", "torchrun", "torchrun, own store", "warm", "learnt")


@dataclass(frozen=True)
class Start:
    """One attempt.

    Attributes:
        step_s: from the order to start until the last rank had done its first step.
    """

    script: str
    case: str
    step_s: float


def environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """A port that is free now, below those that other programs' connections are served out of (Linux)."""
    while True:
        port = random.randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port


def start_cold(script: str, out: Path, folder: Path) -> float:
    """A new Python per rank, as a shell script would do it; when that began."""
    group = Group(1, range(RANKS), RANKS, 0, 1, LOOPBACK, free_port())
    begin_s = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(out)],
            cwd=folder,
            env={**environ(), **torchrun_environment(group, rank), "TORCHELASTIC_USE_AGENT_STORE": "False"},
        )
        for rank in range(RANKS)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{script} failed")
    return begin_s


def start_torchrun(script: str, out: Path, folder: Path, *, own_store: bool) -> float:
    """torchrun, whose agent serves the store, or rank 0; when that began."""
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if own_store else {}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    begin_s = time.monotonic()
    subprocess.run([*command, script, str(out)], cwd=folder, env=environ() | more, check=True, capture_output=True)
    return begin_s


async def start_warm(script: str, out: Path, folder: Path, *, learns: bool) -> float:
    """A template that is ready, and with `learns` has seen an attempt; when the attempt measured began."""
    codes: dict[tuple[int, int], int] = {}
    changed = asyncio.Event()

    def hear(attempt: int, word: AttemptReport) -> None:
        if isinstance(word, Exited):
            codes[attempt, word.rank] = word.code
            changed.set()

    what = Script(script, (str(out),), folder=str(folder))
    template = WarmTemplate(what, environ(), hear, learns=learns)
    template.start()
    try:
        if why := await template.ready():
            raise SystemExit(f"ranks cannot be forked: {why}")
        for attempt in range(1, 2 + learns):
            await template.settle()
            begin_s = time.monotonic()
            with open_store_socket(LOOPBACK) as listener:
                group = Group(attempt, range(RANKS), RANKS, 0, 1, LOOPBACK, listener.getsockname()[1])
                specs = rank_specs(what, group, Places([Share(None, 1)] * RANKS), environ())
                await template.spawn(attempt, [store_spec(listener, RANKS, environ()), *specs])
            while not {(attempt, rank) for rank in range(RANKS)} <= set(codes):
                await changed.wait()
                changed.clear()
            await template.kill(attempt)
        if any(codes[attempt, rank] for rank in range(RANKS)):
            raise SystemExit(f"{script} failed")
        return begin_s
    finally:
        await template.close()


def measure(script: str, case: str) -> Start:
    ways: dict[str, Callable[[Path, Path], float]] = {
        "cold": partial(start_cold, script),
        "torchrun": partial(start_torchrun, script, own_store=False),
        "torchrun, own store": partial(start_torchrun, script, own_store=True),
        "warm": lambda out, folder: asyncio.run(start_warm(script, out, folder, learns=False)),
        "learnt": lambda out, folder: asyncio.run(start_warm(script, out, folder, learns=True)),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        (folder / script).write_text(SCRIPTS[script])
        begin_s = ways[case](out, folder)
        return Start(script, case, stepped_at_s(out, RANKS) - begin_s)


def report(starts: list[Start]) -> str:
    lines = ["| script | started | s to the first step, median (range) | against torchrun |", "|---|---|---|---|"]
    for script in dict.fromkeys(start.script for start in starts):
        of = {case: [s.step_s for s in starts if (s.script, s.case) == (script, case)] for case in CASES}
        peer = statistics.median(of["torchrun"])
        for case, seconds in of.items():
            lines.append(
                f"| {script} | {case} | {median_and_range(seconds)} | {peer / statistics.median(seconds):.1f} x |"
            )
    return "\n".join(lines)


def main() -> None:
    arguments = read_arguments(parser_of(__doc__, rounds=5))
    rounds, scripts = arguments.rounds, arguments.scripts
    for script in scripts:
        measure(script, "cold")  # brings the files into memory
    starts = [measure(script, case) for _ in range(rounds) for script in scripts for case in CASES]
    conclude(arguments, starts, report(starts))


if __name__ == "__main__":
    with nothing_left():
        main()
