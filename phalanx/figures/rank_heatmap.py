"""Which rank or host is slow: phases of a step by rank, each beside the median of those that do the same work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from phalanx.figures.series import packed
from phalanx.figures.style import DIVERGING, Figure, Row, axis, empty, figure, whole_ticks
from phalanx.telemetry.alike_ranks import FEW_DIFFER, FEW_RANKS, LEAST_RANKS
from phalanx.telemetry.spans import KINDS

_OWN_WORK = ("data", "forward", "backward", "optimizer", "snapshot", "evaluation")
"""Phases that take long on the rank that is slow; in the others, such as waiting, its victims take long."""
_LEAST_SLOWER = 0.05
_DEVIATIONS = 6.0
_MOST_NAMED = 3
_MOST_MARKED = 500
_MOST_TEXTS = 1024
"""Rows whose every cell can carry a text: more would make a page of some MB."""
_NORMAL = 1.4826
"""A normal distribution's standard deviation in median absolute deviations."""


@dataclass(frozen=True)
class Outlier:
    """A rank or host that takes longer at its own work than those that do the same.

    Attributes:
        row: number of the rank, or name of the host.
        ratio: its time over the median.
        place: of its row in the figure.
    """

    row: int | str
    host: str
    phase: str
    ratio: float
    place: int

    def __str__(self) -> str:
        at = f"{self.row}" if isinstance(self.row, str) else f"rank {self.row}" + f" ({self.host})" * bool(self.host)
        return f"{at} {self.ratio:.2f}× in {self.phase}"


