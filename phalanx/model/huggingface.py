"""Hugging Face model folders: import, export, names of weights, and a parity check against transformers.

One rule per stored tensor: which logical parameters lie in it, stacked along dimension 0, and whether it is stored
transposed. Our ``o`` and ``down`` are (inputs, outputs); torch's Linear is (outputs, inputs); GPT-2's Conv1D is
(inputs, outputs).

A folder is config.json, weights in safetensors (one file, or shards named by model.safetensors.index.json) and
tokenizer.json. Nothing is unpickled: folders with only ``.bin`` weights are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.core.files import fsync_folder, write_json
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.hf_config import export_family, family_of, read_config, write_config
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.model.shapes import Parameter, parameter_table


@dataclass(frozen=True)
class Rule:
    """The stored tensor `name` is the stack of the logical `parts`, transposed if `transposed`."""

    name: str
    parts: tuple[str, ...]
    transposed: bool = False

    def split(self, stored: Tensor, table: Mapping[str, Parameter]) -> Iterator[tuple[str, Tensor]]:
        """The logical tensors in `stored`; a `UserError` where its shape is not the config's."""
        shapes = [table[part].shape for part in self.parts]
        full = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        expected = full[::-1] if self.transposed else full
        if tuple(stored.shape) != expected:
            problem = f"has shape {tuple(stored.shape)} where config.json makes it {expected}"
            raise UserError(problem, cure="take config.json and weights from the same model", field=self.name)
        rows = [shape[0] for shape in shapes]
        pieces = torch.split(stored.t() if self.transposed else stored, rows)
        return zip(self.parts, (piece.contiguous() for piece in pieces), strict=True)

    def join(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], like: Tensor) -> Tensor:
        """The stored tensor; a bias or norm bias that the model lacks becomes zeros, vocabulary padding is cut."""
        parts = [tensors.get(part) for part in self.parts]
        whole = [
            torch.zeros(shapes[name], dtype=like.dtype) if part is None else part[: shapes[name][0]]
            for name, part in zip(self.parts, parts, strict=True)
        ]
        stored = torch.cat(whole) if len(whole) > 1 else whole[0]
        return (stored.t() if self.transposed else stored).detach().cpu().contiguous()


def rules(family: str, config: ModelConfig) -> list[Rule]:
    """The rules of all tensors of a model; `config` is as `phalanx.model.hf_config.read_config` gives it."""
    table = parameter_table(config)
    make = _gpt2 if family == "gpt2" else _llama
    return [rule for rule in make(config.layers) if all(part in table for part in rule.parts)]


