"""The benchmark of the paper's Minder and its variants: calibration, scores, candidates that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from minder_compare import main
from support import minder_candidates
from support.minder_candidates import of_jobs
from support.minder_scores import PaperNumbers, direction, first_in, limit_name
from support.minder_variants import MINDER, PUBLISHED, VARIANTS

from phalanx.detect.minder.minder_weights import shipped_numbers
from phalanx.detect.minder.paper_minder import find_first
from phalanx.detect.monitoring.detection_scores import DetectionScore, FaultOutcome
from phalanx.detect.monitoring.job_scenarios import draw_scenario
from phalanx.detect.monitoring.metric_generator import generate


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["minder_compare.py", *words])
    main()


def test_thresholds_are_learnt_and_written_for_all_that_variants_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "calibrate", "--quick", "--keep", str(tmp_path / "kept"), "--numbers", str(tmp_path / "n.json"))
    numbers = PaperNumbers.read(tmp_path / "n.json")
    assert set(numbers.factors) == set(VARIANTS)
    looks = {limit_name(variant, metric) for variant in VARIANTS.values() for metric in variant.looks}
    assert set(numbers.healthy) == looks == set(PaperNumbers.read().healthy)
    assert all(0 < value < np.inf for value in numbers.healthy.values())


def test_variants_are_scored_and_what_was_found_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["variants", "--quick", "--split", "develop", "--keep", str(tmp_path / "kept"), "--variants", "Mahalanobis"]
    run(monkeypatch, *words, "--json", str(tmp_path / "first.json"))
    shown = capsys.readouterr().out
    assert f"| {MINDER} | 0.904, 0.883, 0.893 |" in shown and "| Mahalanobis | 0.788, 0.767, 0.777 |" in shown

    def fails(*_: object) -> None:
        raise AssertionError("candidates were kept")

    monkeypatch.setattr(minder_candidates, "generate", fails)
    run(monkeypatch, *words, "--json", str(tmp_path / "second.json"))
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert first == second and first["variants"]["Mahalanobis"]["faults"] > 0


def test_what_candidates_say_is_what_the_method_says_of_the_table(tmp_path: Path) -> None:
    scenario = draw_scenario("develop", 650_001, fault="CUDA execution error", machines=10)
    table = minder_candidates.complete(generate(scenario).table)
    for variant in (VARIANTS[MINDER], VARIANTS["Minder, windows that do not overlap"]):
        healthy = {limit_name(variant, metric): 5.0 for metric in variant.looks}
        of_table = find_first(table, variant, shipped_numbers().encoders, dict.fromkeys(variant.looks, 5.0))
        for _ in range(2):  # made, then read
            (job,) = of_jobs([scenario], [variant], tmp_path)
            found = first_in(job, variant, healthy, 1.0)
            assert found is not None and found == of_table
            assert abs(found.found - found.since - 239) < variant.stride
            assert job.labels.faults


def test_a_direction_is_as_in_the_paper_where_the_difference_is_more_than_chance() -> None:
    def of(found: int, false: int) -> DetectionScore:
        outcomes = [FaultOutcome(f"c{at}", "f", 9, 1.0, at < found, 1.0, int(at < false)) for at in range(100)]
        return DetectionScore(tuple(outcomes), 0.0, 0, 0)

    minder = of(80, 10)
    assert direction("Mahalanobis", of(60, 20), minder) == "yes"
    assert direction("Mahalanobis", of(80, 10), minder) == "alike"
    assert direction("more metrics", of(90, 10), minder) == "precision alike, recall yes"
    assert direction("raw windows (RAW)", of(90, 10), minder) == "no"
    assert direction("Manhattan", of(81, 10), minder) == "yes" and direction(MINDER, minder, minder) == ""
    assert set(PUBLISHED) <= set(VARIANTS)
