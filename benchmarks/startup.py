"""Time from nothing to ranks that can train on one host: forked from a template, against one Python each.

A job is ready when every rank has entered its main function, with all that training imports, has joined one gloo group
of all, and has finished an all-reduce. Every round does each case once, in turn. Example:

    python benchmarks/startup.py --ranks 1 4 8 --rounds 3
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.harness import benchmark_parser, median_and_range, write_json

from phalanx.launch.environment import Worker
from phalanx.launch.local_ranks import launch_local

TRAINING = ("phalanx.train.session", "torch.distributed")
BAR_S = 1.5


@dataclass(frozen=True)
class Start:
    """One job that was started.

    Attributes:
        ready_s: from the call of the launcher until the last rank was ready.
        gone_s: from then until the launcher returned.
        cpu_s: CPU time of all processes, once they were gone.
        phases_s: of the slowest rank; the last one, "group", is joining and the all-reduce.
    """

    ranks: int
    fork: bool
    ready_s: float
    gone_s: float
    cpu_s: float
    phases_s: dict[str, float]

    @property
    def after_imports_s(self) -> float:
        """Without what one rank alone would have to wait for too, and what varies most on a busy machine."""
        return self.ready_s - self.phases_s["template"] - self.phases_s["import"]


def become_ready(worker: Worker, folder: str) -> None:
    """What each rank does. Torch is imported here, so that the launcher does not import it with this file."""
    begin_s = time.monotonic()
    import torch
    import torch.distributed as dist

    import phalanx.train.session  # noqa: F401

    imported_s = time.monotonic()
    store = dist.TCPStore(
        worker.host,
        worker.port,
        is_master=worker.hosts_store,
        wait_for_workers=False,
        master_listen_fd=worker.listen_fd,
        timeout=timedelta(seconds=300),
    )
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == worker.world_size
    ready_s = time.monotonic()
    phases_s = {**worker.phases_s, "import": imported_s - begin_s, "group": ready_s - imported_s}
    Path(folder, f"{worker.rank}.json").write_text(json.dumps({"ready_s": ready_s, "phases_s": phases_s}))


def measure(ranks: int, fork: bool) -> Start:
    """Start `ranks` ranks and wait until they are gone again."""
    preload = TRAINING if fork else ()
    cpu_before_s = children_cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        begin_s = time.monotonic()
        status = launch_local(ranks, "startup:become_ready", (folder,), preload=preload, fork=fork)
        end_s = time.monotonic()
        assert status == 0
        said = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    last: dict[str, Any] = max(said, key=lambda rank: rank["ready_s"])
    ready_s = last["ready_s"]
    cpu_s = children_cpu_s() - cpu_before_s
    return Start(ranks, fork, ready_s - begin_s, end_s - ready_s, cpu_s, last["phases_s"])


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(starts: list[Start]) -> str:
    """Medians and ranges per case, and what more ranks cost over one."""
    lines = [
        "| ranks | made by | ready, s | after imports, s | CPU, s | phases of the last rank, s |",
        "|---" * 6 + "|",
    ]
    for fork in (True, False):
        for ranks in sorted({start.ranks for start in starts}):
            case = [start for start in starts if (start.ranks, start.fork) == (ranks, fork)]
            if not case:
                continue
            ready, rest = [start.ready_s for start in case], [start.after_imports_s for start in case]
            middle = sorted(case, key=lambda start: start.ready_s)[len(case) // 2]
            phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in middle.phases_s.items())
            cpu_s = statistics.median(start.cpu_s for start in case)
            how = "fork" if fork else "exec"
            lines.append(
                f"| {ranks} | {how} | {median_and_range(ready)} | {median_and_range(rest)} | {cpu_s:.1f} | {phases} |"
            )
    return "\n".join([*lines, "", *differences(starts)])


def differences(starts: list[Start]) -> list[str]:
    """How much later the most ranks are ready than the fewest, paired by round."""
    lines = []
    for fork in (True, False):
        by_ranks = {n: [s.ready_s for s in starts if (s.ranks, s.fork) == (n, fork)] for n in {s.ranks for s in starts}}
        few, many = min(by_ranks), max(by_ranks)
        if few == many or not by_ranks[few]:
            continue
        later = [b - a for a, b in zip(by_ranks[few], by_ranks[many], strict=True)]
        bar = f" (bar {BAR_S})" if fork and (few, many) == (1, 8) else ""
        each = ", ".join(f"{seconds:.2f}" for seconds in later)
        made = "fork" if fork else "exec"
        lines.append(f"{made}: {many} ranks ready {statistics.median(later):.2f} s after {few} would be: {each}{bar}")
    return lines


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one round of 1 and 2 ranks", as_json=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-exec", action="store_true", help="leave out one Python per rank, which takes long")
    arguments = parser.parse_args()
    ranks, rounds = ([1, 2], 1) if arguments.quick else (arguments.ranks, arguments.rounds)
    ways = [True] if arguments.no_exec else [True, False]
    measure(1, fork=True)  # brings the files of torch into memory
    starts = [measure(n, fork) for _ in range(rounds) for fork in ways for n in ranks]
    print(f"{len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}\n{report(starts)}")
    write_json(arguments.json, [asdict(start) for start in starts])


if __name__ == "__main__":
    main()
