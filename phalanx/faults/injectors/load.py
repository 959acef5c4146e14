"""Innocent disturbances, of which nothing must come. Torch-free."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from phalanx.faults.agenda import Order
from phalanx.faults.injectors.base import Act, RefusedError, Surroundings

LINES = (
    "step {step}: grad norm 0.83, no NaN or inf found in 41 tensors",
    "validation: 0 errors in 128 samples, word error rate 0.112",
    "step {step}: skipping nan check for frozen parameters (check_nan=False)",
    "Nanjing, Nanterre and 17 other place names were added to the vocabulary",
    "checkpoint: timeout is 1800 s, error feedback is off, killed branches: 0",
    "retrying after error 0 of 5 (none so far)",
)

_PIECE = b"\0" * (1 << 20)


def log_lines(order: Order, around: Surroundings) -> Act:
    """Write one of `LINES` to stdout and the next to stderr."""

    def act() -> None:
        step = around.step()
        print(LINES[2 * step % len(LINES)].format(step=step), flush=True)
        print(LINES[(2 * step + 1) % len(LINES)].format(step=step), file=sys.stderr, flush=True)

    return act


def evaluation(order: Order, around: Surroundings) -> Act:
    """Compute for a while, as an evaluation does between two steps."""
    seconds = _length(order)

    def act() -> None:
        end_s, total = time.monotonic() + seconds, 0.0
        while time.monotonic() < end_s:
            total += sum(index**0.5 for index in range(10_000))

    return act


def long_checkpoint(order: Order, around: Surroundings) -> Act:
    """Write to a nameless file, with fsync, until the time is over."""
    seconds = _length(order)

    def act() -> None:
        end_s = time.monotonic() + seconds
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < end_s:
                file.seek(0)
                file.write(_PIECE)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.02)

    return act


def cpu_hog(order: Order, around: Surroundings) -> Act:
    """Start ``processes`` (one per core) that do nothing but compute; they end by themselves."""
    seconds = _length(order)
    count = int(order.settings.get("processes", os.cpu_count() or 1))

    def act() -> None:
        for _ in range(count):
            command = ["timeout", str(seconds), "/bin/sh", "-c", "while :; do :; done"]
            around.kept.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    return act


def _length(order: Order) -> float:
    if order.seconds is None:
        raise RefusedError(f"lasts.unit = {order.unit!r}: give seconds")
    return order.seconds
