"""Errors that name their rank, for workers that torchrun or srun started. Torch-free."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.core.layout import Layout
from phalanx.launch.environment import Worker
from phalanx.launch.failures import describe, failure_of_exception


@contextmanager
def errors_named(worker: Worker, layout: Layout | None) -> Iterator[None]:
    """Show an error that leaves the block as `launch_local` would, then leave with its exit status.

    An error that only says that a peer is gone is one line, so that the traceback that explains it is not buried. Where
    our own launcher started this process, which hears of errors by itself, nothing is done here.

    Raises:
        SystemExit: in place of the error.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if worker.launcher == "phalanx":
            raise
        failure = failure_of_exception(worker.rank, time.monotonic_ns(), error)
        text = describe([failure], worker.world_size, socket.gethostname(), layout)
        sys.stderr.write(text if not failure.follows else f"rank {worker.rank} ended with a peer: {failure.summary}\n")
        sys.stderr.flush()
        raise SystemExit(failure.status) from None
