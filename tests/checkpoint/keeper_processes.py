"""Real keepers and real writers for tests, and how they end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from keeper_forks import fork_keeper
from keeper_helpers import SET, some_bytes

from phalanx.checkpoint.format.shard_plan import JobPlan, ShardPlan
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_start import end_keeper
from phalanx.checkpoint.keeper_contract import Destination, Taken

GUARD_S = 150.0


@contextmanager
def a_host(start: Callable[..., None] = fork_keeper, **environ: str) -> Iterator[Path]:
    """The address of a keeper; it ends with the context.

    Args:
        start: `ensure_keeper`, where it matters that it is started as ranks do it.
    """
    folder = Path(tempfile.mkdtemp(prefix="keeper"))
    address = folder / "k"
    try:
        start(address, ttl_s=GUARD_S, environ=os.environ | environ | {"PHALANX_KEEPER": str(address)})
        yield address
    finally:
        end_keeper(address)
        shutil.rmtree(folder)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that no event tells of."""
    end_s = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end_s, "it has not come"
        time.sleep(0.005)


def until_gone(pid: int) -> None:
    """Wait for a process that is not ours to end."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(GUARD_S)


def a_rank(
    address: Path,
    plan: ShardPlan,
    attempt: int = 1,
    set_id: str = SET,
    slots: int = 2,
    job: JobPlan | None = None,
    destination: Destination | None = None,
) -> KeeperClient:
    """Connected, with memory."""
    keeper = KeeperClient(address, plan.rank, plan.world_size)
    keeper.begin(attempt, set_id, plan.world_size)
    keeper.lease(plan, job, slots, destination)
    until(lambda: keeper.ready)
    return keeper


def write(keeper: KeeperClient, plan: ShardPlan, step: int, attempt: int = 1, **settings: object) -> None:
    """Copy a snapshot into a slot, and say so."""
    until(lambda: not keeper.busy)
    slot = keeper.slot()
    slot.memory[:] = some_bytes(plan, step, attempt)
    keeper.taken(slot, Taken(step, hurry=True, **settings))  # type: ignore[arg-type]


def snapshots(keeper: KeeperClient) -> list[tuple[int, int, int]]:
    """Attempt, step and rank of all that is held."""
    return sorted((held.record.attempt, held.record.step, held.record.rank) for held in keeper.held())


@contextmanager
def a_process(program: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said a line; it is killed with the context, if not before."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
