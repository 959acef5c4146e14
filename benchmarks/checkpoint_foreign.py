"""What a training loop that is not ours survives: flipped bits in its newest checkpoint, and its end after a resume.

`flips`: one bit of any byte of the newest checkpoint, or of the pointer to it, is changed (every file in turn, then
bytes by chance), and each door comes back: `Checkpointer.restore`, `blank_weights`, `restore_checkpoint`, the callback
of the Hugging Face Trainer, `phalanx train`. It counts as recovered if it went on, bit for bit, from the checkpoint
before, or from the same where nothing is restored from the file that was harmed.

`ends`: a loop of 8 steps with a checkpoint at every second, then the same again to step 10, each in a process of its
own (or two ranks): how long `Checkpointer.close` takes after the last step of the second.

    python benchmarks/checkpoint_foreign.py flips --times 100
    python benchmarks/checkpoint_foreign.py ends --times 50 --ranks 2
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from support.doors import DOORS, Door, Loop, a_keeper_at, expected_step, flip, made, newest_files
from support.harness import benchmark_parser

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.keeper.keeper_start import end_keeper

BAR_S = 5.0  # from the last step to the end
_HANG_S = 120.0


def main() -> int:
    """Do what the command line asks for; 1 where a bar was not met."""
    parser = benchmark_parser(__doc__, quick="a few, to see that it works")
    parser.add_argument("what", choices=["flips", "ends"], nargs="?", default="flips")
    parser.add_argument("--times", type=int, default=0, help="flips for each door, or ends; default: 100, or 50")
    parser.add_argument("--doors", nargs="*", choices=list(DOORS), default=list(DOORS))
    parser.add_argument("--ranks", type=int, default=1, help="of the loops that end")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "flips":
            times = 7 if args.quick else args.times or 100
            doors = ["Checkpointer.restore"] if args.quick else args.doors
            return flips(Path(folder), doors, times, args.seed)
        return ends(Path(folder), 2 if args.quick else args.times or 50, args.ranks)


def flips(folder: Path, doors: list[str], times: int, seed: int) -> int:
    """Try every door so many times."""
    table = Table("door", "flips", "recovered", "from the one before", "from the same", "s each")
    lost: list[str] = []
    for name in doors:
        with a_keeper_at(folder / "k"):
            door = DOORS[name]
            pristine = made(door, folder / name.replace(" ", "-"), folder / "k")
            chance, steps, began_s = random.Random(seed), Counter[int](), time.monotonic()
            for number in range(times):
                try:
                    steps[_try(door, pristine, folder / "harmed", number, chance)] += 1
                except Exception as error:
                    lost.append(f"{name}, flip {number}: {type(error).__name__}: {error}")
            seconds = (time.monotonic() - began_s) / times
        print(f"{name}: {steps.total()} of {times} recovered, {steps[8]} from the same", file=sys.stderr, flush=True)
        row = (times, steps.total(), steps[4], steps[8], f"{seconds:.2f}")
        table.add_row(name, *map(str, row))
    console = Console()
    console.print(table)
    for line in lost:
        console.print(line, style="red", markup=False)
    return 1 if lost else 0


def _try(door: Door, pristine: Path, folder: Path, number: int, chance: random.Random) -> int:
    files = len(newest_files(pristine / door.checkpoints))
    harm = partial(flip, chance=chance, file=number if number < files else None)
    file, step, said = door.harmed(pristine, folder, harm)
    assert step == expected_step(file), f"{file}: it went on from step {step}"
    assert said, f"{file}: nothing was said"
    return step


def ends(folder: Path, times: int, ranks: int) -> int:
    """Resume and end so many times."""
    seconds: list[float] = []
    for number in range(times):
        os.environ["PHALANX_KEEPER"] = str(folder / "k")
        place = folder / f"c{number}"
        _loops(place, 8, ranks)
        seconds.append(max(_loops(place, 10, ranks)))
        print(f"{number + 1} of {times}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
        end_keeper(folder / "k")
    in_time = sum(one < BAR_S for one in seconds)
    middle, longest = statistics.median(seconds), max(seconds)
    print(
        f"{in_time} of {times} ended within {BAR_S:g} s of the last step ({ranks} ranks); {middle=:.2f} {longest=:.2f}"
    )
    return 0 if in_time == times else 1


def _loops(folder: Path, steps: int, ranks: int) -> list[float]:
    """How long each rank took to end."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    about = (str(folder), steps, ranks, str(folder.with_name(f"{folder.name}-{steps}")), told)
    processes = [context.Process(target=_loop, args=(rank, *about)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        return [told.get(timeout=_HANG_S) for _ in processes]
    except Exception:
        return [float("inf")]
    finally:
        for process in processes:
            process.join(BAR_S)
            process.kill()


def _loop(rank: int, folder: str, steps: int, ranks: int, store: str, told: Any) -> None:
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    loop = Loop(0)
    with Checkpointer(folder, **loop.given, every_steps=2) as checkpoints:
        for step in range(checkpoints.restore() + 1, steps + 1):
            loop.train(step)
            checkpoints.step(step)
        began_s = time.monotonic()
    told.put(time.monotonic() - began_s)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
