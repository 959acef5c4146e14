"""Nonsense is refused before anything is computed, with the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.jobs import JOB, MODEL, SOFTWARE, STRATEGY, Allowed
from phalanx.plan.predict import predict
from phalanx.plan.types import Job, Model, Software, Strategy

CLUSTER = load_cluster("selene", 16)
SIZES: dict[str, Any] = {"layers": 8, "hidden": 1024, "heads": 16, "vocab_rows": 32_000, "max_sequence": 2048}

STRATEGIES: list[tuple[str, Any, str]] = [
    ("recompute", "selective", "'attention', 'elementwise', 'full', 'mlp', 'none'"),
    ("recompute", ["none"], "'attention', 'elementwise', 'full', 'mlp', 'none'"),
    ("schedule", "gpipe", "'1f1b', 'interleaved_1f1b', 'interleaved_zero_bubble', 'zbv'"),
    ("tensor_overlap", "symmetric", "'chunked', 'fused', 'none'"),
    ("context_method", "ulysses", "'all_to_all', 'ring'"),
    ("zero", 4, "0, 1, 2, 3"),
    ("zero", "1", "0, 1, 2, 3"),
    ("sequence_parallel", "no", "False, True"),
    *((axis, 0, "from 1 to") for axis in ("pipeline", "replicate", "shard", "context", "tensor", "expert")),
    ("pipeline", -2, "from 1 to"),
    ("shard", True, "from 1 to"),
    ("shard", "4", "from 1 to"),
    ("shard", None, "from 1 to"),
    ("shard", float("nan"), "from 1 to"),
    ("tensor", 10**30, "from 1 to 1,000,000,000"),
    ("micro_batch", -1, "from 1 to"),
    ("micro_batch", 2.0, "from 1 to"),
    ("chunks", 0, "from 1 to"),
    ("tensor_chunks", 0, "from 1 to"),
    ("bucket_bytes", -1, "from 0 to"),
    ("offload", 1.5, "from 0 to 1"),
    ("offload", -0.1, "from 0 to 1"),
]
JOBS: list[tuple[str, Any, str]] = [
    ("precision", "fp8", "'bf16', 'fp16', 'fp32'"),
    ("optimizer", "sgd", "'adamw', 'came', 'lamb', 'muon'"),
    ("state_bits", 4, "16, 32, 8"),
    ("sequence", 0, "from 1 to"),
    ("sequence", -5, "from 1 to"),
    ("sequence", 4096, "raise Model.max_sequence"),
    ("global_batch", 0, "from 1 to"),
    ("global_batch", 32.0, "from 1 to"),
]
MODELS: list[tuple[str, Any, str]] = [
    ("block", "parralel", "'parallel', 'serial'"),
    ("position", "alibi", "'learned', 'none', 'rotary'"),
    ("norm", "batch", "'layer', 'rms'"),
    ("bias", "some", "'all', 'none', 'qkv'"),
    ("gated", "yes", "False, True"),
    *((size, 0, "from 1 to") for size in SIZES),
    ("heads", -16, "from 1 to"),
    ("layers", 2.5, "from 1 to"),
    ("layers", 10**6, "from 1 to 100,000"),
    ("kv_heads", 3, "1, 2, 4, 8"),
    ("windows", (), "one number of keys"),
    ("windows", (0, -1), "one number of keys"),
    ("windows", [0], "one number of keys"),
    ("windows", 0, "one number of keys"),
    ("experts", -1, "from 0 to"),
    ("moe_every", 0, "from 1 to"),
]
MIXTURES: list[tuple[str, Any, str]] = [
    ("experts_per_token", 0, "from 1 to"),
    ("experts_per_token", 8, "from 1 to 4"),
    ("capacity_factor", 0.0, "above 0"),
    ("capacity_factor", float("nan"), "above 0"),
    ("capacity_factor", float("inf"), "above 0"),
]


def refused(job: Job, strategy: Strategy, field: str, value: Any, allowed: str) -> None:
    with pytest.raises(UserError) as refusal:
        predict(job, strategy, CLUSTER)
    said = str(refusal.value)
    assert said.startswith(f"{field} = {value!r}: ")
    assert allowed in said


@pytest.mark.parametrize(("field", "value", "allowed"), STRATEGIES)
def test_a_strategy_is_refused_by_field(field: str, value: Any, allowed: str) -> None:
    refused(Job(Model(**SIZES), 2048, 32), Strategy(**{field: value}), f"Strategy.{field}", value, allowed)


@pytest.mark.parametrize(("field", "value", "allowed"), JOBS)
def test_a_job_is_refused_by_field(field: str, value: Any, allowed: str) -> None:
    given = {"sequence": 2048, "global_batch": 32, field: value}
    refused(Job(Model(**SIZES), **given), Strategy(), f"Job.{field}", value, allowed)


@pytest.mark.parametrize(
    ("given", "field", "value", "allowed"),
    [*(({}, *row) for row in MODELS), *(({"experts": 4}, *row) for row in MIXTURES)],
)
def test_a_model_is_refused_by_field(given: dict[str, Any], field: str, value: Any, allowed: str) -> None:
    model = Model(**{**SIZES, **given, field: value})
    refused(Job(model, 2048, 32), Strategy(), f"Model.{field}", value, allowed)


def test_a_program_is_refused_by_field_and_a_name_is_none() -> None:
    with pytest.raises(UserError, match=r"Software\.residual_bytes = 0: .* from 1 to 8"):
        predict(Job(Model(**SIZES), 2048, 32, software=Software(residual_bytes=0)), Strategy(), CLUSTER)
    with pytest.raises(UserError, match="'megascale': is no Software"):
        predict(Job(Model(**SIZES), 2048, 32, software="megascale"), Strategy(), CLUSTER)  # type: ignore[arg-type]


def test_whole_numbers_of_numpy_are_as_good_as_pythons() -> None:
    job = Job(Model(**SIZES), 2048, 32)
    ours, theirs = Strategy(shard=4, tensor=2), Strategy(shard=np.int64(4), tensor=np.int64(2))
    assert predict(job, theirs, CLUSTER).step_s == predict(job, ours, CLUSTER).step_s


def test_a_long_sequence_is_refused_without_counting_up_to_it() -> None:
    model = Model(**{**SIZES, "position": "rotary"})
    with pytest.raises(UserError, match=r"parallel\.context = 3: .* take one of 1, 2, 4, 5"):
        predict(Job(model, 10**9, 1), Strategy(context=3), CLUSTER)


@pytest.mark.parametrize(("allowed", "kind"), [(STRATEGY, Strategy), (JOB, Job), (MODEL, Model), (SOFTWARE, Software)])
def test_no_choice_or_count_of_a_class_is_forgotten(allowed: Allowed, kind: type) -> None:
    checked_elsewhere = {
        "windows",
        "capacity_factor",
        "model",
        "software",
        "name",
        "host_factor",
        "offload",
        "residual",
    }
    hints = get_type_hints(kind)
    assert {*allowed.numbers, *allowed.words} == set(hints) - checked_elsewhere
    for name, words in allowed.words.items():
        assert words == set(get_args(hints[name]) or (True, False))
