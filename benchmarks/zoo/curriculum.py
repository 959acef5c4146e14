"""A curriculum: from one step to the next, sequences are so much longer that steps take twenty times as long.

torchrun --nproc-per-node 2 curriculum.py 400
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--short", type=float, default=0.5, help="seconds that a short step computes")
    parser.add_argument("--times", type=float, default=20.0, help="as long are the long ones")
    parser.add_argument("--every", type=int, default=40, help="short steps, then an eighth as many long ones")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = DDP(nn.GRU(64, 128, batch_first=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        is_long = step % (options.every + options.every // 8) >= options.every
        end = time.monotonic() + options.short * (options.times if is_long else 1.0)
        optimizer.zero_grad()
        with model.no_sync():  # the sequence in pieces, as many as its length asks for
            while time.monotonic() < end:
                model(torch.randn(4, 32, 64))[0].square().mean().backward()
        loss = model(torch.randn(4, 32, 64))[0].square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} {'long' if is_long else 'short'} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