def rank_heatmap(
    averages: pa.Table,
    *,
    by: Literal["rank", "host"] = "rank",
    alike: Sequence[int] | None = None,
    slow: Sequence[int | str] | None = None,
    doubt: str = "",
) -> Figure:
    """Seconds of each phase by rank, as ratios to the median; who is slow is named in the title and marked.

    A rank is slow in a phase of its own work where it takes 5 % longer than the median and lies six standard
    deviations (by the median absolute deviation) above it. Where others wait for it is no such phase.

    Args:
        averages: a row for each rank: `rank`, `host` and seconds ``forward_s`` … (`Trace.rank_averages`).
        by: a row for each rank, or for each host with the slowest of its ranks in each phase.
        alike: a number for each row of `averages`, the same for those that do the same work, such as the pipeline
            rank; None: all do.
        slow: ranks (or hosts) that were found slow already, such as by `phalanx.telemetry.slow_ranks`; only they are
            named then. None: those that the figure finds.
        doubt: what to say where no row stands out and that does not mean that all are well (`SlowRanks.doubt`).
    """
    name = "ranks" if by == "rank" else "hosts"
    if not averages.num_rows:
        return empty(f"Phases of {name}", "no spans in these steps")
    rows, hosts, phases, seconds, sets = _matrix(averages, by, alike)
    ratios = _ratios(seconds, sets)
    seen = np.isfinite(ratios).any(axis=0)
    phases, seconds, ratios = (
        [p for p, is_seen in zip(phases, seen, strict=True) if is_seen],
        seconds[:, seen],
        ratios[:, seen],
    )
    if not phases:
        return empty(f"Phases of {name}", "no time was spent in any phase")
    outliers = find_outliers(ratios, phases, rows, hosts, sets, slow)
    # What waits for a slow rank may be far from the median: it must not take the colours from the rest.
    reach = max(0.1, float(np.nanpercentile(np.abs(ratios - 1), 99)), *(one.ratio - 1 for one in outliers))
    reach = min(reach, 1.0)
    counted = f"{len(rows):,} {name}" if len(rows) != 1 else f"1 {by}"
    is_compared = slow is not None or max(np.unique(sets, return_counts=True)[1]) >= LEAST_RANKS
    healthy = doubt or ("none is slow" if is_compared else "too few to compare")
    title = f"{counted}: {_verdict(outliers) or healthy}"
    y = {"y": rows} if by == "host" else {"y": packed(np.array(rows))}
    heatmap = {
        "type": "heatmap",
        **y,
        "x": phases,
        "z": packed(ratios.astype(np.float32)),
        "customdata": packed(seconds.astype(np.float32)),
        "zmin": 1 - reach,
        "zmax": 1 + reach,
        "colorscale": DIVERGING,
        "colorbar": {"title": {"text": "times the<br>median"}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": "%{y}, %{x}: %{customdata:.4g} s<br>%{z:.3f} × the median<extra></extra>",
    }
    if by == "rank" and len(rows) <= _MOST_TEXTS and any(hosts):
        heatmap |= {"text": [[host] * len(phases) for host in hosts]}
        heatmap["hovertemplate"] = (
            "rank %{y} on %{text}, %{x}: %{customdata:.4g} s<br>%{z:.3f} × the median<extra></extra>"
        )
    return figure(
        [heatmap, *_marked(outliers)],
        title,
        height=min(max(160 + 20 * len(rows), 260), 680),
        description=f"Phases of a step on {counted} as ratios to the median: {_verdict(outliers, 10) or healthy}",
        xaxis=axis("phase of a step", type="category", side="bottom", showgrid=False),
        yaxis=axis(by, autorange="reversed", showgrid=False, **_rows_axis(rows, by)),
    )


def find_outliers(
    ratios: np.ndarray,
    phases: Sequence[str],
    rows: Sequence[int | str],
    hosts: Sequence[str],
    sets: np.ndarray,
    slow: Sequence[int | str] | None = None,
) -> list[Outlier]:
    """Who is slow at its own work, the slowest first.

    Args:
        ratios: (rows, phases), to the median of the set.
        sets: (rows,), the same number for those that do the same work.
        slow: rows that were found slow already; they are named for the phases in which they take 2.5 % longer.
    """
    found = []
    for column, phase in enumerate(phases):
        if phase not in _OWN_WORK:
            continue
        for number in np.unique(sets):
            places = np.flatnonzero((sets == number) & np.isfinite(ratios[:, column]))
            excess = ratios[places, column] - 1
            deviation = _NORMAL * float(np.median(np.abs(excess - np.median(excess)))) if len(places) else 0.0
            differ = min(_DEVIATIONS * deviation, FEW_DIFFER) if len(places) <= FEW_RANKS else _DEVIATIONS * deviation
            limit = max(_LEAST_SLOWER, differ) if slow is None else _LEAST_SLOWER / 2
            for place in places[excess > limit]:
                if slow is not None and rows[place] not in slow:
                    continue
                found.append(Outlier(rows[place], hosts[place], phase, float(ratios[place, column]), int(place)))
    return sorted(found, key=lambda outlier: -outlier.ratio)


def _matrix(
    averages: pa.Table, by: str, alike: Sequence[int] | None
) -> tuple[list[int | str], list[str], list[str], np.ndarray, np.ndarray]:
    """Names of the rows, their hosts, phases in the order of their kinds, seconds (rows, phases), sets of rows."""
    phases: list[str] = [kind for kind in KINDS if f"{kind}_s" in averages.column_names]
    columns = [averages[f"{phase}_s"].to_numpy(zero_copy_only=False) for phase in phases]
    seconds = np.stack([np.asarray(column, float) for column in columns], axis=1)
    ranks = averages["rank"].to_numpy()
    hosts = averages["host"].to_pylist() if "host" in averages.column_names else [""] * len(ranks)
    sets = np.zeros(len(ranks), np.int64) if alike is None else np.asarray(alike, np.int64)
    if by == "rank":
        order = np.argsort(ranks, kind="stable")
        return ranks[order].tolist(), [hosts[i] or "" for i in order], phases, seconds[order], sets[order]
    known = np.array([host or "?" for host in hosts])
    names, first, of_host = np.unique(known, return_index=True, return_inverse=True)
    slowest = np.full((len(names), len(phases)), -np.inf)
    np.fmax.at(slowest, of_host, seconds)
    slowest[np.isneginf(slowest)] = np.nan
    return names.tolist(), names.tolist(), phases, slowest, sets[first]


def _ratios(seconds: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Each over the median of its set; NaN where that is 0 or not known."""
    ratios = np.full(seconds.shape, np.nan)
    for number in np.unique(sets):
        chosen = sets == number
        of_set = np.where(np.isfinite(seconds[chosen]), seconds[chosen], np.nan)
        known = np.isfinite(of_set).any(axis=0)
        medians = np.full(seconds.shape[1], np.nan)
        medians[known] = np.nanmedian(of_set[:, known], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios[chosen] = np.where(medians > 0, of_set / medians, np.nan)
    return ratios


def _rows_axis(rows: Sequence[int | str], by: str) -> Row:
    """Names of hosts are categories; ranks are numbers, and between two of them there is none to mark."""
    if by == "host":
        return {"type": "category"}
    return whole_ticks(rows)  # type: ignore[arg-type]


def _verdict(outliers: Sequence[Outlier], most: int = _MOST_NAMED) -> str:
    """Such as ``rank 7 (node-0) 1.31× in forward, 1.28× in backward; 2 more are slow``; empty: nobody is."""
    by_row: dict[int, list[Outlier]] = {}
    for outlier in outliers:
        by_row.setdefault(outlier.place, []).append(outlier)
    named = [
        ", ".join([str(of_row[0]), *(f"{one.ratio:.2f}× in {one.phase}" for one in of_row[1:])])
        for of_row in list(by_row.values())[:most]
    ]
    more = len(by_row) - len(named)
    return "; ".join(named) + f"; {more:,} more are slow" * bool(more)


def _marked(outliers: Sequence[Outlier]) -> list[Row]:
    """Rings around slow cells, which in thousands of rows are too thin to be seen."""
    if not outliers:
        return []
    shown = outliers[:_MOST_MARKED]
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "slow",
            "x": [outlier.phase for outlier in shown],
            "y": [outlier.row for outlier in shown],
            "text": [str(outlier) for outlier in shown],
            "marker": {"symbol": "circle-open", "size": 14, "color": "#000000", "line": {"width": 2}},
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]
