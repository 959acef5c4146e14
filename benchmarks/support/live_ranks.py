"""Ranks that really record spans, in processes of their own, and do as they are told: to be slow, or to stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GUARD_S = 90.0

_RANK = """
import sys, time
from pathlib import Path
from phalanx.telemetry.recording import record_spans
from phalanx.telemetry.span_writer import WriterSettings

run, orders = Path(sys.argv[1]), Path(sys.argv[2])
spans = record_spans(run, settings=WriterSettings(period_s=float(sys.argv[4])))
rank = int(sys.argv[3])
step = 0
(orders / f"ready-{rank}").touch()
while not (orders / "begin").exists():
    time.sleep(0.01)
begin_s = float((orders / "begin").read_text())
while not (orders / "end").exists():
    step += 1
    # All begin a step together, as ranks do that wait for each other.
    time.sleep(max(0.0, begin_s + 0.15 * step - time.time()))
    with spans.step(step):
        with spans.span("batch", kind="data"):
            pass
        with spans.span("net", kind="forward"):
            time.sleep(0.06 if (orders / f"slow-{rank}").exists() else 0.03)
        with spans.span("net", kind="backward"):
            time.sleep(0.02)
        with spans.span("AdamW", kind="optimizer"):
            time.sleep(0.005)
spans.close()
"""


@contextmanager
def live_ranks(
    run: Path, orders: Path, ranks: int = 3, period_s: float = 0.2
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A job of so many ranks on this host; a file ``slow-RANK`` in `orders` makes a rank slow, ``end`` ends all.

    Args:
        period_s: between two looks of the writer of spans.
    """
    orders.mkdir(parents=True)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(run), str(orders), str(rank), str(period_s)],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        until_s = time.monotonic() + GUARD_S
        while any(not (orders / f"ready-{rank}").exists() for rank in range(ranks)):
            assert time.monotonic() < until_s, "the ranks do not start"
            time.sleep(0.02)
        (orders / "soon").write_text(str(time.time()))
        (orders / "soon").rename(orders / "begin")
        yield started
    finally:
        (orders / "end").touch()
        for rank in started:
            rank.wait(60)
