"""Thresholds of the paper's Minder and its variants, learnt from the develop split, and how well each does.

A threshold is a number of deviations of the others (`phalanx.detect.minder.paper_minder`): for each thing that is
looked at what no healthy job keeps up for the time of continuity, times the factor with which F1 on jobs of the
develop split is best, alarms in healthy ones being false ones. The paper has one similarity threshold: variants of
Minder have its factor, and those of `VARIANTS` that are no variants of it (`OWN_FACTOR`) are at their own best.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.detect.detection import Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.minder.paper_minder import PaperFinding, Variant, deviations_of, first_of, score_limit
from phalanx.detect.minder.similarity import steady_score
from phalanx.detect.monitoring.detection_scores import DetectionScore, f1_of, score
from phalanx.detect.monitoring.job_scenarios import Scenario, draw_scenario, fault_scenarios
from phalanx.detect.monitoring.metric_generator import machine_names
from support.minder_candidates import JobCandidates, look_name, of_jobs
from support.minder_variants import MINDER, OWN_FACTOR, PUBLISHED, VARIANTS

NUMBERS = Path(__file__).with_name("minder_paper.json")

FIRST_HEALTHY, FIRST_FAULT = 420_000, 600_000
"""Numbers of scenarios of the develop split, which nothing else is learnt from."""

FIRST_CALM = 200_000
"""Number of the first healthy job of a split on which variants are scored."""

SIZES: Mapping[int, int] = {4: 8, 8: 8, 16: 8, 32: 8, 64: 8, 128: 6, 256: 4, 512: 2, 1000: 1}
"""Healthy jobs by number of machines."""

FACTORS = np.geomspace(0.25, 16, 25)
"""That are tried on thresholds."""

CONTINUITY = 240
"""Samples."""

_SAME = 0.02
"""Figures that differ by less say nothing about which is higher: three faults of 150."""


@dataclass(frozen=True)
class PaperNumbers:
    """What was learnt.

    Attributes:
        healthy: by `limit_name`: deviations of the others that no healthy job kept up.
        factors: on them, by the name of the variant.
    """

    healthy: Mapping[str, float]
    factors: Mapping[str, float]

    @classmethod
    def read(cls, file: Path = NUMBERS) -> PaperNumbers:
        """As `write` left them."""
        return cls(**json.loads(file.read_text("utf-8")))

    def write(self, file: Path = NUMBERS) -> None:
        """To a file that people can read."""
        rounded = {
            name: {key: round(value, 4) for key, value in part.items()}
            for name, part in (("healthy", self.healthy), ("factors", self.factors))
        }
        file.write_text(json.dumps(rounded, indent=1) + "\n", "utf-8")


def limit_name(variant: Variant, metric: str) -> str:
    """Of what a threshold is of: windows that are further apart stay alike by chance for longer."""
    return look_name(variant, metric) + (f", every {variant.stride} samples" if variant.stride > 1 else "")


def healthy_jobs(sizes: Mapping[int, int] = SIZES) -> list[Scenario]:
    """Of the develop split, small ones first."""
    counts = [size for size, jobs in sizes.items() for _ in range(jobs)]
    return [draw_scenario("develop", FIRST_HEALTHY + at, machines=count) for at, count in enumerate(counts)]


def calm_jobs(split: str, count: int) -> list[Scenario]:
    """Healthy ones of 15 minutes, as large as they are drawn, for scores."""
    return [draw_scenario(split, FIRST_CALM + at) for at in range(count)]


def calibration_faults(cases: int, most_machines: int) -> list[Scenario]:
    """Of the develop split, from which factors are learnt: the first so many of 90."""
    drawn = itertools.islice(fault_scenarios("develop", 90, first=FIRST_FAULT), cases)
    return [one for one in drawn if one.machines <= most_machines]


def calibrate(kept: Path | None, healthy_ones: Iterable[Scenario], faulty: Iterable[Scenario]) -> PaperNumbers:
    """Learn them from jobs of the develop split.

    Args:
        kept: folder of candidates.
    """
    healthy: dict[str, float] = {}
    limits = {limit_name(variant, look): (variant, look) for variant in VARIANTS.values() for look in variant.looks}
    calm = list(of_jobs(healthy_ones, VARIANTS.values(), kept))
    for job in calm:
        for name, (variant, metric) in limits.items():
            who, scores = (one[:: variant.stride] for one in job.of[look_name(variant, metric)])
            # A job in which the candidate changes often says little by what it keeps up.
            least = max(steady_score(who, scores, CONTINUITY // variant.stride), float(np.median(scores)))
            healthy[name] = max(healthy.get(name, 0.0), deviations_of(least, job.labels.machines))
    jobs = [*calm, *of_jobs(faulty, VARIANTS.values(), kept)]
    factors: dict[str, float] = {}
    for name, variant in VARIANTS.items():
        tried = [(f1_of_all(judged(jobs, variant, healthy, factor)), factor) for factor in FACTORS]
        best = _middle_of_best(tried)
        factors[name] = best if name in OWN_FACTOR else factors[MINDER]
        found = judged(jobs, variant, healthy, factors[name])
        calm_hours = f"{found.healthy_alarms} alarms in {found.healthy_hours:.1f} healthy hours"
        print(
            f"{name:36s} factor {factors[name]:.2f} (its best {best:.2f})  {score_line(found)}, {calm_hours}",
            flush=True,
        )
    return PaperNumbers(healthy, factors)


def precision_of_all(found: DetectionScore) -> float:
    """Alarms in healthy jobs count as false ones."""
    alarms = found.found + found.false_alarms + found.healthy_alarms
    return found.found / alarms if alarms else 1.0


def f1_of_all(found: DetectionScore) -> float:
    """Of that precision and the recall."""
    return f1_of(precision_of_all(found), found.recall)


def _middle_of_best(tried: Sequence[tuple[float, float]]) -> float:
    """Of the factors that are about as good as the best one: chance picks among them."""
    best = max(f1 for f1, _ in tried)
    good = [factor for f1, factor in tried if f1 >= best - 0.005]
    return float(np.exp(np.mean(np.log(good))))


def judged(
    jobs: Iterable[JobCandidates], variant: Variant, healthy: Mapping[str, float], factor: float
) -> DetectionScore:
    """How well a variant does on jobs."""
    return score((verdict_of(first_in(job, variant, healthy, factor), job), job.labels) for job in jobs)


def first_in(job: JobCandidates, variant: Variant, healthy: Mapping[str, float], factor: float) -> PaperFinding | None:
    """The machine that a variant calls faulty; None: none."""
    for metric in variant.looks:
        limit = score_limit(factor * healthy[limit_name(variant, metric)], job.labels.machines)
        found = first_of(job.of[look_name(variant, metric)], metric, limit, variant, CONTINUITY)
        if found is not None:
            return found
    return None


def verdict_of(found: PaperFinding | None, job: JobCandidates) -> JudgeVerdict:
    """In the shape that scores take."""
    if found is None:
        return JudgeVerdict("machines", looked_at="all")
    host = machine_names(job.labels.machines)[found.machine]
    start_s = job.labels.start_unix_s
    detection = Detection(
        "faulty machine",
        f"{host} is faulty",
        (Culprit("host", host, hosts=(host,)),),
        Onset(start_s + found.since),
        advice="evict",
        figures={"raised_unix_s": start_s + found.found},
    )
    return JudgeVerdict("machines", (detection,))


def score_line(found: DetectionScore) -> str:
    """In words."""
    return (
        f"{len(found.outcomes)} faults: P {found.precision:.3f}  R {found.recall:.3f}  F1 {found.f1:.3f}  "
        f"({found.found} found, {found.false_alarms} false)"
    )


def table_of(found: Mapping[str, DetectionScore]) -> list[str]:
    """Lines of Markdown: the paper's figures, ours, and whether those go where the paper's do."""
    lines = [
        "| | paper: precision, recall, F1 | ours: precision | recall | F1 | found | false | healthy | as there? |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, one in found.items():
        cells = [_paper_cell(name), *(f"{figure:.3f}" for figure in _figures(one).values())]
        cells += [f"{one.found} of {len(one.outcomes)}", str(one.false_alarms)]
        cells += [f"{one.healthy_alarms} in {one.healthy_hours:.0f} h", direction(name, one, found[MINDER])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _figures(one: DetectionScore) -> dict[str, float]:
    return {"precision": precision_of_all(one), "recall": one.recall, "f1": f1_of_all(one)}


def _paper_cell(name: str) -> str:
    published = PUBLISHED.get(name)
    if published is None:
        return "not compared"
    figures = (published.precision, published.recall, published.f1)
    said = [", ".join("-" if one is None else f"{one:.3f}" for one in figures)] if any(figures) else []
    if not all(figures):
        said += [f"{'F1' if one == 'f1' else one} lower" for one in published.lower]
        said += [f"{one} higher" for one in published.higher]
        said += ["about Minder's"] if published.alike else []
    return "; ".join(said)


def direction(name: str, one: DetectionScore, minder: DetectionScore) -> str:
    """Whether what the paper says is lower or higher is so here too."""
    published = PUBLISHED.get(name)
    if published is None or name == MINDER:
        return ""
    ours, minders = _figures(one), _figures(minder)
    parts = {}
    for figure, sign in (*((f, -1) for f in published.lower), *((f, 1) for f in published.higher)):
        change = ours[figure] - minders[figure]
        parts[figure] = "yes" if sign * change >= _SAME else "alike" if abs(change) < _SAME else "no"
    if published.alike:
        parts["f1"] = "yes" if abs(ours["f1"] - minders["f1"]) <= 2.5 * _SAME else "no"
    if len(set(parts.values())) == 1:
        return next(iter(parts.values()))
    return ", ".join(f"{'F1' if figure == 'f1' else figure} {said}" for figure, said in parts.items())


def as_json(found: Mapping[str, DetectionScore]) -> dict[str, Any]:
    """Plain values."""
    return {name: one.as_json() for name, one in found.items()}
