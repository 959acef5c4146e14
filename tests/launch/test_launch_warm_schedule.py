"""A rank that has an agenda does to itself what that says, though its script knows nothing of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from launch_warm_helpers import GUARD_S, PRELOAD_TO_TRAIN, host

from phalanx.faults.fault_schedule import Agenda, Memory, Order, write_agenda
from phalanx.launch.environment import without_worker

SCRIPT = """\
import os, torch

print("agenda", "PHALANX_AGENDA" in os.environ, flush=True)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
for step in range(1, 6):
    optimizer.step()
    print("step", step, flush=True)
"""


@pytest.mark.slow
def test_a_rank_kills_itself_after_the_step_that_its_agenda_names(tmp_path: Path) -> None:
    order = Order(0, "signal", [1], 3, "step", 2, 0.0, "calls", 1, "once", {"name": "SIGKILL"})
    path = tmp_path / "notes"
    write_agenda(Agenda(1, "optimizer", [order]), path)
    environ = {**without_worker(os.environ), "PHALANX_AGENDA": str(path), "PHALANX_HOST": "left"}

    async def story() -> None:
        async with host(tmp_path, SCRIPT, environ=environ, preload=PRELOAD_TO_TRAIN) as here:
            for number, code in ((1, 0), (2, -signal.SIGKILL), (3, 0)):
                attempt = await here.spawn(number)
                lines = {rank: (await attempt.rest(rank)).splitlines() for rank in (0, 1)}
                assert await here.end(attempt) == {0: 0, 1: code}
                assert lines[0] == ["agenda False", *(f"step {step}" for step in range(1, 6))]
                assert lines[1] == (lines[0] if code == 0 else lines[0][:3])

    asyncio.run(asyncio.wait_for(story(), 4 * GUARD_S))
    [record] = Memory(path).records()
    assert (record.rank, record.attempt, record.step, record.host) == (1, 2, 3, "left")
