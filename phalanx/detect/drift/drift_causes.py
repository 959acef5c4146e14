"""Which part of a step grew, on which ranks: what stands behind a step time that drifts.

Time that ranks wait is a consequence, so causes are looked for in this order: ranks whose own work grew (a few: those
ranks; most: the part of the program), bytes of a group that take longer, and at last ranks that are late in turns while
nobody's usual work grew: launch skew, as garbage collection makes it (MegaScale, 6.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from phalanx.detect.drift.change_points import Change
from phalanx.detect.drift.step_series import OWN, Floats, StepSeries

Kind = Literal["ranks", "part", "bytes", "skew", "unknown"]

_MOST_OF_IT = 0.5
_LATE_RANK = 0.5  # of what the step grew
_FEW = 0.5  # of all ranks


@dataclass(frozen=True)
class Grown:
    """A part of the step before and after: mean seconds over ranks of a step."""

    part: str
    before_s: float
    after_s: float

    @property
    def grown_s(self) -> float:
        """Seconds more than before."""
        return self.after_s - self.before_s


@dataclass(frozen=True)
class Cause:
    """What made steps longer.

    Attributes:
        kind: ``ranks`` that work longer; a ``part`` of the program, on most ranks; ``bytes`` of a group; launch
            ``skew`` of a group; ``unknown``.
        part: that grew most, as in `StepSeries.parts`; of ``skew`` the one in which the latest rank is late.
        group: of ``bytes`` and ``skew``.
        ranks, hosts, stage: of ``ranks``; `stage` is -1 unless they are all of one stage's ranks.
        share: of the growth that it explains; NaN: not known.
        parts: all of them, the most grown first.
        skew_s: of the group, before and after: launches of its first and last member.
        steadiest: growth of the own work of the rank that grew most, as a share of it.
    """

    kind: Kind = "unknown"
    part: str = ""
    group: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    stage: int = -1
    share: float = float("nan")
    parts: tuple[Grown, ...] = ()
    skew_s: tuple[float, float] = (float("nan"), float("nan"))
    steadiest: float = float("nan")
    rank_rows: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


def windows(change: Change, places: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Places (of plain steps) before the onset and after it; of a creep the last fifth, and the first where it has
    none before."""
    chosen = np.asarray(places)
    if change.shape == "jump":
        return chosen[: change.onset], chosen[change.onset :]
    fifth = max((len(chosen) - change.onset) // 5, 3)
    return chosen[: max(change.onset, fifth)], chosen[-fifth:]


def find_cause(series: StepSeries, change: Change, places: Sequence[int]) -> Cause:
    """What explains a change of the step's seconds, found among the steps at `places`."""
    before, after = windows(change, places)
    parts = _grown_parts(series, before, after)
    if not parts:
        return Cause()
    grown_s = _median(series.step_s, after) - _median(series.step_s, before)
    own = _of_ranks(series, before, after, grown_s, parts)
    if own is not None:
        return own
    for prefix, kind in (("waiting for bytes: ", "bytes"), ("waiting for late ranks: ", "skew")):
        # Of several groups the one that grew most: a rank that is late in one is late in the next.
        found = [one for one in parts if one.part.startswith(prefix)]
        total_s = sum(one.grown_s for one in found if one.grown_s > 0)
        if total_s >= _MOST_OF_IT * grown_s > 0:
            group = found[0].part.removeprefix(prefix)
            return _of_group(series, kind, group, total_s / grown_s, parts, before, after)  # type: ignore[arg-type]
    largest = parts[0]
    is_it = largest.part in OWN and largest.grown_s >= _MOST_OF_IT * grown_s > 0
    share = largest.grown_s / grown_s if grown_s > 0 else float("nan")
    return Cause("part" if is_it else "unknown", largest.part if is_it else "", share=share, parts=parts)


def ranks_behind(series: StepSeries, change: Change, places: Sequence[int]) -> Cause | None:
    """Ranks whose own work explains that others wait longer, where steps themselves have not grown; None: there are
    none."""
    before, after = windows(change, places)
    return _of_ranks(series, before, after, change.after - change.before, ())


def _grown_parts(series: StepSeries, before: np.ndarray, after: np.ndarray) -> tuple[Grown, ...]:
    """Parts that add up to the step, the most grown first."""
    columns = {name: column for name, column in series.parts.items() if name != "wait"}
    for group, waits in series.waits.items():
        columns[f"waiting for bytes: {group}"] = waits.bytes_s
        columns[f"waiting for late ranks: {group}"] = waits.late_s
    if not series.waits and "wait" in series.parts:
        columns["waiting"] = series.parts["wait"]
    found = [Grown(name, _median(column, before), _median(column, after)) for name, column in columns.items()]
    return tuple(sorted((one for one in found if one.before_s or one.after_s), key=lambda one: -one.grown_s))


def _of_ranks(
    series: StepSeries, before: np.ndarray, after: np.ndarray, grown_s: float, parts: tuple[Grown, ...]
) -> Cause | None:
    """Ranks whose own work grew by about what the step did."""
    ranks = series.ranks
    if len(ranks.ranks) < 2 or grown_s <= 0:
        return None
    early, late = _blocks(series, before), _blocks(series, after)
    if not early.any() or not late.any():
        return None
    grown = {part: _row_medians(table, late) - _row_medians(table, early) for part, table in ranks.parts.items()}
    own = np.sum([np.nan_to_num(one) for one in grown.values()], axis=0)
    usual = np.sum([np.nan_to_num(_row_medians(table, early)) for table in ranks.parts.values()], axis=0)
    is_late = own >= _LATE_RANK * grown_s
    steadiest = float(np.max(own / np.maximum(usual, 1e-12)))
    if not is_late.any():
        return None
    by_part = {part: float(np.nanmean(one[is_late])) for part, one in grown.items()}
    part = max(by_part, key=lambda name: by_part[name])
    share = float(np.mean(own[is_late]) / grown_s)
    chosen = np.flatnonzero(is_late)
    if is_late.mean() > _FEW or len(chosen) == len(ranks.ranks):
        return Cause("part", part, share=share, parts=parts, steadiest=steadiest)
    named = tuple(ranks.ranks[place] for place in chosen)
    hosts = tuple(dict.fromkeys(ranks.hosts[place] for place in chosen))
    stages = {ranks.stages[place] for place in chosen}
    stage = stages.pop() if len(stages) == 1 else -1
    if stage >= 0 and ranks.stages.count(stage) != len(chosen):
        stage = -1
    rows = tuple(
        {
            "rank": ranks.ranks[place],
            "host": ranks.hosts[place],
            "own_before_s": float(usual[place]),
            "own_grown_s": float(own[place]),
        }
        for place in sorted(chosen, key=lambda place: -own[place])
    )
    return Cause("ranks", part, "", named, hosts, stage, share, parts, steadiest=steadiest, rank_rows=rows)


def _blocks(series: StepSeries, places: np.ndarray) -> np.ndarray:
    """Which blocks of the ranks' table hold only steps from the first to the last of these places."""
    bounds = np.asarray(series.ranks.bounds)
    ends = np.append(bounds[1:] - 1, series.step[-1])
    chosen: np.ndarray = (bounds >= series.step[places[0]]) & (ends <= series.step[places[-1]])
    return chosen


def _row_medians(table: Floats, columns: np.ndarray) -> Floats:
    chosen = table[:, columns]
    known = np.isfinite(chosen).any(axis=1)
    found = np.full(len(table), np.nan)
    found[known] = np.nanmedian(chosen[known], axis=1)
    return found


def _of_group(
    series: StepSeries,
    kind: Literal["bytes", "skew"],
    group: str,
    share: float,
    parts: tuple[Grown, ...],
    before: np.ndarray,
    after: np.ndarray,
) -> Cause:
    waits = series.waits[group]
    skew_s = (_median(waits.skew_s, before), _median(waits.skew_s, after))
    part = ""
    if kind == "skew":
        late = {name: _mean(column, after) - _mean(column, before) for name, column in series.latest.items()}
        part = max(late, key=lambda name: late[name]) if late and max(late.values()) > 0 else ""
    return Cause(
        kind, part, group, share=share, parts=parts, skew_s=skew_s, steadiest=_steadiest(series, before, after)
    )


def _steadiest(series: StepSeries, before: np.ndarray, after: np.ndarray) -> float:
    """By how much the own work of the rank grew that grew most."""
    early, late = _blocks(series, before), _blocks(series, after)
    if not series.ranks.parts or not early.any() or not late.any():
        return float("nan")
    tables = series.ranks.parts.values()
    usual = np.sum([np.nan_to_num(_row_medians(table, early)) for table in tables], axis=0)
    now = np.sum([np.nan_to_num(_row_medians(table, late)) for table in tables], axis=0)
    return float(np.max(now / np.maximum(usual, 1e-12)) - 1)


def _median(column: Floats, places: np.ndarray) -> float:
    known = column[places][np.isfinite(column[places])]
    return float(np.median(known)) if len(known) else 0.0


def _mean(column: Floats, places: np.ndarray) -> float:
    """Of all but the largest: where each rank is late only now and then, a median would not see it."""
    known = np.sort(column[places][np.isfinite(column[places])])
    return float(known[: max(len(known) - len(known) // 50, 1)].mean()) if len(known) else 0.0
