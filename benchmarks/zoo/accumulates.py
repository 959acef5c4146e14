"""Gradient accumulation: each step has many micro-batches, and only the last one is synchronised (``no_sync``).

torchrun --nproc-per-node 2 accumulates.py 100 --micro 128
"""

import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--micro", type=int, default=128, help="micro-batches in a step")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 512)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(options.steps):
        began = time.time()
        optimizer.zero_grad()
        total = 0.0
        for micro in range(options.micro):
            last = micro == options.micro - 1
            with contextlib.nullcontext() if last else model.no_sync():
                x = torch.randn(256, 512)
                loss = nn.functional.mse_loss(model(x), x) / options.micro
                loss.backward()
                total += loss.item()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} | loss {total:.4f} | {time.time() - began:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
