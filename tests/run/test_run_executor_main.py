"""The executor with a real template and real ranks, commanded as the driver does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from run_executor_parts import GUARD_S, Driver, WithoutTorch, make_executor, workers_of

from phalanx.run import messages
from phalanx.run.executor.executor import Executor
from phalanx.run.messages import report_of

SCRIPT = """\
import os, time
from phalanx.core.progress import own_progress

page = own_progress(os.environ, int(os.environ["PHALANX_RUN_ATTEMPT"]))
print("host", os.environ["PHALANX_HOST"], "world", os.environ["WORLD_SIZE"], flush=True)
page.step(1, loss=1.0)
import own_part, torch
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
time.sleep(600)
"""


@asynccontextmanager
async def an_executor(
    folder: Path, script: str = "", kind: type[Executor] = WithoutTorch
) -> AsyncIterator[tuple[Executor, Driver]]:
    executor, driver = make_executor(folder, script, kind=kind)
    task = asyncio.create_task(executor.run())
    try:
        yield executor, driver
    finally:
        executor.hear(messages.End("the test is over", 6))
        assert await asyncio.wait_for(task, GUARD_S) == 6


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 2 * GUARD_S))


def start(attempt: int, port: int = 1) -> messages.Start:
    return messages.Start(attempt, [0, 1], 2, 0, 1, "127.0.0.1", port, attempt - 1)


@pytest.mark.slow
def test_attempts_from_the_first_command_to_the_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with an_executor(tmp_path, SCRIPT, Executor) as (executor, driver):
            executor.hear(messages.Welcome(1, "j", 0, 0.05))
            executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), {}, []))
            prepared = await driver.until(messages.Prepared)
            assert prepared.problem == "" and "torch._dynamo" in prepared.learnt
            pids = await attempt_one(executor, driver)
            await refusals(executor, driver)
            await attempt_two(executor, driver)
            assert not any(psutil.pid_exists(pid) for pid in pids)

    run(story)
    assert "host h world 2" in (tmp_path / "logs" / "rank-1" / "attempt-0001.0001.log").read_text()


async def attempt_one(executor: Executor, driver: Driver) -> list[int]:
    executor.hear(messages.OpenStore(1))
    opened = await driver.until(messages.StoreOpened)
    executor.hear(messages.OpenStore(1))
    assert await driver.until(messages.StoreOpened) == opened and opened.port > 0
    executor.hear(start(1, opened.port))
    started = await driver.until(messages.Started)
    assert started.problem == "" and set(started.pids) == {0, 1}
    executor.hear(start(1, opened.port))
    assert await driver.until(messages.Started) == started
    found = await driver.until(messages.Found)
    assert found.findings[0].line.endswith("host h world 2")
    beat = await driver.until(
        messages.Heartbeat, lambda beat: all(w.steps_here for w in workers_of(beat)) and workers_of(beat)
    )
    assert (
        beat.attempt == 1
        and [worker.step for worker in workers_of(beat)] == [1, 1]
        and report_of(beat).host.cpu_load == 0.5
    )
    assert executor.hello().running == [0, 1] and executor.hello().attempt == 1
    learnt = await driver.until(messages.Prepared)
    assert "own_part" in learnt.learnt and learnt.problem == ""
    executor.hear(messages.Gather(1))
    assert [rank.rank for rank in (await driver.until(messages.Evidence)).ranks] == [0, 1]
    os.kill(started.pids[1], signal.SIGKILL)
    ended = await driver.until(messages.WorkerEnded)
    assert (ended.rank, ended.code, ended.by_us) == (1, -9, False)
    executor.hear(messages.Stop(1))
    assert (await driver.until(messages.WorkerEnded)).by_us
    stopped = await driver.until(messages.Stopped)
    assert stopped.attempt == 1 and stopped.stuck == []
    executor.hear(messages.Stop(1))
    assert (await driver.until(messages.Stopped)).attempt == 1
    executor.hear(start(1, opened.port))
    assert await driver.until(messages.Started) == started  # it has been; it is not begun again
    assert executor.workers is None
    return list(started.pids.values())


async def refusals(executor: Executor, driver: Driver) -> None:
    executor.hear(messages.OpenStore(5))
    await driver.until(messages.StoreOpened)
    for command in (messages.OpenStore(4), start(4), messages.Stop(4)):
        executor.hear(command)
        refused = await driver.until(messages.Refused)
        assert (refused.attempt, refused.problem) == (4, "attempt 5 has begun")


async def attempt_two(executor: Executor, driver: Driver) -> None:
    """A second one through the same template, ended with grace; checks beside it."""
    executor.hear(messages.OpenStore(6))
    opened = await driver.until(messages.StoreOpened)
    executor.hear(start(6, opened.port))
    assert (await driver.until(messages.Started)).attempt == 6
    for _ in range(2):
        executor.hear(messages.Check(9, "passive", ["127.0.0.1"]))
        checked = await driver.until(messages.Checked)
        assert (checked.number, checked.outcomes[0].reason) == (9, "1 peers, 3 own")
    began_s = time.monotonic()
    executor.hear(messages.Stop(6, 60.0))
    ended = [await driver.until(messages.WorkerEnded) for _ in range(2)]
    assert {one.code for one in ended} == {-signal.SIGTERM} and all(one.by_us for one in ended)
    await driver.until(messages.Stopped)
    assert time.monotonic() - began_s < 50  # SIGTERM was enough


STEPS = """\
import os, time
from phalanx.core.progress import own_progress
own_progress(os.environ, int(os.environ["PHALANX_RUN_ATTEMPT"])).step(1)
time.sleep(600)
"""
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{STEPS}"


def test_a_second_stop_ends_the_grace_of_the_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with an_executor(tmp_path, DEAF) as (executor, driver):
            executor.hear(messages.Welcome(1, "j", 0, 0.2))
            executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), {}, []))
            executor.hear(start(1))
            await driver.until(
                messages.Heartbeat,
                lambda beat: workers_of(beat) and all(w.steps_here for w in workers_of(beat)),
            )
            executor.hear(messages.Stop(1, 3600.0))
            await driver.until(messages.Heartbeat, lambda beat: all(w.state == "stopping" for w in workers_of(beat)))
            executor.hear(messages.Stop(1, 7200.0))  # as a driver says that was started again: nobody gets more time
            executor.hear(messages.Stop(1, 0.1))
            assert (await driver.until(messages.Stopped)).stuck == []
            ends = [one for one in driver.heard if isinstance(one, messages.WorkerEnded)]
            assert {one.code for one in ends} == {-signal.SIGKILL} and all(one.by_us for one in ends)

    run(story)


SAVES = """\
import os, select, sys, threading, time
if os.environ["RANK"] == "0":
    with open(".pid", "w") as file:
        file.write(str(os.getpid()))
    os.rename(".pid", "pid")
    time.sleep(600)
