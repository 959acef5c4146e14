"""A module that makes this Linux look like a system that has no descriptors of processes and is not to be forked."""

from __future__ import annotations

import os
import signal
import sys

from phalanx.launch.environment import Worker

if hasattr(os, "pidfd_open"):
    del os.pidfd_open
sys.platform = "elsewhere"


def end(worker: Worker, killed: int) -> int:
    if worker.rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    while killed >= 0:
        signal.pause()
    return 3
