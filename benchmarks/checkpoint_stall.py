"""How long checkpoints hold up training, beside torch.distributed.checkpoint's `async_save`.

    python benchmarks/checkpoint_stall.py                # stall: 10 checkpoints of 2 × 300 MB; some minutes
    python benchmarks/checkpoint_stall.py --overlap      # ours alone: copying at once against copying beside training
    python benchmarks/checkpoint_stall.py --memory       # growth of memory over 50 checkpoints
    python benchmarks/checkpoint_stall.py --every-step   # a snapshot and a replica at every step, every 10th durable
    python benchmarks/checkpoint_stall.py --last         # the checkpoint that training waits for, beside the disk
    python benchmarks/checkpoint_stall.py --quick        # a tiny one of each

Two processes of one thread each train 25M fp32 parameters of their own with AdamW (300 MB of state each), forward and
backward for real, with a barrier at every step. *Stall* is the wall time of the step that ends with a checkpoint and
the next one, less twice the median of the four steps before, of the same run. *Until the next* is the same for all
steps until shortly before the next checkpoint: what writing in the background takes from training counts there too.
*Durable* is the time from the snapshot until all of it is on the disk (torch's does not wait for the disk: no fsync).
With "stager", torch keeps its staging memory between saves.

*Memory* is the proportional set size of all processes of the run, keeper and savers included, after the 5th and after
the last checkpoint. For `--every-step` two keepers on one machine play two hosts; rounds alternate.

`--last`: both processes wait for their shares of one checkpoint, then a file is written as `phalanx check` does it, in
turns, `--checkpoints` times. It prints the rate of each, their ratio, and what the former takes of the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.harness import benchmark_parser
from support.stall.contenders import NAMES
from support.stall.ranks import disturbances, every_step, last, stall, stalls
from support.stall.task import MARK, Size

from phalanx.checkpoint.keeper.keeper_start import end_keeper

FULL, QUICK = Size(6, 2048, 160), Size(3, 512, 256)
SMALL, QUICK_SMALL = Size(10, 1024, 1024), Size(3, 256, 256)
TIMEOUT_S = 3600.0
ROW = "{:22} {:>10} {:>10} {:>10} {:>14} {:>10} {:>9} {:>22}"
HEADS = ("", "stall s", "first s", "worst s", "until next s", "durable s", "step s", "memory MB, 5th, last")


def main() -> None:
    parser = benchmark_parser(__doc__, quick="small and short, to see that it works")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--last", action="store_true")
    parser.add_argument("--only", nargs="*", choices=NAMES, help="these contenders")
    parser.add_argument("--checkpoints", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(json.loads(arguments.rank))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    for work in jobs(arguments):
        work.report(run(work.order, arguments.folder))


class Stall:
    """Runs of one contender."""

    def __init__(self, name: str, size: Size, checkpoints: int, every: int) -> None:
        self.every = every
        self.order = {"what": "stall", "name": name, "size": vars(size), "checkpoints": checkpoints, "every": every}

    def report(self, result: Any) -> None:
        seconds = result["seconds"]
        found, until = stalls(seconds, self.every), disturbances(seconds, self.every)
        durable_s, memory = result["durable_s"], [f"{size / 1e6:.0f}" for size in result["memory_bytes"]]
        times = (statistics.median(found), found[0], max(found), statistics.median(until))
        rest = (statistics.median(durable_s) if durable_s else float("nan"), statistics.median(seconds))
        print(ROW.format(self.order["name"], *(f"{value:.3f}" for value in times + rest), ", ".join(memory)))
        if "events" in result:  # rank 0's own account of it
            names = ("stall_s", "snapshot_s", "examine_s", "persist_s", "durable_s")
            print("   ", ", ".join(f"{name} {_median(result['events'], name):.3f}" for name in names))


class EveryStep:
    """Rounds with and without."""

    def __init__(self, size: Size, rounds: int, steps: int) -> None:
        self.order = {"what": "every-step", "size": vars(size), "rounds": rounds, "steps": steps}
        self.steps = steps

    def report(self, result: Any) -> None:
        ways, events = result["seconds"], result["events"]
        ratios = [without / own for own, without in zip(ways["with"], ways["without"], strict=True)]
        each = [f"{ratio:.3f}" for ratio in ratios]
        print(f"every step: {statistics.median(ratios):.3f} of the throughput without ({', '.join(each)})")
        print(f"  a step without: {statistics.median(ways['without']) / self.steps:.3f} s")
        replicated = [event for event in events if event["replicate_bytes"]]
        durable = [event for event in events if event["name"]]
        counts = f"{len(events)} snapshots, {len(replicated)} replicated, {len(durable)} durable"
        print(f"  {counts} in {result['taken_steps']} steps")
        for name in ("stall_s", "snapshot_s", "examine_s", "replicate_s", "durable_s"):
            print(f"  {name}: {_median(events, name):.3f}")


class Last:
    """A checkpoint that training waits for, in turns with the disk by itself."""

    def __init__(self, size: Size, rounds: int) -> None:
        self.order = {"what": "last", "size": vars(size), "rounds": rounds}

    def report(self, result: Any) -> None:
        ours, disk = result["checkpoint_bytes_per_s"], result["disk_bytes_per_s"]
        ratios = [own / other for own, other in zip(ours, disk, strict=True)]
        print(f"last checkpoint of {result['bytes'] / 1e9:.2f} GB: {_rates(ours)} GB/s, median first")
        print(f"  the disk by itself, as `phalanx check` writes it: {_rates(disk)} GB/s")
        print(f"  ratio of each pair: {statistics.median(ratios):.2f} ({', '.join(f'{one:.2f}' for one in ratios)})")
        print(f"  seconds of a core per GB: {statistics.median(result['core_s_per_gb']):.2f}")
        print(f"  load at the end: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


def _rates(rates: list[float]) -> str:
    return f"{statistics.median(rates) / 1e9:.2f} ({', '.join(f'{one / 1e9:.2f}' for one in rates)})"


def _median(events: list[dict[str, Any]], name: str) -> float:
    return statistics.median([event[name] for event in events if event[name]] or [float("nan")])


def jobs(arguments: argparse.Namespace) -> list[Stall | EveryStep | Last]:
    quick = arguments.quick
    if arguments.last:
        return [Last(QUICK_SMALL if quick else FULL, arguments.checkpoints)]
    size, every = (QUICK, 8) if quick else (FULL, 16)
    if arguments.every_step and not quick:
        return [EveryStep(SMALL, 5, 30)]
    names = arguments.only or (["ours", "ours, overlapping"] if arguments.overlap else NAMES[:1] + NAMES[2:-1])
    if arguments.memory:
        names, size = arguments.only or ["ours", "dcp thread, stager", "dcp process, stager"], Size(6, 2048, 16)
        print(ROW.format(*HEADS))
        return [Stall(name, size, 50, 12) for name in names]
    print(ROW.format(*HEADS))
    names = arguments.only or (("ours", "dcp thread") if quick else names)
    work: list[Stall | EveryStep | Last] = [
        Stall(name, size, 3 if quick else arguments.checkpoints, every) for name in names
    ]
    return [*work, EveryStep(QUICK_SMALL, 1, 20)] if quick else work


def run(order: dict[str, Any], folder: Path | None) -> Any:
    """Start both ranks, each with a keeper of its own where hosts are played; what rank 0 prints last."""
    mark = secrets.token_hex(8)
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        tempfile.TemporaryDirectory() as sockets,
        tempfile.TemporaryFile("w+") as errors,
    ):
        address = f"127.0.0.1:{free_port()}"
        ranks = []
        for rank in range(2):
            text = json.dumps(order | {"rank": rank, "address": address, "folder": own})
            keeper = str(keeper_of(order, sockets, rank))
            settings = {MARK: mark, "PHALANX_KEEPER": keeper, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--rank", text]
            pipes = {"stdout": subprocess.PIPE, "stderr": errors}
            ranks.append(subprocess.Popen(command, env=os.environ | settings, text=True, **pipes))
        try:
            outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            for rank in range(2):
                end_keeper(keeper_of(order, sockets, rank))
        if any(process.returncode for process in ranks):
            errors.seek(0)
            raise RuntimeError(f"a rank failed: {outputs} {errors.read()[-5000:]}")
    for line in {line for output in outputs for line in output.splitlines()[:-1]}:
        print(line, file=sys.stderr)
    return json.loads(outputs[0].splitlines()[-1])


def keeper_of(order: dict[str, Any], sockets: str, rank: int) -> Path:
    """The address of the keeper of a rank's host."""
    return Path(sockets) / (f"keeper{rank}" if order["what"] == "every-step" else "keeper")


def run_rank(order: dict[str, Any]) -> None:
    size = Size(**order["size"])
    rank, address, folder = order["rank"], order["address"], Path(order["folder"])
    if order["what"] == "last":
        result = last(rank, address, folder, size, rounds=order["rounds"])
    elif order["what"] == "stall":
        counts = {"checkpoints": order["checkpoints"], "every": order["every"]}
        result = stall(order["name"], rank, address, folder, size, **counts)
    else:
        result = every_step(rank, address, folder, size, rounds=order["rounds"], steps=order["steps"])
    print(json.dumps(result), flush=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
