"""How Hugging Face names and lays out the weights of each family, against our logical parameters.

One rule per stored tensor: which logical parameters lie in it, stacked along dimension 0, and whether it is stored
transposed. Our ``o`` and ``down`` are (inputs, outputs); torch's Linear is (outputs, inputs); GPT-2's Conv1D is
(inputs, outputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import Parameter, parameter_table


@dataclass(frozen=True)
class Rule:
    """The stored tensor `name` is the stack of the logical `parts`, transposed if `transposed`."""

    name: str
    parts: tuple[str, ...]
    transposed: bool = False

    def split(self, stored: Tensor, table: Mapping[str, Parameter]) -> Iterator[tuple[str, Tensor]]:
        """The logical tensors in `stored`.

        Raises:
            UserError: the shape is not the config's.
        """
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
