"""A plain DDP loop in which one rank, or all, hang once a file says so; they make a note of it just before.

    torchrun --nproc-per-node 2 hanging.py deadlock --rank 1 --when now

The file holds the step after which it happens, so that all ranks do it in the same one (what a data loader's worker
does, it does at once). Beside it the guilty leave a note of when; where there is one at the start, nothing happens.

    deadlock   two threads of the rank hold a lock each and want the other's
    busy       the rank computes for ever
    flat       the same in two lines of one function
    send       the same in a function of its own that has the name of a collective
    polling    two threads of the rank are deadlocked, and a third looks at something every 100 ms
    fifo       the rank reads from a FIFO that nobody writes
    traced     a debugger has attached itself to the rank, and leaves it halted
    exits      the rank's main thread does sys.exit, and a thread that is no daemon goes on
    mismatched the rank is in another collective than the others, in the same step
    skipped    the rank leaves out a collective, and is in the next one, of another kind, while the others are in this
    sleep      every rank sleeps for ever
    loader     a worker of the rank's data loader does not come back
    loaders    the same on every rank
    none       nothing: what happens comes from outside
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

ALL = ("sleep", "loaders")


class Examples(Dataset):
    """One of which, if it is to be so, never comes."""

    def __init__(self, when, is_stuck):
        self.when, self.is_stuck = Path(when), is_stuck

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        while self.is_stuck and self.when.exists():
            note(self.when)
            time.sleep(3600)
        return torch.randn(64), torch.randn(8)


def noted(when):
    return when.with_name(f"{when.name}.done")


def note(when):
    if not noted(when).exists():
        noted(when).write_text(str(time.time()))


def is_now(when, step):
    return when.exists() and step >= int(when.read_text() or step + 1)


def deadlock():
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other():
        with second:
            both.wait()
            with first:
                pass

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        with second:
            pass


def busy():
    while True:
        pass


def flat():
    x = 3
    while True:
        x = x * 3 % 7
        x += 1


def send():
    x = 3
    while True:
        x = x * 3 % 7


def polling():
    def poll():
        while True:
            time.sleep(0.1)
            Path(__file__).stat()

    threading.Thread(target=poll, daemon=True).start()
    deadlock()


def fifo():
    path = Path("nobody-writes")
    os.mkfifo(path)
    path.read_bytes()


TRACER = """
import ctypes, sys, time
PTRACE_ATTACH = 16
ctypes.CDLL(None).ptrace(PTRACE_ATTACH, int(sys.argv[1]), None, None)
time.sleep(3600)
"""


def traced():
    subprocess.Popen([sys.executable, "-c", TRACER, str(os.getpid())])
    time.sleep(3600)


def exits():
    threading.Thread(target=threading.Event().wait, name="uploader").start()
    sys.exit()


def mismatched():
    dist.all_gather([torch.zeros(4) for _ in range(dist.get_world_size())], torch.ones(4))


def sleep():
    while True:
        time.sleep(3600)


def skipped():
    dist.barrier()


HANGS = {
    "deadlock": deadlock,
    "busy": busy,
    "flat": flat,
    "send": send,
    "polling": polling,
    "fifo": fifo,
    "traced": traced,
    "exits": exits,
    "mismatched": mismatched,
    "sleep": sleep,
    "skipped": skipped,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=(*HANGS, "loader", "loaders", "none"))
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--when", type=Path, default=Path("now"))
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that a step takes at least")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_guilty = rank == options.rank or options.kind in ALL
    is_again = noted(options.when).exists()
    model = DDP(nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loads = options.kind.startswith("loader")
    examples = Examples(options.when, loads and is_guilty and not is_again)
    batches = iter(
        DataLoader(examples, batch_size=8, num_workers=1 if loads else 0, prefetch_factor=2 if loads else None)
    )
    for step in range(1, options.steps + 1):
        source, target = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(source), target)
        loss.backward()
        optimizer.step()
        time.sleep(options.pace)
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        if not is_again and is_guilty and options.kind in HANGS and is_now(options.when, step):
            note(options.when)
            HANGS[options.kind]()
        elif not is_again and options.kind == "mismatched" and is_now(options.when, step):
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
