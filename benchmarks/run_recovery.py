"""Seconds from a SIGKILL of one rank until both have made a new step, and until the driver knows of faults.

Two local hosts with a gloo rank each run `support/recovery/training.py`, a DDP script whose state (weights and AdamW's
moments) has the size named. `phalanx run` with the state in the keepers' memory, and with a file that the script has
saved, against torchrun with two agents and the same file; with the plain script and with one that does what
docs/warm_start.md says of scripts that are to be back soon. All are measured in the same way: ranks write down the time
after each thing that they have done, with the CPU seconds and page faults until then. The cases take turns in each
round; a run loses one rank of each host.

For detection, the time until the driver has written the fault into its journal: from the signal, or from what the rank
did last. A host that is dead has lost all of its processes; one that is silent has all of them stopped.

    python benchmarks/run_recovery.py --rounds 5
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from support.harness import benchmark_parser, median_and_range, write_json
from support.leaving import nothing_left
from support.recovery.job import Job
from support.recovery.marks import PARTS, STAGES, costs, decided, parts, read_marks, stage_ends, stepped
from support.recovery.torchrun import Torchrun

SOCKETS = Path(tempfile.gettempdir()) / f"phalanx-{os.geteuid()}"
"""Where the script has its keepers listen, whatever becomes this program's own folder for temporary files."""
SCRIPT = Path(__file__).parent / "support" / "recovery" / "training.py"
HOSTS = ("--hosts", "2", "--workers-per-host", "1")
STEP_S = 0.1
"""That the script sleeps in each step."""

CASES = {
    "phalanx run, state in memory": "memory",
    "phalanx run, quick script, state in memory": "memory --quick",
    "phalanx run, state in a file": "file",
    "torchrun, state in a file": "torchrun",
    "torchrun, quick script, state in a file": "torchrun --quick",
}
STEPS_BEFORE = 20
WITHIN_S = 300.0
FAULTS = ("killed rank", "crashed rank", "dead host", "silent host", "stopped rank (SIGSTOP)", "deadlock in one rank")
NOTICED = {
    "killed rank": "worker-failed",
    "crashed rank": "worker-failed",
    "dead host": "host-gone",
    "silent host": "host-unknown",
    "stopped rank (SIGSTOP)": "no-progress",
    "deadlock in one rank": "no-progress",
}


@dataclass(frozen=True)
class Recovery:
    """One.

    Attributes:
        parts_s: by the names of `PARTS`.
        total_s: from the signal to the first step of the rank that made it last.
        cpu_s, faults: of the rank that took most, by the names of `STAGES`: CPU seconds, and pages given by the kernel.
    """

    case: str
    state_mb: int
    parts_s: dict[str, float]
    total_s: float
    cpu_s: dict[str, float]
    faults: dict[str, int]


@dataclass(frozen=True)
class Detection:
    """One fault; `step_s` is the usual step time of the run before it."""

    fault: str
    seconds: float
    step_s: float


def make_job(folder: Path, case: str, state_mb: int) -> Job:
    """A job that has not been started."""
    kind, *options = CASES[case].split()
    script = [str(SCRIPT), str(folder), str(state_mb), "file" if kind == "torchrun" else kind, str(STEP_S), *options]
    return Torchrun(folder, script) if kind == "torchrun" else Job(folder, [*HOSTS, "--", *script])


