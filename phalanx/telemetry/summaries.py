"""A run at a glance, and two runs side by side: what `phalanx trace summary` and `compare` print."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean, stdev
from typing import Any

from phalanx.core.errors import UserError
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.slow_ranks import find_slow_ranks
from phalanx.telemetry.span_store import PARTS

BREAKDOWN = (*PARTS, "other")

_CERTAIN = 3.0
"""Standard errors by which step times must differ: steps of one run are not quite independent."""


def summarize(trace: Trace, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    """What a run's time went on, as values that JSON has.

    Returns:
        ``hosts, ranks, steps, first_step, last_step, spans``; ``step_s`` with median, fastest and slowest step;
        ``breakdown`` (seconds by kind, with ``other`` for what lies between spans), ``between`` (what was measured
        there and what parts share; null where spans are not kept any more); ``exposed``, ``bubble``, ``skew``, ``mfu``,
        ``incidents`` and ``slow`` (verdict and ranks); ``damaged_files`` that none of this is of, ``spans_dropped`` by
        host, in the whole run, and ``lost`` (lines that say both).

    Raises:
        UserError: no step is done, or none can be read.
    """
    trace = trace.shared()
    times = trace.step_times(first, last).to_pylist()
    if not times:
        raise _no_steps(trace, "ask for steps that are done (or for all, without --steps)")
    count = "select (select count(distinct rank) from steps) as ranks, (select count(*) from spans) as spans"
    counted = trace.ask(count, first, last).to_pylist()[0]
    each = sorted(row["median_s"] for row in times)
    between = trace.between_spans(first, last).to_pylist()
    slow = find_slow_ranks(trace, first, last)
    found = {
        "hosts": len(trace.hosts),
        "ranks": counted["ranks"],
        "steps": len(times),
        "first_step": times[0]["step"],
        "last_step": times[-1]["step"],
        "spans": counted["spans"],
        "step_s": {"median": each[len(each) // 2], "fastest": each[0], "slowest": each[-1]},
        "breakdown": _breakdown(trace, first, last),
        "between": _means(between, ("step_s", "parts_s", "between_s", "twice_s")),
        "exposed": trace.exposed_communication(first, last).to_pylist(),
        "bubble": trace.pipeline_bubble(first, last).to_pylist(),
        "skew": skew_by_group(trace, first, last),
        "mfu": _mfu(trace, first, last),
        "incidents": trace.incidents(first, last).to_pylist(),
        "slow": {"verdict": slow.verdict, "ranks": slow.slow, "abstains": slow.abstains},
    }
    lost = trace.lost()  # at last: that some files are damaged shows only when they are read
    return {**found, **lost.as_json(), "lost": lost.sentences}


def _no_steps(trace: Trace, cure: str) -> UserError:
    lost = trace.lost()
    said = "no step can be read" if lost.damaged or lost.without_steps else "no step with telemetry"
    problem = "; ".join([said, *lost.sentences])
    return UserError(problem, cure=cure, value=str(trace.folder))


def compare(one: Trace, other: Trace, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    """Two runs side by side.

    Returns:
        ``step_s`` (mean of steps of each, standard errors, whether they differ beyond chance), ``parts`` (rows of
        ``what``, seconds of each, ``change_s``, ``change``: relative, null where the first has none; what grew most
        comes first), ``exposed`` (the same by group of ranks) and ``verdict``.

    Raises:
        UserError: one of them lacks steps.
    """
    one, other = one.shared(), other.shared()
    sides = [_mean_step(trace, first, last) for trace in (one, other)]
    (mean_a, error_a, steps_a), (mean_b, error_b, steps_b) = sides
    error_s = math.hypot(error_a, error_b)
    is_certain = steps_a > 2 and steps_b > 2 and abs(mean_b - mean_a) > _CERTAIN * error_s
    breakdowns = [_breakdown(trace, first, last) for trace in (one, other)]
    parts = _side_by_side(*({kind: found[kind] for kind in BREAKDOWN} for found in breakdowns))
    exposed = _side_by_side(
        *(
            {row["group"] or "(none)": row["exposed_s"] for row in trace.exposed_communication(first, last).to_pylist()}
            for trace in (one, other)
        )
    )
    return {
        "step_s": {
            "a": mean_a,
            "b": mean_b,
            "change_s": mean_b - mean_a,
            "change": mean_b / mean_a - 1,
            "error_s": error_s,
            "steps": [steps_a, steps_b],
            "is_certain": is_certain,
        },
        "parts": parts,
        "exposed": exposed,
        "verdict": _verdict(mean_a, mean_b, is_certain, parts),
    }


def _verdict(mean_a: float, mean_b: float, is_certain: bool, parts: list[dict[str, Any]]) -> str:
    if not is_certain:
        return f"no difference beyond chance: {mean_a:.4g} s and {mean_b:.4g} s a step"
    grew = mean_b > mean_a
    most = parts[0] if grew else parts[-1]
    return (
        f"B's step is {abs(mean_b / mean_a - 1):.1%} {'longer' if grew else 'shorter'};"
        f" most of it is {most['what']}: {most['change_s']:+.4g} s of {mean_b - mean_a:+.4g} s"
    )


def _mean_step(trace: Trace, first: int | None, last: int | None) -> tuple[float, float, int]:
    """Mean, standard error and number of steps; a step is as long as its slowest rank's."""
    each = [row["slowest_s"] for row in trace.step_times(first, last).to_pylist()]
    if not each:
        raise _no_steps(trace, "ask for steps that both runs have")
    return fmean(each), stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf, len(each)


