"""Every layout gives the numbers of a single process: initial weights, gradients, losses, norms, held-out loss."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from support.parity import runs
from support.parity.cases import CASES as TABLE
from support.parity.compare import difference, worst
from support.parity.places import by_processes, by_threads
from support.parity.runs import single
from support.parity.task import Case, Seen, samples

from phalanx.data.batch import Batch
from phalanx.model.offload import Lanes, Offload
from phalanx.parallel import apply
from phalanx.parallel.process_groups import _ThroughHost, make_gloo

PARALLEL_BLOCK = {"block": "parallel"}
WINDOWS = {"attention": ("window", "window", "full"), "window": 5, "kv_heads": 2}
DROPPED = {"dropout": 0.2, "attention_dropout": 0.2, "attention_backend": "math"}
SGD = {"name": "sgd"}

CASES = {
    "replicate": Case({"replicate": 2}),
    "zero 1": Case({"shard": 2}, optim=SGD),
    "zero 2 of 4, lamb": Case({"shard": 4, "zero": 2}, optim={"name": "lamb"}),
    "zero 3, came": Case({"shard": 2, "zero": 3}, optim={"name": "came"}),
    "hybrid zero 3, recompute": Case({"replicate": 2, "shard": 2, "zero": 3}, recompute="full", optim=SGD),
    "tensor": Case({"tensor": 2}, optim=SGD, micro_batch=4),
    "tensor 4, parallel block, dropout": Case({"tensor": 4}, PARALLEL_BLOCK | DROPPED, micro_batch=4),
    "tensor, chunked": Case({"tensor": 2, "tensor_overlap": "chunked"}, PARALLEL_BLOCK, optim=SGD, micro_batch=4),
    "ring": Case({"context": 2}, WINDOWS, optim=SGD),
    "all to all, dropout": Case({"context": 2, "context_method": "all_to_all"}, DROPPED),
    "1f1b": Case({"pipeline": 2}, optim=SGD),
    "1f1b of 4, tied, dropout": Case({"pipeline": 4}, {"tie_embeddings": True} | DROPPED),
    "interleaved": Case({"pipeline": 2, "schedule": "interleaved_1f1b"}, optim=SGD),
    "zero bubble": Case({"pipeline": 2, "schedule": "interleaved_zero_bubble"}, optim=SGD),
    "zbv, tied, zero 3": Case(
        {"pipeline": 2, "shard": 2, "zero": 3, "schedule": "zbv"}, {"tie_embeddings": True}, optim=SGD
    ),
    "zbv, tied": Case({"pipeline": 2, "schedule": "zbv"}, {"tie_embeddings": True}, optim=SGD),
    "pp, fs, tp": Case({"pipeline": 2, "shard": 2, "tensor": 2}, PARALLEL_BLOCK | WINDOWS, optim={"name": "lamb"}),
    "pp, dp, cp": Case({"pipeline": 2, "replicate": 2, "context": 2}, {"tie_embeddings": True}, optim=SGD),
    "fs, cp, tp, zero 3": Case(
        {"shard": 2, "context": 2, "tensor": 2, "zero": 3}, DROPPED, optim={"name": "came"}, micro_batch=2
    ),
    "zero bubble, fs, tp": Case(
        {"pipeline": 2, "shard": 2, "tensor": 2, "schedule": "interleaved_zero_bubble"},
        {"bias": "all", "norm": "layer", "activation": "gelu", "position": "learned"},
    ),
    "no clipping, gpt": Case(
        {"shard": 2, "tensor": 2}, {"bias": "all", "norm": "layer", "position": "learned"},
        optim=SGD | {"clip_norm": 0.0}, micro_batch=4,
    ),
    "1f1b, recompute mlp, dropout": Case({"pipeline": 2}, DROPPED, recompute="mlp"),
    "ring, recompute mlp": Case({"context": 2}, WINDOWS, recompute="mlp", optim=SGD),
    "zbv, zero 3, recompute mlp": Case({"pipeline": 2, "shard": 2, "zero": 3, "schedule": "zbv"}, recompute="mlp"),
    "fs, tp, parallel block, recompute mlp": Case({"shard": 2, "tensor": 2}, PARALLEL_BLOCK, recompute="mlp"),
}  # fmt: skip
CASES = {name: dataclasses.replace(case, steps=3) for name, case in CASES.items()}


@pytest.mark.campaign(
    but=(
        "zero 2 of 4, lamb",
        "zero 3, came",
        "hybrid zero 3, recompute",
        "tensor 4, parallel block, dropout",
        "tensor, chunked",
        "ring",
        "all to all, dropout",
        "1f1b of 4, tied, dropout",
        "interleaved",
        "zbv, tied, zero 3",
        "zero bubble, fs, tp",
        "no clipping, gpt",
        "zbv, zero 3, recompute mlp",
    )
)
@pytest.mark.parametrize("name", CASES)
def test_a_layout_computes_what_one_process_computes(name: str) -> None:
    case = CASES[name]
    (found,) = by_threads([case])
    seen = difference(found, single(case))
    assert seen.passes, seen


@pytest.mark.parametrize("name", ["replicate", "zero 3, came", "tensor", "ring", "1f1b", "pp, dp, cp"])
def test_ranks_and_whole_steps_without_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the samples, so a rank's or a micro-batch's, without any count for nothing; all without are no step."""

    def some(case: Case, step: int) -> Batch:
        batch = samples(case, step)
        batch.weights_BS[: (case.batch // 2, case.batch, 0)[step]] = 0
        return batch

    monkeypatch.setattr(runs, "samples", some)
    (found,) = by_threads([CASES[name]])
    seen = difference(found, single(CASES[name]))
    assert seen.passes, seen
    assert len(found.losses) == 2


@pytest.mark.campaign(but=("zbv, tied, zero 3", "1f1b, recompute mlp, dropout"))
@pytest.mark.parametrize("name", ["zbv, tied, zero 3", "fs, cp, tp, zero 3", "1f1b, recompute mlp, dropout"])
def test_activations_on_the_host_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = CASES[name], []

    def make(_share: float, _device: torch.device) -> Offload:
        made.append(Offload(1.0, Lanes(), least_bytes=64))
        return made[-1]

    expected = single(case)
    monkeypatch.setattr(apply, "make_offload", make)
    (found,) = by_threads([case])
    seen = difference(found, expected)
    assert seen.passes, seen
    assert made and all(each.host_bytes for each in made)


@pytest.mark.parametrize("name", ["zero 2 of 4, lamb", "tensor, chunked", "ring", "zbv, tied, zero 3"])
def test_a_layout_computes_the_same_over_gloo(name: str) -> None:
    """Where much of a group goes at a time, and messages are told apart by tags; all others keep NCCL's order."""
    case = CASES[name]
    (found,) = by_threads([case], make_gloo)
    seen = difference(found, single(case))
    assert seen.passes, seen


@pytest.mark.campaign(but=("zero 3, came", "zbv, tied"))
@pytest.mark.parametrize("name", ["zero 3, came", "zbv, tied", "ring"])
def test_a_layout_computes_the_same_through_the_host(name: str) -> None:
    """As ranks that share a GPU talk."""
    case = CASES[name]
    (found,) = by_threads([case], lambda *told: _ThroughHost(make_gloo(*told)))
    seen = difference(found, single(case))
    assert seen.passes, seen


@pytest.mark.campaign(but=("zero 3",))
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case({"tensor": 2}, PARALLEL_BLOCK | DROPPED, optim=SGD, micro_batch=4, recompute="full"),
        Case({"context": 2}, WINDOWS, optim=SGD),
        Case({"pipeline": 2, "schedule": "zbv"}, {"tie_embeddings": True}, optim=SGD),
        Case({"shard": 2, "zero": 3}, {"layers": 2}, optim=SGD, recompute="selective"),
        dataclasses.replace(TABLE["pp2 fs2 zbv, zero 3"], optim=SGD),
    ],
    ids=["tensor", "context", "zero bubble", "zero 3", "zero bubble, zero 3"],
)
def test_real_processes_compute_what_one_process_computes(case: Case) -> None:
    """Also where layers are compiled, whole or in pieces, around what waits for other ranks."""
    expected = single(case)
    for found in by_processes([case, dataclasses.replace(case, compiled=True)]):
        seen = difference(found, expected)
        assert seen.passes, seen


