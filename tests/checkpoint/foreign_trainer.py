"""A `transformers.Trainer` with our callback; run by `test_foreign_huggingface`. Not a test itself."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from phalanx.checkpoint.foreign.huggingface_callback import PhalanxCheckpointCallback
from phalanx.core.config import parse_override


class BrokenOffError(Exception):
    """Raised in the middle of a step."""


class Kill(TrainerCallback):
    """Kills this process in the middle of a step; of a negative one, an error ends the training there, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step + 1 == -self.step:
            self.step = 0
            raise BrokenOffError


class Plain(nn.Module):
    """No model of transformers: a Trainer takes any module that gives a loss. With tied weights, a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.inner, self.head = nn.Embedding(31, 16), nn.Linear(16, 16), nn.Linear(16, 31, bias=False)
        self.head.weight = self.token.weight
        self.norm = nn.BatchNorm1d(16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.inner(self.token(input_ids[:, :-1])).flatten(0, 1))
        logits = self.head(nn.functional.dropout(hidden, 0.1, self.training))
        return {"loss": nn.functional.cross_entropy(logits, labels[:, 1:].flatten()), "logits": logits}


def made(kind: str) -> nn.Module:
    """A model; drawn with the generators where they are."""
    if kind == "plain":
        return Plain()
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2))  # with dropout


def train(root: str, kill_at: int, kind: str, *overrides: str) -> dict[str, Any]:
    """Losses and norms by step, weights, and the step it began after; see `Kill` for `kill_at`."""
    folder, settings = Path(root), dict(parse_override(text) for text in overrides)
    torch.set_num_threads(1)
    temporary = folder / "temporary"
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(temporary)
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
    trainer = Trainer(model=made(kind), args=arguments, train_dataset=rows, callbacks=callbacks)
    try:
        trainer.train(resume_from_checkpoint=callback.resume())
    except BrokenOffError:
        trainer.train(resume_from_checkpoint=callback.resume())
    history = {str(row["step"]): [row["loss"], row["grad_norm"]] for row in trainer.state.log_history if "loss" in row}
    weights = [parameter.double().sum().item() for parameter in trainer.model.parameters()]
    left = [path.name for path in temporary.glob("phalanx-resume-*")]
    return {"history": history, "weights": weights, "start": callback._resumed_step, "left": left}


def unseeded(root: str) -> list[dict[int, list[float]]]:
    """Losses and norms by step where the order of batches is drawn with torch's generator.

    Of a run that is not disturbed, of one that the Trainer itself resumes at step 4, and of those that the callback
    resumes at 4, 8 and 12.
    """
    folder, losses = Path(root), []
    torch.set_num_threads(1)
    texts = torch.randint(0, 31, (22, 8), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": row} for row in texts]

    def run(last: int, callback: PhalanxCheckpointCallback | None, resumed: str | None = None) -> None:
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=16,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no" if callback else "steps",
            save_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
            accelerator_config={"use_seedable_sampler": False},
        )
        callbacks: list[TrainerCallback] = [Kill(-last), *filter(None, [callback])]
        set_seed(3)
        data = {"train_dataset": rows, "eval_dataset": rows[:4]}
        trainer = Trainer(model=made("gpt2"), args=arguments, callbacks=callbacks, **data)
        try:
            trainer.train(resume_from_checkpoint=callback.resume() if callback else resumed)
        except BrokenOffError:
            return
        found = {row["step"]: [row["loss"], row["grad_norm"]] for row in trainer.state.log_history if "loss" in row}
        losses.append(found)

    run(0, None)
    run(0, None, str(folder / "trainer" / "checkpoint-4"))
    for at in (4, 8, 12):
        given: dict[str, Any] = {"folder": folder / f"killed-{at}", "mode": "blocking", "every_steps": 4}
        run(at + 1, PhalanxCheckpointCallback(**given))
        again = PhalanxCheckpointCallback(**given)
        run(0, again)
        assert again._resumed_step == at
    return losses
