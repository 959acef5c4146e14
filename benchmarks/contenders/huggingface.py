"""Hugging Face: `GPT2LMHeadModel` of the same size under `Trainer`'s own loop, without evaluation, saving or reports.

Differences that its GPT-2 cannot be rid of: biases everywhere. Its optimizer and logging are Trainer's defaults, but
for logging every tenth step as all contenders do.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from contenders.task import Task, Windows


def run(task: Task) -> None:
    torch.manual_seed(0)
    windows = Windows(task, extra=0)  # targets are the inputs; the model shifts them
    config = GPT2Config(
        vocab_size=windows.vocabulary,
        n_positions=task.length,
        n_embd=task.hidden,
        n_layer=task.layers,
        n_head=task.heads,
        activation_function=task.activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    arguments = TrainingArguments(
        output_dir=task.folder,
        max_steps=task.steps,
        per_device_train_batch_size=task.batch,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=task.precision == "bf16",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    torch.set_num_threads(task.threads)  # accelerate may have set its own
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=windows, data_collator=collate)
    trainer.train()


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens}
