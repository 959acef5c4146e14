"""Twelve cases of the fault campaign with the real command, each in folders of its own; under six minutes in all.

Four hosts of two gloo ranks and a spare. The others are run by ``benchmarks/run_campaign.py``; see docs/faults.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.faults.campaign import ci_cases, generate
from phalanx.faults.case_manifest import Manifest
from phalanx.run.campaign.case_run import run_case

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"), pytest.mark.slow]

SEED = 7
GUARD_S = 300.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Here the losses of the undisturbed training are kept from one case to the next."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.campaign(but=("073-link-cut--host-3", "008-exception-recurring--rank-7"))
@pytest.mark.parametrize("case", ci_cases(generate(SEED)), ids=lambda case: case.id)
def test_the_right_thing_is_done(case: Manifest, results: Path) -> None:
    score = run_case(case, results, guard_s=GUARD_S)
    explained = results / "explained" / case.id
    assert score.problems == [], (explained / "story.txt").read_text()
    assert score.outcome == "right"
    assert score.orphans == 0 and not score.wrong_evictions
