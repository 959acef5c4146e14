"""A data loader whose workers read from storage that now and then does not answer for a while.

torchrun --nproc-per-node 2 slow_loader.py 600 --least 15 --most 45
"""

import argparse
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class FromStorage(Dataset):
    def __init__(self, every, least, most):
        self.every, self.least, self.most = every, least, most

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if index and index % self.every == 0:
            time.sleep(random.Random(index).uniform(self.least, self.most))
        return torch.full((64,), float(index % 97)), index % 8


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=4000, help="examples, of which one takes long")
    parser.add_argument("--least", type=float, default=15.0, help="seconds")
    parser.add_argument("--most", type=float, default=45.0, help="seconds")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    dataset = FromStorage(options.every, options.least, options.most)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2, persistent_workers=True)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, (source, target) in enumerate(loader):
        if step == options.steps:
            break
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(source), target)
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
