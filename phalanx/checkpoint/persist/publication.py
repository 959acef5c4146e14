"""How a durable checkpoint is published: the files by which writers of shards and the publisher communicate.

Beside a shard its writer leaves a *part*, a small JSON file, for the publisher. It stays in the published checkpoint,
listed in the manifest like every other file, and says which rank wrote what.

A checkpoint that is published shows in the pointer. For one that will not be there is a small file beside the
checkpoints, ``failed-step-00000012.a3-1f….json``, which goes when the next one is begun. The writers of shards wait for
one or the other, looking more and more rarely.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from phalanx.checkpoint.format.manifest import FileEntry
from phalanx.checkpoint.format.shard_plan import Record
from phalanx.checkpoint.keeper_contract import PersistTask
from phalanx.checkpoint.storage.checkpoint_store import Store, full_name
from phalanx.checkpoint.storage.latest import Latest, read_latest, require_charge


class Writing(NamedTuple):
    """Which checkpoint of which start of which job: parts of another are never mixed in."""

    step: int
    attempt: int
    set_id: str
    nonce: str

    @staticmethod
    def of(task: PersistTask) -> Writing:
        """What `task` is part of."""
        return Writing(*task.record.snapshot, task.destination.nonce)


@dataclass(frozen=True)
class ShardPart:
    """A shard that is written into `file`; `record` is the slot's, without the sums of its memory: the file has its
    own."""

    writing: Writing
    rank: int
    file: FileEntry
    record: Record

    @staticmethod
    def of(task: PersistTask, file: FileEntry) -> ShardPart:
        """The shard of `task` is in `file`."""
        return ShardPart(Writing.of(task), task.plan.rank, file, replace(task.record, sums=()))

    def to_bytes(self) -> bytes:
        """As JSON."""
        tree = asdict(self) | {"file": self.file.model_dump()}
        return (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def from_bytes(content: bytes) -> ShardPart:
        """The reverse of `to_bytes`; ValueError, TypeError, KeyError: it is something else."""
        tree: dict[str, Any] = json.loads(content)
        file = FileEntry.model_validate(tree["file"])
        record = Record.from_text(json.dumps(tree["record"]))
        return ShardPart(Writing(*tree["writing"]), tree["rank"], file, record)


def part_name(rank: int) -> str:
    """Name of the part of `rank` in an area."""
    return f"part-{rank}.json"


_PREFIX = "failed-"
_GONE_S = 30.0  # after the area has gone: renamed, so that the pointer moves next, or removed
_TRIES = 2
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 2.0
_GROWTH = 1.2  # of the waits: an end is seen late by at most this share of the time that it took
# Ranks of a large job that look at the storage in a second: some six requests each by one rank in eight, the first of
# its host to wait; object stores take some thousands a second (S3: 5,500 reads a second of one prefix).
_RANKS_PER_S = 2500


class NotPublishedError(RuntimeError):
    """The checkpoint will not be there; the message gives the reason."""


def report_failure(store: Store, writing: Writing, problem: str) -> None:
    """Report to the publisher and the other writers that nothing will come of it, as far as storage still can; the
    first report counts."""
    with suppress(OSError):
        _report(store, writing, problem)


def require_no_failure(store: Store, writing: Writing) -> None:
    """Raise NotPublishedError, with the reason, where a checkpoint has failed; OSError: storage refuses."""
    with suppress(FileNotFoundError):
        raise NotPublishedError(json.loads(store.get(_key(writing)))["problem"])


def withdraw(store: Store, writing: Writing, rank: int, problem: str) -> None:
    """Report that the part of `rank`, whose keeper is gone, will not come; unless it is there, or all is published.

    Raises:
        SupersededError: a higher attempt is in charge. OSError: storage refuses.
    """
    latest = read_latest(store)
    require_charge(latest, writing.attempt)
    # It is published, so nothing can be withdrawn any more.
    if latest is not None and _points_to(latest, writing):
        return
    has_part = False
    if rank:  # with the keeper of rank 0's host the publisher is gone too, so its part does not help
        with suppress(TimeoutError):  # nobody has begun it
            area = store.join(writing.step, writing.attempt, writing.nonce, 0.0)
            has_part = part_name(rank) in store.files(area)
    if not has_part:
        _report(store, writing, problem)


def forget_failures(store: Store, but: Writing) -> None:
    """Remove the reports on checkpoints other than `but`, on which a writer may have reported before it was begun."""
    for key in store.keys(_PREFIX):
        if key != _key(but):
            with suppress(IsADirectoryError, PermissionError):  # nobody's note
                store.remove(key)


def forget_failure(store: Store, writing: Writing) -> None:
    """Remove the report on a checkpoint that is tried again, and that nobody writes any more."""
    store.remove(_key(writing))


def join(store: Store, writing: Writing, timeout_s: float) -> str:
    """The area of a checkpoint that another task publishes, when it is there; raises as `await_end`."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            # In short waits, so that a failure, or a later attempt, is noticed between them.
            return store.join(writing.step, writing.attempt, writing.nonce, min(_LONGEST_WAIT_S, left_s))
        except TimeoutError:
            require_no_failure(store, writing)
            require_charge(read_latest(store), writing.attempt)
            if left_s <= _LONGEST_WAIT_S:
                raise


