"""A plain DDP loop; every so often, between two steps, something that a training script may well do takes long.

torchrun --nproc-per-node 2 pauses.py 1000 sleep --seconds 20

sleep      rank 0 sleeps, as in a retry of its own
print      rank 0 prints a gigabyte
save       rank 0 writes a large state with torch.save, the others wait in a barrier
slow-disk  rank 0 writes to a slow disk, piece by piece, with an fsync after each
download   rank 0 reads from a slow server, the others wait in a barrier
receive    rank 0 receives 800 kB a second into a hash, so that neither files nor memory show it; the others wait
svd        every rank computes in one line of numpy
garbage    every rank makes and drops Python objects
measure    every rank runs the model over a test set, in a function that no name gives away
shuffle    every rank shuffles its examples anew, at the end of an epoch
"""

import argparse
import hashlib
import http.server
import io
import multiprocessing
import os
import random
import socket
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def sleep(rank, model, seconds):
    if rank == 0:
        time.sleep(seconds)


def print_much(rank, model, seconds):
    """As much as is asked for, not as long: 50 MB a second."""
    if rank == 0:
        line = "x" * 99 + "\n"
        for _ in range(int(seconds * 50)):
            sys.stdout.write(line * 10_000)


def save(rank, model, seconds):
    """100 MB a second."""
    if rank == 0:
        state = [torch.randn(25_000_000) for _ in range(int(seconds))]
        torch.save({"model": model.state_dict(), "optimizer": state}, "state.pt")
    dist.barrier()


def slow_disk(rank, model, seconds):
    if rank == 0:
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": torch.randn(1_000_000)}, buffer)
        data, end = buffer.getvalue(), time.monotonic() + seconds
        with Path("state.slow").open("wb") as file:
            while time.monotonic() < end:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                time.sleep(0.2)  # what a disk of 20 MB a second takes
    dist.barrier()


class Dribbles(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        end = time.monotonic() + float(self.path[1:])
        while time.monotonic() < end:
            self.wfile.write(b"0" * 16384)
            time.sleep(0.5)

    def log_message(self, *words):
        pass


def serve(where):
    server = http.server.HTTPServer(("127.0.0.1", 0), Dribbles)
    where.send(server.server_port)
    server.handle_request()


def download(rank, model, seconds):
    if rank == 0:
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
        server.start()
        with urllib.request.urlopen(f"http://127.0.0.1:{ours.recv()}/{seconds}") as answer:
            Path("downloaded").write_bytes(answer.read())
        server.join()
    dist.barrier()


def feed(where, seconds):
    with socket.create_server(("127.0.0.1", 0)) as server:
        where.send(server.getsockname())
        client, end = server.accept()[0], time.monotonic() + seconds
        with client:
            while time.monotonic() < end:
                client.sendall(b"0" * 80_000)
                time.sleep(0.1)


def receive(rank, model, seconds):
    if rank == 0:
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.Process(target=feed, args=(theirs, seconds), daemon=True)
        server.start()
        said = hashlib.sha256()
        with socket.create_connection(ours.recv()) as client:
            while data := client.recv(1 << 16):
                said.update(data)
        server.join()
    dist.barrier()


def svd(rank, model, seconds):
    """One after the other, each larger, until one took half of the time: a small one says little on a busy machine."""
    size, took = 300, 0.0
    while took < seconds / 2:
        began = time.monotonic()
        np.linalg.svd(np.random.rand(size, size))
        took = time.monotonic() - began
        size = int(size * min(2.0, max(1.1, (seconds / took) ** (1 / 3))))


def garbage(rank, model, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        [{"id": i, "text": str(i) * 3} for i in range(20_000)]


def measure(rank, model, seconds):
    end, right = time.monotonic() + seconds, 0
    with torch.no_grad():
        while time.monotonic() < end:
            right += int(model.module(torch.randn(64, 256)).argmax(1).eq(3).sum())


def shuffle(rank, model, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        examples = list(range(1_000_000))
        random.Random(rank).shuffle(examples)


KINDS = {
    "sleep": sleep,
    "print": print_much,
    "save": save,
    "slow-disk": slow_disk,
    "download": download,
    "receive": receive,
    "svd": svd,
    "garbage": garbage,
    "measure": measure,
    "shuffle": shuffle,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--every", type=int, default=200, help="steps")
    parser.add_argument("--seconds", type=float, default=20.0, help="that it takes, about")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(512, 256)), torch.randint(10, (512,)))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        if step % options.every == 0:
            KINDS[options.what](rank, model, options.seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