@pytest.mark.parametrize(
    "parallel",
    [{"context": 2}, {"pipeline": 2}, {"pipeline": 2, "schedule": "interleaved_1f1b"}, {"shard": 2, "zero": 3}],
    ids=["context", "1f1b", "interleaved", "zero 3"],
)
def test_products_in_8_bits_in_every_layout_that_has_them(parallel: dict[str, Any]) -> None:
    """Close, not equal: of other tokens at a time the sums differ, and here and there what a value is rounded to."""
    case = Case(parallel, {"layers": 4}, optim=SGD, fp8_layers=range(1, 4))
    (found,) = by_threads([case])
    seen = difference(found, single(case))
    assert seen.weights_equal
    assert seen.losses < 2e-3
    assert seen.norms < 2e-2
    assert seen.gradients < 0.1


def test_the_comparison_sees_what_is_wrong() -> None:
    """A gradient twice as large, one weight that is another in its last bit, a loss that is none, a name too few."""
    case = dataclasses.replace(TABLE["one rank"], steps=2, optim=SGD)
    right = single(case)
    assert difference(right, right).passes

    def changed(**changes: object) -> Seen:
        return dataclasses.replace(right, **changes)

    name = "layers.0.attention.q"
    gradient, weight = right.gradients[name], right.weights[name].clone()
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(math.inf))
    wrong = [
        changed(gradients=right.gradients | {name: 2 * gradient}),
        changed(gradients={n: g for n, g in right.gradients.items() if n != name}),
        changed(weights=right.weights | {name: weight}),
        changed(losses=[right.losses[0], math.nan]),
        changed(norms=[right.norms[0], right.norms[1] * (1 + 1e-4)]),
        changed(held_out=right.held_out * 1.001),
    ]
    assert [difference(one, right).passes for one in wrong] == [False] * len(wrong)
    assert not worst([difference(one, right) for one in (right, wrong[2])]).passes
