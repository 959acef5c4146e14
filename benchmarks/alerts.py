"""Alerts: none in healthy runs, each once and soon in runs that go wrong, and what the watcher costs.

    python benchmarks/alerts.py              # 10 healthy runs, of other seeds, batches and rates, then each trouble
    python benchmarks/alerts.py --quick      # 1 healthy run, and a process that is killed
    python benchmarks/alerts.py --only ranks # 10 healthy runs of 4 ranks, then one with a slow rank

Settings of `[alerts]` are the defaults, but for the disk, which is this machine's. The first healthy run is eight
times as long as the others: throughput is judged after some two minutes. Runs of 4 ranks record spans, and last for
60 s each; a rank is slow because all else on the machine comes before it (nice 19, on fewer cores than ranks). Runs
are real ones, with all of their processes; how late an alert comes is counted from the signal to what alerts.jsonl
says. What the watcher costs is its CPU time over the run's.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support import tiny
from support.harness import benchmark_parser

from phalanx.telemetry.run_presence import presences

_GIVE_UP_S = 300.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Signals = Sequence[tuple[int, float]]


def settings(number: int, steps: int) -> dict[str, Any]:
    """A healthy run; each number is another one."""
    return tiny.SETTINGS | {
        "train.steps": steps,
        "train.seed": number,
        "data.seed": number,
        "train.global_batch": (2, 4, 8)[number % 3],
        "optim.lr": (1e-3, 3e-3, 6e-3)[number % 3],
        "logging.every_steps": (1, 5, 10)[number % 3],
        "evaluate.every_steps": (0, 100)[number % 2],
        "checkpoint.every_steps": 200,
        "alerts.watch": True,
        "alerts.disk_free_bytes": 1 << 20,
    }


def of_ranks(number: int) -> dict[str, Any]:
    """A run of four ranks whose steps take long enough for a rank to be slow in."""
    larger = {"model.layers": 4, "model.hidden": 128, "data.sequence_length": 128, "train.global_batch": 8}
    ranks = {"parallel.devices": 4, "telemetry.spans": True, "telemetry.keep_spans_s": 60.0}
    stages = (
        {"parallel.pipeline": 2, "parallel.devices": 6, "train.micro_batch": 1, "train.global_batch": 6}
        if number % 5 == 4
        else {}
    )
    return settings(number, 1_000_000) | larger | ranks | stages


def start(folder: Path, name: str, changes: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """A `phalanx train` of its own."""
    config = folder / "empty.toml"
    config.touch()
    words = tiny.overrides(folder, folder / name, changes)
    command = [sys.executable, "-m", "phalanx", "train", str(config), *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def alerts(run: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        lines = [json.loads(line) for line in (run / "alerts" / "alerts.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == "alert"]
    return []


def until(look: Callable[[], Any]) -> Any:
    give_up_s = time.monotonic() + _GIVE_UP_S
    while not (found := look()):
        if time.monotonic() > give_up_s:
            raise RuntimeError("it does not come")
        time.sleep(0.02)
    return found


def watcher_of(run: Path) -> int | None:
    """The process that watches this run."""
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdigit() and str(run / "alerts" / "watcher.log") == str((each / "fd" / "1").readlink()):
                return int(each.name)
    return None


def used(pid: int) -> tuple[float, float]:
    """CPU seconds and MiB of a process so far; zeros: it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0, 0.0


def healthy(folder: Path, number: int, steps: int) -> tuple[list[str], float, float, float]:
    """Kinds that were reported; CPU seconds of the watcher, its MiB and the seconds that the run took."""
    run = folder / f"healthy-{number}"
    process = start(folder, run.name, settings(number, steps))
    pid = until(lambda: watcher_of(run))
    began_s, most = time.monotonic(), (0.0, 0.0)
    while process.poll() is None:
        most = max(most, used(pid))
        time.sleep(0.1)
    until(lambda: alerts(run))
    until(lambda: watcher_of(run) is None)
    return [alert["kind"] for alert in alerts(run)], *most, time.monotonic() - began_s


def killed_or_stopped(folder: Path, number: int, kind: str) -> tuple[list[str], float]:
    """Kinds that were reported, and how many seconds after the signal."""
    run = folder / f"{kind}-{number}"
    process = start(folder, run.name, settings(0, 1_000_000))
    try:
        until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 20_000)
        process.send_signal(number)
        sent_s = time.time()
        found = until(lambda: [alert for alert in alerts(run) if alert["kind"] == kind])
        return [alert["kind"] for alert in alerts(run)], found[0]["unix_s"] - sent_s
    finally:
        process.kill()
        process.wait()


