"""Constraints as people write them, and what is said of those that cannot be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phalanx.core.errors import UserError
from phalanx.plan.search.constraints import Constraints, Machine, options_of, parse
from phalanx.plan.types import Job, Model, Software

SMALL = Model(layers=2, hidden=64, heads=4, vocab_rows=256, max_sequence=64)


def bounds(*words: str) -> list[str]:
    return [bound.text for bound in parse(words).bounds if not bound.default]


def test_words_become_bounds() -> None:
    assert bounds("tensor=8", "pipeline<=16", " micro_batch > 1 ", "data!=3,5") == [
        "tensor=8",
        "pipeline<=16",
        "micro_batch>1",
        "data!=3,5",
    ]


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        ("tensor=2,4", [2, 4]),
        ("tensor==2", [2]),
        ("tensor!=2,4", [1, 3, 5]),
        ("tensor<=2", [1, 2]),
        ("tensor<2", [1]),
        ("tensor>=4", [4, 5]),
        ("tensor>4", [5]),
    ],
)
def test_bounds_allow_numbers_and_arrays(word: str, allowed: list[int]) -> None:
    (bound,) = (bound for bound in parse([word]).bounds if bound.name == "tensor")
    numbers = np.arange(1, 6)
    assert numbers[bound.allows(numbers)].tolist() == allowed
    assert [number for number in range(1, 6) if bound.allows(number)] == allowed


def test_defaults_are_replaced_or_lifted() -> None:
    defaults = {bound.name for bound in Constraints().bounds}
    assert defaults == {"context_tokens", "imbalance"}
    assert {bound.text for bound in parse(["imbalance<=0.5"]).bounds} == {"imbalance<=0.5", "context_tokens>=1024"}
    assert {bound.name for bound in parse(["context_tokens=any"]).bounds} == {"imbalance"}


def test_choices_are_named_or_left_out() -> None:
    asked = parse(["schedule=1f1b,zbv", "zero!=3", "sequence_parallel=true,false", "bucket_bytes=25MB,0"]).choices
    assert asked["schedule"] == ("1f1b", "zbv") and asked["zero"] == (0, 1, 2)
    assert asked["sequence_parallel"] == (True, False) and asked["bucket_bytes"] == (25_000_000, 0)
    assert parse(["zero=1,1,0"]).choices["zero"] == (1, 0)
    assert parse(["recompute=any"]).choices["recompute"] == ("none", "attention", "elementwise", "mlp", "full")


def test_memory_is_a_share_or_a_size() -> None:
    assert parse(["memory<=0.5"]).memory_bytes(80e9) == 40e9
    assert parse(["memory<=1"]).memory_bytes(80e9) == 80e9
    assert parse(["memory<=72GB"]).memory_bytes(80e9) == 72e9
    assert math.isinf(parse(["memory=any"]).memory_bytes(80e9))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("tensor", "write such as tensor=8"),
        ("tensor=", "write such as tensor=8"),
        ("tensr=8", "write tensor"),
        ("colour=blue", "take one of pipeline"),
        ("tensor=big", "'big' is no number of ranks that split every matrix"),
        ("tensor=nan", "'nan' is no number of ranks that split every matrix; write such as tensor=8, a whole number"),
        ("tensor=inf", "a whole number from 1"),
        ("tensor<=0", "write such as tensor<=8, a whole number from 1"),
        ("tensor=-8", "a whole number from 1"),
        ("tensor=8.5", "a whole number from 1"),
        ("pipeline=1e999", "a whole number from 1"),
        ("imbalance<=-1", "write such as imbalance<=0.25, a number from 0"),
        ("tensor!=any", "write tensor=any, or a value"),
        ("memory<=any", "write memory=any, or a value"),
        ("pipeline<=4,8", "write pipeline=4,8"),
        ("zero!=0,1,2,3", "no zero is left; leave one of 0, 1, 2, 3"),
        ("memory=1B", "nothing fits into that; write a size such as 72GB"),
        ("bucket_bytes!=25MB", "write bucket_bytes= with those to try"),
        ("schedule=gpipe", "take of 1f1b"),
        ("zero<=2", "write zero=2"),
        ("zero=4", "take of 0, 1, 2, 3"),
        ("memory>=0.5", "write such as 'memory<=0.9'"),
        ("memory<=72", "a size with its unit"),
        ("memory<=lots", "is no size"),
        ("bucket_bytes=many", "is no size"),
        ("inside_host=pipeline", "some of tensor, context, data"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_cure(word: str, says: str) -> None:
    with pytest.raises(UserError, match=word.strip("=")) as caught:
        parse([word])
    assert says in str(caught.value)


def test_what_is_tried_by_default_is_what_train_runs() -> None:
    job = Job(SMALL, 64, 8)
    options = options_of(job, Machine(8, 8, 1e9), Constraints())
    assert options["recompute"] == ("none", "elementwise", "mlp", "full") and options["sequence_parallel"] == (True,)
    assert "fused" in options["tensor_overlap"]
    assert "fused" not in options_of(job, Machine(8, 8, 1e9, "cpu"), Constraints())["tensor_overlap"]
    plain = Job(SMALL, 64, 8, software=Software(fused_attention=False))
    assert "attention" in options_of(plain, Machine(8, 8, 1e9), Constraints())["recompute"]
