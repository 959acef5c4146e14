"""What all ranks of a run do that makes its steps long: each a function from evidence to findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median, stdev

from phalanx.telemetry.alike_ranks import LEAST_RANKS
from phalanx.telemetry.evidence import Evidence
from phalanx.telemetry.findings import (
    LEAST_SHARE,
    PLAN_SEARCH,
    Action,
    Finding,
    Name,
    waits_by_axis,
)

_HEAVY_OPTIMIZER, _HEAVY_SNAPSHOT, _UNCOVERED = 0.15, 0.02, 0.15  # of a step
_LONG_STEP = 1.5  # times the median
_LEAST_REGULAR = 10  # steps
_TREND_STEPS, _TREND, _CERTAIN = 50, 0.03, 3.0
_MOST_NAMED = 8


def diverged(evidence: Evidence) -> Iterator[Finding]:
    """The loss or the gradient norm became infinite or NaN."""
    bad = evidence.not_finite
    if bad is None or evidence.figures is None:
        return
    first, last = evidence.figures
    what = ", ".join(f"{name} was {value}" for name, value in bad["not_finite"].items())
    share = (last - bad["step"] + 1) / (last - first + 1)
    yield Finding(
        "diverged",
        f"The run diverged at step {bad['step']}: {what}",
        math.nan,
        share,
        "certain",
        (f"metrics.jsonl, step {bad['step']}: {what}",),
        steps=(bad["step"],),
        actions=(
            Action("Go on from a checkpoint before that step, with a lower learning rate or stricter clipping"),
            Action("See which checkpoints there are", f"phalanx checkpoint ls {evidence.run}"),
        ),
    )


def unbalanced_stages(evidence: Evidence, step_s: float, _: Sequence[Finding]) -> Iterator[Finding]:
    """A pipeline stage that computes longer than the others, slow ranks left out."""
    if evidence.slow is None or len(set(evidence.stages.values())) < 2:
        return
    slow = {one["rank"] for one in evidence.slow.slow}
    by_stage: dict[int, list[float]] = {}
    for row in evidence.slow.ranked:
        if row["rank"] in evidence.stages and row["rank"] not in slow:
            by_stage.setdefault(row["stage"], []).append(row["own_s"])
    if len(by_stage) < 2:
        return
    usual = {stage: median(each) for stage, each in by_stage.items()}
    heavy = max(usual, key=lambda stage: usual[stage])
    mean_s = fmean(usual.values())
    lost_s = usual[heavy] - mean_s
    if lost_s < step_s * LEAST_SHARE:
        return
    each = ", ".join(f"{stage}: {usual[stage]:.4g} s" for stage in sorted(usual)[:16])
    is_told_apart = len(by_stage[heavy]) >= LEAST_RANKS
    doubt = "" if is_told_apart else "; with so few ranks of it, a slow host looks the same"
    yield Finding(
        "unbalanced stages",
        f"Stage {heavy} of the pipeline computes {usual[heavy] / mean_s - 1:.0%} longer than stages do on average,"
        f" and the others wait{doubt}",
        lost_s,
        lost_s / step_s,
        "likely" if is_told_apart else "possible",
        (f"own time of a step by stage: {each}",),
        tuple(sorted(rank for rank, stage in evidence.stages.items() if stage == heavy))[:64],
        actions=(
            Action("Split the layers otherwise: the planner balances stages", PLAN_SEARCH),
            Action("See the step as it ran", f"phalanx trace export {evidence.run} step.json.gz --groups pipeline"),
        ),
    )  # fmt: skip


def pipeline_bubble(evidence: Evidence, step_s: float, _: Sequence[Finding]) -> Iterator[Finding]:
    """What even the stage that waits least waits: the schedule's own share, whoever is slow besides."""
    waits = [row for row in evidence.waits if "pipeline" in row["group"].split("·")]
    if not waits:
        return
    lost_s = min(max(row["least_s"] for row in waits), step_s)
    if lost_s < step_s * LEAST_SHARE:
        return
    yield Finding(
        "pipeline bubble",
        f"The pipeline's schedule leaves its stages without work for {lost_s / step_s:.0%} of a step",
        lost_s,
        lost_s / step_s,
        "likely",
        (f"the stage that waits least waits {lost_s:.4g} s of a step for others",),
        group="pipeline",
        actions=(
            Action("More micro-batches, or another schedule: the planner compares them", PLAN_SEARCH),
            Action("See the step as it ran", f"phalanx trace export {evidence.run} step.json.gz --groups pipeline"),
        ),
    )


