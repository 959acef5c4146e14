"""One loader process per host against a loader in every rank: bytes read, CPU time, memory, time to the first batch.

    python benchmarks/host_loader.py                    # 8 ranks of 1, 2 and 8 data-parallel indices; a minute or two
    python benchmarks/host_loader.py --method exec      # the loader as a new Python instead of a fork

The ranks are forks of one process that has imported torch, as `phalanx.launch` makes them. They do nothing but take
batches, as fast as they come. For each way and number of indices:

- read: bytes of tokens copied out of the token files (mapped: the system's page cache has them once either way).
- CPU: of all ranks and the loader process, per token that a rank received, after the first batch.
- memory: proportional set size (/proc/PID/smaps_rollup) of all processes, their parent included so that what they share
  by forking counts once, less what it was before loading; mapped pages of the token files are listed apart.
- first: from the decision to load until the last rank has its first batch, opening the corpus and starting the loader
  process included.

Ways alternate; medians and ranges over the repeats.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import torch
from support.harness import benchmark_parser, median_and_range

from phalanx.data.config import DataConfig, TokenizerConfig
from phalanx.data.host_loader import HostLoaderClient, start_host_loader
from phalanx.data.loader import Loader
from phalanx.data.prepare import prepare
from phalanx.data.samples import SampleReader
from phalanx.data.tokens.prepared_corpus import Prepared

WAYS = ("a loader per rank", "one per host")


@dataclass(frozen=True)
class Case:
    """How much is read by whom: `rows` samples a step for each of `indices`, by `ranks` processes."""

    prepared: Prepared
    config: DataConfig
    ranks: int
    indices: int
    rows: int
    steps: int
    method: Any

    def index(self, rank: int) -> int:
        return rank * self.indices // self.ranks

    @property
    def count(self) -> int:
        return self.rows * self.indices

    @property
    def tokens(self) -> int:
        """That a rank receives after the first batch."""
        return self.steps * self.rows * self.config.sequence_length


@dataclass(frozen=True)
class Result:
    read_bytes: int
    cpu_s: float
    memory_bytes: int
    mapped_bytes: int
    first_s: float


class Counted:
    """Bytes read by all forks of this process: each has a place of its own in memory that they share."""

    def __init__(self, places: int) -> None:
        self._memory = mmap.mmap(-1, 8 * places)
        self.place = 0

    def reset(self) -> None:
        self._memory[:] = bytes(len(self._memory))

    @property
    def total(self) -> int:
        return sum(struct.unpack(f"{len(self._memory) // 8}q", self._memory[:]))

    def count(self) -> None:
        """Count what every `SampleReader` reads from now on, in this process and its forks."""
        real = SampleReader.read

        def read(reader: SampleReader, begin_B: Any) -> Any:
            size = len(begin_B) * (reader.length + 1) * int(reader.stream.shards[0].dtype[-1])
            (before,) = struct.unpack_from("q", self._memory, 8 * self.place)
            struct.pack_into("q", self._memory, 8 * self.place, before + size)
            return real(reader, begin_B)

        SampleReader.read = read  # type: ignore[method-assign]


def rank_process(rank: int, case: Case, counted: Counted, meet: Callable[[], int], words: Connection) -> None:
    counted.place = rank + 1
    torch.set_num_threads(1)
    meet()
    begin_s, address = words.recv()
    with ExitStack() as stack:
        if address is None:
            loader = Loader(case.prepared, case.config)
            own = loader.stream(counts=case.count, rank=case.index(rank), ranks=case.indices)
            stream: Any = stack.enter_context(own)
        else:
            client = HostLoaderClient(address, rank=case.index(rank), ranks=case.indices)
            stream = stack.enter_context(client.stream(counts=case.count))
        next(stream)
        first_s = time.monotonic() - begin_s
        meet()
        before_s = time.process_time()
        for _ in range(case.steps):
            next(stream)
        words.send((first_s, time.process_time() - before_s))
        meet()
        meet()


def measure(case: Case, counted: Counted, *, shared: bool) -> Result:
    context: ForkContext = multiprocessing.get_context("fork")
    barrier = context.Barrier(case.ranks + 1)
    pipes = [context.Pipe() for _ in range(case.ranks)]
    counted.reset()
    children = [
        context.Process(target=rank_process, args=(rank, case, counted, barrier.wait, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    pids = [os.getpid(), *(child.pid or 0 for child in children)]
    with ExitStack() as stack:
        barrier.wait()
        idle = memory(pids)
        begin_s, address, pid = time.monotonic(), None, None
        if shared:
            indices = [case.index(rank) for rank in range(case.ranks)]
            host = start_host_loader(case.prepared, case.config, indices=indices, method=case.method)
            stack.enter_context(host)
            address, pid = host.address, host.pid
        for ours, _ in pipes:
            ours.send((begin_s, address))
        barrier.wait()
        before_s = process_cpu_s(pid)
        said = [ours.recv() for ours, _ in pipes]
        barrier.wait()
        loader_s = process_cpu_s(pid) - before_s
        used = memory(pids + ([] if pid is None else [pid]))
        read_bytes = counted.total
        barrier.wait()
        for child in children:
            child.join()
    added = [after - before for after, before in zip(used, idle, strict=True)]
    return Result(read_bytes, loader_s + sum(cpu for _, cpu in said), added[0], added[1], max(f for f, _ in said))


def process_cpu_s(pid: int | None) -> float:
    """CPU seconds of a process, by the clock that the kernel keeps for it (clock_getcpuclockid)."""
    return 0.0 if pid is None else time.clock_gettime((~pid << 3) | 2)


def memory(pids: list[int]) -> tuple[int, int]:
    """Bytes of all processes, proportionally: what is theirs or shared between them, and pages of files."""
    found = {"Pss_Anon": 0, "Pss_Shmem": 0, "Pss_File": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value, *_ = line.split()
            if name[:-1] in found:
                found[name[:-1]] += int(value) * 1024
    return found["Pss_Anon"] + found["Pss_Shmem"], found["Pss_File"]


def main() -> None:
    parser = benchmark_parser(__doc__, quick="4 ranks and few steps, once, to see that it works", repeats=5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--indices", default="1,2,8")
    parser.add_argument("--rows", type=int, default=8, help="samples of a step for each data-parallel index")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--method", choices=("fork", "exec"), default="fork")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.indices, options.steps, options.repeats = 4, "1,4", 10, 1
    print(f"{options.ranks} ranks, {options.rows} x {options.length} tokens a step for each data-parallel index,")
    print(f"{options.steps} steps, n={options.repeats}: median (range); the loader process by {options.method}")
    print("| indices | way | read, bytes per token | CPU, us per token | memory, MiB | token files, MiB | first, ms |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = TokenizerConfig(kind="bytes")
        config = DataConfig(sequence_length=options.length, tokenizer=tokenizer, folder=folder)
        prepared = prepare(config)
        counted = Counted(options.ranks + 1)
        if options.method == "fork":  # a new Python would not count
            counted.count()
        for indices in map(int, options.indices.split(",")):
            case = Case(prepared, config, options.ranks, indices, options.rows, options.steps, options.method)
            report(case, counted, options.repeats)


def report(case: Case, counted: Counted, repeats: int) -> None:
    results: list[list[Result]] = [[], []]
    for _ in range(repeats):
        for shared in (False, True):
            results[shared].append(measure(case, counted, shared=shared))
    received = case.tokens * case.ranks
    for way, runs in zip(WAYS, results, strict=True):
        read = median_and_range([run.read_bytes / received for run in runs], 2) if counted.total else "not counted"
        cells = [
            str(case.indices),
            way,
            read,
            median_and_range([run.cpu_s * 1e6 / received for run in runs], 4),
            median_and_range([run.memory_bytes / 2**20 for run in runs], 1),
            median_and_range([run.mapped_bytes / 2**20 for run in runs], 1),
            median_and_range([run.first_s * 1e3 for run in runs], 0),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
