"""The loops of one rank; each returns what rank 0 prints as JSON."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checks.disks import measure
from phalanx.parallel.group import Group
from support.stall.contenders import Contender, Nothing, Ours, make
from support.stall.task import Size, Task, cores_s, meet, memory_bytes, timed

PAIR = 2  # a checkpoint costs in its step and the next one
BEFORE = 4  # steps before it that it is compared with


def stall(name: str, rank: int, address: str, folder: Path, size: Size, *, checkpoints: int, every: int) -> Any:
    """`checkpoints` of them, one each `every` steps; seconds of every step, and memory after the 5th and the last."""
    task = Task(size, rank)
    group, store = meet(rank, address)
    warm(task, group)
    config = CheckpointConfig(every_steps=every)
    contender = make(name, task, store, folder, config)
    seconds, memory = [], []
    for step in range(1, every * (checkpoints + 1)):
        seconds.append(timed(lambda step=step: do(task, contender, step), group))  # type: ignore[misc]
        if step % every == every - 1 and step // every in (min(5, checkpoints), checkpoints):
            contender.settle()
            group.barrier()
            memory.append(memory_bytes())
            group.barrier()
    contender.settle()
    result = {"seconds": seconds, "memory_bytes": memory, "durable_s": contender.durable_s()}
    if isinstance(contender, Ours):
        result["events"] = [vars(event) for event in contender.events]
    group.barrier()
    contender.close()
    return result


def every_step(rank: int, address: str, folder: Path, size: Size, *, rounds: int, steps: int) -> Any:
    """Rounds with a snapshot and a replica of it at every step, every 10th durable, in turns with rounds without.

    The durable ones begin at the 5th, 15th … step of a round, so that they end within it.
    """
    task = Task(size, rank)
    group, store = meet(rank, address)
    warm(task, group)
    config = CheckpointConfig(every_steps=10, memory_every_steps=1)
    ours = Ours(task, store, folder, config)
    for step in range(1, 6):
        do(task, ours, step)
        group.barrier()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    at = 5
    for _ in range(rounds):
        for way in seconds:
            ours.settle()
            group.barrier()
            contender: Contender = ours if way == "with" else Nothing()
            seconds[way].append(_round(task, group, contender, at, steps))
            at += steps if way == "with" else 0
    ours.settle()
    events = [vars(event) for event in ours.events]
    group.barrier()
    ours.close()
    return {"seconds": seconds, "events": events, "taken_steps": at}


def last(rank: int, address: str, folder: Path, size: Size, *, rounds: int) -> Any:
    """A checkpoint that is waited for, and the disk by itself, in turns; rates of all ranks together."""
    task = Task(size, rank)
    group, store = meet(rank, address)
    warm(task, group)
    ours = Ours(task, store, folder, CheckpointConfig(every_steps=1 << 30, keep_last=1))
    whole_bytes = 2 * sum(tensor.nbytes for tensor in task.tensors().values())
    found: dict[str, list[float]] = {"checkpoint_bytes_per_s": [], "disk_bytes_per_s": [], "core_s_per_gb": []}
    for step in range(1, rounds + 2):
        do(task, ours, step)
        group.barrier()
        began_s, core_s = time.perf_counter(), cores_s()
        ours.session.after_step(step, lambda step=step: {"step": step}, ending=True)  # type: ignore[misc]
        group.barrier()
        seconds, core_s = time.perf_counter() - began_s, cores_s() - core_s
        written, write_s, _ = measure(folder) if rank == 0 else (0, 1.0, 0.0)
        group.barrier()
        if step > 1:  # the first one makes the memory that all others use
            found["checkpoint_bytes_per_s"].append(whole_bytes / seconds)
            found["disk_bytes_per_s"].append(written / write_s)
            found["core_s_per_gb"].append(core_s / whole_bytes * 1e9)
    group.barrier()
    ours.close()
    return {**found, "bytes": whole_bytes}


def _round(task: Task, group: Group, contender: Contender, at: int, steps: int) -> float:
    began_s = time.perf_counter()
    for step in range(at + 1, at + steps + 1):
        do(task, contender, step)
        group.barrier()
    return time.perf_counter() - began_s


def do(task: Task, contender: Contender, step: int) -> None:
    contender.ask(step)
    task.gradients()
    contender.fence()
    task.update()
    contender.after_step(step)


def warm(task: Task, group: Group) -> None:
    """Steps that make the optimizer's state and touch all memory."""
    for _ in range(3):
        task.gradients()
        task.update()
        group.barrier()


def stalls(seconds: list[float], every: int) -> list[float]:
    """Added wall time of each checkpointed step and the next one, against the steps before."""
    found = []
    for step in range(every, len(seconds), every):
        plain = statistics.median(seconds[step - 1 - BEFORE : step - 1])
        found.append(sum(seconds[step - 1 : step - 1 + PAIR]) - PAIR * plain)
    return found


def disturbances(seconds: list[float], every: int) -> list[float]:
    """Added wall time of each checkpointed step and all until shortly before the next, whatever goes on beside them."""
    found = []
    for step in range(every, len(seconds) - every + 2, every):
        plain = statistics.median(seconds[step - 1 - BEFORE : step - 1])
        after = seconds[step - 1 : step - 1 + every - BEFORE]
        found.append(sum(after) - len(after) * plain)
    return found
