"""DDP by hand: gradients are averaged and applied without torch.optim, no step has a number, and nothing is printed.

torchrun --nproc-per-node 2 silent.py --minutes 3
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the pause in the middle")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 1))
    begin = time.monotonic()
    has_paused = False
    goes_on = torch.ones(1)
    while goes_on.item():
        model.zero_grad()
        model(torch.randn(256, 128)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= 0.01 * parameter.grad / dist.get_world_size()
        spent = time.monotonic() - begin
        if not has_paused and spent > options.minutes * 30:
            has_paused = True
            if dist.get_rank() == 0:
                time.sleep(options.seconds)
        goes_on = torch.tensor([float(spent < options.minutes * 60)])
        dist.broadcast(goes_on, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
