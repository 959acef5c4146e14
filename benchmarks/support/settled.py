"""Waits until a process is in the state that is meant: whoever says beforehand that it will be may not be there yet.

A line that a process prints, a file or a step are seen by others before it has gone on to what comes next, above all
where two processes share a core. Linux.
"""

from __future__ import annotations

import time
from pathlib import Path

from phalanx.ipc.processes import Process, read_process

_GUARD_S = 240.0
_POLL_S = 0.01
_LOOKS = 3
_LOOP_TICKS = 3  # more than any program here computes between its word and its loop


def until_at_rest(pid: int, state: str = "S") -> None:
    """Wait until a process stays in a state: it sleeps (``S``) or is stopped (``T``) and does not wake in between."""
    seen: list[tuple[int, str]] = []
    end_s = time.monotonic() + _GUARD_S
    while len(seen) < _LOOKS:
        process = _alive(pid, end_s)
        status = Path(f"/proc/{pid}/status").read_text()
        look = (process.cpu_ticks, status[status.find("voluntary_ctxt_switches") :])
        seen = ([*seen, look] if look in seen else [look]) if process.state == state else []
        time.sleep(_POLL_S)


def until_in_loop(pid: int) -> None:
    """Wait until a process has computed for so long that it is in the loop that it does not leave."""
    end_s = time.monotonic() + _GUARD_S
    first = _alive(pid, end_s).cpu_ticks
    while _alive(pid, end_s).cpu_ticks < first + _LOOP_TICKS:
        time.sleep(_POLL_S)


def _alive(pid: int, end_s: float) -> Process:
    process = read_process(pid)
    assert process is not None and process.is_alive, f"process {pid} has ended"
    assert time.monotonic() < end_s, f"process {pid} is in state {process.state}, not in the one that is meant"
    return process
