"""A GAN: two optimizers in turn, five steps of the critic for one of the generator; samples and scores now and then.

torchrun --nproc-per-node 2 gan.py 4000
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, outputs)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0, help="that scoring samples takes")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    generator, critic = DDP(network(32, 128)), DDP(network(128, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))
    for step in range(1, options.steps + 1):
        for _ in range(5):
            with torch.no_grad():
                fake = generator.module(torch.randn(128, 32))
            real = torch.randn(128, 128) * 2 + 1
            of_critic.zero_grad()
            loss = critic(torch.cat([fake, real])).mul(torch.cat([torch.ones(128, 1), -torch.ones(128, 1)])).mean()
            loss.backward()
            of_critic.step()
        of_generator.zero_grad()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        loss_g = -critic.module(generator(torch.randn(128, 32))).mean()
        loss_g.backward()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        of_generator.step()
        if rank == 0 and step % 50 == 0:
            print(f"[{step}/{options.steps}] loss_d {loss.item():.3f} loss_g {loss_g.item():.3f}", flush=True)
        if rank == 0 and step % options.every == 0:
            end = time.monotonic() + options.seconds
            while time.monotonic() < end:  # a distance between what is made and what is real, by covariances
                with torch.no_grad():
                    made = generator.module(torch.randn(2048, 32))
                torch.linalg.eigvalsh(torch.cov(made.T))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
