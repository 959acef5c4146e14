"""Between Hugging Face's config.json and `ModelConfig`. Nothing is guessed, the unknown is refused.

A key is read (`_KINDS`), has no part in what a model computes (`_IGNORED`), or is refused unless it is null or empty.

Families: llama (with Llama 3.1 scaling and YaRN), mistral, qwen2, qwen3, gpt2. Training-only settings (dropout,
z-loss, initial spread, back ends) have no place in config.json; imported models train without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig, RopeScaling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


# What transformers takes where a key is absent; where it is null, as many as heads.
_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
# Keys that are read, by the kind of their values.
_SHARED_KINDS = {
    "text": "model_type",
    "size": "vocab_size",
    "number": "initializer_range",
    "flag": "tie_word_embeddings",
    "value": "is_causal is_encoder_decoder chunk_size_feed_forward add_cross_attention",
}
_LLAMA_KINDS = {
    "text": "hidden_act",
    "size": "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size "
    "max_position_embeddings head_dim sliding_window",
    "count": "max_window_layers",
    "number": "rms_norm_eps rope_theta partial_rotary_factor",
    "flag": "attention_bias mlp_bias use_sliding_window",
    "list": "layer_types",
    "table": "rope_parameters rope_scaling",
    "value": "pretraining_tp rope_interleaved use_mrope",
}
_ROPE_KINDS = {
    "text": "rope_type type",
    "size": "original_max_position_embeddings",
    "number": "factor rope_theta partial_rotary_factor attention_factor low_freq_factor high_freq_factor beta_fast "
    "beta_slow mscale mscale_all_dim",
    "flag": "truncate",
}
_GPT2_KINDS = {
    "text": "activation_function",
    "size": "n_layer n_embd n_head n_positions n_inner",
    "number": "layer_norm_epsilon",
    "flag": "scale_attn_weights scale_attn_by_inverse_layer_idx",
}
_WORDS = {"size": "whole number of 1 or more", "count": "whole number", "flag": "true or false", "table": "object"}
_IGNORED = (
    # where it comes from, how it is run
    "architectures transformers_version torch_dtype dtype use_cache gradient_checkpointing tokenizer_class prefix "
    "model_max_length max_sequence_length attn_implementation reorder_and_upcast_attn use_bfloat16 torchscript "
    "n_ctx output_past is_llama_config is_decoder transformers.js_config "
    # training
    "attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout classifier_dropout neftune_noise_alpha "
    # ids of tokens, heads for other tasks, what a call returns
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id "
    "decoder_start_token_id id2label label2id num_labels problem_type finetuning_task task_specific_params "
    "return_dict output_attentions output_hidden_states tf_legacy_loss "
    # sampling
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences "
    "encoder_no_repeat_ngram_size bad_words_ids output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens"
)
_IGNORED_PREFIXES = ("_", "summary_", "unsloth_")
_QUANTISED = ("quantization_config", "quantization", "compression_config", "quantize_config")
_MOST_POSITIONS = 1 << 24  # tables of cos and sin have a row for each


def family_of(raw: Mapping[str, Any]) -> str:
    """The family of a config.json. `UserError`: it is none of `FAMILIES`."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        cure = f"import one of {', '.join(FAMILIES)}"
        raise UserError("is an architecture that cannot be imported", cure=cure, field="model_type", value=family)
    return str(family)


def read_config(raw: Mapping[str, Any], *, stored_layers: int | None = None) -> ModelConfig:
    """The `ModelConfig` that computes what a config.json describes.

    Args:
        stored_layers: layers of the weights beside it, where they are known.

    Raises:
        UserError: the family is unknown, a needed key is missing, another is not known, a setting has no counterpart
            here, or the weights have another number of layers.
    """
    family = family_of(raw)
    for key in _QUANTISED:
        if raw.get(key):
            raise dequantise_first(f"config.json: {key}", raw[key])
    _require_kinds(raw, (_SHARED_KINDS, _GPT2_KINDS if family == "gpt2" else _LLAMA_KINDS))
    for key, expected in {"is_causal": True, "is_encoder_decoder": False, "chunk_size_feed_forward": 0}.items():
        _refuse(raw, key, expected)
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    if stored_layers is not None and _need(raw, key) != stored_layers:
        cure = "take config.json and weights from the same model"
        raise UserError(f"the weights have {stored_layers} layers", cure=cure, field=key, value=raw[key])
    return _read_gpt2(raw) if family == "gpt2" else _read_llama(raw)


