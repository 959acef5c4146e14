"""What it costs the driver to hear every executor once a second: CPU, memory and latency of one server process.

    python benchmarks/run_wire.py                      # all contenders with 500, 2,000 and 12,500 executors
    python benchmarks/run_wire.py --contenders ours --counts 12500 --seconds 30 --repeats 3

The server is one process on one core; the crowd of executors (benchmarks/crowd) is another, on another core. Every
executor has a socket of its own over loopback and sends a heartbeat a second (8 workers, at least 1 kB), spread over
the second; the server decodes it into checked values, keeps the latest of each host and acknowledges it. CPU is the
server's own user and system time over the wall clock, latency is from just before the crowd writes a heartbeat until it
has read the acknowledgement, so what the crowd's own process waits for a core is in it.

Contenders: `ours` is phalanx.run.wire on uvloop, with the handshake, `ours-asyncio` the same on asyncio's loop,
`ours-tls` with TLS; `websockets` and `websockets-asyncio` are that package's asyncio server with msgspec; `picows` with
msgspec; `fastapi` is FastAPI on uvicorn with pydantic and JSON. The last two are not dependencies of the project
(`pip install picows fastapi uvicorn`) and are left out, with a line, where they are not installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from crowd.beats import payload
from crowd.servers import CONTENDERS, lacks
from support.harness import benchmark_parser
from support.leaving import nothing_left

HERE = Path(__file__).parent
ROW = "{:20} {:>7} {:>10} {:>7} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6}"
HEAD = (
    "contender",
    "hosts",
    "connect s",
    "CPU %",
    "us/beat",
    "beats/s",
    "RSS MB",
    "p50 ms",
    "p99 ms",
    "max ms",
    "late",
)
BAR_CPU, BAR_BYTES, BAR_S = 0.60, 1e9, 0.050


class Outcome(NamedTuple):
    cpu: float
    beats_per_s: float
    rss_bytes: int
    connect_s: float
    p50_s: float
    p99_s: float
    longest_s: float
    late: int
    lost: int
    unanswered: int


def main() -> None:
    parser = benchmark_parser(__doc__, quick="ours with a few hosts, to see that it works", repeats=1)
    parser.add_argument("--counts", type=int, nargs="*", default=[500, 2000, 12500], help="executors")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, after 5 s that are not")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.counts, arguments.contenders, arguments.seconds = [20], ["ours"], 2.0
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start,")
    print(f"heartbeat of {len(payload(False)[0])} bytes in MessagePack, {len(payload(True)[0])} in JSON")
    print(ROW.format(*HEAD))
    for name in arguments.contenders:
        if missing := lacks(name):
            print(f"{name:20} left out: {', '.join(missing)} not installed")
            continue
        for count in arguments.counts:
            if count + 100 > hard:
                print(f"{name:20} {count:>7} left out: this process may open {hard} files")
                continue
            for _ in range(arguments.repeats):
                show(name, count, measure(name, count, arguments.seconds))


def show(name: str, count: int, seen: Outcome) -> None:
    values = (
        f"{seen.connect_s:.1f}",
        f"{seen.cpu:.1%}"[:-1],
        f"{seen.cpu / seen.beats_per_s * 1e6:.1f}",
        f"{seen.beats_per_s:.0f}",
        f"{seen.rss_bytes / 1e6:.0f}",
        f"{seen.p50_s * 1e3:.2f}",
        f"{seen.p99_s * 1e3:.1f}",
        f"{seen.longest_s * 1e3:.0f}",
        seen.late,
    )
    remarks = [f"{seen.lost} lost"] * bool(seen.lost) + [f"{seen.unanswered} unanswered in 1 s"] * bool(seen.unanswered)
    if name == "ours" and count >= 12_500:
        met = seen.cpu < BAR_CPU and seen.rss_bytes < BAR_BYTES and seen.p99_s < BAR_S and not seen.lost
        remarks.append("bar met" if met else "bar NOT met")
    print(ROW.format(name, count, *values), *remarks, flush=True)


def measure(name: str, count: int, seconds: float) -> Outcome:
    with contextlib.ExitStack() as stack:
        certificate = stack.enter_context(certified()) if name.endswith("tls") else None
        files = [str(path) for path in certificate] if certificate else []
        server = stack.enter_context(process("crowd.servers", name, *files[:1], core=0))
        port = line(server)
        mode = "proof" if name.startswith("ours") else "json" if name == "fastapi" else "bare"
        crowd = stack.enter_context(process("crowd.clients", port, count, 0, mode, *files[1:], core=1))
        connect_s = line(crowd)["connect_s"]
        ask(crowd, 5.0)
        before = ask(server)
        seen = ask(crowd, seconds)
        after = ask(server)
    latencies = sorted(seen["latencies_s"])
    wall_s = after["at_s"] - before["at_s"]
    return Outcome(
        cpu=(after["cpu_s"] - before["cpu_s"]) / wall_s,
        beats_per_s=(after["beats"] - before["beats"]) / wall_s,
        rss_bytes=after["rss_bytes"],
        connect_s=connect_s,
        p50_s=latencies[len(latencies) // 2],
        p99_s=latencies[int(len(latencies) * 0.99)],
        longest_s=latencies[-1],
        late=seen["late"],
        lost=seen["lost"],
        unanswered=seen["unanswered"],
    )


@contextlib.contextmanager
def process(module: str, *arguments: object, core: int) -> Iterator[subprocess.Popen]:
    """A process of this benchmark on one core, ended afterwards."""
    cores = sorted(os.sched_getaffinity(0))
    mine = {cores[core % len(cores)]}
    running = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.sched_setaffinity(running.pid, mine)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def line(running: subprocess.Popen) -> Any:
    assert running.stdout is not None
    text = running.stdout.readline()
    if not text:
        raise SystemExit(f"{running.args} has ended")
    return json.loads(text)


def ask(running: subprocess.Popen, *what: object) -> Any:
    assert running.stdin is not None
    print(*what, file=running.stdin, flush=True)
    return line(running)


@contextlib.contextmanager
def certified() -> Iterator[tuple[Path, Path]]:
    """A server's certificate with its key, and the authority to check it by."""
    import trustme

    with tempfile.TemporaryDirectory() as folder:
        authority = trustme.CA()
        server, trusted = Path(folder, "server.pem"), Path(folder, "ca.pem")
        authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(server)
        authority.cert_pem.write_to_path(trusted)
        yield server, trusted


if __name__ == "__main__":
    with nothing_left():
        main()
