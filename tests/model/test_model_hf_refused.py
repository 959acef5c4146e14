"""Hugging Face folders that are not understood are refused through every door, before anything of their size is built;
healthy ones with the same oddities compute what transformers computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from model_builders import build, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.model.hf_config import read_config
from phalanx.model.huggingface import export_folder, import_folder, load_decoder, parity
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.train.weights.initial import weights_of_folder

Q = "model.layers.1.self_attn.q_proj.weight"
MANY = 10**9


def _convert(folder: Path) -> None:
    target = folder.parent / "tune.toml"
    result = CliRunner().invoke(group, ["checkpoint", "convert", str(folder), str(target), "--to", "config"])
    assert not target.exists()
    assert result.exception is not None
    raise result.exception


DOORS: dict[str, Callable[[Path], object]] = {
    "load": load_decoder, "initial weights": weights_of_folder, "convert": _convert,
}  # fmt: skip


def _folder(path: Path, variant: str = "llama", **changes: Any) -> Path:
    model = build(tiny(variant, **changes))
    export_folder(model.config, LogicalParameters(model), None, path)
    return path


def _change(
    folder: Path, config: dict[str, Any] | None = None, weights: dict[str, Tensor | None] | None = None
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    stored = load_file(folder / "model.safetensors") | weights
    save_file({key: value for key, value in stored.items() if value is not None}, folder / "model.safetensors")


def _value(kind: torch.dtype) -> Tensor:
    return torch.ones(32, 32).to(kind)


def _bad(name: str, value: float) -> dict[str, Tensor | None]:
    tensor = torch.ones(32, 32)
    tensor[3, 4] = value
    return {name: tensor}


# What is changed in config.json and among the tensors of a good folder, and what the error names.
BAD: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "fp8": ({}, {Q: _value(torch.float8_e4m3fn)}, rf"model\.safetensors: {Q} = 'F8_E4M3': is quantised.*dequantise it"),
    "fp8 with scales": ({}, {f"{Q}_scale_inv": torch.ones(1)}, f"{Q}_scale_inv: is in .*no such weight"),
    "int8": ({}, {Q: _value(torch.int8)}, f"{Q} = 'I8'"),
    "int8 with SCB": ({}, {Q.replace("weight", "SCB"): torch.ones(32)}, "q_proj.SCB: is in"),
    "packed int4": ({}, {Q: torch.ones(512, 1, dtype=torch.uint8)}, f"{Q} = 'U8'"),
    "GPTQ": ({}, {Q.replace("weight", "qweight"): torch.ones(4, 32, dtype=torch.int32), Q: None}, "q_proj.(q?)weight"),
    "a method": ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config = 'fp8': is quantised"),
    "MLX": ({"quantization": {"bits": 4}}, {}, "config.json: quantization"),
    "fewer layers": ({"num_hidden_layers": 2}, {}, "num_hidden_layers = 2: the weights have 3 layers"),
    "more layers": ({"num_hidden_layers": MANY}, {}, f"num_hidden_layers = {MANY}: the weights have 3 layers"),
    "names of far layers": ({"num_hidden_layers": MANY}, {f"model.layers.{MANY - 1}.x": torch.ones(1)}, "have 4"),
    "many layers with windows": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4,
         "num_hidden_layers": MANY}, {}, "3 layers",
    ),
    "vocabulary": ({"vocab_size": MANY}, {}, "embed_tokens.weight: has shape .61, 32. where"),
    "width": ({"hidden_size": 4 * MANY}, {}, "has shape"),
    "positions": ({"max_position_embeddings": MANY}, {}, "max_position_embeddings"),
    "tied beside another head": ({"tie_word_embeddings": True}, {}, "lm_head.weight differs from the embedding"),
    "NaN": ({}, _bad(Q, math.nan), f"{Q}: has values that are NaN"),
    "infinite": ({}, _bad(Q, -math.inf), f"{Q}: has values that are NaN or infinite"),
    "an extra bias": ({}, {"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}, "o_proj.bias: is in"),
    "the same twice": ({}, {Q.removeprefix("model."): torch.ones(32, 32)}, "layers.1.self_attn.q_proj.weight: is in"),
    "soft cap": ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping = 30.0: is not understood"),
    "experts": ({"num_local_experts": 8}, {}, "num_local_experts = 8"),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "x.py"}}, {}, "auto_map"),
    "both ways": ({"is_causal": False}, {}, "is_causal = False"),
    "window of a llama": ({"sliding_window": 5}, {}, "sliding_window = 5"),
    "layer types": ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, {}, "layer_types"),
    "two rotations": (
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 5.0}}, {}, "rope_parameters",
    ),
    "rotation by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, {}, "full_attention"),
    "an unknown part of it": ({"rope_parameters": {"rope_theta": 5.0, "short_factor": [1.0]}}, {}, "short_factor"),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_is_not_understood_is_refused(tmp_path: Path, case: str, door: str) -> None:
    folder = _folder(tmp_path / "folder")
    config, weights, named = BAD[case]
    _change(folder, config, weights)
    with pytest.raises(UserError, match=named):
        DOORS[door](folder)


def _index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = change(index["weight_map"]) or index["weight_map"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda f: min(f.glob("*.safetensors")).unlink(), "of-00002.safetensors: is missing"),
    "a shard too many": (
        lambda f: save_file({"x": torch.ones(1)}, f / "model-00003-of-00003.safetensors"), "00003.safetensors: is not",
    ),
    "one file beside them": (lambda f: save_file({"x": torch.ones(1)}, f / "model.safetensors"), "is not named by"),
    "in another file": (
        lambda f: _index(f, lambda m: m.update({Q: max(m.values())})), f"{Q}: is not in model-00002",
    ),
    "not in the index": (
        lambda f: _index(f, lambda m: {k: v for k, v in m.items() if k != Q}), f"{Q}: is in model-00001",
    ),
    "not in its file": (lambda f: _index(f, lambda m: m.update(x=m[Q])), "x: is not in model-00001"),
    "no map": (lambda f: _index(f, lambda m: [*m]), "weight_map: does not name a file"),
    "no names": (lambda f: _index(f, lambda m: dict.fromkeys(m, 3)), "weight_map: does not name a file"),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "has an adapter that is not merged"),
    "in two files": (
        lambda f: save_file({**load_file(max(f.glob("*rs"))), Q: torch.ones(1)}, max(f.glob("*rs"))),
        f"{Q}: is in model-00001-of-00002.safetensors and in model-00002",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARDS)
def test_shards_and_index_must_agree(tmp_path: Path, case: str) -> None:
    model = build(tiny())
    export_folder(model.config, LogicalParameters(model), None, tmp_path / "folder", max_shard_bytes=110_000)
    assert len(list((tmp_path / "folder").glob("model-*"))) == 2
    import_folder(tmp_path / "folder")
    change, named = SHARDS[case]
    change(tmp_path / "folder")
    for door in DOORS.values():
        with pytest.raises(UserError, match=named):
            door(tmp_path / "folder")


@pytest.mark.parametrize("variant", ["llama", "gpt2", "windows", "qwen"])
def test_values_of_any_other_kind_are_refused_by_name(tmp_path: Path, variant: str) -> None:
    folder = _folder(tmp_path / "folder", variant, **({"bias": "none"} if variant == "qwen" else {}))
    raw = json.loads((folder / "config.json").read_text())
    odd = (
        None,
        "text",
        "4",
        True,
        -1,
        0,
        1.5,
        MANY,
        10**30,
        math.nan,
        float("inf"),
        [],
        [1],
        {},
        {"a": 1},
        {"type": []},
    )
    for key in raw:
        for value in odd:
            try:
                read_config(raw | {key: value}, stored_layers=raw.get("num_hidden_layers", raw.get("n_layer")))
            except UserError:
                continue


HEALTHY: dict[str, tuple[str, dict[str, Any], dict[str, Tensor | None]]] = {
    "rotary tables": ("llama", {}, {
        "model.rotary_emb.inv_freq": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }),
    "keys that change nothing": ("llama", {
        "quantization_config": None, "pretraining_tp": 1, "use_cache": True, "unsloth_version": "1", "new_key": None,
        "_name_or_path": "x", "max_sequence_length": 4096, "rope_interleaved": False, "sliding_window": None,
    }, {}),
    "masks": ("gpt2", {"n_ctx": 64, "summary_type": "cls_index", "reorder_and_upcast_attn": False}, {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril().bool(),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }),
}  # fmt: skip


@pytest.mark.parametrize("case", HEALTHY)
def test_what_changes_nothing_is_accepted(tmp_path: Path, case: str) -> None:
    pytest.importorskip("transformers")
    variant, config, weights = HEALTHY[case]
    folder = _folder(tmp_path / "folder", variant)
    _change(folder, config, weights)
    assert parity(folder) < 1e-4


def test_a_tied_head_that_is_the_embedding_is_accepted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = _folder(tmp_path / "folder", tie_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    _change(folder, {}, {"lm_head.weight": stored["model.embed_tokens.weight"].clone()})
    assert parity(folder) < 1e-4


def test_what_is_absent_is_what_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        raw = {"model_type": family, **sizes, "num_attention_heads": 32, "max_position_embeddings": 64}
        theirs, ours = transformers.AutoConfig.for_model(**raw), read_config(raw)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.window == (theirs.sliding_window or 0 if hasattr(theirs, "sliding_window") else 0)
        assert (ours.norm_eps, ours.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
        assert (ours.rope_theta, ours.head_dim) == (
            theirs.rope_parameters["rope_theta"],
            getattr(theirs, "head_dim", 2),
        )
