"""Ranks of one host, forked by a real template: what is reported of them while they run and when they end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from phalanx.launch.user_script import Script
from phalanx.launch.warm_template import AttemptReport, WarmTemplate
from phalanx.run import messages
from phalanx.run.decide.events import LAST_LINE
from phalanx.run.executor.workers import Workers
from phalanx.run.logs.log_files import RankLog, last_lines
from phalanx.run.logs.log_lines import Tails
from phalanx.run.logs.log_pump import Pump
from phalanx.run.wire.message_frames import Kept, encode

GUARD_S = 240.0

SCRIPT = """\
import atexit, os, sys, time
from phalanx.core.progress import own_progress

rank, what = int(os.environ["RANK"]), os.environ["WHAT"]
page = own_progress(os.environ, int(os.environ["PHALANX_RUN_ATTEMPT"]))
print("rank", rank, "of {WORLD_SIZE} on group {GROUP_RANK} to {WHAT}".format(**os.environ), flush=True)
page.step(41, loss=float("nan") if rank else 2.5)
page.step(42, busy_ns=10**7, loss=2.25)
page.phase("evaluate", 30.0)
if what == "raise" and rank == 3:
    atexit.register(time.sleep, 600)
    raise ValueError("wrong number")
if what == "shout" and rank == 3:
    raise ValueError(chr(0xDC80) + "x" * 3_000_000)
if what == "exit":
    sys.exit("no data at step 7" if rank % 2 else 0)
if what == "return":
    sys.exit()
