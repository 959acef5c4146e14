"""A layout that does not fit: what is offered fits, keeps the ranks, and is the fastest that does."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import product

import pytest
from plan_report_samples import report
from rich.console import Console

from phalanx.figures.pages.page_blocks import html_of
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.report.report_model import changed_settings, prediction_json
from phalanx.plan.report.report_page import prediction_sections
from phalanx.plan.report.report_text import prediction_text
from phalanx.plan.score import score
from phalanx.plan.search.constraints import SearchTarget
from phalanx.plan.search.frontier import CostModel
from phalanx.plan.search.search import reliefs
from phalanx.plan.types import Job, Model, Prediction, Strategy

CLUSTER = load_cluster("h100_400g", 16)
LLAMA_13B = Model(layers=40, hidden=5120, heads=40, vocab_rows=32000, max_sequence=4096, mlp_width=13824, gated=True)
JOB = Job(LLAMA_13B, sequence=4096, global_batch=64)
TIGHT = Strategy(shard=2, tensor=8, micro_batch=8, zero=1)


def _offered(job: Job, strategy: Strategy) -> tuple[Prediction, ...]:
    costs = CostModel(lambda one: score(job, one, CLUSTER), lambda one: predict(job, one, CLUSTER))
    return reliefs(job, strategy, SearchTarget.of(CLUSTER), costs)


def _fullest(prediction: Prediction) -> float:
    return max(rank.total for rank in prediction.memory)


def test_the_fastest_that_fit_on_the_same_ranks_are_offered() -> None:
    limit_bytes = 0.95 * CLUSTER.device.memory_bytes
    assert _fullest(predict(JOB, TIGHT, CLUSTER)) > CLUSTER.device.memory_bytes
    every = []
    for micro_batch, zero, recompute in product(
        (1, 2, 4, 8, 16, 32), (1, 2, 3), ("none", "elementwise", "mlp", "full")
    ):
        one = replace(TIGHT, micro_batch=micro_batch, zero=zero, recompute=recompute)
        every.append(predict(JOB, one, CLUSTER))
    fitting = sorted(one.step_s for one in every if _fullest(one) <= limit_bytes)
    offered = _offered(JOB, TIGHT)
    assert [one.step_s for one in offered] == pytest.approx(fitting[:3], rel=1e-12)
    assert all((one.strategy.shard, one.strategy.tensor) == (2, 8) for one in offered)


def test_where_nothing_fits_nothing_is_offered() -> None:
    huge = replace(JOB, model=replace(LLAMA_13B, hidden=20480, heads=160, mlp_width=55296))
    assert _offered(huge, TIGHT) == ()


def test_settings_say_what_is_changed_and_no_more() -> None:
    assert changed_settings(TIGHT, replace(TIGHT, micro_batch=2)) == "train.micro_batch=2"
    other = replace(TIGHT, recompute="elementwise", zero=3)
    assert changed_settings(TIGHT, other) == "train.recompute=selective parallel.zero=3"
    assert changed_settings(other, TIGHT) == "train.recompute=none parallel.zero=1"


def test_they_are_told_in_every_form() -> None:
    shown = replace(report(1, 90.0), reliefs=(predict(JOB, TIGHT, CLUSTER),))
    words = changed_settings(shown.prediction.strategy, TIGHT)
    file = io.StringIO()
    Console(file=file, width=140, color_system=None).print(prediction_text(shown, width=140))
    assert words in file.getvalue().partition("on the same ranks it fits with")[2]
    assert words in html_of(prediction_sections(shown))
    assert prediction_json(shown)["reliefs"][0]["settings"] == words
    assert "on the same ranks" not in html_of(prediction_sections(report(1, 90.0)))