while not os.path.exists("pid"):
    time.sleep(0.01)
peer = os.pidfd_open(int(open("pid").read()))
def save():
    select.select([peer], [], [])
    open("saved", "w").write(str("phalanx.launch.template" in sys.modules))
threading.Thread(target=save).start()
raise ValueError("the rest is saved beside")
"""


@pytest.mark.parametrize("is_warm", [False, True], ids=["fresh", "warm"])
def test_a_rank_that_has_failed_comes_to_its_end_while_its_peers_are_killed(tmp_path: Path, is_warm: bool) -> None:
    """Its failure is told at once; what its threads save after that is saved."""

    async def story() -> None:
        async with an_executor(tmp_path, SAVES) as (executor, driver):
            executor.hear(messages.Welcome(1, "j", 0, 3600.0))
            executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), {}, [], is_warm))
            executor.hear(start(1))
            failed = await driver.until(messages.WorkerEnded)
            assert (failed.rank, failed.kind, failed.by_us) == (1, "raised", False)
            assert executor.workers is not None and executor.workers.running == [0, 1]
            executor.hear(messages.Stop(1))
            peer = await driver.until(messages.WorkerEnded)
            assert (peer.rank, peer.code, peer.by_us) == (0, -signal.SIGKILL, True)
            assert (await driver.until(messages.Stopped)).stuck == []
            assert (tmp_path / "saved").read_text() == str(is_warm)

    run(story)


def test_the_first_step_of_all_ranks_is_told_before_the_next_heartbeat_is_due(tmp_path: Path) -> None:
    async def story() -> None:
        async with an_executor(tmp_path, STEPS) as (executor, driver):
            executor.hear(messages.Welcome(1, "j", 0, 3600.0))
            executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), {}, []))
            executor.hear(start(1))
            await driver.until(
                messages.Heartbeat,
                lambda beat: workers_of(beat) and all(w.steps_here for w in workers_of(beat)),
            )
            await driver.until(messages.Started)

    run(story)


def test_a_stop_does_not_wait_for_what_is_being_imported(tmp_path: Path) -> None:
    """A host of an attempt that fails elsewhere says at once that it has nothing of it."""
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(3600)\n")

    async def story() -> None:
        async with an_executor(tmp_path) as (executor, driver):
            environment = {"PYTHONPATH": str(tmp_path)}
            executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), environment, ["endless"]))
            executor.hear(start(1))
            executor.hear(messages.Stop(1))
            assert (await driver.until(messages.Stopped)).stuck == []
            assert executor.workers is None
            assert not [one for one in driver.heard if isinstance(one, messages.Started | messages.Prepared)]

    run(story)


def test_a_start_without_a_script_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with an_executor(tmp_path) as (executor, driver):
            executor.hear(start(1))
            assert "no script" in (await driver.until(messages.Started)).problem

    run(story)


def test_a_script_that_cannot_be_prepared_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with an_executor(tmp_path) as (executor, driver):
            executor.hear(messages.Prepare(["script.py"], False, str(tmp_path / "absent"), {}, []))
            assert (await driver.until(messages.Prepared)).problem
            executor.hear(start(1))
            assert (await driver.until(messages.Started)).problem

    run(story)


def test_a_driver_that_comes_again_disturbs_nothing_of_its_attempt(tmp_path: Path) -> None:
    async def story() -> None:
        async with an_executor(tmp_path, STEPS) as (executor, driver):
            executor.hear(messages.Welcome(1, "j", 0, 0.05))
            prepare = messages.Prepare(["script.py"], False, str(tmp_path), {}, [])
            executor.hear(prepare)
            assert (await driver.until(messages.Prepared)).problem == ""
            executor.hear(start(2))
            pids = (await driver.until(messages.Started)).pids
            executor.hear(messages.Welcome(1, "j", 2, 0.05))
            executor.hear(prepare)
            assert (await driver.until(messages.Prepared, lambda told: told.seconds > 0)).problem == ""
            executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), {}, ["colorsys"]))
            assert "colorsys" in (await driver.until(messages.Prepared, lambda told: told.seconds > 0)).learnt
            executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), {"NEW": "1"}, []))
            assert (await driver.until(messages.Prepared, lambda told: told.seconds > 0)).problem == ""
            assert executor.hello().running == [0, 1] and all(psutil.pid_exists(pid) for pid in pids.values())
            executor.hear(messages.Welcome(1, "j", 3, 0.05))
            assert executor.hello().running == []
            ended = [await driver.until(messages.WorkerEnded) for _ in range(2)]
            assert all(one.by_us for one in ended)
            executor.hear(start(2))
            assert (await driver.until(messages.Refused)).problem == "attempt 3 has begun"
            executor.hear(start(3))  # by the newest template
            assert (await driver.until(messages.Started)).problem == ""
            assert not any(psutil.pid_exists(pid) for pid in pids.values())

    run(story)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_executor_without_driver_stays_as_long_as_something_runs(tmp_path: Path) -> None:
    async def story() -> None:
        clock = Clock()
        executor, driver = make_executor(tmp_path, STEPS, clock=clock, kind=WithoutTorch)
        task = asyncio.create_task(executor.run())
        executor.hear(messages.Welcome(1, "j", 0, 0.02))
        executor.hear(messages.Prepare(["script.py"], False, str(tmp_path), {}, []))
        executor.hear(start(1))
        pids = (await driver.until(messages.Started)).pids
        driver.connected = False
        clock.now_s = 1000.0
        await beats(driver, 3)
        assert not task.done() and all(psutil.pid_exists(pid) for pid in pids.values())
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for _ in pids:
            await driver.until(messages.WorkerEnded)
        clock.now_s = 1009.0
        await beats(driver, 3)
        assert not task.done()
        clock.now_s = 1011.0
        assert await asyncio.wait_for(task, GUARD_S) == 1

    run(story)


def test_an_executor_that_no_driver_ever_wanted_leaves(tmp_path: Path) -> None:
    async def story() -> None:
        clock = Clock()
        executor, driver = make_executor(tmp_path, "", clock=clock)
        driver.connected = False
        clock.now_s = 10.0
        assert await asyncio.wait_for(executor.run(), GUARD_S) == 1

    run(story)


async def beats(driver: Driver, count: int) -> None:
    driver.heard = [one for one in driver.heard if not isinstance(one, messages.Heartbeat)]
    for _ in range(count):
        await driver.until(messages.Heartbeat)
