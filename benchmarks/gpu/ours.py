"""Ours: the step of the training loop on tokens that are on the device already, the trainer itself, and its parts."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpu.task import Task, measured_s, timed, tokens
from phalanx.core.hardware import table_peak
from phalanx.data.batch import Batch
from phalanx.kernels.attention import CausalKernel
from phalanx.kernels.attention_trial import find_fault
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import flops_per_token, num_parameters
from phalanx.optim.bad_step import BadStepJudge
from phalanx.optim.build import build_optimizer
from phalanx.train.assemble import build_trainer
from phalanx.train.config import RunConfig
from phalanx.train.device import Device, choose_device
from phalanx.train.ranks import Ranks
from phalanx.train.session import run_session
from phalanx.train.trainer import Trainer

_SKIPPED_STEPS = 10
_TRAINER_STEPS = 60


def model_settings(task: Task) -> dict[str, Any]:
    """The shape as settings of `[model]`."""
    shape = task.sizes
    settings: dict[str, Any] = {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "mlp_hidden": shape.mlp_hidden,
        "rope_theta": shape.rope_theta,
    }
    if shape.gpt:
        gpt = {"position": "learned", "norm": "layer", "activation": "gelu_tanh", "tie_embeddings": True}
        settings = {name: value for name, value in settings.items() if name != "rope_theta"} | gpt
    return settings


def run_config(task: Task, **changes: Any) -> RunConfig:
    """A run of the shape, with the settings that a user would leave alone at their defaults."""
    shape = task.sizes
    train = {
        "steps": _TRAINER_STEPS,
        "global_batch": shape.batch,
        "micro_batch": shape.batch,
        "device": task.device,
        "precision": task.precision if task.device == "cuda" else "fp32",
        "compile": task.compiled,
        "recompute": "full" if shape.recompute else "none",
    }
    if task.precision == "fp8":  # in all blocks: a shape of four stands for a model of many
        train |= {"bf16_layers_at_start": 0, "bf16_layers_at_end": 0}
    optim: dict[str, Any] = {"lr": 1e-4}
    if shape.state_bits != 32:
        optim["state_bits"] = shape.state_bits
    settings: dict[str, Any] = {"train": train, "optim": optim, "data": {"sequence_length": shape.length}}
    return RunConfig.model_validate(settings | changes)


def step(task: Task) -> dict[str, Any]:
    """Forward, backward, gradient norm, bad-step verdict and AdamW, as the training loop makes them."""
    shape = task.sizes
    sizes = {"vocab_size": shape.vocabulary, "max_sequence": shape.length}
    config = run_config(task, model=model_settings(task) | sizes)
    device = choose_device(config.train, None)
    trainer = build_trainer(config, shape.vocabulary, device, Ranks())
    _choose_attention(trainer, task, device)
    optimizer = build_optimizer(config.optim, trainer.parameters)
    judge = BadStepJudge(config.optim.bad_step, device.torch_device)
    drawn = tokens(task)
    numbers, weights = torch.arange(shape.batch), torch.ones(shape.batch, shape.length)
    batch = Batch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), weights, None, numbers)

    def one() -> Tensor:
        loss = trainer.accumulate_gradients(batch, micro_batch=shape.batch, seed=0, step=0)
        norm, scale = optimizer.clip()
        optimizer.step(found_inf=judge.judge(loss, norm), grad_scale=scale)
        trainer.zero_grad()
        trainer.weights_changed()
        return loss

    return timed(task, one)


def _choose_attention(trainer: Trainer, task: Task, device: Device) -> None:
    """The fastest kernel that passes its trial, as `phalanx train` chooses it."""
    if task.device != "cuda":
        return
    trial = trainer.attention_trial(task.sizes.batch, task.sizes.length)
    for kernel in trial.kernels:
        fault = find_fault(kernel, trial.shape, device.torch_device)
        print(f"attention by {kernel}: {fault or 'passed'}", flush=True)
        if not fault:
            trainer.use_attention(CausalKernel(kernel, task.sizes.length))
            return


def trainer(task: Task) -> dict[str, Any]:
    """`phalanx train` on real text, checkpoints on: the time between updates, those that write checkpoints included.

    The vocabulary of characters is padded to the shape's, so that the products are the same.
    """
    shape = task.sizes
    model = model_settings(task) | {"vocab_multiple": shape.vocabulary}
    data = {
        "sequence_length": shape.length,
        "sources": [{"kind": "text", "path": task.source}],
        "tokenizer": {"kind": "chars", "end_of_text": False},
        "validation_split": "tail",
        "validation_fraction": 0.1,
        "folder": f"{task.folder}/prepared",
        "document_mask": False,
    }
    changes = {
        "model": model,
        "data": data,
        "run": {"folder": f"{task.folder}/run"},
        "evaluate": {"final_tokens": shape.batch * shape.length},
        "checkpoint": {"every_steps": _TRAINER_STEPS // 2},
    }
    stamps: list[float] = []
    handle = register_optimizer_step_post_hook(lambda *_: stamps.append(time.perf_counter()))
    try:
        run_session(run_config(task, **changes), Path(task.folder) / "trainer.toml", Console(quiet=True))
    finally:
        handle.remove()
    seconds = [after - before for before, after in itertools.pairwise(stamps)][_SKIPPED_STEPS:]
    peak_bytes = torch.cuda.max_memory_allocated() if task.device == "cuda" else 0
    return {"step_s": statistics.fmean(seconds), "first_step_s": 0.0, "peak_bytes": peak_bytes, "loss": 0.0}


def products(task: Task) -> dict[str, Any]:
    """What the device is, the rate of a large square product in bf16, and what the shape's step computes."""
    on_gpu, shape = task.device == "cuda", task.sizes
    size = 8192 if on_gpu else 512
    left = torch.randn(size, size, device=task.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    seconds = [measured_s(task.device, lambda: torch.mm(left, left)) for _ in range(12)]
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    peak = table_peak(name, bf16=True) if on_gpu else None
    config = ModelConfig(**model_settings(task), vocab_size=shape.vocabulary, max_sequence=shape.length)
    heads = 12 * shape.layers * shape.hidden * shape.length
    return {
        "device": f"{name}, torch {torch.__version__}",
        "product_flops_per_s": 2 * size**3 / statistics.median(seconds[2:]),
        "peak_flops_per_s": None if peak is None else peak.flops_per_s,
        "parameters": num_parameters(config),
        "flops_per_token": flops_per_token(config, shape.length).total,
        "palm_flops_per_token": 6 * num_parameters(config) + heads,
    }
