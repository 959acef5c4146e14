"""Against transformers models with random weights: logits, gradients, and folders both ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_builders import build, tiny, tokens
from safetensors.torch import load_file, save_file

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.generate import generate_batch
from phalanx.model.hf_config import read_config, write_config
from phalanx.model.huggingface import export_folder, import_folder, load_decoder, parity, rules
from phalanx.model.logical_parameters import LogicalParameters

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama31": ("llama", {**SIZES, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama_yarn": ("llama", {**SIZES, "rope_parameters": {**YARN, "beta_fast": 8.0, "truncate": False}}),
    "llama_biased_tied": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**SIZES, "sliding_window": 5, "head_dim": 12}),
    "qwen2": ("qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen2_windows": ("qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 16}),
    "gpt2": ("gpt2", {
        "vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
    }),
    "gpt2_untied_gelu": ("gpt2", {
        "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 40, "n_positions": 64,
        "activation_function": "gelu", "tie_word_embeddings": False, "initializer_range": 0.2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder saved by transformers for every case, biases and norms away from their initial values too."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("huggingface")
    for name, (family, settings) in CASES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **settings), attn_implementation="eager"
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
    return {name: root / name for name in CASES}


def _theirs(folder: Path) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def _export(model: Decoder, path: Path, **settings: Any) -> Path:
    export_folder(model.config, LogicalParameters(model), None, path, **settings)
    return path


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    ours, theirs = load_decoder(folders[name]), _theirs(folders[name])
    ids = tokens(ours.config, batch=2, length=40)
    expected = theirs(ids).logits
    torch.testing.assert_close(ours.logits(ours(ids)), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    targets = tokens(ours.config, batch=2, length=40, seed=1)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours.loss(ours(ids), targets)[0].backward()
    logical = LogicalParameters(ours)
    logical.bind_gradients()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for rule in rules(CASES[name][0], ours.config):
        grads = {part: logical[part].grad for part in rule.parts}
        got = rule.join(grads, {p: tuple(logical[p].shape) for p in rule.parts}, ours.embedding.weight)
        wanted = gradients[rule.name]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5 * wanted.abs().max().item(), msg=rule.name)


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_that_of_transformers(name: str, folders: dict[str, Path]) -> None:
    ours, theirs = load_decoder(folders[name]), _theirs(folders[name])
    prompts = [tokens(ours.config, 1, length, seed=length)[0].tolist() for length in (1, 12, 7)]
    found = generate_batch(ours, prompts, max_new_tokens=24, temperature=0)
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        wanted = theirs.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert text == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", CASES)
def test_a_folder_comes_back_bit_for_bit(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config, weights = import_folder(folders[name])
    export_folder(config, weights, None, tmp_path / "back")
    before, after = (load_file(f / "model.safetensors") for f in (folders[name], tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again, same = import_folder(tmp_path / "back")
    assert again == config
    assert all(torch.equal(weights[key], same[key]) for key in weights)


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_what_we_export(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config, weights = import_folder(folders[name])
    export_folder(config, weights, None, tmp_path / "back")
    ids = tokens(config, length=40)
    with torch.no_grad():
        torch.testing.assert_close(_theirs(tmp_path / "back")(ids).logits, _theirs(folders[name])(ids).logits)
    assert parity(tmp_path / "back") < 1e-4


@pytest.mark.parametrize(
    ("variant", "family"),
    [("llama", "llama"), ("nanogpt", "gpt2"), ("gpt2", "gpt2"), ("qwen", "qwen3"), ("windows", "qwen2")],
)
def test_our_own_models_export(variant: str, family: str, tmp_path: Path) -> None:
    """Padding rows are cut; biases that our model lacks and the family has become zeros."""
    model = build(tiny(variant, **({"bias": "none"} if variant == "qwen" else {})))
    _export(model, tmp_path / "out", end_of_text=7)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["model_type"], raw["vocab_size"], raw["eos_token_id"]) == (family, 61, 7)
    ids = tokens(model.config)
    with torch.no_grad():
        expected = model.logits(model(ids))[..., :61]
        torch.testing.assert_close(_theirs(tmp_path / "out")(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block": "parallel"}, "model.block = 'parallel'"),
        ({"logit_softcap": 30.0}, "model.logit_softcap = 30.0"),
        ({"position": "none"}, "model.position = 'none'"),
        ({"norm": "layer"}, "model.norm = 'layer'"),
        ({"activation": "gelu"}, "model.activation = 'gelu'"),
        ({"qk_norm": True, "bias": "qkv"}, "model.bias = 'qkv'"),
        ({"bias": "all", "attention": ("window",), "window": 4}, "model.window = 4"),
        ({"hidden": 30, "heads": 4, "head_size": 8}, "model.heads = 4"),
        ({"position": "learned"}, "model.norm = 'rms'"),
        ({"position": "learned", "norm": "layer"}, "model.activation = 'swiglu'"),
        ({"position": "learned", "norm": "layer", "activation": "gelu"}, "model.kv_heads = 2"),
    ],
)
def test_what_has_no_counterpart_is_named(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    model = build(tiny(**changes))
    with pytest.raises(UserError) as caught:
        _export(model, tmp_path / "out")
    assert str(caught.value).startswith(field + ": ")
    assert not list(tmp_path.iterdir())


def test_shards_and_dtype(tmp_path: Path) -> None:
    model = build(tiny())
    _export(model, tmp_path / "one", dtype=torch.bfloat16)
    _export(model, tmp_path / "many", dtype=torch.bfloat16, max_shard_bytes=5000)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    (config, one), (same, many) = import_folder(tmp_path / "one"), import_folder(tmp_path / "many")
    assert config == same
    assert all(torch.equal(one[name], many[name]) and one[name].dtype == torch.bfloat16 for name in one)
    with torch.no_grad():
        assert _theirs(tmp_path / "many")(tokens(config)).logits.isfinite().all()


def test_gpt2_files_without_prefix_and_with_mask_buffers(folders: dict[str, Path], tmp_path: Path) -> None:
    """The form in which OpenAI's own GPT-2 weights are published."""
    shutil.copytree(folders["gpt2"], tmp_path / "bare")
    weights = load_file(tmp_path / "bare" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}, tmp_path / "bare" / "model.safetensors")
    (_, expected), (_, got) = import_folder(folders["gpt2"]), import_folder(tmp_path / "bare")
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_the_tokenizer_is_copied_and_found(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tok.json"))
    model = build(tiny())
    export_folder(model.config, LogicalParameters(model), tmp_path / "tok.json", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tok.json").read_bytes()
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("b") == [1]


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model = build(tiny())
    with pytest.raises(UserError, match="there is no such file"):
        export_folder(model.config, LogicalParameters(model), tmp_path / "absent.json", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    weights = dict(LogicalParameters(model))
    del weights["layers.1.mlp.up"]
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up: is missing"):
        export_folder(model.config, weights, None, tmp_path / "out")
    _export(model, tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        _export(model, tmp_path / "out")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A complete folder of our own, for a test to damage."""
    return _export(build(tiny()), tmp_path / "folder")


def test_missing_and_damaged_files_are_named(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: is missing"):
        import_folder(tmp_path / "absent")
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors: is damaged"):
        import_folder(damaged)
    (damaged / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        import_folder(damaged)
    (damaged / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(UserError, match=r"only pickled weights.*safe_serialization"):
        import_folder(damaged)
    (damaged / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        import_folder(damaged)


def test_missing_shards_and_paths_that_lead_outside_are_refused(tmp_path: Path) -> None:
    folder = _export(build(tiny()), tmp_path / "folder", max_shard_bytes=5000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shutil.move(folder / index["weight_map"]["lm_head.weight"], tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"of-\d+\.safetensors: is missing"):
        import_folder(folder)
    index["weight_map"]["lm_head.weight"] = "../elsewhere"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside the folder"):
        import_folder(folder)


def test_tensors_that_do_not_fit_are_named(damaged: Path) -> None:
    weights = load_file(damaged / "model.safetensors")
    name = "model.layers.2.self_attn.k_proj.weight"
    save_file({**weights, name: weights[name][1:].clone()}, damaged / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.2\.self_attn\.k_proj\.weight: has shape \(15, 32\).*\(16, 32\)"):
        import_folder(damaged)
    del weights[name]
    save_file(weights, damaged / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.2\.self_attn\.k_proj\.weight: is missing"):
        import_folder(damaged)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"model_type": "mamba"}, "model_type = 'mamba'"),
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("llama", {"attention_bias": True}, "mlp_bias = False"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers: is missing"),
        ("llama", {"num_key_value_heads": 3}, "kv_heads = 3"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["x"]}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(family: str, changes: dict[str, Any], named: str) -> None:
    raw = {"model_type": family, **CASES[family][1], **changes}
    with pytest.raises(UserError) as caught:
        read_config(raw)
    assert named in str(caught.value)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    new = read_config({"model_type": "llama", **SIZES, "rope_parameters": LLAMA3})
    scaling = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = read_config({"model_type": "llama", **SIZES, "rope_theta": 10000.0, "rope_scaling": scaling})
    assert old == new
    assert new.rope_scaling.kind == "llama3"


@pytest.mark.parametrize("variant", ["llama", "gpt2", "windows"])
def test_config_json_says_the_same_config_again(variant: str) -> None:
    config = tiny(variant, vocab_multiple=1)
    again = read_config(write_config(config))
    ignored = {"bias", "attention", "kv_heads", "head_size", "mlp_hidden", "rope_theta"}
    same = {f for f in ModelConfig.model_fields if getattr(again, f) == getattr(config, f)}
    assert set(ModelConfig.model_fields) - same <= ignored
    assert (again.num_kv_heads, again.head_dim, again.mlp_width) == (
        config.num_kv_heads, config.head_dim, config.mlp_width,
    )  # fmt: skip
    assert [again.window_of(i) for i in range(3)] == [config.window_of(i) for i in range(3)]


def test_loading_refuses_other_shapes_and_names() -> None:
    model = build(tiny())
    weights = {name: p.detach().clone() for name, p in LogicalParameters(model).items()}
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up: has shape"):
        LogicalParameters(model).load({**weights, "layers.0.mlp.up": torch.zeros(3, 3)})
    with pytest.raises(UserError, match="extra: is not a parameter"):
        LogicalParameters(model).load({**weights, "extra": torch.zeros(1)})
    with pytest.raises(UserError, match="norm: is missing"):
        LogicalParameters(model).load({name: w for name, w in weights.items() if name != "norm"})
    LogicalParameters(model).load({**weights, "head": weights["head"][:61]})
    assert torch.equal(model.head.weight[61:], torch.zeros(3, 32))
