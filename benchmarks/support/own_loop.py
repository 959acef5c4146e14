"""A training loop that somebody wrote, over gloo, whose ranks record spans; in its fifth step one of them pauses.

    python own_loop.py RUN --case hang          # until it is killed
    python own_loop.py RUN --case evaluates --plain

With `--plain` collectives are in no span, as in most scripts. Ranks are forked from one process that has imported
torch. What pauses stands still (it waits for a lock, sleeps, goes round in an endless loop), or is healthy: it
evaluates, saves, or prepares data, for as long as it lives.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from phalanx.telemetry import attach, record_spans, span
from phalanx.telemetry.unfinished_spans import ranks_at_rest

STEP = 5
"""In which a rank pauses."""
_PR_SET_PDEATHSIG = 1
_START_S = 120.0


def hang(folder: Path) -> None:
    """Wait for a lock that nobody gives back."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleeps(folder: Path) -> None:
    """Do nothing."""
    time.sleep(10_000)


def endless(folder: Path) -> None:
    """Go round and get nowhere."""
    done = False
    while not done:
        done = time.monotonic() < 0


def evaluates(folder: Path) -> None:
    """Compute a loss over many batches, and say nothing meanwhile."""
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    with torch.no_grad():
        while True:
            x = torch.randn(64, 256)
            losses = [(model(part) - part).square().mean() for part in x.split(16)]
            torch.stack(losses).mean().item()


def saves(folder: Path) -> None:
    """Write a large checkpoint, in pieces, to a slow disk."""
    with (folder / "checkpoint.pt").open("wb") as file:
        while True:
            file.write(os.urandom(1 << 20))
            file.flush()
            time.sleep(0.05)
            if file.tell() > 64 << 20:
                file.seek(0)


def prepares(folder: Path) -> None:
    """Make data of text, on one core."""
    text = "the quick brown fox jumps over the lazy dog " * 200
    while True:
        words = [word.encode() for word in text.split()]
        tokens = [int.from_bytes(hashlib.blake2b(word, digest_size=4).digest(), "big") % 50_257 for word in words]
        sorted(tokens)


PAUSES: dict[str, Callable[[Path], None]] = {
    one.__name__: one for one in (hang, sleeps, endless, evaluates, saves, prepares)
}
HANGS = ("hang", "sleeps", "endless")


def rank_main(rank: int, world: int, run: Path, port: int, case: str, guilty: int, *, plain: bool) -> None:
    """Be one rank."""
    environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ.update(environ)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    pairs = [dist.new_group([first, first + 1], group_desc="data") for first in range(0, world, 2)]
    data = pairs[rank // 2]
    torch.manual_seed(rank)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    spans = record_spans(run)
    attach(model)

    def noted(name: str, group: Any, x: torch.Tensor) -> Any:
        return nullcontext() if plain else span(name, group=group, bytes=x.nbytes)

    for step in range(1, 100_000):
        with spans.step(step):
            with span("batch", kind="data"):
                x = torch.randn(8, 32)
                time.sleep(0.02)
            model(x).square().mean().backward()
            if step == STEP and rank == guilty:
                PAUSES[case](run)
            for parameter in model.parameters():
                gradient = parameter.grad
                assert gradient is not None
                with noted("all-reduce", data, gradient):
                    dist.all_reduce(gradient, group=data)
            with span("SGD", kind="optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            norm = torch.zeros(1)
            with noted("all-reduce", dist.group.WORLD, norm):
                dist.all_reduce(norm)


@contextmanager
def paused_loop(run: Path, case: str, *, ranks: int = 2, plain: bool = False, still_s: float = 5.5) -> Iterator[None]:
    """A loop of which one rank has paused, for so long; killed in the end.

    Raises:
        RuntimeError: it did not come there.
    """
    words = [sys.executable, "-W", "ignore", __file__, str(run), "--case", case, "--ranks", str(ranks)]
    places = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile("w+") as log:
        loop = subprocess.Popen(
            [*words, *(["--plain"] if plain else [])], env={**os.environ, "PYTHONPATH": places}, stdout=log, stderr=log
        )
        try:
            until_s = time.monotonic() + _START_S
            while not _has_paused(run, ranks, still_s):
                if loop.poll() is not None or time.monotonic() > until_s:
                    log.seek(0)
                    raise RuntimeError(f"the loop did not pause: {log.read()[-2000:]}")
                time.sleep(0.05)
            yield
        finally:
            processes = psutil.process_iter(["cmdline"])
            writers = [one for one in processes if any(str(run) in word for word in one.info["cmdline"] or ())]
            loop.kill()  # its ranks die with it
            loop.wait()
            psutil.wait_procs(writers, timeout=60)  # they write down what is left; until then the folder cannot go


def _has_paused(run: Path, ranks: int, still_s: float) -> bool:
    found = ranks_at_rest(run) if (run / "telemetry").is_dir() else []
    is_there = len(found) == ranks and all(any(span.step >= STEP for span in one.begun) for one in found)
    return is_there and min(one.still_s for one in found) > still_s


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--case", choices=PAUSES, default="hang")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--guilty", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="collectives are in no span")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options.run.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(options.ranks):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            try:
                rank_main(rank, options.ranks, options.run, port, options.case, options.guilty, plain=options.plain)
            finally:
                os._exit(1)
        children.append(pid)
    sys.stdout.write(f"ranks {' '.join(map(str, children))}\n")
    sys.stdout.flush()
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
