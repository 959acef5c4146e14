"""Runs a benchmark's script once per rank on two hosts (see namespaces.py), one core each; gives what rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from phalanx.core.layout import Axis
from phalanx.parallel.group import Group
from support import harness

_PORT = 29611


def run_pair(hosts: Sequence[Any], script: Path, arguments: Sequence[str], timeout_s: float) -> Any:
    """Start `script` with `arguments` and ``--rank`` on each host; the JSON that rank 0 prints last."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    for rank, host in enumerate(hosts):
        command = [*host.prefix, sys.executable, str(script), *arguments, "--rank", str(rank)]
        command += ["--address", hosts[0].address, "--core", str(cores[rank % len(cores)])]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
        started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        ranks.append(started)
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in ranks]}")
    return json.loads(outputs[0].splitlines()[-1])


def join(rank: int, address: str, core: int, axes: Sequence[Axis]) -> Group:
    """The group of the two ranks, from inside one of them, which is bound to one core."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    store = TCPStore(address, _PORT, 2, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    backend = ProcessGroupGloo(store, rank, 2, timeout)
    return Group((0, 1), rank, lambda: backend, axes)


def slowest(group: Group, values: Sequence[float]) -> list[float]:
    """Of each value, the larger one of the two ranks."""
    x = torch.tensor(values, dtype=torch.float64)
    group.all_reduce(x, torch.distributed.ReduceOp.MAX).wait()
    return [float(value) for value in x]


def in_turns(group: Group, contenders: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contender, the slower rank's, in turns so that all see the same machine; one turn is not counted.

    A contender returns the seconds it took; both ranks start it together.
    """

    def together(run: Callable[[], float]) -> float:
        group.barrier()
        return run()

    seconds = harness.in_turns({name: partial(together, run) for name, run in contenders.items()}, repeats)
    return {name: slowest(group, values) for name, values in seconds.items()}
