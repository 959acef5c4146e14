"""Starts the processes that measure this machine, and collects their answers by name and size.

The processes are `phalanx.checks.calibration.calibration_worker`; this one stays without torch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from phalanx.checks.calibration.calibration_messages import Answer, Kind, Precision, Task, Timing, together
from phalanx.core.errors import UserError

_WORKER = "phalanx.checks.calibration.calibration_worker"
# By its name alone, so that nothing here imports torch.


@dataclass(frozen=True)
class RankPlacement:
    """Where one rank computes. `cpus`: hardware threads; empty: all that this process may use."""

    cpus: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class MeasurementPlan:
    """How to measure."""

    device: Kind = "cpu"
    precisions: tuple[Precision, ...] = ()  # of matrix products; empty: those that are fast
    quick: bool = False
    limit_s: float = 1800.0  # after which the processes are given up


def measure(places: Sequence[RankPlacement], wanted: MeasurementPlan) -> list[Answer]:
    """What as many ranks as `places` find, all measuring at the same time; leaves no process."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-measure-")))
        ranks = []
        for rank, place in enumerate(places):
            task = Task(
                meet=str(folder / "store"),
                rank=rank,
                ranks=len(places),
                threads=place.threads,
                cpus=place.cpus,
                device=wanted.device,
                precisions=wanted.precisions,
                quick=wanted.quick,
                parent=os.getpid(),
                started_unix_s=time.time(),
            )
            ranks.append(_start(task, os.environ))
            stack.callback(_end, ranks[-1])
        return [_read(process, wanted.limit_s) for process in ranks]


def _start(task: Task, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # As ranks have it: see phalanx.cli.main.yield_idle_cores.
        env={"GOMP_SPINCOUNT": "1000", **environment, "OMP_NUM_THREADS": str(task.threads)},
    )
    assert process.stdin is not None
    process.stdin.write(task.to_json().encode())
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _read(process: subprocess.Popen[bytes], limit_s: float) -> Answer:
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"measuring took more than {limit_s:g} s", cure="end other work on this machine, or give --quick"
        ) from None
    try:
        return Answer.from_json(output.decode())
    except ValueError:
        lines = errors.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"it ended with status {process.returncode}"
        raise UserError(f"a process that measures has failed: {why}", cure="mend that, or give fewer --ranks") from None


@dataclass(frozen=True)
class Measurements:
    """What ranks that measured at the same time found, the mean of them."""

    ranks: int
    threads: int
    answer: Answer
    apart_ratio: float  # standard deviation of how much longer or shorter than the mean each rank took, ratio

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Of products."""
        return tuple(dict.fromkeys(timing.precision for timing in self.all("product")))

    def all(self, what: str, precision: Precision | None = None) -> list[Timing]:
        """All timings of one kind, in the order in which they were made."""
        return [
            timing
            for timing in self.answer.timings
            if timing.what == what and (precision is None or timing.precision == precision)
        ]

    def kinds(self) -> list[str]:
        """What was measured at all."""
        return list(dict.fromkeys(timing.what for timing in self.answer.timings))


def found_of(answers: Sequence[Answer], threads: int) -> Measurements:
    """The mean of the answers of all ranks."""
    return Measurements(len(answers), threads, together(answers), _apart(answers))


def sizes_of(timings: Sequence[Timing], name: str) -> list[float]:
    """The different sizes of that name, ascending."""
    return sorted({timing.sizes[name] for timing in timings})


def at(timings: Sequence[Timing], sizes: Mapping[str, float]) -> Timing:
    """The one of those sizes."""
    return next(t for t in timings if all(t.sizes[name] == value for name, value in sizes.items()))


def _apart(answers: Sequence[Answer]) -> float:
    """How much ranks differ in what they computed alone: each by the median over all that was measured, since single
    timings differ by chance."""
    if len(answers) == 1:
        return 0.0
    alone = [i for i, timing in enumerate(answers[0].timings) if "ranks" not in timing.sizes]
    means = [statistics.fmean(answer.timings[i].seconds for answer in answers) for i in alone]
    typical = [
        statistics.median(answer.timings[i].seconds / mean for i, mean in zip(alone, means, strict=True))
        for answer in answers
    ]
    return statistics.stdev(typical)
