"""The form of Lightning's loop: a trainer that owns the loop and calls a module and callbacks; validation every epoch.

torchrun --nproc-per-node 2 lightning_form.py 10
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, batch):
        return nn.functional.cross_entropy(self.layers(batch), batch[:, :10].argmax(1))


class Callback:
    def on_fit_start(self, trainer): ...
    def on_batch_end(self, trainer, index, loss): ...
    def on_epoch_end(self, trainer): ...


class Bar(Callback):
    """Of this rank alone, redrawn in one line."""

    def on_fit_start(self, trainer):
        self.bar = tqdm(total=trainer.batches, disable=trainer.rank != 0, mininterval=0.1)

    def on_batch_end(self, trainer, index, loss):
        self.bar.update()
        if index % 20 == 0:  # as a logger that asks for the loss now and then
            self.bar.set_postfix(loss=f"{loss.item():.3f}")

    def on_epoch_end(self, trainer):
        self.bar.reset()


class SaveBest(Callback):
    best = float("inf")

    def on_epoch_end(self, trainer):
        if trainer.val_loss < self.best and trainer.rank == 0:
            torch.save(trainer.module.state_dict(), Path(f"epoch={trainer.epoch}.ckpt"))
        self.best = min(self.best, trainer.val_loss)
        dist.barrier()


class Trainer:
    def __init__(self, epochs, batches, seconds, callbacks):
        self.epochs, self.batches, self.seconds, self.callbacks = epochs, batches, seconds, callbacks
        self.rank = dist.get_rank()

    def call(self, hook, *given):
        for callback in self.callbacks:
            getattr(callback, hook)(self, *given)

    def fit(self, module):
        self.module = DDP(module)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.call("on_fit_start")
        for self.epoch in range(self.epochs):
            for index in range(self.batches):
                optimizer.step(lambda: self.training_step(optimizer))  # the step is a closure, as Lightning has it
                self.call("on_batch_end", index, self.loss)
            self.run_stage()
            self.call("on_epoch_end")

    def training_step(self, optimizer):
        optimizer.zero_grad()
        self.loss = self.module(torch.randn(256, 256))
        self.loss.backward()
        return self.loss

    @torch.no_grad()
    def run_stage(self):
        end, losses = time.monotonic() + self.seconds, []
        while time.monotonic() < end:
            losses.append(self.module.module(torch.randn(512, 256)))
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        self.val_loss = mean.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=25.0, help="of a validation")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    Trainer(options.epochs, options.batches, options.seconds, [Bar(), SaveBest()]).fit(Module())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
