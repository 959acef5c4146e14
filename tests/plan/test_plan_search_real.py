"""The search with the planner's own cost model: bounds lie below predictions, and the best are those of brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from phalanx.api.planning import lacking
from phalanx.parallel.config import ParallelConfig
from phalanx.plan.hardware import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.score import score
from phalanx.plan.search.constraints import SearchTarget, parse
from phalanx.plan.search.frontier import CostModel
from phalanx.plan.search.search import memory_bytes, search
from phalanx.plan.search.space import SearchSpace, layouts
from phalanx.plan.software import PHALANX, SOFTWARE
from phalanx.plan.types import Job, Model, Strategy

SMALL = Model(layers=24, hidden=2048, heads=16, vocab_rows=51200, max_sequence=4096)
TINY = Model(layers=4, hidden=1024, heads=8, vocab_rows=51200, max_sequence=4096)
LARGE = Model(layers=96, hidden=12288, heads=96, vocab_rows=51200, max_sequence=2048)
CASES = {
    "small": (Job(SMALL, 4096, 64), 16, []),
    "large": (Job(LARGE, 2048, 1536), 1024, ["pipeline<=16", "chunks<=6"]),
    "lamb": (Job(SMALL, 4096, 256, optimizer="lamb"), 64, ["zero!=0"]),
    "experts": (Job(Model(**{**vars(SMALL), "experts": 8, "moe_every": 2}), 4096, 64), 16, ["context=1"]),
}


def costs_of(job: Job, devices: int) -> tuple[CostModel, SearchTarget]:
    cluster = load_cluster("megascale", devices)
    return CostModel(partial(score, job, cluster=cluster), partial(predict, job, cluster=cluster)), SearchTarget.of(
        cluster
    )


def some(space: SearchSpace, count: int, seed: int) -> list[Strategy]:
    """Layouts drawn from all groups."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        group = draw.randrange(len(space.groups))
        found.append(space.strategy(group, int(draw.choice(space.groups[group].rows))))
    return found


@pytest.mark.parametrize("name", CASES)
def test_bounds_lie_below_predictions(name: str) -> None:
    job, devices, words = CASES[name]
    costs, machine = costs_of(job, devices)
    space = layouts(job, machine, parse(words))
    for strategy in some(space, 40, seed=1):
        scores, prediction = costs.score(strategy), costs.predict(strategy)
        assert scores.step_s <= prediction.step_s * (1 + 1e-9), strategy
        assert scores.memory_bytes <= memory_bytes(prediction) * (1 + 1e-9), strategy


@pytest.mark.parametrize("name", CASES)
def test_arrays_score_as_single_layouts_do(name: str) -> None:
    job, devices, words = CASES[name]
    costs, machine = costs_of(job, devices)
    space = layouts(job, machine, parse(words))
    for group_at in random.Random(2).sample(range(len(space.groups)), 6):
        group = space.groups[group_at]
        together = costs.score(space.strategies(group))
        for at in random.Random(3).sample(range(len(group.rows)), min(4, len(group.rows))):
            alone = costs.score(space.strategy(group_at, int(group.rows[at])))
            assert np.broadcast_to(together.step_s, group.rows.shape)[at] == pytest.approx(alone.step_s)
            assert np.broadcast_to(together.memory_bytes, group.rows.shape)[at] == pytest.approx(alone.memory_bytes)


def test_overlap_needs_no_memory() -> None:
    """The search asks for the memory of layouts that differ in this only once."""
    job, devices, words = CASES["small"]
    costs, machine = costs_of(job, devices)
    for strategy in some(layouts(job, machine, parse(words)), 10, seed=4):
        needed = [
            costs.score(replace(strategy, tensor_overlap=how)).memory_bytes for how in ("none", "chunked", "fused")
        ]
        assert needed[0] == needed[1] == needed[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_best_are_those_of_predicting_a_random_subspace(seed: int) -> None:
    job, devices, _ = CASES["small"]
    costs, machine = costs_of(job, devices)
    draw = random.Random(seed)
    words = [
        f"tensor={draw.choice([1, 2, 4, 8])}",
        f"recompute={draw.choice(['none', 'elementwise', 'mlp', 'full'])}",
        f"zero={draw.choice([1, 2, 3])}",
        f"chunks<={draw.choice([2, 3])}",
        f"micro_batch<={draw.choice([2, 4])}",
    ]
    space, limit = layouts(job, machine, parse(words)), parse(words).memory_bytes(machine.memory_bytes)
    every = [space.strategy(at, int(row)) for at, group in enumerate(space.groups) for row in group.rows]
    predicted = [costs.predict(strategy) for strategy in every]
    fitting = sorted(one.step_s for one in predicted if memory_bytes(one) <= limit)
    result = search(job, machine, costs, parse(words), top=10)
    assert result.proven and result.candidates == len(every) and result.fitting >= len(fitting)
    assert [one.step_s for one in result.best] == pytest.approx(fitting[:10], rel=1e-12)


WITHIN = {
    "ours": (PHALANX.name, 8, 4096, ["context=1"]),
    "ours, one choice": (PHALANX.name, 4, 4096, ["zero=3"]),
    "megatron 2021": ("megatron-lm-2021", 8, 4096, []),
    "megatron 2022": ("megatron-lm-2022", 16, 4096, []),
    "megatron 2022, one device": ("megatron-lm-2022", 1, 4096, []),
    "megatron core": ("megatron-core", 8, 8192, ["chunks=1"]),
    "megascale": ("megascale", 8, 4096, ["zero=2"]),
    "fsdp2": ("fsdp2", 8, 4096, ["pipeline=1"]),
    "fsdp2, nothing to split": ("fsdp2", 8, 4096, ["shard=1", "context=1", "pipeline=1"]),
    "fsdp2 compiled": ("fsdp2-compiled", 2, 4096, []),
    "deepspeed": ("deepspeed", 16, 2048, []),
    "deepspeed, whole": ("deepspeed", 4, 2048, ["zero=0"]),
    "deepspeed zero 3": ("deepspeed-zero3", 1, 2048, []),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_program_is_searched_as_brute_force_finds_what_it_has(name: str) -> None:
    """What a program has is judged here as its layouts are refused: a setting without effect is nobody's lack."""
    program, devices, sequence, words = WITHIN[name]
    job = Job(replace(TINY, max_sequence=sequence), sequence, 32, software=SOFTWARE[program])
    costs, machine = costs_of(job, devices)
    words = [*words, "micro_batch<=2", "chunks<=2"]
    # Of a program that has everything, and is the same else.
    anything = replace(job, software=replace(SOFTWARE[program], name=PHALANX.name))
    space = layouts(anything, machine, parse(words))
    every = [space.strategy(at, int(row)) for at, group in enumerate(space.groups) for row in group.rows]
    own = [one for one in every if lacking(program, _as_config(one)) is None]
    limit = parse(words).memory_bytes(machine.memory_bytes)
    predicted = [costs.predict(one) for one in own]
    fitting = sorted(one.step_s for one in predicted if memory_bytes(one) <= limit)
    found = search(job, machine, costs, parse(words), top=5)
    assert found.proven and found.candidates == len(own)
    assert [one.step_s for one in found.best] == pytest.approx(fitting[:5], rel=1e-12)


def _as_config(one: Strategy) -> ParallelConfig:
    names = ("pipeline", "replicate", "shard", "context", "tensor", "expert", "schedule", "zero", "tensor_overlap")
    return ParallelConfig.model_construct(**{name: getattr(one, name) for name in names})
