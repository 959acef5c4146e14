"""What the benchmarks share: their command line, contenders that take turns, and ratios of what each turn took.

These machines are noisy. A figure here is a ratio between two contenders of the same turn, so that a machine that is
busy for a while is busy for both, and the median of several turns; seconds alone compare nothing across machines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

Measured = TypeVar("Measured")


def benchmark_parser(
    doc: str | None, quick: str, *, repeats: int = 0, as_json: bool = False
) -> argparse.ArgumentParser:
    """A command line with ``--quick``, by which `make bench` and the tests see whether a benchmark works.

    Args:
        doc: the script's docstring: what is measured, and how it is called.
        quick: what ``--quick`` measures.
        repeats: default of ``--repeats``; 0: the script has no such option.
        as_json: add ``--json FILE``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if repeats:
        parser.add_argument(
            "--repeats", type=int, default=repeats, help=f"turns; medians are shown (default {repeats})"
        )
    if as_json:
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser


def in_turns(
    contenders: Mapping[str, Callable[[], Measured]], repeats: int, *, warm_up: int = 1
) -> dict[str, list[Measured]]:
    """What each contender measured in each turn; the first `warm_up` turns are not counted.

    The order rotates from turn to turn, so that nobody always runs on the caches that the same neighbour left.
    """
    measured: dict[str, list[Measured]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(warm_up + repeats):
        for name in names:
            found = contenders[name]()
            if turn >= warm_up:
                measured[name].append(found)
        names = names[1:] + names[:1]
    return measured


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call; where a GPU is in use, until its queue is empty."""
    synchronize()
    start_s = clock()
    run()
    synchronize()
    return clock() - start_s


def timer(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """`run` as a contender that measures its own seconds."""
    return lambda: timed(run, clock)


def clock_for(threads: int) -> Callable[[], float]:
    """CPU time of one thread, which other work on the machine does not count into; wall time of more than one."""
    return time.process_time if threads == 1 else time.perf_counter


def synchronize() -> None:
    """Wait until a GPU, if one is in use, has done what was queued."""
    torch = sys.modules.get("torch")  # who has not imported it has queued nothing
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over turns of mine / theirs."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """Such as ``1.02 (0.98 to 1.10)``."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine() -> str:
    """What stands above a table: the version of torch, cores, load."""
    return f"torch {version('torch')}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


def write_json(path: Path | None, figures: Any) -> None:
    """Write what was measured, where a file was asked for."""
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")