def _side_by_side(one: dict[str, float], other: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for what in dict.fromkeys([*one, *other]):
        a, b = one.get(what, 0.0), other.get(what, 0.0)
        if a or b:
            change_s = round(b - a, 9)  # nanoseconds: less is the rounding of sums
            rows.append(
                {"what": what, "a_s": a, "b_s": b, "change_s": change_s, "change": change_s / a if a > 0 else None}
            )
    return sorted(rows, key=lambda row: -row["change_s"])


def _breakdown(trace: Trace, first: int | None, last: int | None) -> dict[str, float]:
    row = trace.step_breakdown(first, last).to_pylist()[0]
    return {kind: row[f"{kind}_s"] or 0.0 for kind in (*BREAKDOWN, "step")}


def _means(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, float] | None:
    steps = sum(row["steps"] for row in rows)
    return {name: sum(row[name] * row["steps"] for row in rows) / steps for name in names} if steps else None


def skew_by_group(trace: Trace, first: int | None, last: int | None) -> list[dict[str, Any]]:
    """Of the launches of each group: mean and largest, and the rank that was last for most of that time."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in trace.launch_skew(first, last).to_pylist():
        found.setdefault(row["group"], []).append(row)
    rows = []
    for group, each in sorted(found.items()):
        late_s: dict[int, float] = defaultdict(float)
        for row in each:
            late_s[row["last_rank"]] += row["skew_s"]
        latest = max(sorted(late_s), key=lambda rank: late_s[rank])
        total_s = sum(late_s.values())
        rows.append(
            {
                "group": group,
                "collectives": len(each),
                "mean_s": fmean(row["skew_s"] for row in each),
                "largest_s": max(row["skew_s"] for row in each),
                "last_rank": latest,
                "last_share": late_s[latest] / total_s if total_s else 0.0,
                "error_s": None if None in (errors_s := [row["error_s"] for row in each]) else max(errors_s),
            }
        )
    return rows


def _mfu(trace: Trace, first: int | None, last: int | None) -> dict[str, float] | None:
    """Of the first, the middle and the last tenth of the steps; null: the peak rate of the devices is unknown."""
    each = [row["mfu"] for row in trace.mfu(first, last).to_pylist() if row["mfu"] is not None]
    if not each:
        return None
    tenth = max(1, len(each) // 10)
    middle = (len(each) - tenth) // 2
    return {"begin": fmean(each[:tenth]), "middle": fmean(each[middle : middle + tenth]), "end": fmean(each[-tenth:])}
