"""Two hosts with a keeper each, of which one dies while a checkpoint is written: nobody waits for what does not come.

The publisher would wait for half an hour, the others for an hour: a test that had to wait would not end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from keeper_processes import GUARD_S, a_host, until, until_gone
from support.open_checkpoint import open_checkpoint
from thread_ranks import ThreadPeers, succeed

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_start import ensure_keeper
from phalanx.checkpoint.session.background_session import Session
from phalanx.checkpoint.session.open_session import open_session
from phalanx.checkpoint.session.snapshot_outcomes import SnapshotEvent
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import open_store

VALUES = 50_000
ROLES = {"model.0": "trained", "model.1": "trained"}


@pytest.fixture
def hosts() -> Iterator[list[Path]]:
    with ExitStack() as stack:
        yield [stack.enter_context(a_host()) for _ in range(2)]


class Rank:
    """One of two, with the keeper of its own host."""

    def __init__(self, folder: Path, address: Path, peers: ThreadPeers, **settings: Any) -> None:
        self.folder, self.peers, self.lines = folder, peers, []  # type: tuple[Path, ThreadPeers, list[str]]
        config = CheckpointConfig(**({"every_steps": 2, "replicas": False, "final_timeout_s": 10 * GUARD_S} | settings))

        def link() -> KeeperClient:
            ensure_keeper(address, ttl_s=GUARD_S, environ=os.environ | {"PHALANX_KEEPER": str(address)})
            return KeeperClient(address, peers.rank, peers.size)

        self.session: Session = open_session(
            str(folder), config, peers=peers, report=self.lines.append, host=f"host {peers.rank}", connect=link
        )
        assert self.session.job.destination.timeout_s > 10 * GUARD_S
        self.tensors = {f"model.{peers.rank}": torch.zeros(VALUES)}
        self.session.watch(self.tensors, None, ROLES)  # type: ignore[arg-type]
        until(self.is_free)
        keeper = self.session.link.keeper
        assert isinstance(keeper, KeeperClient)
        self.keeper = psutil.Process(keeper.pid)
        until(self.keeper.children)
        [self.persister] = self.keeper.children()
        peers.barrier()

    def is_free(self) -> bool:
        return self.session.link.ask(lambda keeper: not keeper.busy, False)

    def step(self, number: int, **options: Any) -> None:
        self.session.ask(number)
        self.session.fence()
        self.tensors[f"model.{self.peers.rank}"].fill_(number)
        self.session.after_step(number, lambda: {"step": number}, **options)

    def kill(self) -> None:
        """The keeper and its persister."""
        for process in (self.keeper, self.persister):
            process.send_signal(signal.SIGKILL)
        for process in (self.keeper, self.persister):
            until_gone(process.pid)

    def go_on(self, first: int) -> int:
        """Steps until both ranks know that a later checkpoint than that of step 2 is durable; the step of that."""
        latest, until_s = 0, time.monotonic() + GUARD_S
        for number in range(first, 10**6):
            assert time.monotonic() < until_s, self.lines
            self.step(number)
            latest = max([latest, *(event.step for event in self.session.events() if event.name)])
            if min(self.peers.gather(latest)) > 2:
                break
            time.sleep(0.01)
        assert "step-00000002" not in open_store(self.folder).names()
        return latest


def area_there(folder: Path) -> bool:
    return any(path.is_dir() and path.name.startswith(".writing-step-00000002") for path in folder.iterdir())


def failure_told(folder: Path) -> bool:
    return any(path.name.startswith("failed-step-00000002") for path in folder.iterdir())


def run(folder: Path, hosts: list[Path], body: Callable[[Rank], int], **settings: Any) -> list[str]:
    """What was reported. The newest checkpoint is whole, and as new as `body` says."""
    lines: list[str] = []

    def main(peers: ThreadPeers) -> int:
        rank = Rank(folder, hosts[peers.rank], peers, **settings)
        try:
            return body(rank)
        finally:
            rank.session.finish(clean=False)
            lines.extend(rank.lines)

    newest = max(succeed(2, main))
    store = open_store(folder)
    latest = read_latest(store)
    assert latest is not None and latest.step >= newest
    found = open_checkpoint(folder / latest.name)
    assert found.state == {"step": latest.step}
    assert all(bool((values == latest.step).all()) for values in found.read().values())
    return lines


def losing(whose: int, kill: Callable[[Rank], object], *, begun: bool = True) -> Callable[[Rank], int]:
    """A rank whose part of the checkpoint of step 2 is missing loses what would write it; both train on.

    Args:
        begun: only when the publisher has begun that checkpoint.
    """

    def body(rank: Rank) -> int:
        is_hit = rank.peers.rank == whose
        if is_hit:
            rank.persister.suspend()
        rank.step(1)
        rank.step(2)
        if is_hit and begun:
            until(lambda: area_there(rank.folder))
        if is_hit:
            kill(rank)
        rank.peers.barrier()
        return rank.go_on(3)

    return body


def test_a_part_that_will_not_come_is_not_waited_for(tmp_path: Path, hosts: list[Path]) -> None:
    lines = run(tmp_path, hosts, losing(1, Rank.kill))
    why = "the keeper of rank 1's host was lost before the checkpoint was published"
    assert [line for line in lines if "durable" in line] == [f"snapshot of step 2: not durable: step 2, rank 0: {why}"]


@pytest.mark.campaign
def test_what_was_told_before_the_publisher_began_counts(tmp_path: Path, hosts: list[Path]) -> None:
    def body(rank: Rank) -> int:
        rank.persister.suspend()
        rank.step(1)
        rank.step(2)
        rank.peers.barrier()
        if rank.peers.rank == 1:
            rank.kill()
        rank.peers.barrier()
        rank.step(3)
        until(lambda: failure_told(rank.folder))
        rank.peers.barrier()
        if rank.peers.rank == 0:
            rank.persister.resume()
        return rank.go_on(4)

    assert any("rank 1's host was lost" in line for line in run(tmp_path, hosts, body))


@pytest.mark.campaign
def test_a_publisher_that_is_gone_is_not_waited_for(tmp_path: Path, hosts: list[Path]) -> None:
    lines = run(tmp_path, hosts, losing(0, Rank.kill, begun=False))
    assert len([line for line in lines if "is lost" in line]) == 1


def test_a_persister_that_is_gone_is_not_waited_for(tmp_path: Path, hosts: list[Path]) -> None:
    lines = run(tmp_path, hosts, losing(1, lambda rank: rank.persister.kill()))
    [told] = [line for line in lines if "durable" in line]
    assert told.endswith("the persister process of rank 1's host was killed by SIGKILL")


def test_the_last_checkpoint_is_taken_again(tmp_path: Path, hosts: list[Path]) -> None:
    def body(rank: Rank) -> int:
        killer = threading.Thread(target=lambda: (until(lambda: area_there(rank.folder)), rank.kill()))
        if rank.peers.rank == 1:
            rank.persister.suspend()
            killer.start()
        rank.step(1)
        rank.step(2, ending=True)
        if rank.peers.rank == 1:
            killer.join()
        ended: list[SnapshotEvent] = []
        until(lambda: ended.extend(rank.session.events()) or not rank.session.is_under_way)  # replicas may come later
        last = ended[-1]
        assert (last.step, last.name) == (2, "step-00000002")
        return last.step

    run(tmp_path, hosts, body, every_steps=0, replicas=True)
