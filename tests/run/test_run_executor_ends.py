"""What is said of ranks' ends while their attempt is being stopped; neither template nor ranks are real."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_executor_parts import GUARD_S, make_executor

from phalanx.core.progress import ProgressReader
from phalanx.launch.launch_messages import Exited, Returned
from phalanx.launch.rank_failures import Failure
from phalanx.launch.user_script import Script
from phalanx.launch.warm_template import AttemptReport, Gone, TemplateGoneError
from phalanx.run import messages
from phalanx.run.executor.workers import Workers, _WorkerRank


class Lines:
    """Plays a `Pump` of ranks that have written nothing."""

    def take_now(self, rank: int) -> None: ...

    def last_lines(self, rank: int) -> Sequence[str]:
        return []


class GoneTemplate:
    """Its process has died since it was last heard of."""

    def signal(self, attempt: int, ranks: Sequence[int], number: int) -> None:
        raise TemplateGoneError("broken pipe")

    async def kill(self, attempt: int, spared: Sequence[int] = ()) -> None:
        raise TemplateGoneError("broken pipe")

    async def close(self) -> None: ...


def workers_with(report: Callable[[messages.WorkerEnded], object], folder: Path, template: Any = None) -> Workers:
    """Of attempt 1, with rank 0."""
    start = messages.Start(1, [0], 2, 0, 1, "127.0.0.1", 1)
    page = folder / "rank-0.1"
    found = Workers(start, Script("s.py"), template, {}, folder, lambda *_: pytest.fail("no log"), Lines(), report)  # type: ignore[arg-type]
    found._ranks[0] = _WorkerRank(0, page, ProgressReader(page), pid=os.getpid())
    return found


def raised(time_ns: int, *, follows: bool = False) -> Failure:
    return Failure(0, time_ns, "raised", 1, "ValueError: wrong", "Traceback", follows)


LONG_AGO, LATER = 1, time.monotonic_ns() + 10**15


@pytest.mark.parametrize(
    ("words", "by_us"),
    [
        ([raised(LONG_AGO), Exited(0, LATER, -9, is_killed=True)], False),
        ([Returned(0, 3, time_ns=LONG_AGO), Exited(0, LATER, -9, is_killed=True)], False),
        ([Returned(0, 0, time_ns=LONG_AGO), Exited(0, LATER, 0)], True),
        ([raised(LATER), Exited(0, LATER, 1)], True),
        ([Returned(0, 3, time_ns=LATER), Exited(0, LATER, 3)], True),
        ([raised(LONG_AGO, follows=True), Exited(0, LATER, 1)], True),
        ([Exited(0, LATER, 1)], True),
    ],
    ids=["raised", "left", "done", "raised-then", "left-then", "followed", "ended"],
)
def test_what_went_wrong_before_a_stop_and_is_heard_of_after_it_is_not_by_us(
    tmp_path: Path, words: Sequence[AttemptReport], by_us: bool
) -> None:
    """A rank that raises may close its groups first: peers say that they lost it, and all are stopped for that."""
    told: list[messages.WorkerEnded] = []
    workers = workers_with(told.append, tmp_path)
    workers.note_stop()
    for word in words:
        workers.hear(word)
    assert [one.by_us for one in told] == [by_us]


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_a_stop_is_answered_though_the_template_dies_as_it_is_told(tmp_path: Path, grace_s: float) -> None:
    """Else the driver, which waits for the answer, would take the host for one that does not end its processes."""

    async def story() -> None:
        executor, driver = make_executor(tmp_path, "")
        workers = executor.workers = workers_with(lambda _: None, tmp_path, GoneTemplate())
        workers.hear(Gone())
        await executor._stop(messages.Stop(1, grace_s))
        assert (await driver.until(messages.Stopped)).stuck == []

    asyncio.run(asyncio.wait_for(story(), GUARD_S))
