"""Keys to paste into a config give the layout that was found."""

from __future__ import annotations

import tomllib

import pytest
from search_costs import FakeCosts

from phalanx.model.config import ModelConfig
from phalanx.parallel.feasible import Task
from phalanx.parallel.layout_choice import Machines, choose_layout
from phalanx.plan.jobs import make_strategy, model_of
from phalanx.plan.report.report_model import foreign, toml_keys
from phalanx.plan.search.constraints import SearchTarget, parse
from phalanx.plan.search.search import search
from phalanx.plan.types import Job, Strategy
from phalanx.train.config import RunConfig

CONFIG = ModelConfig(layers=8, hidden=512, heads=8, vocab_size=1024, max_sequence=4096)
JOB = Job(model_of(CONFIG), 4096, 64)


@pytest.mark.parametrize(
    "words",
    [[], ["pipeline=2", "schedule=zbv"], ["pipeline=4", "schedule=interleaved_1f1b"], ["tensor=2", "context=2"]],
)
def test_what_is_pasted_is_what_was_found(words: list[str]) -> None:
    result = search(JOB, SearchTarget(16, 8, 6.0), FakeCosts(JOB).costs, parse(words))
    for found in result.best:
        tree = tomllib.loads(toml_keys(JOB, found.strategy))
        config = RunConfig.model_validate({"train": {"steps": 1, **tree.pop("train")}, **tree})
        assert config.train.global_batch == 64
        task = Task(CONFIG, 4096, (64,), config.train.micro_batch, 1, 1, 1)
        choice = choose_layout(config.parallel, task, Machines(8))
        again = make_strategy(choice.config, micro_batch=choice.micro_batch, recompute=config.train.recompute)
        assert normal(again) == normal(found.strategy)
        assert foreign(found.strategy) == ()


def normal(strategy: Strategy) -> dict[str, object]:
    """What matters of a strategy, without what has no effect in it."""
    values = dict(vars(strategy))
    if strategy.shard * strategy.context == 1:
        values["zero"] = 0
    return values


def test_one_bucket_for_each_chunk_is_a_large_one() -> None:
    tree = tomllib.loads(toml_keys(JOB, Strategy(shard=2, bucket_bytes=0)))
    assert tree["parallel"]["bucket_bytes"] >= 10**12


def test_what_a_config_cannot_say_is_named() -> None:
    strategy = Strategy(tensor=2, shard=2, expert=2, recompute="attention", sequence_parallel=False)
    reasons = foreign(strategy)
    assert [reason.split(":")[0] for reason in reasons] == [
        "recompute = attention",
        "sequence_parallel = false",
        "expert parallel",
    ]
    assert "recompute" in toml_keys(JOB, strategy)
