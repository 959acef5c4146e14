"""Ranks as real processes, started as `phalanx train` starts them, that hand back what each of them saw."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from phalanx.core.layout import Layout
from phalanx.launch.environment import Worker
from phalanx.launch.local_ranks import launch_local
from phalanx.parallel.rendezvous import open_store


def from_processes(count: int, module: str, work: Sequence[Any], layout: Layout | None = None) -> list[Any]:
    """What `count` processes handed back, by rank: each calls ``process_rank(worker, work, folder)`` of `module`.

    Raises:
        RuntimeError: a rank failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        target, preload = f"{module}:process_rank", ["phalanx.train.session", module]
        status = launch_local(count, target, (list(work), folder), preload=preload, layout=layout, threads=1)
        if status:
            raise RuntimeError(f"{count} ranks{f' of {layout}' if layout else ''} ended with status {status}")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(count)]


def meet(worker: Worker, timeout_s: float) -> Store:
    """What the ranks find each other by; each computes with one thread."""
    torch.set_num_threads(1)
    return open_store(
        worker.host,
        worker.port,
        worker.rank,
        worker.world_size,
        is_host=worker.hosts_store,
        listen_fd=worker.listen_fd,
        timeout_s=timeout_s,
    )


def hand_back(worker: Worker, folder: str, seen: Any) -> None:
    """Leave what this rank saw where `from_processes` finds it."""
    (Path(folder) / str(worker.rank)).write_bytes(pickle.dumps(seen))