@dataclass
class Endings:
    """What becomes of checkpoints, for the tasks of one host: one of them looks at the storage for all, at once when
    the publisher is one of them and is done."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looking: dict[Writing, tuple[Future[str], threading.Event]] = field(default_factory=dict)

    def hear(self, writing: Writing, look: Callable[[threading.Event], str]) -> str:
        """What `look` finds, or what it raises, for all that ask while one of them looks; it waits for the end of the
        checkpoint, and is given an event that is set when a look is worth it."""
        with self._lock:
            known = self._looking.get(writing)
            found, worth_it = known or (Future(), threading.Event())
            # The first of a host's ranks asks the storage for all of them, or a large job would ask it too often.
            if known is None:
                self._looking[writing] = found, worth_it
        if known is None:
            try:
                found.set_result(look(worth_it))
            except BaseException as error:
                found.set_exception(error)
            finally:
                with self._lock:
                    del self._looking[writing]
        return found.result()

    def settle(self, writing: Writing) -> None:
        """The publisher is done with it, one way or the other."""
        with self._lock:
            known = self._looking.get(writing)
        if known is not None:
            known[1].set()


def await_end(
    store: Store,
    area: str,
    own: str,
    writing: Writing,
    before: Latest | None,
    timeout_s: float,
    *,
    ranks: int = 1,
    worth_it: threading.Event | None = None,
) -> str:
    """Wait until another host has published the checkpoint that is written in `area`; its name.

    Args:
        own: a file that was written into the area, which has gone when this has; empty: there is none.
        before: the pointer as it was before this host's part was there.
        ranks: of the job, that may all be waiting: the more, the more rarely each looks.
        worth_it: an event that is set when a look is worth it.

    Raises:
        NotPublishedError: it will not be.
        TimeoutError: that is not known yet.
        SupersededError: a higher attempt is in charge.
        OSError: storage refuses.
    """
    gone_at = None
    longest_s = max(_LONGEST_WAIT_S, ranks / _RANKS_PER_S)
    for now in pauses(timeout_s, longest_s, longest_s * _FIRST_WAIT_S / _LONGEST_WAIT_S, worth_it):
        latest = read_latest(store)
        # The pointer first: once it has moved, a failure that is reported late is none. As it was before, it is that of
        # an earlier try of the same step.
        if latest is not None and _points_to(latest, writing) and latest != before:
            return latest.name
        require_charge(latest, writing.attempt)
        require_no_failure(store, writing)
        # One file is asked for, not the area listed: a listing has all files of all ranks.
        is_there = True
        if own:
            try:
                store.at(area).size_bytes(own)
            except FileNotFoundError:
                is_there = False
        gone_at = None if is_there else (gone_at or now)
        if gone_at is not None and now - gone_at > _GONE_S:
            raise NotPublishedError(f"what was written of it has gone from {store.url}, and the pointer did not move")
    raise TimeoutError(f"{store.url}: step {writing.step} was not published within {timeout_s:.0f} s")


def pauses(
    timeout_s: float, longest_s: float, first_s: float = _FIRST_WAIT_S, worth_it: threading.Event | None = None
) -> Iterator[float]:
    """The time (monotonic), again and again, with longer and longer pauses, until the timeout has passed; `worth_it`
    ends the pause in which it is set."""
    deadline, wait_s = time.monotonic() + timeout_s, first_s
    woken = worth_it or threading.Event()
    while True:
        now = time.monotonic()
        yield now
        if now >= deadline:
            return
        if woken.wait(min(wait_s, max(0.0, deadline - time.monotonic()))):
            woken.clear()
        wait_s = min(_GROWTH * wait_s, longest_s)


def _points_to(latest: Latest, writing: Writing) -> bool:
    return (latest.attempt, latest.step) == (writing.attempt, writing.step)


def _report(store: Store, writing: Writing, problem: str) -> None:
    content = json.dumps({"problem": problem}, ensure_ascii=False).encode()
    # Errors of storage pass; that of the last try is raised.
    for _ in range(_TRIES - 1):
        with suppress(OSError):
            store.create(_key(writing), content)
            return
    store.create(_key(writing), content)


def _key(writing: Writing) -> str:
    return f"{_PREFIX}{full_name(writing.step, writing.attempt, writing.nonce)}.json"