def recoveries(case: str, state_mb: int, rest_s: float) -> list[Recovery]:
    """Kill a rank, and once all is well again the other."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        job = make_job(Path(name), case, state_mb)
        with job:
            known = until_stepped(job, 0.0, set())
            job.wait_for(lambda: is_calm(job, known), WITHIN_S)
            found = []
            for rank in (1, 0):
                time.sleep(rest_s)  # what is learnt in the first attempt is imported meanwhile
                found.append(recovery(job, case, state_mb, rank, known))
                job.wait_for(lambda: is_calm(job, known), WITHIN_S)
        forget_keepers(Path(name))
        return found


def forget_keepers(folder: Path) -> None:
    """Remove the sockets of keepers that were killed with the job of this folder."""
    for left in SOCKETS.glob(f"keeper-{folder.name}-*"):
        left.unlink()


def forget_all_keepers(folder: Path) -> None:
    """Of the jobs whose folders are in this one."""
    for job in folder.iterdir():
        forget_keepers(job)


def recovery(job: Job, case: str, state_mb: int, rank: int, known: set[int]) -> Recovery:
    """Kill a rank; `known` are the processes there have been, to which those that come are added."""
    victim = max((mark for mark in read_marks(job.folder) if mark.rank == rank), key=lambda mark: mark.unix_s).pid
    kill_s = time.time()
    os.kill(victim, signal.SIGKILL)
    new = until_stepped(job, kill_s, known)
    known |= new
    marks = read_marks(job.folder)
    ends = stage_ends(marks, new)
    if not isinstance(job, Torchrun):
        ends |= decided(job.events(), kill_s)
    cpu_s, faults = costs(marks, new)
    return Recovery(case, state_mb, parts(kill_s, ends), ends["step"] - kill_s, cpu_s, faults)


def until_stepped(job: Job, since_s: float, known: set[int]) -> set[int]:
    """Wait until two new processes have made a step; who they are."""

    def both() -> set[int]:
        found = stepped(read_marks(job.folder), since_s, known)
        return found if len(found) == 2 else set()

    found: set[int] = job.wait_for(both, WITHIN_S)
    return found


def is_calm(job: Job, known: set[int]) -> bool:
    """Whether every process that there is has saved its state and made some steps since it began."""
    marks = read_marks(job.folder)
    newest = {mark.rank: mark.pid for mark in marks if mark.pid in known and mark.what == "script"}
    counts = [sum(mark.pid == pid and mark.what == "step" for mark in marks) for pid in newest.values()]
    return min(counts) >= STEPS_BEFORE and any(mark.what == "saved" for mark in marks)


def detection(fault: str) -> Detection:
    """Have a fault happen in a run of its own, and wait until it has been written down."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job = make_job(folder, "phalanx run, state in a file", 1)
        with job:
            known = until_stepped(job, 0.0, set())
            job.wait_for(lambda: is_calm(job, known) and job.events("running"), WITHIN_S)
            usual_s = step_s(folder)
            begun_s = _ACTS[fault](job)
            (event, *_) = job.wait_for(
                lambda: [event for event in job.events(NOTICED[fault]) if event.unix_s >= begun_s], WITHIN_S
            )
            return Detection(fault, event.unix_s - begun_s, usual_s)


def step_s(folder: Path) -> float:
    """The usual time of a step: the median of those of rank 0."""
    ends = [mark.unix_s for mark in read_marks(folder) if mark.rank == 0 and mark.what == "step"]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _kill_rank(job: Job) -> float:
    return _signal([_rank(job)], signal.SIGKILL)


def _stop_rank(job: Job) -> float:
    return _signal([_rank(job)], signal.SIGSTOP)


def _kill_host(job: Job) -> float:
    return _signal(_host(job), signal.SIGKILL)


def _stop_host(job: Job) -> float:
    return _signal(_host(job), signal.SIGSTOP)


def _rank(job: Job) -> int:
    return max(mark.pid for mark in read_marks(job.folder) if mark.rank == 1)


def _host(job: Job) -> list[int]:
    """All processes of the second host, its executor first."""
    executor = psutil.Process(job.executor_pid("host-2"))
    return [executor.pid, *(process.pid for process in executor.children(recursive=True))]


def _signal(pids: Sequence[int], number: signal.Signals) -> float:
    begun_s = time.time()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it went with the one before
            os.kill(pid, number)
    return begun_s


def _asked(job: Job, what: str) -> float:
    """Have rank 1 do something by itself; when it began to."""
    (job.folder / f"{what}-1").touch()
    mark = job.wait_for(lambda: next((mark for mark in read_marks(job.folder) if mark.what == what), None))
    begun_s: float = mark.unix_s
    return begun_s


_ACTS: dict[str, Callable[[Job], float]] = {
    "killed rank": _kill_rank,
    "crashed rank": lambda job: _asked(job, "crash"),
    "dead host": _kill_host,
    "silent host": _stop_host,
    "stopped rank (SIGSTOP)": _stop_rank,
    "deadlock in one rank": lambda job: _asked(job, "deadlock"),
}


