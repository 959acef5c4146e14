"""What making the groups of a mesh costs: seconds, and operations and bytes on the store, against `new_group`.

    python benchmarks/group_init.py            # 8 real processes both ways, then 2,048 and 12,288 light members
    python benchmarks/group_init.py --naive 64 256   # the naive way with so many light members

Real processes are forked from this one after it has imported torch. They make the groups over tensor, pipeline, data
(shard) and all ranks of pp2·fs2·tp2 with gloo, as a `Mesh` does and as `torch.distributed.new_group` does when every
rank calls it for every group: without barriers, as torch does since 2023, and with one of all ranks at the end of each
group (TORCH_DIST_INIT_BARRIER=1), as it did before and in MegaScale's figures. Seconds are from the first fork until
the last rank has all its groups; the store is behind a proxy that counts.

Light members (benchmarks/rendezvous): everything that `phalanx train` says to the store until its first step is done,
for every rank of pp8·fsN·tp8, against a real TCPStore in a process of its own: one socket for every rank, every answer
waited for, all from one thread. The groups are those that the trainer's own code made (`rendezvous.startup`), and all
ranks' tree of connections; what NCCL's groups say is a stand-in's, which says what ProcessGroupNCCL says (no GPU is
needed). Left out is what NCCL does off the store, and the tree's own connections.
The naive way is what real ranks said to `new_group` with barriers, for every group over tensor, shard and pipeline.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from support.harness import benchmark_parser

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from rendezvous import naive, startup
from rendezvous.members import Crowd, Outcome
from rendezvous.nccl import NcclRendezvous
from rendezvous.proxy import Proxy, Recording
from rendezvous.scripts import GroupScript, record
from rendezvous.wire import Request
from support.store_port import port_of

from phalanx.core.layout import AXES, Axis, Layout
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.rendezvous import look_names_up_in_files_only, open_store

KINDS: list[tuple[Axis, ...]] = [("tensor",), ("shard",), ("pipeline",)]
ROW = "{:28} {:>7} {:>9} {:>9} {:>11} {:>10} {:>10}"


def main() -> None:
    parser = benchmark_parser(__doc__, quick="few members, once", repeats=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2048, 12288], help="light members, multiples of 64")
    parser.add_argument("--naive", type=int, nargs="*", default=[128, 256, 512], help="the same with new_group")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.naive, arguments.repeats = [128], [64], 1
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    for _ in range(max(1, arguments.repeats)):
        heard = real_processes()
    print(ROW.format("light members", "ranks", "connect s", "meet s", "requests", "MB sent", "MB got"))
    for count in arguments.ranks:
        replay("phalanx train, nccl", startup.scripts(startup.Everyone(layout_of(count))), arguments.repeats)
    for count in arguments.naive:
        replay("new_group + barriers, nccl", naively(count, naive.barrier_of(heard)), 1)


def layout_of(count: int) -> Layout:
    """pp8·fsN·tp8 of `count` ranks."""
    if count % 64:
        raise SystemExit(f"{count} ranks: give a multiple of 64")
    return Layout(pipeline=8, shard=count // 64, tensor=8)


def naively(count: int, barrier: list[Request]) -> list[list[Request]]:
    layout = layout_of(count)
    return naive.scripts(layout, recorded(layout, NcclRendezvous), barrier)


def recorded(layout: Layout, make: Any) -> dict[tuple[Axis, ...], GroupScript]:
    return {axes: record(layout, axes, make) for axes in KINDS if layout.size(*axes) > 1}


def replay(name: str, said: list[list[Request]], repeats: int) -> None:
    """Replay against a fresh server each time, and print."""
    for _ in range(repeats):
        with Server() as server:
            crowd = Crowd(("127.0.0.1", server.port), said)
            outcome = crowd.run(timeout_s=1800)
            crowd.close()
        _print(name, outcome)


def _print(name: str, outcome: Outcome) -> None:
    print(
        ROW.format(
            name,
            outcome.members,
            f"{outcome.connect_s:.2f}",
            f"{outcome.seconds:.2f}",
            outcome.requests,
            f"{outcome.sent_bytes / 1e6:.2f}",
            f"{outcome.received_bytes / 1e6:.2f}",
        ),
        flush=True,
    )


class Server:
    """A TCPStore in a process of its own, as `open_store` serves it."""

    def __enter__(self) -> Server:
        command = [sys.executable, __file__, "serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve() -> None:
    """Serve a store until the standard input ends."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    look_names_up_in_files_only()
    store = open_store("127.0.0.1", 0, 0, 1, is_host=True)
    print(port_of(store), flush=True)
    sys.stdin.read()


def real_processes() -> list[Recording]:
    """Make the same groups with a mesh and with `new_group`, in 8 processes; what each said with barriers."""
    layout = Layout(pipeline=2, shard=2, tensor=2)
    recordings: list[Recording] = []
    for name, body in (
        ("mesh", _with_mesh),
        ("new_group", _with_new_group),
        ("new_group with barriers", _with_barriers),
    ):
        with Server() as server:
            proxy = Proxy(("127.0.0.1", server.port), layout.world_size)
            seconds = _run_forked(body, layout, proxy.ports)
            proxy.drain()
            recordings = proxy.recordings
            proxy.close()
        requests = sum(len(r.requests) for r in recordings)
        sent, got = sum(r.sent_bytes for r in recordings), sum(r.received_bytes for r in recordings)
        print(
            f"{layout.world_size} processes, gloo, {name:23}: {seconds:.2f} s, {requests} requests, "
            f"{sent / 1e3:.1f} kB sent, {got / 1e3:.1f} kB got",
            flush=True,
        )
    return recordings


def _run_forked(body: Callable[[Layout, int, int], Any], layout: Layout, ports: list[int]) -> float:
    """Run `body` in a process per rank; seconds until all have said that they are done. None leaves before that."""
    said, saying = os.pipe()
    held, holding = os.pipe()
    begin = time.perf_counter()
    children = [_fork(body, layout, rank, ports[rank], saying, (held, holding)) for rank in range(layout.world_size)]
    os.close(saying)
    heard = b""
    while chunk := os.read(said, 64):
        heard += chunk
        if len(heard) == len(children):
            break
    seconds = time.perf_counter() - begin
    for end in (holding, held, said):
        os.close(end)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    assert not failed, f"{failed} ranks failed"
    return seconds


def _fork(
    body: Callable[[Layout, int, int], Any], layout: Layout, rank: int, port: int, saying: int, hold: tuple[int, int]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.close(hold[1])
        kept = body(layout, rank, port)
        os.write(saying, b".")
        os.close(saying)
        os.read(hold[0], 1)  # ends when the parent has heard of all
        status = 0 if kept else 1
    finally:
        os._exit(status)


def _with_mesh(layout: Layout, rank: int, port: int) -> Mesh:
    store = open_store("127.0.0.1", port, rank, layout.world_size, is_host=False)
    mesh = Mesh(layout, rank, store, torch.device("cpu"), 60.0, 60.0)
    mesh.prepare(*(mesh.group(*axes) for axes in [*KINDS, AXES]))
    return mesh


def _with_new_group(layout: Layout, rank: int, port: int) -> list[Any]:
    store = open_store("127.0.0.1", port, rank, layout.world_size, is_host=False)
    minute = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=minute)
    return [dist.new_group(list(ranks), timeout=minute) for axes in KINDS for ranks in layout.groups(axes)]


def _with_barriers(layout: Layout, rank: int, port: int) -> list[Any]:
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    return _with_new_group(layout, rank, port)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
