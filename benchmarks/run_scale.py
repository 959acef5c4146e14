"""One driver and very many hosts: what it costs to hear them all, and what it makes of 500 deaths at once.

    python benchmarks/run_scale.py                                   # 12,500 hosts of 8 workers
    python benchmarks/run_scale.py --counts 2000 12500 --repeats 3

The whole driver is one process on one core: connections, checked messages, judges, decisions, and a journal on the
disk. The hosts (benchmarks/crowd/hosts.py) are another process on another core, with a socket each over loopback; they
answer checks, start and stop as executors do, and report 8 ranks each once a second (at least 1 kB), which make steps.
CPU is the driver's own user and system time over the wall clock; latency is from just before a host writes a heartbeat
until it has read the acknowledgement, so what both processes wait for a core is in it. Then so many ranks on different
hosts are killed at once; "again" is the time until all ranks have made a step in the next attempt, and "incidents" how
many recoveries that was (one is right).
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from run_wire import ask, line, process
from support.harness import benchmark_parser
from support.leaving import nothing_left

WORKERS = 8
ROW = "{:>7} {:>10} {:>8} {:>8} {:>9} {:>8} {:>7} {:>7} {:>7} {:>7} {:>8} {:>9} {:>8}"
HEAD = (
    *("hosts", "connect s", "start s", "CPU %", "us/beat", "beats/s", "RSS MB", "p50 ms", "p99 ms", "max ms"),
    *("again s", "incidents", "evicted"),
)
BAR_CPU, BAR_BYTES, BAR_S = 0.60, 1e9, 0.050


class Outcome(NamedTuple):
    connect_s: float
    start_s: float
    cpu: float
    beats_per_s: float
    rss_bytes: int
    latencies_s: list[float]
    again_s: float
    incidents: int
    evicted: int
    lost: int
    beat_bytes: int


def main() -> None:
    parser = benchmark_parser(__doc__, quick="a few hosts, to see that it works", repeats=1)
    parser.add_argument("--counts", type=int, nargs="*", default=[12_500], help="hosts")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured while all run, after 5 s that are not")
    parser.add_argument("--deaths", type=int, default=500, help="ranks killed at once, on as many hosts")
    parser.add_argument("--folder", type=Path, help="of the journal; absent: a temporary one")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.counts, arguments.seconds, arguments.deaths = [40], 2.0, 10
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    print(ROW.format(*HEAD))
    with nothing_left(inside=arguments.folder):
        for count in arguments.counts:
            if count + 100 > hard:
                print(f"{count:>7} left out: this process may open {hard} files")
                continue
            for _ in range(arguments.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    show(count, measure(count, arguments.seconds, min(arguments.deaths, count), folder))


def show(count: int, seen: Outcome) -> None:
    latencies = sorted(seen.latencies_s)
    p50_s, p99_s = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    remarks = [f"heartbeat of {seen.beat_bytes} bytes"] + [f"{seen.lost} connections lost"] * bool(seen.lost)
    if count >= 12_500:
        met = seen.cpu < BAR_CPU and seen.rss_bytes < BAR_BYTES and p99_s < BAR_S and seen.incidents == 1
        remarks.append("bar met" if met and not seen.lost else "bar NOT met")
    values = (
        f"{seen.connect_s:.1f}",
        f"{seen.start_s:.1f}",
        f"{seen.cpu * 100:.1f}",
        f"{seen.cpu / seen.beats_per_s * 1e6:.1f}",
        f"{seen.beats_per_s:.0f}",
        f"{seen.rss_bytes / 1e6:.0f}",
        f"{p50_s * 1e3:.2f}",
        f"{p99_s * 1e3:.1f}",
        f"{latencies[-1] * 1e3:.0f}",
        f"{seen.again_s:.1f}",
        seen.incidents,
        seen.evicted,
    )
    print(ROW.format(count, *values), "; ".join(remarks), flush=True)


def measure(count: int, seconds: float, deaths: int, folder: str) -> Outcome:
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(process("crowd.driver", count, WORKERS, folder, core=0))
        port = line(driver)
        began_s = time.monotonic()
        crowd = stack.enter_context(process("crowd.hosts", port, count, core=1))
        connect_s = line(crowd)["connect_s"]
        until_running(driver, crowd, 1)
        start_s = time.monotonic() - began_s - connect_s
        ask(crowd, "beat", 5.0)
        before = ask(driver)
        seen = ask(crowd, "beat", seconds)
        after = ask(driver)
        ask(crowd, "die", deaths)
        died_s = time.monotonic()
        last = until_running(driver, crowd, 2)
        again_s = time.monotonic() - died_s
    wall_s = after["at_s"] - before["at_s"]
    return Outcome(
        connect_s=connect_s,
        start_s=start_s,
        cpu=(after["cpu_s"] - before["cpu_s"]) / wall_s,
        beats_per_s=(after["beats"] - before["beats"]) / wall_s,
        rss_bytes=after["rss_bytes"],
        latencies_s=seen["latencies_s"],
        again_s=again_s,
        incidents=last["incidents"],
        evicted=last["evicted"],
        lost=seen["lost"],
        beat_bytes=seen["bytes"],
    )


def until_running(driver: Any, crowd: Any, attempt: int, within_s: float = 600.0) -> dict[str, Any]:
    """Let hosts beat until this attempt makes steps; where the driver stands then."""
    end_s = time.monotonic() + within_s
    while not ((seen := ask(driver))["running"] and seen["attempt"] >= attempt):
        if time.monotonic() > end_s:
            raise SystemExit(f"attempt {attempt} does not run after {within_s:.0f} s: {seen}")
        ask(crowd, "beat", 0.1)
    return dict(seen)


if __name__ == "__main__":
    main()