def table_of_recoveries(found: Sequence[Recovery]) -> str:
    """In Markdown, a row for each case and size."""
    lines = [
        "| state | | s from SIGKILL to a new step, median (range) | n | against torchrun |",
        "|---|---|---|---|---|",
    ]
    for state_mb in dict.fromkeys(one.state_mb for one in found):
        totals = {
            case: [one.total_s for one in found if (one.case, one.state_mb) == (case, state_mb)] for case in CASES
        }
        peer = totals["torchrun, state in a file"]  # with the plain script
        for case, seconds in totals.items():
            if seconds:
                ratio = f"{statistics.median(peer) / statistics.median(seconds):.1f} x" if peer else "not measured"
                lines.append(f"| {state_mb} MB | {case} | {median_and_range(seconds)} | {len(seconds)} | {ratio} |")
    return "\n".join(lines)


def table_of_parts(found: Sequence[Recovery]) -> str:
    """In Markdown: medians of the parts, a column for each case and size."""
    columns = list(dict.fromkeys((one.case, one.state_mb) for one in found))
    lines = ["| until | " + " | ".join(f"{case}, {state_mb} MB" for case, state_mb in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for part, words in PARTS.items():
        cells = [
            [one.parts_s[part] for one in found if (one.case, one.state_mb) == column and part in one.parts_s]
            for column in columns
        ]
        if any(cells):
            lines.append(f"| {words} | " + " | ".join(f"{statistics.median(s):.3f}" if s else "" for s in cells) + " |")
    return "\n".join(lines)


def table_of_costs(found: Sequence[Recovery]) -> str:
    """In Markdown: medians of what a rank has used up, a row for each case and size."""
    stages = STAGES[3:]
    lines = ["| state | | " + " | ".join(f"{PARTS[stage]}: CPU s, pages" for stage in stages) + " |"]
    lines.append("|---|---|" + "---|" * len(stages))
    for case, state_mb in dict.fromkeys((one.case, one.state_mb) for one in found):
        mine = [one for one in found if (one.case, one.state_mb) == (case, state_mb)]
        cpu_s = [statistics.median(one.cpu_s[stage] for one in mine) for stage in stages]
        faults = [statistics.median(one.faults[stage] for one in mine) for stage in stages]
        cells = [f"{seconds:.2f}, {pages:,.0f}" for seconds, pages in zip(cpu_s, faults, strict=True)]
        lines.append(f"| {state_mb} MB | {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table_of_detections(found: Sequence[Detection]) -> str:
    """In Markdown, a row for each kind of fault."""
    lines = [
        "| fault | s until the driver has written it down, median (range) | n | usual step, s |",
        "|---|---|---|---|",
    ]
    for fault in dict.fromkeys(one.fault for one in found):
        mine = [one for one in found if one.fault == fault]
        step = statistics.median(one.step_s for one in mine)
        lines.append(f"| {fault} | {median_and_range([one.seconds for one in mine])} | {len(mine)} | {step:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one round of 50 MB, and a killed rank to be detected", as_json=True)
    parser.add_argument("--rounds", type=int, default=5, help="each gives two recoveries of each case and size")
    parser.add_argument("--sizes", type=int, nargs="*", default=[50, 600], help="of the state, MB")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS), help="to detect, once a round")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds between a good step and the next kill")
    args = parser.parse_args()
    rounds, sizes, faults = (1, [50], ["killed rank"]) if args.quick else (args.rounds, args.sizes, args.faults)
    found: list[Recovery] = []
    noticed: list[Detection] = []
    for number in range(rounds):
        for case, size in [(case, size) for size in sizes for case in args.cases]:
            found += recoveries(case, size, args.rest)
            print(f"round {number + 1}: {case}, {size} MB: {[round(one.total_s, 2) for one in found[-2:]]}", flush=True)
        for fault in faults:
            noticed.append(detection(fault))
            print(f"round {number + 1}: {fault}: {noticed[-1].seconds:.2f} s", flush=True)
    print(f"\n{len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}, {rounds} rounds\n")
    tables = [table_of_recoveries(found), table_of_parts(found), table_of_costs(found)] if found else []
    print("\n\n".join([*tables, *([table_of_detections(noticed)] if noticed else [])]))
    if args.json:
        every: list[Recovery | Detection] = [*found, *noticed]
        write_json(args.json, [asdict(one) for one in every])


if __name__ == "__main__":
    with nothing_left(forget_all_keepers):
        main()
