"""A deep model that torch.compile works on for a minute or so before its first step, and again when the batch changes.

torchrun --nproc-per-node 2 compiles.py 400 --layers 12
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.norm, self.up, self.down, self.kind = nn.LayerNorm(width), nn.Linear(width, 2 * width), None, kind
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.up(self.norm(x))
        y = (torch.sin, torch.tanh, nn.functional.gelu, nn.functional.silu)[self.kind % 4](y)
        return x + self.down(y).softmax(-1) * x.std(-1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.compile(nn.Sequential(*(Block(128, kind) for kind in range(options.layers))), dynamic=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(options.steps):
        size = 32 if step < options.steps // 2 else 48
        optimizer.zero_grad()
        loss = model(torch.randn(size, 64, 128)).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
