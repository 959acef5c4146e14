"""One process, without torch.distributed: a plain loop with a learning-rate search first, a profile, and evaluations.

python single.py 2000
"""

import argparse
import copy
import time

import torch
from torch import nn


def search_rate(model, seconds):
    """Leslie Smith's range test on a copy of the model, which is thrown away."""
    trial, rate, best = copy.deepcopy(model), 1e-6, (float("inf"), 1e-3)
    optimizer = torch.optim.SGD(trial.parameters(), lr=rate)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rate *= 1.01
        for group in optimizer.param_groups:
            group["lr"] = min(rate, 1.0)
        optimizer.zero_grad()
        loss = loss_of(trial, 2048)
        loss.backward()
        optimizer.step()
        best = min(best, (loss.item(), rate))
    return min(best[1], 0.01)


def loss_of(model, size):
    x = torch.randn(size, 128)
    return nn.functional.cross_entropy(model(x), (x[:, :10] * 3).argmax(1))


def profile(model, seconds):
    """A few passes under torch.profiler, and its table, which takes longer than they do."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiler:
            for _ in range(20):
                loss_of(model, 256).backward()
        profiler.export_chrome_trace("trace.json")
    print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=5), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the search, the profile and each evaluation")
    options = parser.parse_args()
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=search_rate(model, options.seconds))
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, 1024)
        loss.backward()
        optimizer.step()
        if step == options.every // 2:
            profile(model, options.seconds)
        if step % options.every == 0:
            end, losses = time.monotonic() + options.seconds, []
            with torch.no_grad():
                while time.monotonic() < end:
                    losses.append(loss_of(model, 4096).item())
            print(f"step {step} loss {loss.item():.3f} held-out {sum(losses) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    main()
