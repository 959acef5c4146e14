"""Peers, with the loop that all have: bf16 under autocast over fp32 weights, clipped gradients, fused AdamW."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu.task import Task, timed, tokens


def nanogpt(task: Task) -> dict[str, Any]:
    """The `model.py` of a checkout of nanoGPT, compiled."""
    sys.path.insert(0, task.source)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    shape = task.sizes
    sizes = {"n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.hidden, "vocab_size": shape.vocabulary}
    model = GPT(GPTConfig(block_size=shape.length, dropout=0.0, bias=False, **sizes)).to(task.device)
    compiled = _compiled(task, model)
    return _train(task, model, lambda inputs, targets: compiled(inputs, targets)[1])


def huggingface(task: Task) -> dict[str, Any]:
    """`LlamaForCausalLM` or `GPT2LMHeadModel` of transformers, compiled."""
    model = _transformers_model(task)
    compiled = _compiled(task, model)
    return _train(task, model, lambda inputs, targets: compiled(inputs, labels=inputs, shift_labels=targets).loss)


def liger(task: Task) -> dict[str, Any]:
    """The same Llama with the kernels of Liger, as it is written."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

    apply_liger_kernel_to_llama()
    model = _transformers_model(task)
    return _train(task, model, lambda inputs, targets: model(inputs, labels=inputs, shift_labels=targets).loss)


def torchtitan(task: Task) -> dict[str, Any]:
    """torchtitan's Llama (0.2), block by block compiled, as its `parallelize_llama` does."""
    from torchtitan.models.llama3.model.args import TransformerModelArgs  # type: ignore[import-not-found]
    from torchtitan.models.llama3.model.model import Transformer  # type: ignore[import-not-found]

    shape = task.sizes
    plain = int(2 * 4 * shape.hidden / 3)
    model = Transformer(
        TransformerModelArgs(
            dim=shape.hidden,
            n_layers=shape.layers,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            vocab_size=shape.vocabulary,
            ffn_dim_multiplier=shape.mlp_hidden / plain,
            multiple_of=64,
            rope_theta=shape.rope_theta,
            max_seq_len=shape.length,
        )
    ).to(task.device)
    model.init_weights(torch.device(task.device))
    if task.compiled:
        for block in model.layers.values():
            block.compile()

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())

    return _train(task, model, loss)


def _transformers_model(task: Task) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shape = task.sizes
    with torch.device(task.device):
        if shape.gpt:
            sizes = {
                "n_layer": shape.layers,
                "n_head": shape.heads,
                "n_embd": shape.hidden,
                "n_positions": shape.length,
            }
            drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config = GPT2Config(vocab_size=shape.vocabulary, use_cache=False, **sizes, **drops)
            return GPT2LMHeadModel(config).train()
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.mlp_hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.length,
            rope_theta=shape.rope_theta,
            use_cache=False,
            attn_implementation="sdpa",
        )
        model = LlamaForCausalLM(config).train()
    if shape.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _compiled(task: Task, model: nn.Module) -> Any:
    return torch.compile(model) if task.compiled else model


def _train(task: Task, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    drawn = tokens(task)
    inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    narrow = task.precision == "bf16" and task.device == "cuda"

    def one() -> Tensor:
        with torch.autocast(task.device, torch.bfloat16, enabled=narrow):
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed(task, one)
