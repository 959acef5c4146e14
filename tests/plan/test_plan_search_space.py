"""The layouts that are searched are those that `phalanx train` accepts, each said once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_costs import GPT3

from phalanx.core.errors import UserError
from phalanx.core.layout import divisors
from phalanx.model.config import ModelConfig
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.feasible import Task
from phalanx.parallel.layout_choice import Machines, choose_layout
from phalanx.plan.jobs import model_of
from phalanx.plan.search.constraints import SearchTarget, parse
from phalanx.plan.search.space import NUMERIC, SearchSpace, layouts
from phalanx.plan.types import Job, Model

EVERYTHING = ["context_tokens=any", "imbalance=any", "inside_host=none", "recompute=none"]
FIELDS = (*NUMERIC, "schedule", "zero", "tensor_overlap", "context_method")
Row = tuple[Any, ...]


def rows(space: SearchSpace) -> list[Row]:
    found = []
    for group in space.groups:
        strategies = space.strategies(group)
        columns = [np.broadcast_to(np.asarray(getattr(strategies, name)), group.rows.shape) for name in FIELDS]
        found += list(zip(*(column.tolist() for column in columns), strict=True))
    return found


def accepted(model: ModelConfig, sequence: int, batch: int, devices: int, whole_matrices_for: str) -> Iterator[Row]:
    """What `choose_layout` accepts of everything that can be written in a config, one way of writing each."""
    for axes in itertools.product(divisors(devices), repeat=5):
        if np.prod(axes) == devices:
            for micro_batch, config in written(axes, model.layers, batch):
                task = Task(model, sequence, (batch,), micro_batch, 1, 1, 1, whole_matrices_for)
                try:
                    choose_layout(config, task, Machines(ranks_per_host=8))
                except UserError:
                    continue
                yield row_of(config, micro_batch)


def written(axes: tuple[int, ...], layers: int, batch: int) -> Iterator[tuple[int, ParallelConfig]]:
    pipeline, replicate, shard, context, tensor = axes
    schedules = [("1f1b", 1)] if pipeline == 1 else [("1f1b", 1), ("zbv", 2)]
    if pipeline > 1:
        schedules += [("interleaved_1f1b", chunks) for chunks in range(2, layers + 1)]
        schedules += [("interleaved_zero_bubble", chunks) for chunks in range(1, layers + 1)]
    choices = itertools.product(
        schedules,
        (1, 2, 3) if shard * context > 1 else (1,),
        ("none", "chunked", "fused") if tensor > 1 else ("none",),
        ("ring", "all_to_all") if context > 1 else ("ring",),
        range(1, batch + 1),
    )
    for (schedule, chunks), zero, overlap, method, micro_batch in choices:
        yield (
            micro_batch,
            ParallelConfig(
                pipeline=pipeline,
                replicate=replicate,
                shard=shard,
                context=context,
                tensor=tensor,
                schedule=schedule,  # type: ignore[arg-type]
                chunks=chunks,
                zero=zero,  # type: ignore[arg-type]
                tensor_overlap=overlap,  # type: ignore[arg-type]
                context_method=method,  # type: ignore[arg-type]
            ),
        )


def row_of(config: ParallelConfig, micro_batch: int) -> Row:
    zero = config.zero if config.shard * config.context > 1 else 0
    numbers = (config.pipeline, config.replicate, config.shard, config.context, config.tensor, 1, micro_batch)
    return (*numbers, config.num_chunks, config.schedule, zero, config.tensor_overlap, config.context_method)


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(1, 5),
    heads=st.sampled_from([1, 2, 4, 6]),
    grouped=st.booleans(),
    window=st.sampled_from([(), ("window",), ("window", "full")]),
    sequence=st.sampled_from([4, 6, 8, 12]),
    batch=st.sampled_from([1, 2, 4, 6, 8]),
    devices=st.sampled_from([1, 2, 4, 6, 8]),
    muon=st.booleans(),
)
def test_the_search_offers_exactly_what_train_accepts(
    layers: int,
    heads: int,
    grouped: bool,
    window: tuple[str, ...],
    sequence: int,
    batch: int,
    devices: int,
    muon: bool,
) -> None:
    model = ModelConfig(
        layers=layers,
        hidden=8 * heads,
        heads=heads,
        kv_heads=max(heads // 2, 1) if grouped else 0,
        vocab_size=256,
        max_sequence=sequence,
        activation="gelu",
        attention=window or ("full",),  # type: ignore[arg-type]
        window=2 if window else 0,
    )
    job = Job(model_of(model), sequence, batch, optimizer="muon" if muon else "adamw")
    offered = rows(layouts(job, SearchTarget(devices, 8, 1e9), parse(EVERYTHING)))
    assert len(set(offered)) == len(offered)
    assert set(offered) == set(accepted(model, sequence, batch, devices, "muon" if muon else ""))


@pytest.mark.parametrize("batch", [1536, 3072, 6144])
def test_175_billion_on_12288_devices_have_300000_layouts(batch: int) -> None:
    space = layouts(Job(GPT3, 2048, batch), SearchTarget(12_288, 8, 80e9), parse([]))
    assert space.count >= 300_000
    sizes = {len(group.rows) for group in space.groups}
    assert sum(len(group.rows) for group in space.groups) == space.count and min(sizes) > 0
    for column in space.columns.values():
        assert column.dtype == np.int64
    devices = space.columns["pipeline"] * space.columns["data"] * space.columns["context"] * space.columns["tensor"]
    assert np.all(devices == 12_288)


def test_every_rule_says_how_much_it_took() -> None:
    space = layouts(Job(GPT3, 2048, 6144), SearchTarget(12_288, 8, 80e9), parse(["pipeline<=16", "zero=1,2"]))
    rules = {removed.rule: removed for removed in space.removed}
    assert any(rule.startswith("pipeline<=16") for rule in rules)
    assert rules["tensor inside a host of 8 devices"].removed > 0
    assert all(0 < removed.removed <= removed.before and removed.cure for removed in space.removed)
    assert np.max(space.columns["pipeline"]) == 16
    assert {group.settings["zero"] for group in space.groups} == {1, 2}


def test_constraints_hold_for_every_layout() -> None:
    words = ["tensor=4,8", "micro_batch>=2", "stages<=16", "schedule=zbv", "recompute!=none", "context=1", "data<100"]
    space = layouts(Job(GPT3, 2048, 6144), SearchTarget(1024, 8, 80e9), parse(words))
    assert space.count
    for group in space.groups:
        some = space.strategies(group)
        assert set(np.unique(some.tensor)) <= {4, 8} and np.min(some.micro_batch) >= 2
        assert np.max(some.stages) <= 16 and np.max(some.data) < 100 and np.max(some.context) == 1
        assert group.settings["recompute"] in ("elementwise", "mlp", "full", "attention")
        assert np.all((some.schedule == "zbv") | (some.pipeline == 1))


def test_groups_stay_inside_a_host_unless_they_may_span() -> None:
    job, machine = Job(GPT3, 32_768, 1024), SearchTarget(256, 8, 80e9)
    near = layouts(job, machine, parse(["inside_host=tensor,context"]))
    assert np.max(near.columns["tensor"] * near.columns["context"]) == 8
    wide = layouts(job, machine, parse(["inside_host=none", "context=1"]))
    assert np.max(wide.columns["tensor"]) == 32
    # Fewer devices than a host has are all in one.
    few = layouts(Job(replace(GPT3, vocab_rows=51_216), 2048, 6), SearchTarget(6, 8, 80e9), parse(["context=1"]))
    assert np.max(few.columns["tensor"]) == 6


def test_experts_are_spread_over_data_parallel_ranks() -> None:
    mixture = Model(layers=8, hidden=512, heads=8, vocab_rows=1024, max_sequence=512, experts=12)
    space = layouts(Job(mixture, 512, 64), SearchTarget(16, 8, 80e9), parse([]))
    expert, data = space.columns["expert"], space.columns["data"]
    assert set(np.unique(expert)) == {1, 2, 4}
    assert np.all(data % expert == 0) and np.all(12 % expert == 0)
    dense = layouts(Job(GPT3, 2048, 64), SearchTarget(16, 8, 80e9), parse([]))
    assert np.all(dense.columns["expert"] == 1)


def test_more_choices_are_tried_where_they_are_asked_for() -> None:
    job, machine = Job(GPT3, 2048, 64), SearchTarget(16, 8, 80e9)
    words = ["recompute=attention", "sequence_parallel=true,false", "bucket_bytes=25MB,0", "tensor_overlap=chunked"]
    space = layouts(job, machine, parse(words))
    # Without sequence parallelism nothing can be overlapped.
    tensor = {(group.settings["sequence_parallel"], group.settings["tensor_overlap"]) for group in space.groups}
    assert tensor == {(True, "none"), (True, "chunked"), (False, "none")}
    assert {group.settings["recompute"] for group in space.groups} == {"attention"}
    assert {group.settings["bucket_bytes"] for group in space.groups} == {25_000_000, 0}
    for group in space.groups:
        if not group.settings["sequence_parallel"]:
            assert np.min(space.strategies(group).tensor) > 1