def dequantise_first(field: str, value: Any) -> UserError:
    """The error for weights that are no plain numbers, whatever packed them."""
    shown = value.get("quant_method", "…") if isinstance(value, dict) else value
    cure = (
        "dequantise it first with transformers: AutoModelForCausalLM.from_pretrained(folder).dequantize(), then "
        "save_pretrained(new_folder); or take the float16 or bfloat16 weights it was made from"
    )
    problem = "is quantised, and would be read as raw numbers"
    return UserError(problem, cure=cure, field=field, value=shown)


def _require_kinds(raw: Mapping[str, Any], tables: Sequence[Mapping[str, str]], within: str = "") -> None:
    """Refuse a key that is not known, and a value of another kind than its key's; null is absent."""
    kinds = {key: kind for table in tables for kind, keys in table.items() for key in keys.split()}
    ignored = () if within else _IGNORED.split()
    for key, value in raw.items():
        field, kind = f"{within}{key}", kinds.get(key)
        if value is None or key in ignored or (not within and key.startswith(_IGNORED_PREFIXES)):
            continue
        if kind is None:
            if value in ("", [], {}):
                continue
            cure = "if it changes nothing of what the model computes, remove it from config.json"
            raise UserError("is not understood", cure=cure, field=field, value=value)
        if not _is(kind, value):
            raise UserError(f"is no {_WORDS.get(kind, kind)}", cure="correct config.json", field=field, value=value)
        if kind == "table":
            _require_kinds(value, (_ROPE_KINDS,), f"{key}.")


