"""What limits a run, who is to blame, how sure that is: a pure function from evidence to a value.

    verdict = judge(gather(Path("runs/big")))
    print(verdict.sentence)

The dashboard, reports and judges take the same value. Where evidence is missing it abstains, and says which and how
to get it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.telemetry import rank_causes, step_causes
from phalanx.telemetry.evidence import Evidence, Missing
from phalanx.telemetry.findings import LEAST_SHARE, PLAN_SEARCH, Action, Finding, Sureness
from phalanx.telemetry.slow_ranks import LEAST_STEPS

LIMITS = 0.05
"""Share of a step that a cause must cost to be what limits a run: less is lost in every run."""


CAUSES: tuple[Callable[[Evidence, float, Sequence[Finding]], Iterator[Finding]], ...] = (
    rank_causes.slow_ranks,
    rank_causes.slow_links,
    rank_causes.data,
    step_causes.unbalanced_stages,
    step_causes.pipeline_bubble,
    step_causes.communication,
    rank_causes.late_ranks,
    rank_causes.waits_of_unknown_groups,
    step_causes.irregular_steps,
    step_causes.large_parts,
    step_causes.slower_steps,
)
"""In this order: what explains waiting comes before waiting that nothing explains."""


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        sentence: one, for people: what limits the run, who is to blame, what it costs.
        limit: the finding that it is about; None: the run's own work limits it, or nothing can be said (`abstains`).
        sureness: of the sentence, and why so sure; ``possible`` where it abstains.
        abstains: why nothing is said; empty: something is.
        findings: all, what costs most first.
        missing: evidence that would say more.
        actions: what to do next, the first first.
    """

    sentence: str
    limit: Finding | None
    sureness: Sureness
    why_sure: str
    abstains: tuple[str, ...]
    findings: tuple[Finding, ...]
    missing: tuple[Missing, ...]
    actions: tuple[Action, ...]


def judge(evidence: Evidence) -> Verdict:
    """Weigh the evidence."""
    findings = tuple(find_causes(evidence))
    reasons = _abstains(evidence)
    first = findings[0] if findings else None
    if first is not None and first.cause == "diverged":
        sentence = f"{_capital(first.sentence)}: how fast it is matters no more."
        return _made(evidence, sentence, first, "certain", first.because[0], (), findings)
    if reasons:
        return _made(evidence, f"No verdict: {'; '.join(reasons)}.", None, "possible", "", reasons, findings)
    if first is None or first.share < LIMITS:
        return _healthy(evidence, findings)
    cost = f"that costs up to {first.lost_s:.3g} s of {mean_step_s(evidence):.3g} s a step ({first.share:.0%})"
    sentence = f"{_capital(first.sentence)}; {cost}."
    return _made(evidence, sentence, first, first.sureness, "; ".join(first.because), (), findings)


def find_causes(evidence: Evidence) -> list[Finding]:
    """All that cost `LEAST_SHARE` of a step or more, what costs most first; a run that diverged comes before all."""
    step_s = mean_step_s(evidence)
    found: list[Finding] = [*step_causes.diverged(evidence)]
    if not math.isfinite(step_s) or step_s <= 0:
        return found
    for cause in CAUSES:
        found += cause(evidence, step_s, found)
    kept = [_bounded(one, step_s) for one in found if one.share >= LEAST_SHARE]
    return sorted(kept, key=lambda one: (one.cause != "diverged", -one.lost_s))


def mean_step_s(evidence: Evidence) -> float:
    """Seconds of a step that costs and shares are of: means too, since a few long steps cost what no median shows."""
    return evidence.breakdown.get("step") or evidence.step_s


def _bounded(finding: Finding, step_s: float) -> Finding:
    """Costs of the newest steps may be more than the mean step of all: none is more than the whole step."""
    if finding.share <= 1:
        return finding
    return replace(finding, lost_s=min(finding.lost_s, step_s), share=1.0)


def _abstains(evidence: Evidence) -> tuple[str, ...]:
    if not evidence.times:
        lost = evidence.lost
        return (f"no step can be read: {lost}" if lost else "no rank recorded spans",)
    if evidence.steps < LEAST_STEPS:
        steps = f"{evidence.steps} step{'' if evidence.steps == 1 else 's'}"
        return (f"{steps} recorded after the first, {LEAST_STEPS} are needed to tell chance apart",)
    parts = evidence.breakdown
    if not parts or not any(parts.get(kind) for kind in ("forward", "backward", "wait", "data", "optimizer")):
        return ("spans say how long steps were, and not what they went on",)
    return ()


def _healthy(evidence: Evidence, findings: tuple[Finding, ...]) -> Verdict:
    parts = evidence.breakdown
    own_s = parts.get("forward", 0.0) + parts.get("backward", 0.0)
    least = f", the most that could be saved is {findings[0].share:.1%} ({findings[0].cause})" if findings else ""
    sentence = (
        f"Nothing but its own work limits this run: forward and backward are {own_s / parts['step']:.0%} of a step"
        f" of {mean_step_s(evidence):.3g} s{least}."
    )
    compared = evidence.slow is not None and evidence.slow.ranked and not evidence.slow.abstains
    sureness: Sureness = "likely" if compared and evidence.steps >= 20 else "possible"
    told = evidence.slow.verdict if evidence.slow is not None else "ranks could not be compared"
    return _made(evidence, sentence, None, sureness, f"{evidence.steps} steps; {told}", (), findings)


def _made(
    evidence: Evidence,
    sentence: str,
    limit: Finding | None,
    sureness: Sureness,
    why_sure: str,
    abstains: tuple[str, ...],
    findings: tuple[Finding, ...],
) -> Verdict:
    actions = [action for finding in findings for action in finding.actions]
    if abstains:
        actions = [Action(f"{_capital(one.what)}: {one.how}", one.command) for one in evidence.missing] + actions
    elif limit is None:
        actions += [
            Action("To be faster, look for another layout or device", PLAN_SEARCH),
            Action("See where the time of a step goes", f"phalanx trace summary {evidence.run}"),
        ]
    unique = tuple({(one.text, one.command): one for one in actions}.values())
    return Verdict(sentence, limit, sureness, why_sure, abstains, findings, evidence.missing, unique)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
