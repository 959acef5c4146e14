"""litgpt: its `GPT` of the same size under the `fit` loop of its own pretraining, in eager mode.

`litgpt.pretrain.main` always compiles; `fit`, the loop itself, is called here with the model that `main` would have
compiled, as `main` calls it. litgpt has no learned positions: rotary ones, over the quarter of a head that is its
default, take their place. Logging goes every tenth step to the CSV logger.
"""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
from lightning.fabric.loggers import CSVLogger
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.pretrain import fit, initialize_weights
from litgpt.utils import instantiate_torch_optimizer
from torch.utils.data import DataLoader

from contenders.task import Task, Windows


def run(task: Task) -> None:
    windows = Windows(task, extra=1)
    precision = "bf16-mixed" if task.precision == "bf16" else "32-true"
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, precision=precision, loggers=[CSVLogger(task.folder, flush_logs_every_n_steps=10)]
    )
    fabric.launch()
    torch.set_num_threads(task.threads)
    fabric.seed_everything(0, verbose=False)
    config = Config(
        name="same-size",
        block_size=task.length,
        padded_vocab_size=windows.vocabulary,
        vocab_size=windows.vocabulary,
        n_layer=task.layers,
        n_head=task.heads,
        n_embd=task.hidden,
        intermediate_size=4 * task.hidden,
        bias=False,
        parallel_residual=False,
    )
    with fabric.init_module(empty_init=True):
        model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    model.transformer.wte.weight = model.lm_head.weight
    model = fabric.setup(model)
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    chosen = {"class_path": "torch.optim.AdamW", "init_args": settings}
    optimizer = fabric.setup_optimizers(instantiate_torch_optimizer(chosen, model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(windows, batch_size=task.batch))
    state = {"model": model, "optimizer": optimizer, "train_dataloader": loader, "iter_num": 0, "step_count": 0}
    train = TrainArgs(
        save_interval=None,
        log_interval=10,
        global_batch_size=task.batch,
        micro_batch_size=task.batch,
        max_tokens=task.steps * task.batch * task.length,
        max_norm=1.0,
        min_lr=1e-4,
        lr_warmup_steps=10,
        tie_embeddings=True,
    )
    evaluation = EvalArgs(interval=10**9, max_iters=1, initial_validation=False, final_validation=False)
    fit(
        fabric=fabric,
        devices=1,
        state=state,
        train_dataloader=loader,
        val_dataloader=loader,
        out_dir=Path(task.folder),
        tokenizer_dir=None,
        train=train,
        eval=evaluation,
    )