def healthy_ranks(folder: Path, number: int, seconds: float) -> tuple[list[str], float, float]:
    """Kinds that were reported of a run of several ranks; CPU seconds of the watcher a second, and its MiB."""
    run = folder / f"ranks-{number}"
    process = start(folder, run.name, of_ranks(number))
    try:
        until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 2_000)
        pid = until(lambda: watcher_of(run))
        before, began_s = used(pid), time.monotonic()
        time.sleep(seconds)
        after, took_s = used(pid), time.monotonic() - began_s
        found = [alert["kind"] for alert in alerts(run)]
    finally:
        stop(process)
    return found, (after[0] - before[0]) / took_s, after[1]


def slow_rank(folder: Path, number: int, rank: int = 2) -> tuple[list[dict[str, Any]], float]:
    """Alerts of a run one of whose ranks gets little of the processors, and how many seconds after that began."""
    run = folder / f"slow-{number}"
    process = start(folder, run.name, of_ranks(number))
    try:
        until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 10_000)
        slowed = next(one.pid for one in presences(run) if one.rank == rank)
        began_s = time.time()
        for thread in Path(f"/proc/{slowed}/task").iterdir():  # all else on the machine comes before it
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
        found = until(lambda: [alert for alert in alerts(run) if alert["kind"] == "slow_rank"])
        late_s = found[0]["unix_s"] - began_s
        time.sleep(10.0)
        return alerts(run), late_s
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run; its launcher ends the ranks."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def watch_ranks(folder: Path) -> list[list[str]]:
    """Healthy runs of several ranks, and one with a slow rank; returns the alerts of healthy runs that had any."""
    found = [healthy_ranks(folder, number, 60.0) for number in range(10)]
    wrong = [kinds for kinds, *_ in found if kinds]
    print(f"healthy runs of 4 and 6 ranks: {len(found)}, 60 s each; alerts: {sum(map(len, wrong))}")
    print(f"watcher: {statistics.median(s for _, s, _ in found):.2%} of a core, {max(m for *_, m in found):.0f} MiB")
    for number in range(3):
        told, late_s = slow_rank(folder, number)
        for alert in told:
            print(f"slow rank 2: after {late_s:.0f} s {alert['kind']}: {alert['title']}")
        if [(alert["kind"], alert["evidence"].get("ranks")) for alert in told] != [("slow_rank", [2])]:
            print(f"slow rank 2: NOT reported once, but {told}")
    return wrong


def main() -> None:
    parser = benchmark_parser(__doc__, "1 healthy run of a few steps, and one that is killed")
    parser.add_argument("--only", choices=("ranks",), help="runs of several ranks")
    arguments = parser.parse_args()
    if arguments.only == "ranks":
        with tempfile.TemporaryDirectory() as name:
            wrong = watch_ranks(Path(name))
        sys.exit(f"false alarms: {wrong}" if wrong else 0)
    runs, steps = (1, 150) if arguments.quick else (10, 2000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [healthy(folder, n, steps if n or arguments.quick else 8 * steps) for n in range(runs)]
        wrong = [kinds for kinds, *_ in found if kinds != ["finished"]]
        longest_s = max(seconds for *_, seconds in found)
        print(
            f"healthy runs: {runs}, up to {longest_s:.0f} s; alerts but for the end: {sum(len(k) - 1 for k in wrong)}"
        )
        share = statistics.median(cpu_s / seconds for _, cpu_s, _, seconds in found)
        begin = "" if not arguments.quick else " (of a run of seconds: most is its start)"
        mib = max(mib for _, _, mib, _ in found)
        print(f"watcher: {share:.2%} of one core, {mib:.0f} MiB{begin}")
        scenes = [(int(signal.SIGKILL), "failed"), (int(signal.SIGSTOP), "stall")][: 1 if arguments.quick else 2]
        for number, kind in scenes:
            times = [killed_or_stopped(folder / str(n), number, kind) for n in range(1 if arguments.quick else 5)
                     if (folder / str(n)).mkdir(exist_ok=True) is None]  # fmt: skip
            once = all(kinds.count(kind) == 1 for kinds, _ in times)
            late = statistics.median(seconds for _, seconds in times)
            print(f"{signal.Signals(number).name}: {kind} once in each of {len(times)}: {once}; after {late:.1f} s")
        if wrong:
            sys.exit(f"false alarms: {wrong}")


if __name__ == "__main__":
    main()
