"""Tables of a verdict on stragglers: what figures are drawn from, and what `--json` has beside the detections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.detect.stragglers.replay import Seconds
from phalanx.detect.stragglers.straggler_facts import StragglerFacts
from phalanx.detect.stragglers.what_if import worker_slowdowns

Rows = Sequence[Mapping[str, Any]]

_ROUNDING = 1e-9  # of a step: less is no time, but what differences of sums leave


def straggler_tables(facts: StragglerFacts) -> dict[str, Rows]:
    """By name:

    ``what_if``     one row: seconds of a step as recorded, replayed, and with ideal times; slowdown S,
                    M_W and M_S (NaN: hardly anything is lost)
    ``lost``        what is lost of a step by cause; adds up
    ``workers``     a heat map of stages by columns: slowdown S of each worker, its own time, what it waited
    ``stages``, ``columns``, ``operations``   slowdown S of each
    ``steps``       seconds of each step as recorded and with ideal times
    """
    what_if = facts.what_if
    by_stage, by_column = (what_if.part_slowdowns(one) for one in (what_if.by_stage_s, what_if.by_column_s))
    by_operation = what_if.part_slowdowns(what_if.by_operation_s)
    names = ("recorded", "replayed", "even", "alike", "flat", "best", "ideal")
    means = [float(getattr(what_if, f"{name}_s").mean()) for name in names]
    causes = ("delays", "uneven lengths", "slow workers", "unbalanced stages", "transfers and the rest")
    lost = np.array(means[:-2]) - np.array(means[1:-1])
    lost = np.where(np.abs(lost) < _ROUNDING * means[0], 0.0, lost)
    tables: dict[str, Rows] = {
        "what_if": [
            {f"{name}_s": mean for name, mean in zip(names, means, strict=True)}
            | {"slowdown": what_if.slowdown, "launch_slowdown": what_if.launch_slowdown}
            | {"mw": _mean(facts.mw), "ms": _mean(facts.ms)}
        ],
        "lost": [
            {"cause": cause, "lost_s": float(one), "share": float(one) / means[0]}
            for cause, one in zip(causes, lost, strict=True)
        ],
        "workers": _workers(facts),
        "stages": [{"stage": at, "slowdown": float(one)} for at, one in enumerate(by_stage)],
        "columns": [{"column": at, "slowdown": float(one)} for at, one in enumerate(by_column) if not np.isnan(one)],
        "operations": sorted(
            (_operation(*pair) for pair in zip(what_if.operations, by_operation, strict=True)),
            key=lambda row: -float(row["slowdown"]),
        ),
        "steps": [
            {"step": int(step), "recorded_s": float(recorded), "ideal_s": float(ideal)}
            for step, recorded, ideal in zip(facts.steps, what_if.recorded_s, what_if.ideal_s, strict=True)
        ],
    }
    return tables


def _mean(values: Seconds) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan


def _operation(name: str, slowdown: float) -> dict[str, Any]:
    return {"operation": name, "slowdown": float(slowdown)}


def _workers(facts: StragglerFacts) -> list[dict[str, Any]]:
    places = facts.places
    slowdowns = worker_slowdowns(facts.what_if, places)
    own = np.array([np.median(c[~np.isnan(c)]) if (~np.isnan(c)).any() else np.nan for c in facts.own_s.T])
    waited, rows = facts.waited_s.mean(axis=0), []
    order = np.argsort(places.worker, kind="stable")
    begins = np.searchsorted(places.worker[order], np.arange(places.workers + 1))
    for worker in range(places.workers):
        at = order[begins[worker] : begins[worker + 1]]
        rows.append(
            {
                "stage": int(places.worker_stage[worker]),
                "column": int(places.worker_column[worker]),
                "ranks": [int(rank) for rank in places.ranks[at]],
                "hosts": list(dict.fromkeys(places.hosts[one] for one in at)),
                "slowdown": float(slowdowns[worker]),
                "own_s": float(own[at].max()),
                "waited_s": float(waited[at].min()),
            }
        )
    return rows
