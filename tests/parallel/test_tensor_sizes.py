"""What a tensor-parallel rank holds of a model, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import DecoderPart
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.model.shapes import parameter_table
from phalanx.parallel.feasible import local_config, tensor_shards

SIZES = {"vocab_size": 61, "vocab_multiple": 8, "layers": 2, "hidden": 24, "heads": 4, "max_sequence": 24}


@given(
    tensor=st.sampled_from([1, 2, 4]),
    bias=st.sampled_from(["none", "all", "qkv"]),
    activation=st.sampled_from(["gelu", "swiglu"]),
    position=st.sampled_from(["rotary", "learned"]),
    tied=st.booleans(),
    merged=st.booleans(),
    qk_norm=st.booleans(),
)
def test_shards_are_what_the_local_part_stores_and_together_the_whole(
    tensor: int, bias: str, activation: str, position: str, tied: bool, merged: bool, qk_norm: bool
) -> None:
    config = ModelConfig.model_validate(
        SIZES
        | {"bias": bias, "activation": activation, "position": position, "tie_embeddings": tied, "qk_norm": qk_norm}
        | ({"block": "parallel", "merged_projections": True} if merged else {"norm": "layer"})
    )
    stored = LogicalParameters(DecoderPart(local_config(config, tensor), device="meta"))
    ranks = [tensor_shards(config, tensor, index) for index in range(tensor)]
    for name, parameter in parameter_table(config).items():
        shards = [rank[name] for rank in ranks]
        assert {s.sizes for s in shards} == {tuple(stored[name].shape)}
        assert {s.shape for s in shards} == {parameter.shape}
        if shards[0].axes:
            assert [s.offsets[0] for s in shards] == [i * shards[0].sizes[0] for i in range(tensor)]
            assert sum(s.sizes[0] for s in shards) == parameter.shape[0] and all(s.owner for s in shards)
        else:
            assert all(s.is_whole for s in shards) and [s.owner for s in shards] == [i == 0 for i in range(tensor)]


def test_matrices_are_split_and_what_the_stream_meets_is_not() -> None:
    config = ModelConfig.model_validate(SIZES | {"bias": "all", "norm": "layer", "position": "learned"})
    split = {name.rpartition(".")[2] for name, s in tensor_shards(config, 2, 0).items() if s.axes}
    assert split == {
        *("embedding", "head", "q", "k", "v", "o", "gate", "up", "down"),
        *("q_bias", "k_bias", "v_bias", "gate_bias", "up_bias"),
    }


@pytest.mark.parametrize(
    ("changes", "tensor", "named"),
    [
        ({"kv_heads": 2}, 4, r"parallel\.tensor = 4: does not divide model\.kv_heads = 2.*take a tensor size of 1, 2"),
        ({"kv_heads": 1}, 2, r"model\.kv_heads = 1.*take 1, or set model\.kv_heads to a multiple of 2"),
        ({}, 3, r"does not divide model\.heads = 4.*take a tensor size of 1, 2, 4"),
        ({"mlp_hidden": 30}, 4, r"the MLP's width, 30; set model\.mlp_hidden to a multiple of 4, such as 32"),
        ({"vocab_multiple": 1}, 2, r"the padded vocabulary, 61 rows; set model\.vocab_multiple to a multiple of 2"),
        ({"vocab_size": 0}, 2, r"model\.vocab_size = 0"),
    ],
)
def test_what_does_not_divide_is_refused_with_its_cure(changes: dict[str, int], tensor: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        tensor_shards(ModelConfig.model_validate(SIZES | changes), tensor, 0)


def test_a_size_of_one_changes_nothing() -> None:
    config = ModelConfig.model_validate(SIZES | {"vocab_multiple": 1, "kv_heads": 1})
    assert local_config(config, 1) is config
    assert all(s.is_whole and not s.axes and s.owner for s in tensor_shards(config, 1, 0).values())


def test_sizes_are_known_without_torch() -> None:
    code = "import phalanx.parallel.feasible, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
