"""What the persister process does with one task. Torch-free."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from threading import Event

from phalanx.checkpoint.persist.contract import Outcome, Task
from phalanx.checkpoint.persist.ending import Endings, await_end, join, require_no_failure, tell_failure
from phalanx.checkpoint.persist.parts import Writing, part_name
from phalanx.checkpoint.persist.publisher import Publisher, describe
from phalanx.checkpoint.persist.writer import write_shard
from phalanx.checkpoint.storage.base import Store
from phalanx.checkpoint.storage.latest import read_latest, require_charge
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.points import Points

_PROBLEM_CHARACTERS = 4000
OpenStore = Callable[[Task], Store]


def open_destination(task: Task) -> Store:
    """The storage of a task. UserError: there is none of that kind."""
    return open_store(task.destination.url, task.destination.options)


@dataclass
class Work:
    """One task, done in a thread of its own.

    Args:
        task: what is to be done; its descriptor is closed at the end.
        points: where tests inject faults.
        tell: is given the two outcomes, one after the other, whatever happens.
        turn: shards are written within this context, so that not too many are at a time.
        open_storage: how the storage is reached.
        endings: of the tasks of this process.
    """

    task: Task
    points: Points
    tell: Callable[[Outcome], None]
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)
    open_storage: OpenStore = open_destination
    endings: Endings = field(default_factory=Endings)

    def run(self) -> None:
        """Do it. Never raises."""
        self._begun_s = time.monotonic()
        self._told_written = False
        try:
            store = self.open_storage(self.task)
            name = self._publish(store) if self.task.job is not None else self._contribute(store)
        except Exception as error:
            self._fail(error)
        else:
            self.tell(self._outcome(published=True, name=name))
        finally:
            os.close(self.task.descriptor)

    def _publish(self, store: Store) -> str:
        try:
            return Publisher(store, self.task, self.points, self._written, self.turn).publish()
        finally:
            self.endings.settle(Writing.of(self.task))

    def _contribute(self, store: Store) -> str:
        """Write a shard of what another task publishes, here or on another host."""
        writing, timeout_s = Writing.of(self.task), self.task.destination.timeout_s
        before = read_latest(store)
        require_charge(before, writing.attempt)
        area = join(store, writing, timeout_s)
        self._written(self._write(store, area) if self.task.plan.pieces else 0)
        own, ranks = part_name(self.task.plan.rank) if self.task.plan.pieces else "", self.task.plan.world_size
        wait_s = 2 * timeout_s  # for the shards of others, and to publish

        def look(worth_it: Event) -> str:
            return await_end(store, area, own, writing, before, wait_s, ranks=ranks, worth_it=worth_it)

        return self.endings.hear(writing, look)

    def _write(self, store: Store, area: str) -> int:
        """Size of the file, bytes."""
        try:
            with self.turn:
                part = write_shard(store, area, self.task, self.points)
        except Exception as error:
            with suppress(OSError):
                require_no_failure(store, Writing.of(self.task))  # then the area went while this was written into it
            tell_failure(store, Writing.of(self.task), f"the shard of rank {self.task.plan.rank}: {describe(error)}")
            raise
        return part.file.size_bytes

    def _written(self, size_bytes: int) -> None:
        self.tell(self._outcome(published=False, size_bytes=size_bytes))
        self._told_written = True

    def _fail(self, error: Exception) -> None:
        who = f"step {self.task.record.step}, rank {self.task.plan.rank}"
        problem = f"{who}: {describe(error)}"[:_PROBLEM_CHARACTERS]
        print(f"phalanx persister: {problem}", file=sys.stderr, flush=True)
        if not self._told_written:
            self.tell(self._outcome(published=False, problem=problem))
        self.tell(self._outcome(published=True, problem=problem))

    def _outcome(self, *, published: bool, problem: str = "", name: str = "", size_bytes: int = 0) -> Outcome:
        seconds = time.monotonic() - self._begun_s
        return Outcome(self.task.plan.rank, self.task.record.step, published, problem, name, seconds, size_bytes)