def communication(evidence: Evidence, step_s: float, found: Sequence[Finding]) -> Iterator[Finding]:
    """What moving bytes costs: what the member of a group that waits least waits, since nobody keeps it waiting."""
    explained = {one.group for one in found if one.cause == "slow link"}
    for group, rows in waits_by_axis(evidence).items():
        lost_s = min(median(row["least_s"] for row in rows), step_s)
        if group in explained or lost_s < step_s * LEAST_SHARE:
            continue
        advice = {
            "tensor": "Keep tensor-parallel groups within a host, or make them smaller",
            "context": "Split sequences over fewer ranks",
            "expert": "Keep expert groups within a host, or make them smaller",
        }.get(group, "Let more micro-batches share one exchange, or keep it within a host")
        yield Finding(
            "communication",
            f"Moving the bytes of {group or 'unnamed'} communication takes {lost_s / step_s:.0%} of a step that"
            " no compute hides",
            lost_s,
            lost_s / step_s,
            "likely",
            (
                f"{group}: even the members that wait least wait {lost_s:.4g} s of a step"
                f" ({len(rows)} group{'s' * (len(rows) > 1)})",
            ),
            group=group,
            actions=(
                Action(f"{advice}: the planner says what it gains", PLAN_SEARCH),
                Action("Test the ports of each host", "phalanx check --only nic-rate --only nic-errors"),
            ),
        )


def large_parts(evidence: Evidence, step_s: float, found: Sequence[Finding]) -> Iterator[Finding]:
    """Parts of a step that are larger than they are in most runs, also without a few steps that take far longer."""
    irregular_s = sum(one.lost_s for one in found if one.cause == "irregular steps")
    parts, run = evidence.breakdown, evidence.run
    look = f"phalanx trace export {run} step.json.gz --steps {evidence.last_step}"
    known: tuple[tuple[str, Name, float, str, Action], ...] = (
        (
            "optimizer",
            "optimizer",
            _HEAVY_OPTIMIZER,
            "The optimizer takes {share} of a step",
            Action("Shard its state over more ranks, or let more micro-batches share an update", PLAN_SEARCH),
        ),
        (
            "snapshot",
            "checkpoint",
            _HEAVY_SNAPSHOT,
            "Training stands still for snapshots {share} of the time",
            Action("Save less often, or in the background (docs/checkpoints.md)", f"phalanx checkpoint ls {run}"),
        ),
        (
            "other",
            "outside spans",
            _UNCOVERED,
            "No span covers {share} of a step: it is the host's own work, or something that records nothing",
            Action("Look at what lies between the spans of a step", look),
        ),
    )
    for kind, cause, least, sentence, action in known:
        seconds = parts.get(kind, 0.0) - irregular_s
        if seconds >= least * step_s:
            share = seconds / step_s
            why = (f"{kind}: {seconds:.4g} s of {step_s:.4g} s",)
            text = sentence.format(share=f"{share:.0%}")
            yield Finding(cause, text, seconds, share, "certain", why, actions=(action,))


def irregular_steps(evidence: Evidence, step_s: float, _: Sequence[Finding]) -> Iterator[Finding]:
    """Steps that take far longer than the others."""
    usual_s, all_steps = evidence.step_s, len(evidence.times)
    long = [row for row in evidence.times if row["median_s"] > _LONG_STEP * usual_s]
    if not long or all_steps < _LEAST_REGULAR:
        return
    lost_s = sum(row["median_s"] - usual_s for row in long) / all_steps
    worst = sorted(long, key=lambda row: -row["median_s"])[:_MOST_NAMED]
    steps = tuple(row["step"] for row in worst)
    longest = ", ".join(f"step {row['step']} {row['median_s']:.4g} s" for row in worst[:3])
    near = [one for one in evidence.incidents if one["step"] in steps]
    yield Finding(
        "irregular steps",
        f"{len(long)} of {all_steps} steps take far longer than the others,"
        f" up to {worst[0]['median_s'] / usual_s:.1f} times the median",
        lost_s,
        lost_s / step_s,
        "certain",
        (
            f"the longest: {longest}; median {usual_s:.4g} s",
            *(f"incident at step {one['step']}: {one['kind']}" for one in near[:3]),
        ),
        steps=steps,
        actions=(
            Action("See what such a step did", f"phalanx trace export {evidence.run} step.json.gz --steps {steps[0]}"),
        ),
    )


def slower_steps(evidence: Evidence, step_s: float, _: Sequence[Finding]) -> Iterator[Finding]:
    """Steps that become longer from the first fifth of them to the last."""
    each = [row["median_s"] for row in evidence.times]
    if len(each) < _TREND_STEPS:
        return
    fifth = len(each) // 5
    begin, end = each[:fifth], each[-fifth:]
    grown_s = median(end) - median(begin)
    error_s = math.hypot(stdev(begin), stdev(end)) / math.sqrt(fifth)
    if grown_s < max(_TREND * median(begin), _CERTAIN * error_s):
        return
    # of all these steps, not of the last ones: what steps would have taken had they stayed as they were at first
    lost_s = min(max(0.0, fmean(each) - median(begin)), step_s)
    late = evidence.times[-fifth]["step"]
    yield Finding(
        "slower and slower",
        f"Steps became {grown_s / median(begin):.0%} longer from the first to the last fifth of these steps",
        lost_s,
        lost_s / step_s,
        "likely",
        (f"median step {median(begin):.4g} s at first, {median(end):.4g} s at last",),
        actions=(
            Action(
                "See which part grew: compare early steps with late ones",
                f"phalanx trace summary {evidence.run} --steps {late}:",
            ),
        ),
    )
