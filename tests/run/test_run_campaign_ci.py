"""Cases of the fault campaign with the real command, each in folders of its own.

A small one, and twelve of four hosts of two gloo ranks and a spare. The others are run by
``benchmarks/run_campaign.py``; see docs/faults.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.faults.campaign import ci_cases, family_of, generate
from phalanx.faults.case_manifest import Cluster, Manifest
from phalanx.run.campaign.case_run import run_case

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"), pytest.mark.slow]

SEED = 7
GUARD_S = 300.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Here the losses of the undisturbed training are kept from one case to the next."""
    return tmp_path_factory.mktemp("results")


def right(case: Manifest, results: Path) -> None:
    """See that a case ends as it should."""
    score = run_case(case, results, guard_s=GUARD_S)
    explained = results / "explained" / case.id
    assert score.problems == [], (explained / "story.txt").read_text()
    assert score.outcome == "right"
    assert score.orphans == 0 and not score.wrong_evictions


@pytest.mark.campaign
@pytest.mark.parametrize("case", ci_cases(generate(SEED)), ids=lambda case: case.id)
def test_the_right_thing_is_done(case: Manifest, results: Path) -> None:
    right(case, results)


def test_a_small_job_that_loses_an_executor_is_judged_right(tmp_path: Path) -> None:
    cases = generate(SEED, Cluster(hosts=2, workers_per_host=1, spares=1))
    right(next(case for case in cases if family_of(case) == "executor-killed"), tmp_path)
