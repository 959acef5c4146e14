"""Ranks that form a gloo group over the store that the launcher opened for them."""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.launch.environment import Worker


def join(worker: Worker) -> None:
    store = dist.TCPStore(
        worker.host,
        worker.port,
        is_master=worker.hosts_store,
        wait_for_workers=False,
        master_listen_fd=worker.listen_fd,
        timeout=timedelta(seconds=60),
    )
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)


def all_reduce(worker: Worker, folder: str) -> None:
    join(worker)
    weights = torch.full((64, 64), float(worker.rank), requires_grad=True)
    (weights @ weights).sum().backward()
    total = weights.grad.clone()
    dist.all_reduce(total)
    in_thread: list[int] = []
    thread = threading.Thread(target=lambda: in_thread.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    found = {
        "total": float(total[0, 0]),
        "threads": torch.get_num_threads(),
        "threads_in_a_thread": in_thread[0],
        "draw": float(torch.rand(())),
        "phases": dict(worker.phases_s),
    }
    Path(folder, f"{worker.rank}.json").write_text(json.dumps(found))


def steps(worker: Worker, rank: int, number: int) -> None:
    """Steps with an all-reduce each; at step 5 `rank` raises, or gets the signal `number` if that is not 0."""
    join(worker)
    for step in range(100_000):
        dist.all_reduce(torch.ones(4))
        if step == 5 and worker.rank == rank:
            if number:
                os.kill(os.getpid(), signal.Signals(number))
            raise ValueError("a rank that raises at step 5")
