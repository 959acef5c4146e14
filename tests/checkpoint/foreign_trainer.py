"""Runs a `transformers.Trainer` three times, each in a process of its own: through, killed, and resumed. Not a test.

usage: foreign_trainer.py FOLDER KILL_AT [SETTING=VALUE …]; prints the losses by step of each as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
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


def train(folder: Path, kill_at: int, settings: dict[str, Any]) -> dict[str, Any]:
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


def in_child(*arguments: Any) -> Any:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(theirs, json.dumps(train(*arguments)).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        text = told.read()
    return json.loads(text) if text else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    root, kill_at = Path(sys.argv[1]), int(sys.argv[2])
    settings = dict(parse_override(text) for text in sys.argv[3:])
    through = in_child(root / "through", 0, settings)
    killed = in_child(root / "killed", kill_at, settings)
    print(json.dumps([through, killed, in_child(root / "killed", 0, settings)]))
