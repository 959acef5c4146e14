"""One rank of a timed collective, in a process of its own: all-to-all inside a host, all-reduce between neighbours.

torch is loaded by name and in that process only, since the rooms above do not know it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from phalanx.ipc.processes import die_with_parent

Kind = Literal["all-to-all", "all-reduce"]


class CollectiveError(Exception):
    """A rank has failed, given a wrong result, or not answered."""


@dataclass(frozen=True)
class CollectiveTask:
    """What one rank is to do.

    Attributes:
        meet: where the ranks meet, as `torch.distributed.init_process_group` takes it (``file://``, ``tcp://``).
        num_bytes: of each rank's message.
        device: number of its GPU; None: the CPU, with gloo.
    """

    kind: Kind
    rank: int
    size: int
    meet: str
    num_bytes: int
    limit_s: float
    parent: int
    device: int | None = None
    budget_s: float = 0.5


def start_rank(task: CollectiveTask, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank; `read_rank` returns what it found."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(task)).encode())
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def read_rank(process: subprocess.Popen[bytes], limit_s: float) -> float:
    """Bytes per second of its bus, as nccl-tests counts them. Raises `CollectiveError`."""
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise CollectiveError(f"no result within {limit_s:g} s") from None
    try:
        return float(json.loads(output)["bytes_per_s"])
    except (ValueError, KeyError):
        lines = errors.decode(errors="replace").strip().splitlines()
        raise CollectiveError(lines[-1] if lines else f"ended with status {process.returncode}") from None


def run_here(kind: Kind, size: int, *, num_bytes: int, limit_s: float, on_gpus: bool) -> float:
    """All ranks on this host; the slowest one's rate. Raises `CollectiveError`, and leaves no process."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-check-"))
        meet = f"file://{Path(folder) / 'store'}"
        ranks = []
        for rank in range(size):
            task = CollectiveTask(kind, rank, size, meet, num_bytes, limit_s, os.getpid(), rank if on_gpus else None)
            ranks.append(start_rank(task, {"GLOO_SOCKET_IFNAME": "lo"}))
            stack.callback(ranks[-1].kill)
        return min(read_rank(rank, limit_s) for rank in ranks)


def bus_bytes(kind: Kind, num_bytes: int, size: int) -> float:
    """What each rank's link carries: see PERFORMANCE.md of nccl-tests."""
    share = (size - 1) / size
    return num_bytes * share * (2 if kind == "all-reduce" else 1)


def work(task: CollectiveTask) -> float:
    """Take part, check the result, and return bytes per second."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    device = torch.device("cpu") if task.device is None else torch.device("cuda", task.device)
    if task.device is not None:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if task.device is None else "nccl",
        init_method=task.meet,
        rank=task.rank,
        world_size=task.size,
        timeout=timedelta(seconds=task.limit_s),
    )
    step, check = _steps(torch, distributed, task, device)
    step()
    if not check():
        raise CollectiveError("the result is wrong")

    def timed() -> float:
        began_s = time.perf_counter()
        step()
        if task.device is not None:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    # Each rank times on its own, so all make as many steps as rank 0 thinks to fit into the budget.
    count = torch.tensor([max(3, min(50, round(task.budget_s / timed())))], device=device)
    distributed.broadcast(count, 0)
    times = [timed() for _ in range(int(count.item()))]
    return bus_bytes(task.kind, task.num_bytes, task.size) / min(times)


def _steps(torch: Any, distributed: Any, task: CollectiveTask, device: Any) -> tuple[Any, Any]:
    count = task.num_bytes // 4 // task.size * task.size
    part = count // task.size
    sent = torch.full((count,), float(task.rank), device=device)
    got = torch.empty_like(sent)
    if task.kind == "all-to-all":
        expected = torch.arange(task.size, device=device, dtype=torch.float32).repeat_interleave(part)
        return lambda: distributed.all_to_all_single(got, sent), lambda: bool(torch.equal(got, expected))

    def reduce() -> None:
        got.fill_(float(task.rank))
        distributed.all_reduce(got)

    total = float(sum(range(task.size)))
    return reduce, lambda: bool((got == total).all())


def main() -> None:
    """Do one task, which comes on stdin."""
    task = CollectiveTask(**json.load(sys.stdin))
    die_with_parent(task.parent)
    print(json.dumps({"bytes_per_s": work(task)}), flush=True)
    os._exit(0)  # what hangs at the end of a process group is not what is tested


if __name__ == "__main__":
    main()
