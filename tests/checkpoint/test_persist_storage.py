"""Storage that refuses, fails now and then, or is slow: what persisting makes of it, and that the next task works."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from persist_helpers import Job, areas
from typing_extensions import Buffer

from phalanx.checkpoint.format.manifest import FileEntry
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES
from phalanx.checkpoint.keeper_contract import PersistOutcome
from phalanx.checkpoint.persist.checkpoint_writer import PersistWork
from phalanx.checkpoint.persist.publication import ShardPart
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.core.fault_points import NO_POINTS


class Refusing(LocalStore):
    """Refuses a file half way, or every so many."""

    file, errno, every, writes = "", 0, 0, 0

    def write(self, area: str, file: str, content: Iterable[Buffer]) -> FileEntry:
        self.writes += 1
        broken = file == self.file or (self.every and self.writes % self.every == 0)
        return super().write(area, file, self._torn(area, file, content) if broken else content)

    def _torn(self, area: str, file: str, content: Iterable[Buffer]) -> Iterator[Buffer]:
        yield next(iter(content))
        raise OSError(self.errno, os.strerror(self.errno), str(self.path / area / file))


def run(job: Job, store: Store, step: int, ranks: Iterable[int] = (0,), **changes: Any) -> list[PersistOutcome]:
    """The outcomes of a checkpoint whose ranks all write through `store`."""
    outcomes: list[PersistOutcome] = []

    def work(rank: int) -> None:
        with job.task(rank, step, **changes) as task:
            mine = replace(task, descriptor=os.dup(task.descriptor))
            PersistWork(mine, NO_POINTS, outcomes.append, open_storage=lambda _: store).run()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def problems(outcomes: list[PersistOutcome]) -> list[str]:
    return [outcome.problem for outcome in outcomes if outcome.problem]


@pytest.mark.campaign(but=("__0_0.distcp-28", "part-0.json-5", "manifest.json-5", "SHA256SUMS-30"))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize(
    "file", ["__0_0.distcp", "__1_0.distcp", "part-0.json", ".metadata", "manifest.json", "SHA256SUMS"]
)
def test_a_file_that_storage_refuses_is_named_and_the_next_checkpoint_works(
    tmp_path: Path, file: str, number: int
) -> None:
    job, store = Job(tmp_path, size=2), Refusing(tmp_path)
    assert not problems(run(job, store, 1, (0, 1)))
    store.file, store.errno = file, number
    outcomes = run(job, store, 2, (0, 1))
    failed = problems([outcome for outcome in outcomes if outcome.published])
    assert len(failed) == 2 and all(f"{file}: {os.strerror(number)}" in problem for problem in failed)
    assert len(outcomes) == 4
    assert store.names() == ["step-00000001"]
    store.file = ""
    assert not problems(run(job, store, 3, (0, 1)))
    assert not areas(tmp_path)
    job.require(job.latest())
    assert job.latest().step == 3


def test_every_third_write_fails(tmp_path: Path) -> None:
    job, store = Job(tmp_path, size=2), Refusing(tmp_path)
    store.every, store.errno = 3, errno.EIO
    for step in range(1, 10):
        outcomes = run(job, store, step, (0, 1))
        assert len(outcomes) == 4 and any(os.strerror(errno.EIO) in problem for problem in problems(outcomes))
        assert not store.names()
    store.every = 0
    assert not problems(run(job, store, 10, (0, 1)))
    assert not areas(tmp_path)
    job.require(job.latest())


def test_memory_is_bounded_by_what_is_read_ahead(tmp_path: Path) -> None:
    """Storage that is slow is asked for one run after another: nothing is read before it is wanted."""

    class Slow(LocalStore):
        lengths: list[int] = []  # noqa: RUF012

        def write(self, area: str, file: str, content: Iterable[Buffer]) -> FileEntry:
            def noted() -> Iterator[Buffer]:
                for piece in content:
                    self.lengths.append(memoryview(piece).nbytes)
                    yield piece

            return super().write(area, file, noted())

    job, store = Job(tmp_path, rows=3 * CHUNK_BYTES // 1024), Slow(tmp_path)
    assert not problems(run(job, store, 1))
    assert max(store.lengths) <= CHUNK_BYTES
    assert sum(length == CHUNK_BYTES for length in store.lengths) == 3
    job.require(job.latest())


@pytest.mark.parametrize("change", ["step", "attempt", "set_id", "nonce"])
def test_a_part_of_another_checkpoint_is_refused(tmp_path: Path, change: str) -> None:
    job = Job(tmp_path, size=2)

    class Mixed(LocalStore):
        def write(self, area: str, file: str, content: Iterable[Buffer]) -> FileEntry:
            if file != "part-1.json":
                return super().write(area, file, content)
            part = ShardPart.from_bytes(b"".join(bytes(piece) for piece in content))
            other: dict[str, Any] = {change: 7 if change in ("step", "attempt") else "other"}
            part = replace(part, writing=part.writing._replace(**other))
            return super().write(area, file, [part.to_bytes()])

    failed = problems(run(job, Mixed(tmp_path), 1, (0, 1)))
    assert failed and all("part-1.json belongs to" in problem for problem in failed)
    assert not LocalStore(tmp_path).names()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plan_sha256": "0"}, "another plan"),
        ({"data_bytes": 5}, "5 bytes where"),
        ({"sums": ()}, "0 sums"),
        ({"state": "{}"}, "the state of step 1"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    job = Job(tmp_path)
    failed = problems(run(job, LocalStore(tmp_path), 1, **changes))
    assert len(failed) == 2 and all(says in problem and "rank 0" in problem for problem in failed)
    assert not LocalStore(tmp_path).names()
