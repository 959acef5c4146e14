"""Evidence of ranks that are stuck in different ways, started as an executor starts them, with and without py-spy."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_executor_parts import GUARD_S, Monitor, WithoutTorch, make_executor, workers_of
from support.settled import until_at_rest

from phalanx.detect.hangs.python_stacks import main_stack
from phalanx.detect.hangs.stack_dumps import py_spy_program, stacks_of
from phalanx.run import messages
from phalanx.run.executor.flight_recorder import Subject, gather

WITHIN_S = 2.0

SCRIPT = """\
import ctypes, os, time
from phalanx.core.progress import own_progress

page = own_progress(os.environ, int(os.environ["PHALANX_RUN_ATTEMPT"]))
page.step(1)  # also tells what was imported; whoever waits after the second one is stuck
lock = ctypes.PyDLL(None).pthread_mutex_lock  # holds the GIL

def deadlock_in_c():
    lock(mutex)
    page.step(2)
    lock(mutex)

def sleep_for_ever():
    page.step(2)
    while True:
        time.sleep(100)

def stopped():
    page.step(2)
    while True:
        time.sleep(0.01)

mutex = ctypes.create_string_buffer(64)
(deadlock_in_c, sleep_for_ever, stopped)[int(os.environ["RANK"])]()
"""


def monitor(program: Path | None):  # type: ignore[no-untyped-def]
    def look(subjects: Sequence[Subject], attempt: int, within_s: float) -> messages.Evidence:
        return gather(subjects, attempt=attempt, within_s=within_s, program=program)

    return Monitor(gather=look)


async def evidence_of_stuck_ranks(folder: Path, program: Path | None) -> messages.Evidence:
    executor, driver = make_executor(folder, SCRIPT, monitor(program), kind=WithoutTorch)
    task = asyncio.create_task(executor.run())
    try:
        executor.hear(messages.Welcome(1, "j", 0, 0.05))
        executor.hear(messages.Prepare(["script.py"], False, str(folder), {}, []))
        executor.hear(messages.Start(1, [0, 1, 2], 3, 0, 1, "127.0.0.1", 1))
        pids = (await driver.until(messages.Started)).pids
        await driver.until(messages.Heartbeat, lambda beat: [w.step for w in workers_of(beat)] == [2, 2, 2])
        os.kill(pids[2], signal.SIGSTOP)
        for rank, state in enumerate("SST"):  # one has said its step before it is stuck
            await asyncio.to_thread(until_at_rest, pids[rank], state)
        executor.hear(messages.Gather(1, [], WITHIN_S))
        return await driver.until(messages.Evidence)
    finally:
        executor.hear(messages.End("the test is over"))
        await asyncio.wait_for(task, GUARD_S)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def gathered(folder: Path, program: Path | None) -> dict[int, messages.RankEvidence]:
    evidence = asyncio.run(asyncio.wait_for(evidence_of_stuck_ranks(folder, program), 2 * GUARD_S))
    assert evidence.seconds < WITHIN_S + 10  # the limit, and what a busy machine adds
    found = {one.rank: one for one in evidence.ranks}
    assert [found[rank].step for rank in range(3)] == [2, 2, 2]
    assert [found[rank].state for rank in range(3)] == ["S", "S", "T"]
    assert all("s of CPU between two looks" in one.note for one in found.values())
    return found


def test_without_py_spy_ranks_write_their_own_stacks_also_with_the_gil_held(tmp_path: Path) -> None:
    found = gathered(tmp_path, Path("/no/such/py-spy"))
    assert main_stack(found[0].stacks)[0].name == "deadlock_in_c"
    assert main_stack(found[1].stacks)[0].name == "sleep_for_ever"
    assert found[2].stacks == "" and "stopped" in found[2].note
    assert not list(tmp_path.glob("pages/*"))


def test_py_spy_sees_one_that_is_stopped_too(tmp_path: Path) -> None:
    program = py_spy_program()
    if program is None or not stacks_of(os.getpid(), time.monotonic() + GUARD_S, program=program).text:
        pytest.skip("py-spy may not look at processes here")
    found = gathered(tmp_path, program)
    assert main_stack(found[0].stacks)[0].name == "deadlock_in_c"
    assert main_stack(found[1].stacks)[0].name == "sleep_for_ever"
    assert found[2].is_silent or main_stack(found[2].stacks)[0].name == "stopped"