def _is(kind: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "size" | "count":
            return is_number and isinstance(value, int) and value >= (kind == "size")
        case "number":
            return is_number and math.isfinite(value)
        case "value":
            return True
    return isinstance(value, {"flag": bool, "text": str, "list": list, "table": dict}[kind])


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A config.json (for transformers 4 and 5) that computes what `config` does, the vocabulary without padding.

    Raises:
        UserError: a setting has no Hugging Face counterpart; the error names it.
    """
    config.require_sizes()
    _require(config, "block", "serial")
    _require(config, "logit_softcap", 0.0)
    family = export_family(config)
    raw: dict[str, Any] = {"architectures": [_ARCHITECTURES[family]], "model_type": family}
    raw |= {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_embeddings}
    raw |= {"initializer_range": config.init_std, "bos_token_id": None, "eos_token_id": None}
    return raw | (_write_gpt2(config) if family == "gpt2" else _write_llama(config, family))


def export_family(config: ModelConfig) -> str:
    """The Hugging Face family that can compute what `config` does (missing biases are then written as zeros)."""
    if config.position == "learned":
        return "gpt2"
    _require(config, "position", "rotary")
    windows = [config.window_of(layer) is not None for layer in range(config.layers)]
    if config.qk_norm:
        _require(config, "bias", "none")
        return "qwen3"
    if config.bias == "all":
        _require(config, "window", 0)
        return "llama"
    if not any(windows):
        return "qwen2" if config.bias == "qkv" else "llama"
    return "mistral" if all(windows) and config.bias == "none" else "qwen2"


def _require(config: ModelConfig, field: str, value: Any) -> None:
    got = getattr(config, field)
    if got != value:
        cure = f"only models with {field} = {value!r} can be exported with the other settings as they are"
        raise UserError("has no Hugging Face counterpart", cure=cure, field=f"model.{field}", value=got)


def _need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise UserError("is missing from config.json", cure="complete the folder", field=key)
    return raw[key]


def _refuse(raw: Mapping[str, Any], key: str, expected: Any) -> None:
    if raw.get(key, expected) != expected:
        cure = f"import a model with {key} = {expected!r}"
        raise UserError("has no counterpart here", cure=cure, field=key, value=raw[key])


def _read_gpt2(raw: Mapping[str, Any]) -> ModelConfig:
    for key, expected in {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }.items():
        _refuse(raw, key, expected)
    activation = raw.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        cure = f"import a model with one of {', '.join(_ACTIVATIONS)}"
        raise UserError("has no counterpart here", cure=cure, field="activation_function", value=activation)
    return validate(
        ModelConfig,
        {
            "vocab_size": _need(raw, "vocab_size"),
            "vocab_multiple": 1,
            "layers": _need(raw, "n_layer"),
            "hidden": _need(raw, "n_embd"),
            "heads": _need(raw, "n_head"),
            "mlp_hidden": raw.get("n_inner") or 4 * _need(raw, "n_embd"),
            "max_sequence": _need(raw, "n_positions"),
            "position": "learned",
            "norm": "layer",
            "norm_eps": raw.get("layer_norm_epsilon", 1e-5),
            "activation": _ACTIVATIONS[activation],
            "bias": "all",
            "tie_embeddings": raw.get("tie_word_embeddings", True),
            "init_std": raw.get("initializer_range", 0.02),
        },
    )


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    _require(config, "norm", "layer")
    _require(config, "window", 0)
    _require(config, "qk_norm", False)
    if config.gated:
        _require(config, "activation", "gelu_tanh")
    if config.num_kv_heads != config.heads:
        _require(config, "kv_heads", config.heads)
    if config.heads * config.head_dim != config.hidden:
        _require(config, "head_size", config.hidden // config.heads)
    return {
        "n_layer": config.layers,
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_inner": config.mlp_width,
        "n_positions": config.max_sequence,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _read_llama(raw: Mapping[str, Any]) -> ModelConfig:
    family = family_of(raw)
    _refuse(raw, "hidden_act", "silu")
    for key, expected in {"pretraining_tp": 1, "rope_interleaved": False, "use_mrope": False}.items():
        _refuse(raw, key, expected)
    if family != "llama":
        _refuse(raw, "mlp_bias", False)
    heads, hidden = _need(raw, "num_attention_heads"), _need(raw, "hidden_size")
    size = raw.get("head_dim") or (128 if family == "qwen3" else 0)
    if _need(raw, "max_position_embeddings") > _MOST_POSITIONS:
        key, cure = "max_position_embeddings", f"set it to {_MOST_POSITIONS} or fewer in config.json"
        raise UserError("are more positions than can be had", cure=cure, field=key, value=raw[key])
    attention, window = _windows(raw, family)
    return validate(
        ModelConfig,
        {
            "vocab_size": _need(raw, "vocab_size"),
            "vocab_multiple": 1,
            "layers": _need(raw, "num_hidden_layers"),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": raw.get("num_key_value_heads", _KV_HEADS[family]) or heads,
            "head_size": 0 if size * heads == hidden else size,
            "mlp_hidden": _need(raw, "intermediate_size"),
            "max_sequence": _need(raw, "max_position_embeddings"),
            "attention": attention,
            "window": window,
            "position": "rotary",
            **_read_rope(raw),
            "norm": "rms",
            "norm_eps": raw.get("rms_norm_eps", 1e-6),
            "activation": "swiglu",
            "bias": _read_bias(raw, family),
            "qk_norm": family == "qwen3",
            "tie_embeddings": raw.get("tie_word_embeddings", False),
            "init_std": raw.get("initializer_range", 0.02),
        },
    )


def _read_bias(raw: Mapping[str, Any], family: str) -> str:
    if family == "qwen2":
        return "qkv"
    if family != "llama":
        _refuse(raw, "attention_bias", False)
        return "none"
    attention, mlp = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    if attention != mlp:
        cure = f"import a model with mlp_bias = {attention}"
        raise UserError(f"does not fit attention_bias = {attention} here", cure=cure, field="mlp_bias", value=mlp)
    return "all" if attention else "none"


def _windows(raw: Mapping[str, Any], family: str) -> tuple[list[str], int]:
    """The attention pattern, one entry per layer unless all are alike, and the window in tokens."""
    window = raw.get("sliding_window", None if family == "llama" else 4096)  # as transformers, where it is absent
    types = raw.get("layer_types")
    if family in ("llama", "mistral") or window is None or not raw.get("use_sliding_window", False):
        if types and any(kind != "full_attention" for kind in types):
            cure = "import a model whose layers all have full_attention"
            raise UserError("has no counterpart here", cure=cure, field="layer_types", value=types)
        if family == "llama" and window is not None and raw.get("use_sliding_window") is not False:
            cure = "set it to null in config.json, as the architecture attends to all"
            raise UserError("has no counterpart here", cure=cure, field="sliding_window", value=window)
        return (["window"], window) if family == "mistral" and window is not None else (["full"], 0)
    layers, first = _need(raw, "num_hidden_layers"), raw.get("max_window_layers")
    first = 28 if first is None else first
    derived = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    kinds = {"full_attention": "full", "sliding_attention": "window"}
    types = types or derived
    if len(types) != layers or not all(isinstance(kind, str) and kind in kinds for kind in types):
        cure = f"give {layers} of {', '.join(kinds)}"
        raise UserError("does not describe the layers", cure=cure, field="layer_types", value=types)
    pattern = [kinds[name] for name in types]
    return (pattern, window) if "window" in pattern else (["full"], 0)


def _read_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, from transformers 5's rope_parameters or 4's two keys."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if new and old and new != old:
        raise UserError("is not rope_scaling", cure="remove the one that is wrong", field="rope_parameters", value=new)
    rope = dict(new or old)
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3", "yarn"):
        raise UserError("has no counterpart here", cure="import default, llama3 or yarn", field="rope_type", value=kind)
    for settings in (rope, raw):
        _refuse(settings, "partial_rotary_factor", 1.0)
    if kind == "default":
        return {"rope_theta": theta}
    names = set(RopeScaling.model_fields) - {"kind", "original_max_position"}
    scaling = {name: rope[name] for name in names if rope.get(name) is not None}
    original = rope.get("original_max_position_embeddings") or _need(raw, "max_position_embeddings")
    if kind == "yarn" and "factor" not in scaling:
        scaling["factor"] = _need(raw, "max_position_embeddings") / original
    return {"rope_theta": theta, "rope_scaling": {"kind": kind, "original_max_position": original, **scaling}}


def _write_llama(config: ModelConfig, family: str) -> dict[str, Any]:
    _require(config, "norm", "rms")
    _require(config, "activation", "swiglu")
    if family in ("llama", "mistral") and config.hidden % config.heads:
        cure = "make hidden a multiple of heads, which transformers demands of this family"
        raise UserError("does not divide hidden", cure=cure, field="model.heads", value=config.heads)
    raw = {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.max_sequence,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
        "attention_bias": config.bias == "all",
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_scaling(config.rope_scaling),
    }
    if family == "llama":
        return raw | {"mlp_bias": config.bias == "all"}
    if family == "mistral":
        return raw | {"sliding_window": config.window}
    windows = [config.window_of(layer) is not None for layer in range(config.layers)]
    return raw | {
        "use_sliding_window": any(windows),
        "sliding_window": config.window or None,
        "max_window_layers": config.layers,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


def _write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.kind == "none":
        return None
    common = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    if scaling.kind == "llama3":
        return common | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    optional = {name: getattr(scaling, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    common |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    return common | {name: value for name, value in optional.items() if value}
