"""Parameters, gradients and state of the optimizer on a rank."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from phalanx.model.config import ModelConfig
from phalanx.model.shapes import num_parameters, parameter_table
from phalanx.parallel.feasible import tensor_shards
from phalanx.plan.jobs import model_of
from phalanx.plan.memory.rank import rank_memory
from phalanx.plan.types import Job, Model, RankMemory, Software, Strategy

MEGATRON = Software(name="megatron", residual_bytes=2, weight_bytes=2, master_bytes=4, even_stages=True)
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "gelu", "norm": "layer", "bias": "all", "position": "learned", "tie_embeddings": True},
    {"block": "parallel", "kv_heads": 2, "bias": "qkv", "qk_norm": True},
    {"block": "parallel", "merged_projections": True, "norm": "layer", "bias": "all"},
)


def config_of(settings: dict[str, Any]) -> ModelConfig:
    return ModelConfig(vocab_size=500, layers=4, hidden=128, heads=4, max_sequence=256, **settings)


def memory(
    model: Model, strategy: Strategy, optimizer: Any = "adamw", software: Software = MEGATRON
) -> list[RankMemory]:
    return list(rank_memory(Job(model, 256, 64, "bf16", optimizer, software), strategy))


@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_parameters_are_those_of_the_model(settings: dict[str, Any], tensor: int) -> None:
    """Vectors that tensor-parallel ranks do not split are held by each."""
    config = config_of(settings)
    shards = tensor_shards(config, tensor, 0)
    elements = sum(_elements(shard.sizes) for shard in shards.values())
    assert tensor > 1 or elements == num_parameters(config)
    (found,) = memory(model_of(config), Strategy(tensor=tensor, zero=0))
    assert found.parameters == 2 * elements
    assert found.gradients == 4 * elements
    assert found.optimizer == (4 + 8) * elements


def _elements(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def test_stages_hold_the_model_together_and_a_tied_embedding_twice() -> None:
    config = config_of({"tie_embeddings": True})
    ranks = memory(model_of(config), Strategy(pipeline=4, zero=0))
    elements = num_parameters(config) + config.vocab_rows * config.hidden
    assert sum(rank.parameters for rank in ranks) == 2 * elements
    assert ranks[1].parameters == ranks[2].parameters < ranks[0].parameters


@pytest.mark.parametrize(("zero", "parts"), [(0, ""), (1, "o"), (2, "og"), (3, "ogp")])
def test_zero_splits_a_part_more_with_every_stage(zero: Any, parts: str) -> None:
    model = model_of(config_of({}))
    (whole,) = memory(model, Strategy(zero=0))
    (found,) = memory(model, Strategy(zero=zero, shard=8))
    assert found.optimizer == whole.optimizer / (8 if "o" in parts else 1)
    assert found.gradients == whole.gradients / (8 if "g" in parts else 1)
    assert found.parameters == whole.parameters / (8 if "p" in parts else 1)
    assert (found.communication > 0) == (zero == 3)


def test_optimizers_keep_less_and_less() -> None:
    """LAMB as much as AdamW; Muon one moment of matrices; CAME one of all, and factors."""
    model = model_of(config_of({}))
    state = {name: memory(model, Strategy(zero=0), name)[0].optimizer for name in ("adamw", "lamb", "muon", "came")}
    assert state["adamw"] == state["lamb"] > state["muon"] > state["came"]
    masters = state["adamw"] / 3
    elements = num_parameters(config_of({}))
    assert masters == 4 * elements
    assert masters + 4 * elements < state["came"] < masters + 4.2 * elements


@pytest.mark.parametrize(("bits", "of_matrices"), [(32, 8), (16, 4), (8, 2 * (1 + 4 / 128))])
def test_adamws_moments_of_matrices_have_as_many_bits_as_asked(bits: int, of_matrices: float) -> None:
    """Scales of 8 bits: one for 256 columns, of which there are 128 here; vectors stay fp32."""
    config = config_of({})
    shapes = [parameter.shape for parameter in parameter_table(config).values()]
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    job = Job(model_of(config), 256, 64, "bf16", "adamw", Software(), bits)
    (found,) = rank_memory(job, Strategy(zero=0))
    assert found.optimizer == of_matrices * matrices + 8 * (num_parameters(config) - matrices)


def test_experts_are_split_over_their_ranks_and_the_rest_is_not() -> None:
    model = model_of(config_of({}))
    mixture = replace(model, experts=8, experts_per_token=2)
    (dense,) = memory(model, Strategy(zero=0))
    (one,) = memory(mixture, Strategy(zero=0))
    (spread,) = memory(mixture, Strategy(zero=0, shard=4, expert=4))
    of_mlp = 4 * 3 * 128 * model.mlp_width * 2
    routers = 4 * 8 * 128 * 2
    assert one.parameters == dense.parameters + 7 * of_mlp + routers
    assert spread.parameters == dense.parameters + (2 - 1) * of_mlp + routers
    assert one.activations > dense.activations


def test_a_larger_capacity_keeps_more() -> None:
    mixture = replace(model_of(config_of({})), experts=8)
    kept = [memory(replace(mixture, capacity_factor=factor), Strategy())[0].activations for factor in (1.0, 2.0)]
    assert kept[0] < kept[1]


def test_recomputing_more_keeps_less_and_needs_more_for_a_moment() -> None:
    model = model_of(config_of({}))
    found = [
        memory(model, Strategy(recompute=kind), software=replace(MEGATRON, fused_attention=False))[0]
        for kind in ("none", "attention", "elementwise", "mlp", "full")
    ]
    none, attention, elementwise, mlp, full = (rank.activations for rank in found)
    assert none > attention > full and none > elementwise > mlp > full
    assert found[0].workspace < found[3].workspace


def test_phalanx_on_several_ranks_multiplies_16_bit_weights_beside_fp32_masters() -> None:
    """Alone it keeps 16-bit casts of its fp32 weights, those of the head among them."""
    model = model_of(config_of({}))
    (alone,) = memory(model, Strategy(), software=Software())
    (spread,) = memory(model, Strategy(shard=2), software=Software())
    matrices, head = 4 * (4 * 128 * 128 + 3 * 128 * model.mlp_width), model.vocab_rows * 128
    assert alone.parameters == 4 * num_parameters(config_of({})) + 2 * (matrices + head)
    masters = 4 * num_parameters(config_of({})) - 4 * matrices + 4 * matrices / 2
    assert spread.parameters == pytest.approx(masters + 2 * matrices, rel=1e-3)


def test_memory_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, phalanx.plan.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("software", [MEGATRON, Software(), Software(on_cpu=True)])
def test_what_is_given_can_be_written_as_json(software: Software) -> None:
    ranks = memory(model_of(config_of({})), Strategy(pipeline=2, zero=3, shard=2), software=software)
    assert all(json.loads(json.dumps(asdict(rank)))["parameters"] > 0 for rank in ranks)
