"""The candidates of every window of a job, by all that variants of Minder look at: made once, kept, judged often.

What a variant says of a job depends on them alone, so that thresholds, the order of metrics and continuity are tried
in no time once they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.detect.minder.minder_weights import shipped_numbers
from phalanx.detect.minder.paper_minder import Candidates, Variant, represented
from phalanx.detect.minder.similarity import candidates, distance_sums, z_scores
from phalanx.detect.monitoring.job_scenarios import Scenario
from phalanx.detect.monitoring.metric_alignment import fill_short_gaps
from phalanx.detect.monitoring.metric_catalogue import normalise
from phalanx.detect.monitoring.metric_generator import CaseLabels, generate, label
from phalanx.detect.monitoring.metric_table import MetricTable


@dataclass(frozen=True)
class JobCandidates:
    """Of one job.

    Attributes:
        labels: what is wrong with it.
        of: by `look_name`.
    """

    labels: CaseLabels
    of: dict[str, Candidates]


def look_name(variant: Variant, metric: str) -> str:
    """Of what a variant looks at; variants that look at the same have the same names."""
    return f"{variant.representation} {variant.distance} {metric}".strip()


def complete(table: MetricTable) -> MetricTable:
    """Normalised, and without gaps: what is not measured for long is 0, as a nearest sample is not near."""
    filled = fill_short_gaps(normalise(table), 60.0)
    return MetricTable(np.nan_to_num(filled.values), table.metrics, table.machines, table.start_s, table.period_s)


def of_jobs(scenarios: Iterable[Scenario], variants: Iterable[Variant], kept: Path | None) -> Iterator[JobCandidates]:
    """Candidates of each job, as they come.

    Args:
        kept: folder in which they are looked for, and where they are written to, each once it is known.
    """
    looks = {look_name(variant, metric): (variant, metric) for variant in variants for metric in variant.looks}
    for scenario in scenarios:
        labels = label(scenario)
        file = kept / f"{labels.case}-{labels.machines}.npz" if kept else None
        known = _read(file) if file else {}
        lacking = {name: look for name, look in looks.items() if name not in known}
        if lacking:
            known |= _candidates(scenario, lacking)
            if file:
                _write(file, known)
        yield JobCandidates(labels, known)


def _candidates(scenario: Scenario, looks: dict[str, tuple[Variant, str]]) -> dict[str, Candidates]:
    metrics = dict.fromkeys(metric for variant, _ in looks.values() for metric in variant.metrics)
    table = complete(generate(scenario, tuple(metrics)).table)
    encoders = shipped_numbers().encoders
    found, held = {}, ("", np.empty(0, np.float32))
    # Looks at the same numbers follow each other.
    for name, (variant, metric) in sorted(looks.items(), key=lambda one: (one[1][0].representation, one[1][1])):
        what = f"{variant.representation} {metric}"
        if held[0] != what:
            held = what, represented(table, variant, encoders, metric)
        found[name] = candidates(z_scores(distance_sums(held[1], variant.distance)))
    return found


def _read(file: Path) -> dict[str, Candidates]:
    if not file.exists():
        return {}
    with np.load(file, allow_pickle=False) as arrays:
        names = [name.removesuffix("/who") for name in arrays if name.endswith("/who")]
        return {name: (arrays[f"{name}/who"], arrays[f"{name}/score"]) for name in names}


def _write(file: Path, known: dict[str, Candidates]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}/who": who.astype(np.int16) for name, (who, _) in known.items()}
    arrays |= {f"{name}/score": score for name, (_, score) in known.items()}
    part = file.with_suffix(".part.npz")
    np.savez(part, **arrays)
    part.replace(file)