def _llama(layers: int) -> list[Rule]:
    found = [Rule("model.embed_tokens.weight", ("embedding",)), Rule("model.norm.weight", ("norm",))]
    found.append(Rule("lm_head.weight", ("head",)))
    for layer in range(layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        found += [
            Rule(f"{theirs}input_layernorm.weight", (f"{ours}attention.norm",)),
            Rule(f"{theirs}post_attention_layernorm.weight", (f"{ours}mlp.norm",)),
        ]
        for name in ("q", "k", "v", "o"):
            found += _linear(f"{theirs}self_attn.{name}_proj", f"{ours}attention.{name}", transposed=name == "o")
        for name in ("gate", "up", "down"):
            found += _linear(f"{theirs}mlp.{name}_proj", f"{ours}mlp.{name}", transposed=name == "down")
        for name in ("q_norm", "k_norm"):
            found.append(Rule(f"{theirs}self_attn.{name}.weight", (f"{ours}attention.{name}",)))
    return found


def _gpt2(layers: int) -> list[Rule]:
    found = [Rule("transformer.wte.weight", ("embedding",)), Rule("transformer.wpe.weight", ("position_embedding",))]
    found += [*_linear("transformer.ln_f", "norm", transposed=False), Rule("lm_head.weight", ("head",))]
    for layer in range(layers):
        ours, theirs = f"layers.{layer}.", f"transformer.h.{layer}."
        qkv = tuple(f"{ours}attention.{name}" for name in "qkv")
        found += _linear(f"{theirs}ln_1", f"{ours}attention.norm", transposed=False)
        found += _linear(f"{theirs}ln_2", f"{ours}mlp.norm", transposed=False)
        found += [
            Rule(f"{theirs}attn.c_attn.weight", qkv, transposed=True),
            Rule(f"{theirs}attn.c_attn.bias", tuple(f"{name}_bias" for name in qkv)),
        ]
        found += _linear(f"{theirs}attn.c_proj", f"{ours}attention.o", transposed=False)
        found += _linear(f"{theirs}mlp.c_fc", f"{ours}mlp.up", transposed=True)
        found += _linear(f"{theirs}mlp.c_proj", f"{ours}mlp.down", transposed=False)
    return found


def _linear(theirs: str, ours: str, *, transposed: bool) -> list[Rule]:
    return [Rule(f"{theirs}.weight", (ours,), transposed), Rule(f"{theirs}.bias", (f"{ours}_bias",))]


_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def import_folder(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a Llama, Mistral, Qwen2, Qwen3 or GPT-2 folder.

    Returns:
        The config (vocabulary unpadded) and every logical parameter, in the folder's dtype, on the CPU.

    Raises:
        UserError: a file is missing or damaged, the architecture is unknown, a tensor is missing or of another shape.
    """
    path = Path(path)
    raw = _read_json(path / "config.json")
    family, config = family_of(raw), read_config(raw)
    table, wanted = parameter_table(config), rules(family, config)
    tensors: dict[str, Tensor] = {}
    places = _places(path, wanted)
    for file in sorted({file for file, _ in places.values()}):
        here = [(rule, stored) for rule in wanted for place, stored in [places[rule.name]] if place == file]
        with _open(file) as opened:
            for rule, name in here:
                tensors |= rule.split(opened.get_tensor(name), table)
    return config, {name: tensors[name] for name in table}


def export_folder(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer_json: Path | None,
    path: Path,
    *,
    end_of_text: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that transformers loads; it appears whole or not at all.

    Args:
        tensors: logical parameters, as `LogicalParameters` or a checkpoint gives them; vocabulary padding is cut.
        end_of_text: token id that ends a text, for config.json.
        dtype: of the written weights; None = as given.

    Raises:
        UserError: the architecture has no Hugging Face counterpart (names the field), a tensor is missing, `path`
            exists, or it cannot be written.
    """
    path = Path(path)
    raw = write_config(config) | {"eos_token_id": end_of_text}
    stored = _stored(config, tensors, dtype)
    raw["torch_dtype"] = str(next(iter(stored.values())).dtype).removeprefix("torch.")
    with _publish(path) as aside:
        write_json(aside / "config.json", raw)
        _write_weights(aside, stored, max_shard_bytes)
        if tokenizer_json is not None:
            try:
                shutil.copyfile(tokenizer_json, aside / "tokenizer.json")
            except FileNotFoundError:
                source = str(tokenizer_json)
                raise UserError(
                    "there is no such file", cure="check the path", field="tokenizer", value=source
                ) from None
            known = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_sequence}
            write_json(aside / "tokenizer_config.json", known)


def load_decoder(
    path: Path, *, dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype | None = None
) -> Decoder:
    """The folder's model as a `Decoder` on the CPU."""
    config, tensors = import_folder(path)
    model = Decoder(config, dtype=dtype, compute_dtype=compute_dtype)
    LogicalParameters(model).load(tensors)
    return model


def parity(path: Path, *, batch: int = 2, length: int = 32, seed: int = 0) -> float:
    """Largest absolute difference of float32 logits between our model and transformers', over random tokens.

    Raises:
        UserError: transformers is not installed, or the folder cannot be imported.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UserError("transformers is not installed", cure="pip install transformers") from None
    ours = load_decoder(path)
    theirs: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, local_files_only=True
    )
    theirs.train(False)
    generator = torch.Generator().manual_seed(seed)
    length = min(length, ours.config.max_sequence)
    tokens_BS = torch.randint(ours.config.vocab_size, (batch, length), generator=generator)
    with torch.no_grad():
        difference = ours.logits(ours(tokens_BS)) - theirs(tokens_BS).logits
    return float(difference.abs().max())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("is missing", cure="point to a complete Hugging Face folder", field=str(path)) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", cure="fetch the folder again", field=str(path)) from None
    if not isinstance(value, dict):
        raise UserError("is not a JSON object", cure="fetch the folder again", field=str(path))
    return value


def _places(folder: Path, wanted: list[Rule]) -> dict[str, tuple[Path, str]]:
    """For each rule's tensor, the file that holds it and its name there (GPT-2 files may lack ``transformer.``)."""
    files = _weight_files(folder)
    places = {}
    for rule in wanted:
        names = (rule.name, rule.name.removeprefix("transformer."), rule.name.removeprefix("model."))
        stored = next((name for name in names if name in files), None)
        if stored is None:
            cure = "fetch the folder again, or correct config.json (biases, tied embeddings)"
            raise UserError("is missing from the weights", cure=cure, field=rule.name)
        places[rule.name] = (files[stored], stored)
    return places


def _weight_files(folder: Path) -> dict[str, Path]:
    if (folder / _INDEX).exists():
        index = _read_json(folder / _INDEX).get("weight_map", {})
        outside = [name for name in index.values() if Path(name).name != name]
        if outside:
            raise UserError("names a file outside the folder", cure="do not trust it", field=_INDEX, value=outside[0])
        return {tensor: folder / name for tensor, name in index.items()}
    if (folder / _WEIGHTS).exists():
        with _open(folder / _WEIGHTS) as file:
            return dict.fromkeys(file.keys(), folder / _WEIGHTS)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        cure = "convert it with transformers: model.save_pretrained(folder, safe_serialization=True)"
        raise UserError("has only pickled weights, which are never loaded", cure=cure, field=str(folder))
    raise UserError(f"has no {_WEIGHTS}", cure="point to a complete Hugging Face folder", field=str(folder))


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UserError("is missing", cure="fetch the folder again", field=str(path)) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"is damaged: {error}", cure="fetch the folder again", field=str(path)) from None


def _stored(config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    missing = [name for name in parameter_table(config) if name not in tensors]
    if missing:
        raise UserError("is missing", cure="export all logical parameters of the model", field=missing[0])
    raw = write_config(config)
    whole = read_config(raw)
    shapes = {name: parameter.shape for name, parameter in parameter_table(whole).items()}
    like = tensors["embedding"]
    joined = {rule.name: rule.join(tensors, shapes, like) for rule in rules(export_family(config), whole)}
    return {name: tensor.to(dtype or tensor.dtype) for name, tensor in joined.items()}


def _write_weights(folder: Path, stored: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in stored.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / _WEIGHTS, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in stored.values())
    write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


@contextmanager
def _publish(path: Path) -> Iterator[Path]:
    """A folder beside `path` that is made durable and renamed to it when the block ends without an error."""
    if path.exists():
        raise UserError("exists already", cure="name a new folder, or remove it", field="path", value=str(path))
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        yield aside
        for file in aside.iterdir():
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
        fsync_folder(aside)
        aside.chmod(0o755)
        aside.rename(path)
        fsync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        cure = "free space there, or choose another folder"
        raise UserError(f"cannot be written: {error}", cure=cure, field="path", value=str(path)) from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
