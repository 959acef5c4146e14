"""Hangs of real processes: ranks over gloo that record spans, one of which is made to stand still.

Ranks are forked from one process that has imported torch, so that a case takes seconds. Faults are those of our own
campaign (`phalanx.faults.worker_faults`), and mistakes of programs. The job is judged while it stands still, by its
spans alone, and where py-spy may look by its stacks alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from phalanx.core.layout import Layout
from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.hangs.hang_judge import HangContext, HangPolicy, judge_hang
from phalanx.detect.hangs.python_stacks import main_stack
from phalanx.detect.hangs.rank_places import RankPlaces
from phalanx.detect.hangs.span_hangs import judge_run
from phalanx.detect.hangs.stack_dumps import py_spy_program, stacks_of
from phalanx.faults.fault_schedule import Order
from phalanx.faults.worker_faults import INJECTORS, Surroundings
from phalanx.launch.rendezvous_store import open_store_socket
from phalanx.parallel.mesh import Mesh
from phalanx.telemetry.recording import Recording, open_recording
from phalanx.telemetry.unfinished_spans import ranks_at_rest

STEP = 4
"""In which it happens."""

_START_S = 60.0


@dataclass(frozen=True)
class ProcessCase:
    """One hang.

    Attributes:
        place: where in a step it happens.
        by_stacks: whether stacks alone can tell: not of what waits in a collective as the others do.
    """

    name: str
    layout: Layout
    guilty: tuple[int, ...]
    fault: str
    place: str
    by_stacks: bool = True


TP2_DP2 = Layout(shard=2, tensor=2)
PP2_DP2 = Layout(pipeline=2, shard=2)
CASES: tuple[ProcessCase, ...] = (
    ProcessCase("stopped in its forward pass", TP2_DP2, (3,), "pause", "forward"),
    ProcessCase("stopped between collectives", TP2_DP2, (0,), "pause", "optimizer"),
    ProcessCase("deadlock in C, GIL held", TP2_DP2, (1,), "deadlock", "backward"),
    ProcessCase("a Python lock taken twice", TP2_DP2, (2,), "lock", "optimizer"),
    ProcessCase("sleeps", TP2_DP2, (2,), "sleep", "forward"),
    ProcessCase("endless loop", TP2_DP2, (1,), "busy-loop", "backward"),
    ProcessCase("waits for its data", TP2_DP2, (3,), "pipe", "data"),
    ProcessCase("waits for a child in a callback", TP2_DP2, (0,), "child", "user"),
    ProcessCase("leaves a collective out", Layout(shard=4), (2,), "skip", "gradients", by_stacks=False),
    ProcessCase("calls another collective", Layout(shard=4), (1,), "other", "gradients", by_stacks=False),
    ProcessCase("a stage that sends nothing", PP2_DP2, (1,), "sleep", "send"),
    ProcessCase("a last stage that deadlocks", PP2_DP2, (2,), "deadlock", "backward"),
    ProcessCase("two ranks at once", Layout(shard=2, tensor=4), (2, 7), "sleep", "forward"),
    ProcessCase("none, a long step", TP2_DP2, (), "none", "forward"),
)


def _rank(rank: int, case: ProcessCase, run: Path, port: int, struck: Semaphore) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    recording = open_recording(run, rank=rank, attempt=0, is_first_of_host=rank == 0)
    mesh = Mesh(case.layout, rank, store, torch.device("cpu"), 600.0, 600.0, recorder=recording.recorder)
    loop = _Loop(rank, case, recording, mesh, struck)
    for step in range(1, 1000):
        with recording.step(step):
            loop.step(step)


class _Loop:
    """One rank's training loop: passes, tensor-parallel sums, messages of a pipeline, gradients."""

    def __init__(self, rank: int, case: ProcessCase, recording: Recording, mesh: Mesh, struck: Semaphore) -> None:
        self._rank, self._case, self._recording, self._mesh, self._struck = rank, case, recording, mesh, struck
        self._stage = case.layout.coordinates(rank).pipeline

    def _at(self, place: str, step: int) -> bool:
        """Where the fault strikes; whether it is one of the program, which is done otherwise."""
        case = self._case
        if self._rank not in case.guilty or place != case.place or step != STEP:
            return False
        self._struck.release()
        if case.fault in ("skip", "other"):
            return True
        act(case.fault)()
        return False

    def step(self, step: int) -> None:
        """One optimizer step."""
        span = self._recording.span
        tensor, shard = self._mesh.group("tensor"), self._mesh.group("shard")
        x = torch.ones(256)
        with span("data"):
            self._at("data", step)
        if self._stage:
            self._pipeline().receive(x, 0, what="activations", micro_batch=0).wait()
        with span("forward", micro_batch=0):
            time.sleep(0.01 if self._case.fault != "none" else 0.6)
            self._at("forward", step)
            tensor.all_reduce(x).wait()
        if self._case.layout.pipeline > 1 and not self._stage:
            self._at("send", step)
            self._pipeline().send(x, 1, what="activations", micro_batch=0).wait()
            self._pipeline().receive(x, 1, what="gradients", micro_batch=0).wait()
        with span("backward", micro_batch=0):
            self._at("backward", step)
            tensor.all_reduce(x).wait()
        if self._stage:
            self._pipeline().send(x, 0, what="gradients", micro_batch=0).wait()
        with span("callback"):
            self._at("user", step)
        out = torch.empty(256 // shard.size)
        if self._at("gradients", step):
            if self._case.fault == "other":
                shard.all_gather(torch.empty(256 * shard.size), x).wait()
        else:
            shard.reduce_scatter(out, x).wait()
        with span("optimizer"):
            self._at("optimizer", step)
        shard.all_gather(torch.empty(256), out).wait()
        shard.all_reduce(x[:1]).wait()

    def _pipeline(self) -> Any:
        return self._mesh.group("pipeline")


def act(fault: str) -> Callable[[], object]:
    """What makes a rank stand still."""
    if fault == "none":
        return lambda: None
    if fault == "lock":
        lock = threading.Lock()
        lock.acquire()
        return lock.acquire
    if fault == "pipe":
        read, _ = os.pipe()
        return lambda: os.read(read, 1)
    if fault == "child":
        return lambda: subprocess.run(["sleep", "1000"], check=False)
    order = Order(0, fault, [0], STEP, "step", 0, 0.0, "forever", 1, "once")
    return INJECTORS[fault](order, Surroundings(0, 0, lambda: STEP))


def run_case(case: ProcessCase, folder: Path) -> dict[str, Any]:
    """Let it hang, and judge it."""
    run = folder / "run"
    (run / "telemetry").mkdir(parents=True)
    listener = open_store_socket("127.0.0.1")
    port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    count, struck = case.layout.world_size, context.Semaphore(0)
    ranks = [context.Process(target=_rank, args=(rank, case, run, port, struck)) for rank in range(count)]
    try:
        for one in ranks:
            one.start()
        # Not before: its thread may hold a lock of libc's resolver, for which who is forked then would wait for ever.
        fd = listener.detach()
        _store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        if case.guilty:
            as_meant = all(struck.acquire(timeout=_START_S) for _ in case.guilty)
        else:
            as_meant = _until_steps(run, count)
        verdict, spans_s = _judged(run, is_awaited=bool(case.guilty))
        stacks, stacks_s = _by_stacks({rank: one.pid or 0 for rank, one in enumerate(ranks)})
    finally:
        for one in ranks:
            with suppress(ProcessLookupError):
                os.kill(one.pid or 0, signal.SIGKILL)
        for one in ranks:
            one.join(10)
    named = sorted({rank for found in verdict.detections for who in found.who for rank in who.ranks})
    right = as_meant and named == list(case.guilty)
    return {
        "case": case.name,
        "layout": str(case.layout),
        "guilty": list(case.guilty),
        "by spans": named,
        "right": right,
        "spans_s": round(spans_s, 2),
        "by stacks": stacks,
        "stacks right": None if not case.by_stacks or stacks is None else stacks == list(case.guilty),
        "stacks_s": round(stacks_s, 2),
        "sentence": verdict.sentence,
    }


def _judged(run: Path, *, is_awaited: bool) -> tuple[JudgeVerdict, float]:
    """What is said of a job, and how long that took. If a hang `is_awaited`, it is judged until one is found.

    A judge waits for as long as a few steps usually take, and they take long on a machine that has much else to do.
    """
    until_s = time.monotonic() + _START_S
    while True:
        began_s = time.perf_counter()
        verdict = judge_run(run, HangPolicy(least_wait_s=1.0))
        took_s = time.perf_counter() - began_s
        if verdict.detections or not is_awaited or time.monotonic() > until_s:
            return verdict, took_s
        time.sleep(0.1)


def _until_steps(run: Path, count: int) -> bool:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        found = ranks_at_rest(run)
        if len(found) == count and all(any(span.step > STEP for span in one.begun) for one in found):
            return True
        time.sleep(0.1)
    return False


def _by_stacks(pids: Mapping[int, int]) -> tuple[list[int] | None, float]:
    """Who is elsewhere by py-spy alone; None: it may not look."""
    program = py_spy_program()
    if program is None:
        return None, 0.0
    began_s = time.perf_counter()
    texts = {rank: stacks_of(pid, time.monotonic() + 20, program=program).text for rank, pid in pids.items()}
    if not any(texts.values()):
        return None, 0.0
    stacks = {rank: main_stack(text) for rank, text in texts.items() if text}
    verdict = judge_hang(HangContext(RankPlaces(range(len(pids))), source="stacks", stacks=stacks))
    took_s = time.perf_counter() - began_s
    return sorted({rank for found in verdict.detections for who in found.who for rank in who.ranks}), took_s


def run_cases(*, quick: bool = False) -> list[dict[str, Any]]:
    """All of them, or two."""
    rows = []
    for case in CASES[:1] + CASES[8:9] if quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run_case(case, Path(folder)))
    return rows
