"""A rank whose keeper is gone withdraws its part: who waits for it is told, and nothing else is given up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from keeper_processes import until
from persist_helpers import Job
from storage_helpers import Place, place_fixture, s3_server_fixture  # noqa: F401

from phalanx.checkpoint.keeper_contract import PersistOutcome
from phalanx.checkpoint.persist.checkpoint_writer import PersistWork
from phalanx.checkpoint.persist.publication import Writing, forget_failure, withdraw
from phalanx.checkpoint.storage.checkpoint_store import Store, SupersededError
from phalanx.checkpoint.storage.latest import claim, read_latest
from phalanx.core.fault_points import NO_POINTS

LONG_S = 3000.0


class Persisting:
    """Ranks of a job that write step 1, each in a thread and with a connection to storage of its own."""

    def __init__(self, tmp_path: Path, open_storage: Callable[[], Store], size: int) -> None:
        self.job = Job(tmp_path / "unused", size=size, timeout_s=LONG_S)
        self.open_storage = open_storage
        self.outcomes: list[PersistOutcome] = []

    @property
    def writing(self) -> Writing:
        return Writing(1, self.job.attempt, self.job.job.set_id, self.job.nonce)

    @contextmanager
    def running(self, *ranks: int) -> Iterator[None]:
        """They have written their shards; with the context they have ended."""
        self.outcomes.clear()
        threads = [threading.Thread(target=self._work, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join()

    def problems(self) -> list[str]:
        return [outcome.problem for outcome in self.outcomes if outcome.published]

    def _work(self, rank: int) -> None:
        with self.job.task(rank, 1) as task:
            mine = replace(task, descriptor=os.dup(task.descriptor))
            PersistWork(mine, NO_POINTS, self.outcomes.append, open_storage=lambda _: self.open_storage()).run()


@pytest.fixture
def three(tmp_path: Path, place: Place) -> Persisting:
    return Persisting(tmp_path, place.open, 3)


def told(store: Store) -> list[str]:
    return store.keys("failed-")


def test_only_a_part_that_is_not_there_ends_the_waiting(three: Persisting) -> None:
    store = three.open_storage()
    with three.running(0, 1):
        until(lambda: len(three.outcomes) == 2)  # both shards are written
        withdraw(store, three.writing, 1, "not needed any more")
        assert not told(store)
        withdraw(store, three.writing, 2, "the host has burnt")
        withdraw(store, three.writing, 2, "and said so twice")
    assert len(three.outcomes) == 4
    assert all(problem.endswith(": the host has burnt") for problem in three.problems())
    assert not store.names() and read_latest(store) is None


def test_a_publisher_that_does_not_come_is_not_waited_for(three: Persisting) -> None:
    store = three.open_storage()
    with three.running(1, 2):
        withdraw(store, three.writing, 0, "the host has burnt")
    assert [problem[-20:] for problem in three.problems()] == [": the host has burnt"] * 2


def test_what_is_told_before_it_is_begun_counts_until_it_is_forgotten(three: Persisting) -> None:
    store = three.open_storage()
    withdraw(store, three.writing, 2, "the host has burnt")
    withdraw(store, three.writing._replace(step=7), 2, "of another step")
    with three.running(0, 1):
        pass
    assert all(problem.endswith(": the host has burnt") for problem in three.problems())
    assert len(told(store)) == 1, "what was told of another step is of no use any more"
    forget_failure(store, three.writing)
    with three.running(0, 1, 2):
        pass
    assert three.problems() == [""] * 3
    latest = read_latest(store)
    assert latest is not None and latest.step == 1


def test_what_is_published_stays(three: Persisting) -> None:
    store = three.open_storage()
    with three.running(0, 1, 2):
        pass
    for rank in range(3):
        withdraw(store, three.writing, rank, "too late")
    assert not told(store)


def test_a_leftover_withdraws_nothing(three: Persisting) -> None:
    store = three.open_storage()
    assert claim(store, 1) == 2
    with pytest.raises(SupersededError):
        withdraw(store, three.writing, 2, "the host has burnt")
    assert not told(store)
