"""Stragglers of a run, from its folder: what `phalanx detect stragglers`, the driver and the dashboard call.

    verdict = judge_run(Path("runs/big"))

It reads and changes nothing. Of a run that goes on, `phalanx.detect.stragglers.straggler_watch` reads what is new.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.stragglers.job_places import read_groups
from phalanx.detect.stragglers.older_steps import with_onsets
from phalanx.detect.stragglers.span_columns import BACKWARD, FORWARD, read_columns
from phalanx.detect.stragglers.straggler_facts import StragglerFacts, gather_facts
from phalanx.detect.stragglers.straggler_judge import JUDGE, StragglerPolicy, judge_stragglers
from phalanx.telemetry.queries import Trace

_COMPILES = 1.5  # times the usual step


def judge_run(
    run: str | Path, policy: StragglerPolicy | None = None, *, first: int | None = None, last: int | None = None
) -> JudgeVerdict:
    """Who makes the steps of a run longer than they need be, and whether a machine is at fault.

    Args:
        run: its folder, or a URL of object storage; may be under way.
        policy: numbers that a user may set.
        first, last: steps to look at, the last included; None: the newest that `policy` allows.

    Raises:
        UserError: no telemetry is there, or the times of spans contradict each other in every step.
    """
    policy = policy or StragglerPolicy()
    trace = Trace.open(run)
    chosen = _choose_steps(trace, policy, first, last)
    if chosen is None:
        return _without_spans(trace, "no step has spans", "or give steps whose spans are kept still")
    facts = run_facts(trace, *chosen)
    if facts is None:
        return _without_spans(trace, "no rank has forward or backward spans")
    verdict = judge_stragglers(facts, policy)
    if first is None and last is None:
        verdict = replace(verdict, detections=with_onsets(verdict.detections, trace, facts, policy))
    lost = tuple(f"{one}; figures are of the rest" for one in trace.lost().sentences)
    return replace(verdict, abstains=(*verdict.abstains, *lost))


def _without_spans(trace: Trace, what: str, cure: str = "") -> JudgeVerdict:
    """Files that are damaged are why, where there are some: nothing else need be recorded."""
    if lost := trace.lost().sentences:
        return JudgeVerdict(JUDGE, (), (f"{what} that can be read", *lost))
    cure = "record them (docs/trace.md)" + (f", {cure}" if cure else "")
    return JudgeVerdict(JUDGE, (), (f"{what}; {cure}",))


def run_facts(trace: Trace, first: int, last: int) -> StragglerFacts | None:
    """Facts of steps of a run; None: no rank computes anything in them."""
    spans = read_columns(trace, first, last)
    is_busy = len(spans) and bool(np.isin(spans.kind, (FORWARD, BACKWARD)).any())
    return gather_facts(spans, read_groups(trace), is_whole=not trace.lost()) if is_busy else None


def _choose_steps(trace: Trace, policy: StragglerPolicy, first: int | None, last: int | None) -> tuple[int, int] | None:
    """The newest whole steps that hold as many spans as may be read; a first step that takes much longer, as one that
    compiles does, is left out. They are of one attempt, unless steps are given: before it ranks were elsewhere."""
    # from the sums of steps, which are small; of spans only those of a few steps are counted
    rows = trace.ask(
        """
        with seen as (
            select step, count(distinct rank) as ranks, max(step_ns) / 1e9 as step_s from steps
            where forward_ns > 0 and step >= 0
                and ($any_attempt or attempt = (select max(attempt) from steps where forward_ns > 0)) group by step
        )
        select step, step_s from seen where ranks * 2 >= (select max(ranks) from seen) order by step desc
        """,
        first,
        last,
        {"any_attempt": first is not None or last is not None},
    ).to_pylist()
    usual_s = float(np.median([row["step_s"] for row in rows])) if rows else 0.0
    if first is None and len(rows) > policy.least_steps and rows[-1]["step_s"] > _COMPILES * usual_s:
        rows = rows[:-1]
    rows = rows[: policy.most_steps]
    if len(rows) > policy.least_steps:
        counted = rows[: policy.least_steps]
        (spans,) = trace.ask("select count(*) as spans from spans", counted[-1]["step"], counted[0]["step"]).to_pylist()
        affordable = policy.most_spans * len(counted) // max(spans["spans"], 1)
        rows = rows[: max(policy.least_steps, affordable)]
    return (rows[-1]["step"], rows[0]["step"]) if rows else None
