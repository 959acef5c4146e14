"""A `transformers.Trainer` with our callback; run by `test_foreign_huggingface`. Not a test itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from phalanx.checkpoint.foreign.huggingface import PhalanxCheckpointCallback
from phalanx.core.config import parse_override


class Kill(TrainerCallback):
    """Kills this process in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: str, kill_at: int, *overrides: str) -> dict[str, Any]:
    """Losses and norms by step, weights, and the step it began after; with `kill_at`, it kills itself in this step."""
    folder, settings = Path(root), dict(parse_override(text) for text in overrides)
    torch.set_num_threads(1)
    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2)  # with dropout
    texts = torch.randint(0, 31, (22, 8), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": row} for row in texts]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=16,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    callback = PhalanxCheckpointCallback(folder / "checkpoints", **settings)
    callbacks = [callback, Kill(kill_at)]
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=callback.resume())
    history = {str(row["step"]): [row["loss"], row["grad_norm"]] for row in trainer.state.log_history if "loss" in row}
    weights = [parameter.double().sum().item() for parameter in trainer.model.parameters()]
    return {"history": history, "weights": weights, "start": callback._resumed_step}
