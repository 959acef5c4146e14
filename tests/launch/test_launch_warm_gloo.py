"""Unmodified DDP scripts through one template, attempt after attempt: real gloo, real kills, steps reported."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from launch_warm_helpers import GUARD_S, PRELOAD_TO_TRAIN, host, is_gone
from support.progress_pages import read_progress

from phalanx.launch.launch_messages import Exited, Over, Returned
from phalanx.launch.rendezvous_store import STORE_RANK

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.slow,
]

# As anybody writes it: nothing of us in it.
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(int(sys.argv[1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])])):
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
dist.destroy_process_group()
"""

STEPS = 6


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 6 * GUARD_S))


@pytest.mark.campaign(but=("path",))
@pytest.mark.parametrize("is_module", [False, True], ids=["path", "module"])
def test_a_killed_store_is_told_and_an_attempt_after_a_kill_repeats_the_run_bit_for_bit(
    tmp_path: Path, is_module: bool
) -> None:
    async def test() -> None:
        steps, options = (str(STEPS), str(10**9), str(10**9)), {"is_module": is_module, "preload": PRELOAD_TO_TRAIN}
        async with host(tmp_path, SCRIPT, steps[::-1], name="train.py", **options) as here:
            assert await here.template.ready() is None
            alone = await here.spawn(1, store=True)
            await alone.line(0)
            os.kill(alone.pids[STORE_RANK], signal.SIGKILL)
            exited = await here.until(1, Exited)
            assert (exited[0].rank, exited[0].code) == (STORE_RANK, -signal.SIGKILL)
            await here.template.kill(1)
            assert here.of(1, Over)

            first = await here.spawn(2, store=True)
            before = {rank: [await first.line(rank) for _ in range(STEPS)] for rank in (0, 1)}
            os.kill(first.pids[1], signal.SIGKILL)
            await here.until(2, Exited)
            await here.template.kill(2)
            assert {word.rank: word.code for word in here.of(2, Exited)}[1] == -signal.SIGKILL
            assert all(map(is_gone, first.pids.values()))
            page = read_progress(first.pages[1])
            assert page is not None
            assert page.steps_here >= STEPS - 1  # the line of a step comes after its report
            assert (page.pid, page.attempt) == (first.pids[1], 2)

            second = await here.spawn(3, store=True)
            await here.until(3, Returned, 2)
            assert await here.end(second) == {0: 0, 1: 0}
            after = {rank: (await second.rest(rank)).splitlines() for rank in (0, 1)}
            assert after == before
            for rank in (0, 1):
                page = read_progress(second.pages[rank])
                assert page is not None
                assert (page.step, page.steps_here, page.attempt) == (STEPS, STEPS, 3)
                assert page.step_took_ns > 0 and page.step_ended_ns > page.phase_began_ns
                assert page.loss is None and page.busy_ns == -1
            assert len(set(first.pids.values()) | set(second.pids.values())) == 6

    run(test)


CLAIMS = """
import os
import torch
from phalanx.core.progress import own_progress
own = own_progress(os.environ, int(os.environ["PHALANX_RUN_ATTEMPT"]))
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(3):
    parameter.square().sum().backward()
    optimizer.step()
own.step(41, busy_ns=5, loss=0.5)
"""


def test_a_script_that_writes_its_page_itself_is_not_counted_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path, CLAIMS, preload=PRELOAD_TO_TRAIN) as here:
            attempt = await here.spawn(1, [0])
            assert await here.end(attempt) == {0: 0}
            page = read_progress(attempt.pages[0])
            assert page is not None
            assert (page.step, page.steps_here, page.busy_ns, page.loss, page.attempt) == (41, 1, 5, 0.5, 1)

    run(test)


@pytest.mark.campaign(but=("forked",))
@pytest.mark.parametrize("forks", [True, False], ids=["forked", "new"])
def test_steps_are_reported_where_the_script_imports_torch_itself(tmp_path: Path, forks: bool) -> None:
    source = CLAIMS.replace("from phalanx.core.progress import own_progress\n", "").replace("own", "# own")

    async def test() -> None:
        async with host(tmp_path, source, preload=(), forks=forks) as here:
            attempt = await here.spawn(1, [0])
            assert await here.end(attempt) == {0: 0}, await attempt.rest(0)
            page = read_progress(attempt.pages[0])
            assert page is not None
            assert page.steps_here == 3 and (page.imported_ns > 0) is not forks

    run(test)
