"""Hugging Face model folders: import, export, names of weights, and a parity check against transformers.

One rule per stored tensor: which logical parameters lie in it, stacked along dimension 0, and whether it is stored
transposed. Our ``o`` and ``down`` are (inputs, outputs); torch's Linear is (outputs, inputs); GPT-2's Conv1D is
(inputs, outputs).

A folder is config.json, weights in safetensors (one file, or shards named by model.safetensors.index.json) and
tokenizer.json. Nothing is unpickled: folders with only ``.bin`` weights are refused.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.core.files import fsync_folder, write_json
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.hf_config import dequantise_first, export_family, family_of, read_config, write_config
from phalanx.model.hf_files import INDEX, WEIGHTS, Stored, open_weights, read_json, stored_tensors
from phalanx.model.logical_parameters import LogicalParameters
from phalanx.model.shapes import Parameter, parameter_table

_SAME_MODEL = "take config.json and weights from the same model, whole and without anything added to it"


@dataclass(frozen=True)
class Rule:
    """The stored tensor `name` is the stack of the logical `parts`, transposed if `transposed`."""

    name: str
    parts: tuple[str, ...]
    transposed: bool = False

    def require_shape(self, shape: tuple[int, ...], table: Mapping[str, Parameter]) -> None:
        """Refuse a stored tensor whose shape is not the config's."""
        shapes = [table[part].shape for part in self.parts]
        full = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        expected = full[::-1] if self.transposed else full
        if shape != expected:
            raise UserError(
                f"has shape {shape} where config.json makes it {expected}", cure=_SAME_MODEL, field=self.name
            )

    def split(self, stored: Tensor, table: Mapping[str, Parameter]) -> Iterator[tuple[str, Tensor]]:
        """The logical tensors in `stored`, which has the config's shape."""
        rows = [table[part].shape[0] for part in self.parts]
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


_PLAIN = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"(?:model\.layers|layers|transformer\.h|h)\.(\d{1,9})\.")
_BUFFERS = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_GPT2_BUFFERS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")  # masks, in files of former versions


def import_folder(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a Llama, Mistral, Qwen2, Qwen3 or GPT-2 folder.

    The headers of its files are held against config.json before anything of the size that either says is built.

    Returns:
        The config (vocabulary unpadded) and every logical parameter, in the folder's dtype, on the CPU.

    Raises:
        UserError: a file is missing or damaged, the architecture is unknown, weights are quantised, not finite,
            missing, left over, of another shape, or tied to an embedding that they differ from.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    family = family_of(raw)
    stored = stored_tensors(path)
    config = read_config(raw, stored_layers=len({found[1] for found in map(_LAYER.match, stored) if found}))
    table, wanted = parameter_table(config), rules(family, config)
    names = _names(wanted, stored)
    tied = _require_all_taken(family, config, stored, {*names.values()})
    for rule in wanted:
        rule.require_shape(stored[names[rule.name]].shape, table)
    tensors: dict[str, Tensor] = {}
    for file in sorted({stored[name].file for name in names.values()}):
        with open_weights(file) as opened:
            for rule in (rule for rule in wanted if stored[names[rule.name]].file == file):
                tensor = opened.get_tensor(names[rule.name])
                require_finite(names[rule.name], tensor)
                tensors |= rule.split(tensor, table)
    if tied is not None:
        _require_tied(tied, stored[tied].file, tensors["embedding"])
    return config, {name: tensors[name] for name in table}


def require_finite(name: str, tensor: Tensor) -> None:
    """Refuse weights of which one is NaN or infinite."""
    least, most = tensor.aminmax()  # NaN is both, where there is one
    if not (least.isfinite() and most.isfinite()):
        cure = "take the weights from before they were damaged"
        raise UserError("has values that are NaN or infinite", cure=cure, field=name)


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


def _names(wanted: list[Rule], stored: Mapping[str, Stored]) -> dict[str, str]:
    """What each rule's tensor is called in the files (those of base models lack ``transformer.`` or ``model.``)."""
    names = {}
    for rule in wanted:
        candidates = (rule.name, rule.name.removeprefix("transformer."), rule.name.removeprefix("model."))
        found = next((name for name in candidates if name in stored), None)
        if found is None:
            cure = "fetch the folder again, or correct config.json (biases, tied embeddings)"
            raise UserError("is missing from the weights", cure=cure, field=rule.name)
        names[rule.name] = found
    return names


def _require_all_taken(family: str, config: ModelConfig, stored: Mapping[str, Stored], taken: set[str]) -> str | None:
    """Refuse weights that are no plain numbers, or that no rule takes; the name of a stored head that is tied."""
    tied = None
    for name, found in stored.items():
        if _BUFFERS.fullmatch(name) or (family == "gpt2" and _GPT2_BUFFERS.fullmatch(name)):
            continue
        if found.dtype not in _PLAIN:
            raise dequantise_first(f"{found.file}: {name}", found.dtype)
        if name == "lm_head.weight" and config.tie_embeddings:
            tied = name
        elif name not in taken:
            problem = f"is in {found.file}, and the model of config.json has no such weight"
            raise UserError(problem, cure=_SAME_MODEL, field=name)
    return tied


def _require_tied(name: str, file: Path, embedding: Tensor) -> None:
    with open_weights(file) as opened:
        if not torch.equal(opened.get_tensor(name).float(), embedding.float()):
            cure = "set tie_word_embeddings to false in config.json, or remove the head from the weights"
            raise UserError(f"{name} differs from the embedding", cure=cure, field="tie_word_embeddings", value=True)


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
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in stored.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


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
