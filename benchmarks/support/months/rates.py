"""Writes phalanx/simulate/failures/infinitehbd.toml: rates and repairs of recorded faults, by class and effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.files import write_bytes
from phalanx.simulate.failure_trace import DAYS, DETECTION_S, NODES, Fault, on_job

_BINS = 20
_HEAD = f"""\
# Failures of a cluster of {NODES} GPU servers (8 GPUs each) over {DAYS} days: InfiniteHBD-Trace (Apache-2.0, SIGCOMM
# 2025, arXiv 2502.03885), made by `python benchmarks/plan_months.py --write-rates`. Rates and repairs are measured;
# what each class does to a job, and how soon that is noticed, is assumed (phalanx/simulate/failure_trace.py). Repairs:
# means of twentieths of all that were recorded, by length, so their mean is exact. The faults come in bursts, which
# rates forget.
source = "InfiniteHBD-Trace: 584 faults of {NODES} servers in {DAYS} days"
"""


def write_rates(faults: Sequence[Fault], path: Path) -> None:
    groups: dict[tuple[str, str], list[Fault]] = defaultdict(list)
    for fault in faults:
        groups[fault.kind, fault.effect].append(fault)
    largest_first = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    text = _HEAD + "".join(_section(name, effect, ours) for (name, effect), ours in largest_first)
    write_bytes(path, text.encode())


def _section(name: str, effect: str, faults: Sequence[Fault]) -> str:
    lengths_s = sorted(fault.ends_s - fault.begins_s for fault in faults)
    detection_s = DETECTION_S[effect]  # type: ignore[index]
    lines = [
        "",
        "[[class]]",
        f'name = "{name} ({effect})"',
        f"failures_per_1000_host_days = {1000 * len(faults) / (NODES * DAYS):.5g}",
        f'effect = "{on_job(effect)}"',  # type: ignore[arg-type]
        *([] if detection_s is None else [f"detection_s = {detection_s}"]),
        *(["slowdown_ratio = 1.3"] if effect == "slow" else []),
        f"repair_values_s = [{', '.join(f'{value:.0f}' for value in means_of_bins(lengths_s))}]",
        'mark = "measured"',
        'source = "InfiniteHBD-Trace"',
        'date = "2025-02"',
    ]
    return "\n".join(lines) + "\n"


def means_of_bins(values: Sequence[float], bins: int = _BINS) -> list[float]:
    """Means of equal shares of sorted values; a value at an edge is shared out."""
    count = len(values)
    if count <= bins:
        return list(values)
    means = []
    for number in range(bins):
        low, high = number * count / bins, (number + 1) * count / bins
        weights = [max(min(high, k + 1) - max(low, k), 0.0) for k in range(count)]
        means.append(sum(w * v for w, v in zip(weights, values, strict=True)) / (high - low))
    return means
