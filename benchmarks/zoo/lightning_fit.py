"""Lightning's Trainer: callbacks, a progress bar, and a validation at the end of each epoch.

torchrun --nproc-per-node 2 lightning_fit.py 10
"""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader(size, batch):
    return DataLoader(TensorDataset(torch.randn(size, 256), torch.randint(10, (size,))), batch_size=batch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--held-out", type=int, default=400_000, help="examples of a validation")
    options = parser.parse_args()
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(monitor="val_loss", save_last=True),
            lightning.pytorch.callbacks.LearningRateMonitor("epoch"),
        ],
        log_every_n_steps=10,
        default_root_dir="out",
    )
    trainer.fit(Module(), loader(40_000, 128), loader(options.held_out, 256))


if __name__ == "__main__":
    main()