time.sleep(600)
"""


class Host:
    """Workers with all that they need, as an executor gives it to them."""

    def __init__(self, folder: Path, template: WarmTemplate, script: Script) -> None:
        self.folder, self.template, self.script = folder, template, script
        self.ended: dict[int, messages.WorkerEnded] = {}
        self.changed = asyncio.Event()
        self.workers: Workers | None = None
        self.pump = Pump(Tails(), lambda rank, lines: None, time.time)

    def hear(self, attempt: int, word: AttemptReport) -> None:
        if self.workers is not None and attempt == self.workers.attempt:
            self.workers.hear(word)

    def tell(self, ended: messages.WorkerEnded) -> None:
        assert ended.rank not in self.ended
        self.ended[ended.rank] = ended
        self.changed.set()

    async def start(self, attempt: int, what: str) -> messages.Started:
        """Have both ranks do `what`, when those of the attempt before are gone."""
        if self.workers is not None:
            self.workers.close()
        self.ended.clear()
        start = messages.Start(attempt, [2, 3], 4, 1, 2, "127.0.0.1", 1, attempt - 1, {"WHAT": what})
        pages, logs = self.folder / "pages", self.folder / "logs"
        pages.mkdir(exist_ok=True)
        environ = {**os.environ}
        open_log = partial(RankLog, logs)
        self.workers = Workers(start, self.script, self.template, environ, pages, open_log, self.pump, self.tell)
        return await self.workers.begin()

    async def until_over(self, *ranks: int) -> None:
        async with asyncio.timeout(GUARD_S):
            while not set(ranks) <= self.ended.keys():
                self.changed.clear()
                await self.changed.wait()

    async def until_stepped(self) -> list[messages.WorkerState]:
        async with asyncio.timeout(GUARD_S):
            while True:
                assert self.workers is not None
                states = self.workers.states()
                if all(state.phase == "evaluate" for state in states):
                    return states
                await asyncio.sleep(0.01)


@asynccontextmanager
async def a_host(folder: Path) -> AsyncIterator[Host]:
    (folder / "script.py").write_text(SCRIPT)
    script = Script("script.py", folder=str(folder))
    hosts: list[Host] = []
    template = WarmTemplate(
        script, dict(os.environ), lambda attempt, word: hosts[0].hear(attempt, word), preload=("json",), learns=False
    )
    template.start()
    hosts.append(Host(folder, template, script))
    try:
        yield hosts[0]
    finally:
        await template.close()
        if hosts[0].workers is not None:
            hosts[0].workers.close()
        await hosts[0].pump.close()


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 2 * GUARD_S))


def test_attempts_one_after_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_host(tmp_path) as host:
            await killed(host)
            await killed_by_another(host, 9, is_over=True)
            await killed_by_another(host, 10, is_over=False)
            await raised(host)
            await left(host)
            await shouted(host)
            await template_killed(host)

    run(story)
    assert "rank 2 of 4 on group 1 to wait" in [line.text for line in last_lines(tmp_path / "logs", 2, 50)]


async def shouted(host: Host) -> None:
    """What a rank says may be larger than a message, and hold halves of characters, as of names of files."""
    await host.start(20, "shout")
    await host.until_over(3)
    ended = host.ended[3]
    assert encode(Kept(1, ended)) and ended.summary.startswith("ValueError: ?xxx")
    assert "characters are left out" in ended.text and ended.text.startswith("Traceback")


async def killed(host: Host) -> None:
    """What a heartbeat says; one rank is killed by somebody, then the other by us."""
    started = await host.start(4, "wait")
    assert started.problem == "" and set(started.pids) == {2, 3} and started.attempt == 4
    first, second = await host.until_stepped()
    assert (first.rank, first.pid, first.state) == (2, started.pids[2], "running")
    assert (first.step, first.steps_here, first.loss) == (42, 2, 2.25)
    assert first.busy_s == pytest.approx(0.01) and first.expects_s == pytest.approx(30)
    assert first.step_age_s >= 0 and first.last_step_s > 0 and first.rss_bytes > 0 and first.cpu_s >= 0
    assert second.rank == 3 and host.workers is not None and host.workers.running == [2, 3]
    [subject] = host.workers.subjects([3])
    assert (subject.rank, subject.pid) == (3, started.pids[3])
    assert subject.progress is not None and subject.progress() == ("evaluate", 42)
    os.kill(started.pids[3], signal.SIGKILL)
    await host.until_over(3)
    ended = host.ended[3]
    assert (ended.attempt, ended.code, ended.kind, ended.step, ended.by_us) == (4, -9, "signal", 42, False)
    assert "SIGKILL" in ended.summary and "rank 3 of 4 on group 1 to wait" in ended.text
    assert [state.state for state in host.workers.states()] == ["running", "ended"]
    host.workers.note_stop()
    await host.template.kill(4)
    await host.until_over(2)
    assert host.ended[2].by_us and host.workers.running == []
    assert not any(psutil.pid_exists(pid) for pid in started.pids.values())


async def killed_by_another(host: Host, attempt: int, *, is_over: bool) -> None:
    """What has killed a rank is told though all are being stopped by then, be it over or still ending of that."""
    started = await host.start(attempt, "wait")
    await host.until_stepped()
    assert host.workers is not None
    host.workers.note_stop()
    os.kill(started.pids[2], signal.SIGKILL)
    if is_over:
        await host.until_over(2)
    await host.template.kill(attempt)
    await host.until_over(2, 3)
    assert not host.ended[2].by_us and host.ended[3].by_us


async def raised(host: Host) -> None:
    """It is told though the process has much to do at its exit, and once only."""
    await host.start(5, "raise")
    await host.until_over(3)
    ended = host.ended[3]
    assert (ended.attempt, ended.kind, ended.summary) == (5, "raised", "ValueError: wrong number")
    assert "script.py" in ended.text and not ended.follows
    assert (ended.code, ended.step, ended.by_us) == (1, 42, False)
    assert host.workers is not None and host.workers.running == [2, 3]
    await host.template.kill(5)
    await host.until_over(2)
    assert host.workers.running == []


async def left(host: Host) -> None:
    for attempt, what, status in ((6, "exit", 1), (7, "return", 0)):
        await host.start(attempt, what)
        await host.until_over(2, 3)
        told = [(host.ended[rank].attempt, host.ended[rank].code, host.ended[rank].kind) for rank in (2, 3)]
        assert told == [(attempt, 0, "returned"), (attempt, status, "returned")]
        about = f"returned exit status 1{LAST_LINE}no data at step 7" if status else ""
        assert host.ended[3].summary == about


async def template_killed(host: Host) -> None:
    started = await host.start(8, "wait")
    await host.until_stepped()
    template = psutil.Process(started.pids[2]).parent()
    assert template is not None and template.pid != os.getpid()
    template.kill()
    await host.until_over(2, 3)
    assert {one.code for one in host.ended.values()} == {-9}


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_host(tmp_path) as host:
            (tmp_path / "pages").write_text("in the way")
            start = messages.Start(1, [0], 1, 0, 1, "127.0.0.1", 1)
            open_log = partial(RankLog, tmp_path / "logs")
            host.workers = Workers(
                start, host.script, host.template, {}, tmp_path / "pages", open_log, host.pump, host.tell
            )
            started = await host.workers.begin()
            assert started.problem and started.pids == {} and host.workers.running == []

    run(story)
