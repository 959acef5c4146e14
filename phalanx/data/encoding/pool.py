"""Encode units of work in several processes at once."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.core.errors import UserError
from phalanx.data.encoding.encode import UnitRecord
from phalanx.data.encoding.encoding_worker import Encoder, Job
from phalanx.data.sources.input_files import Unit
from phalanx.ipc.processes import start_helper

Beat = Callable[[int, int], None]
BYTES_PER_WORKER = 2 << 20


def encode_all(units: Sequence[Unit], job: Job, workers: int | None, beat: Beat) -> Iterator[UnitRecord]:
    """Encode `units`, yielding records as they are finished, in any order.

    Args:
        units: what to do.
        job: what they have in common.
        workers: processes; None: as many as this process may use cores, fewer for little text. 1 works in this process.
        beat: called with bytes of text and tokens as they are made.

    Raises:
        UserError: the first that a unit raised; what was finished before it stays.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers is None:
        workers = min(cores, sum(unit.num_bytes for unit in units) // BYTES_PER_WORKER)
    workers = min(workers, len(units))
    if workers <= 1:
        encoder = Encoder(job)
        yield from (encoder(unit, beat) for unit in units)
        return
    yield from _in_processes(units, job, workers, beat)


def _in_processes(units: Sequence[Unit], job: Job, workers: int, beat: Beat) -> Iterator[UnitRecord]:
    todo: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for unit in sorted(units, key=lambda u: -u.num_bytes):
        todo.put(unit)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    processes = [_start(job) for _ in range(workers)]
    threads = [threading.Thread(target=_serve, args=(p, todo, inbox), daemon=True) for p in processes]
    try:
        for thread in threads:
            thread.start()
        left = len(units)
        while left:
            message = inbox.get()
            if "problem" in message:
                raise message["problem"]
            if "record" in message:
                left -= 1
                yield UnitRecord.from_json(message["record"])
            else:
                beat(message["bytes"], message["tokens"])
    finally:
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()
        for process in processes:
            process.wait()


def _start(job: Job) -> subprocess.Popen[str]:
    process = start_helper("phalanx.data.encoding.encoding_worker")
    _send(process, job.to_json())
    return process


def _serve(
    process: subprocess.Popen[str], todo: queue.SimpleQueue[Unit], inbox: queue.SimpleQueue[dict[str, Any]]
) -> None:
    """Hand units to one process, one at a time, and pass on what it says."""
    assert process.stdout is not None
    while True:
        try:
            unit = todo.get_nowait()
        except queue.Empty:
            return
        try:
            _send(process, asdict(unit))
        except (BrokenPipeError, ValueError):
            break
        for line in process.stdout:
            message = json.loads(line)
            if "problem" in message:
                message["problem"] = UserError(**message["problem"])
            inbox.put(message)
            if "record" in message or "problem" in message:
                break
        else:
            break
    code = process.wait()
    cure = "look above for its last words; -9 is often too little memory: use fewer workers"
    inbox.put({"problem": UserError(f"a preparing process ended with code {code}", cure=cure, field="workers")})


def _send(process: subprocess.Popen[str], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()
