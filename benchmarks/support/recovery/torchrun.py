"""The same script under torchrun: two agents on this machine that meet over loopback."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.recovery.job import Job


class Torchrun(Job):
    """As `Job`, with torchrun's agents in place of `phalanx run`.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it ranks that come again meet the keys of those before in the agents'
    store, and with gloo they do not get together at all.
    """

    def __init__(self, folder: Path, script: Sequence[str]) -> None:
        super().__init__(folder, script, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        self._port = free_port()

    def start(self) -> subprocess.Popen:
        """Start both agents."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "recovery"]
        sizes = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "100", "--local-addr", "127.0.0.1"]
        agents = [self._popen("torch.distributed.run", *sizes, *rendezvous, *self.words) for _ in range(2)]
        return agents[-1]


def free_port() -> int:
    """A port that is free now, below those that other programs' connections are served out of (Linux)."""
    while True:
        port = random.randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
