"""The one writer of durable checkpoints: every rank's shard, and on rank 0 publishing them as one.

`write_shard` writes the file of a rank and the part that describes it. The `Publisher` waits until all parts are there
and none is stale or sick, describes them in a manifest, publishes, and moves the pointer.

Both modes of ``checkpoint.mode`` use it. In the background, the persister process of each host does a `PersistWork` per
rank: the elements come from a slot, whose memory is checked against its record on the way, run by run, before any of it
is written; ranks learn from the storage what became of it. Where training stands still
(`phalanx.checkpoint.session.blocking_session`), the ranks do the same themselves: the elements come from the tensors,
and the ranks exchange the outcome.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event

from typing_extensions import Buffer

from phalanx import __version__
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.checkpoint_files import Span
from phalanx.checkpoint.format.manifest import FORMAT_VERSION, MANIFEST, SUMS, FileEntry, Manifest, TensorEntry
from phalanx.checkpoint.format.run_sums import RunSums, chunk_fault, record_fault
from phalanx.checkpoint.format.shard_plan import (
    CHUNK_BYTES,
    Piece,
    ShardPlan,
    is_stale,
    parse_state,
    sick_tensors,
    with_crc32,
)
from phalanx.checkpoint.keeper_contract import PersistOutcome, PersistTask
from phalanx.checkpoint.persist.publication import (
    Endings,
    NotPublishedError,
    ShardPart,
    Writing,
    await_end,
    forget_failures,
    join,
    part_name,
    pauses,
    report_failure,
    require_no_failure,
)
from phalanx.checkpoint.storage.checkpoint_store import Store, SupersededError
from phalanx.checkpoint.storage.latest import advance, read_latest, require_charge
from phalanx.checkpoint.storage.location import open_store
from phalanx.checkpoint.storage.retention import prune
from phalanx.core.fault_points import Points


class BadMemoryError(ValueError):
    """The memory of a slot does not match its record; the message names shard, run and tensor."""


Elements = Callable[[Piece], Iterable[Buffer]]
"""Gives the elements of a piece, in order, in any number of buffers; each is good until the next is asked for."""


def write_shard(
    store: Store, area: str, task: PersistTask, points: Points, elements: Elements | None = None
) -> ShardPart:
    """Write the file of a shard into `area`, then its part. Takes the memory of one run (`CHUNK_BYTES`).

    Args:
        elements: where they come from; None: from the slot of the task.

    Raises:
        BadMemoryError: the slot does not match its record.
        OSError: storage refuses.
    """
    plan, sums = task.plan, RunSums()
    source = elements or _SlotReader(task).elements

    def summed() -> Iterator[Buffer]:
        done, half = 0, plan.file_bytes // 2
        # Sums are taken on the way out: reading a file again from storage would take as long as writing it.
        for begins, data in _content(plan, source):
            if begins:
                sums.cut()
            sums.update(data)
            yield data
            length = memoryview(data).nbytes
            if done <= half < done + length:
                points.reach("persist.shard-half", rank=plan.rank)
            done += length

    file = store.write(area, plan.file, summed())
    if file.size_bytes != plan.file_bytes:
        raise OSError(f"{file.name} has {file.size_bytes} of its {plan.file_bytes} bytes")
    part = ShardPart.of(task, file.model_copy(update={"sums": sums.finish()}))
    points.reach("persist.shard-written", rank=plan.rank)
    # The part comes after the file is durable: from it the publisher knows that the file is there.
    store.write(area, part_name(part.rank), [part.to_bytes()])
    points.reach("persist.part-written", rank=plan.rank)
    return part


def _content(plan: ShardPlan, elements: Elements) -> Iterator[tuple[bool, Buffer]]:
    """The bytes of the file, and whether an archive begins with these."""
    end = 0
    for piece, offset in zip(plan.pieces, plan.offsets, strict=True):
        # Archives begin at aligned offsets, so that their elements are aligned in the file too.
        if offset > end:
            yield False, bytes(offset - end)
        yield True, piece.head
        # A ZIP archive has the CRC of its content behind it.
        crc32 = 0
        for data in elements(piece):
            crc32 = zlib.crc32(data, crc32)
            yield False, data
        yield False, with_crc32(piece.tail, crc32)
        end = offset + piece.archive_bytes


class _SlotReader:
    """The memory of a slot, read run by run, each checked against the sum in the record.

    Each run is read into memory of its own before it is checked, so that what is written is what was checked, whatever
    happens to the slot meanwhile. It is the same memory for all of them, since the pages of new memory, which the
    kernel fills with zeros first, would take longer than all sums: a run is good until the next is read.
    """

    def __init__(self, task: PersistTask) -> None:
        self._task = task
        self._number, self._run = -1, memoryview(b"")
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, task.record.data_bytes)))
        if task.plan.data_bytes != task.record.data_bytes:
            self._require(f"{task.record.data_bytes} bytes where {task.plan.data_bytes} belong")
        self._require(record_fault(task.record, os.fstat(task.descriptor).st_size, task.plan))

    def elements(self, piece: Piece) -> Iterator[memoryview]:
        start, end = piece.start_bytes, piece.start_bytes + piece.length_bytes
        while start < end:
            number, first = divmod(start, CHUNK_BYTES)
            part = self._read(number)[first : first + end - start]
            yield part
            start += part.nbytes

    def _read(self, number: int) -> memoryview:
        if number != self._number:
            start = number * CHUNK_BYTES
            length = min(CHUNK_BYTES, self._task.record.data_bytes - start)
            self._run, self._number = self._buffer[:length], number
            if os.preadv(self._task.descriptor, [self._run], start) != length:
                self._require(f"the memory ends within run {number}")
            self._require(chunk_fault(self._run, number, self._task.record, self._task.plan))
        return self._run

    def _require(self, fault: str | None) -> None:
        if fault is not None:
            raise BadMemoryError(f"the memory of rank {self._task.plan.rank}'s shard was not written: {fault}")


_INDEX = ".metadata"
_SHOWN = 8
_LONGEST_WAIT_S = 1.0


@dataclass(frozen=True)
class Publisher:
    """Publishes the checkpoint of one task.

    Args:
        task: rank 0's, with the plan of the job.
        written: called when rank 0's own shard is written, with its bytes.
        turn: a context in which shards are written, so that not too many are at a time.
        is_fenced: obey the pointer, and move it when the checkpoint is there; False: it belongs to no attempt.
    """

    store: Store
    task: PersistTask
    points: Points
    written: Callable[[int], None] = lambda size_bytes: None
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)
    is_fenced: bool = True

    def publish(self) -> str:
        """Do it all, and return the name of the checkpoint; a failure leaves nothing under such a name.

        Raises:
            NotPublishedError: a shard failed or did not come, or the checkpoint is quarantined.
            SupersededError: a higher attempt is in charge.
            OSError: storage refuses.
        """
        area = ""
        try:
            area = self.begin()
            self.points.reach("persist.begin")
            with self.turn:
                own = write_shard(self.store, area, self.task, self.points)
            self.written(own.file.size_bytes)
            name = self.finish(area)
        except BaseException as error:
            # First of all, since the other writers wait for it; then what is left of the area goes.
            report_failure(self.store, Writing.of(self.task), describe(error))
            with suppress(OSError):
                if area:
                    self.store.discard(area)
                self.store.clean(self.task.record.attempt)  # what others wrote into it while it was removed
            raise
        try:
            # Only now: until the new one is published the old ones may be needed.
            prune(self.store, self.task.destination, good_step=self.task.record.step)
        except OSError as error:  # the checkpoint is there; the next one tries again
            problem = f"phalanx persister: old checkpoints were not deleted: {describe(error)}"
            print(problem, file=sys.stderr, flush=True)
        self.points.reach("persist.pruned")
        return name

    def begin(self) -> str:
        """Clear up after dead writers, and make the area in which all ranks write; raises as `publish`."""
        writing = Writing.of(self.task)
        self._require_charge()
        self.store.clean(writing.attempt)
        forget_failures(self.store, writing)
        require_no_failure(self.store, writing)
        return self.store.begin(writing.step, writing.attempt, writing.nonce)

    def finish(self, area: str) -> str:
        """Wait for the parts of all shards, describe them, publish, and move the pointer; returns the name of the
        checkpoint, and raises as `publish`."""
        parts, files = self._gather(area)
        digest = self._describe(area, parts, files)
        self.points.reach("persist.manifest-written")
        self._judge(area, parts)
        writing = Writing.of(self.task)
        # Writers that gave up have reported that nothing will come of it, and a later attempt may be in charge since:
        # both are looked at last, so that the time in which they could change unseen is short.
        require_no_failure(self.store, writing)
        self._require_charge()
        self.points.reach("persist.before-publish")
        try:
            name = self.store.publish(area, writing.step)
        except OSError:  # perhaps because a higher attempt has cleared it away
            self._require_charge()
            raise
        self.points.reach("persist.published")
        if self.is_fenced:
            try:
                advance(self.store, writing.attempt, writing.step, name, digest)
            except SupersededError:
                # Gone while it was published. One of the same name that the other attempt has written meanwhile stays.
                if hashlib.sha256(self.store.at(name).read(MANIFEST)).hexdigest() == digest:
                    self.store.delete(name)
                raise
            self.points.reach("persist.pointer-moved")
        return name

    def _require_charge(self) -> None:
        if self.is_fenced:
            require_charge(read_latest(self.store), self.task.record.attempt)

    def _gather(self, area: str) -> tuple[list[ShardPart], list[FileEntry]]:
        """The parts of all shards, in order of rank, and the files that they are in."""
        assert self.task.job is not None, "a publisher has the plan of the job"
        missing = {part_name(rank): rank for rank in self.task.job.shards}
        found: dict[int, tuple[ShardPart, FileEntry]] = {}
        timeout_s = self.task.destination.timeout_s
        for _ in pauses(timeout_s, _LONGEST_WAIT_S):
            # One listing for all parts that are still missing, and all that have come in one go.
            sizes = self.store.at(area).sizes()
            come = [name for name in missing if name in sizes]
            with self.store.at(area).ahead([Span(name, 0, sizes[name]) for name in come], sizes) as files:
                for name in come:
                    rank = missing.pop(name)
                    found[rank] = self._accept(rank, files.read(name))
            if not missing:
                in_order = [found[rank] for rank in sorted(found)]
                return [part for part, _ in in_order], [file for _, file in in_order]
            # A writer that has given up, or a later attempt, ends the waiting early.
            require_no_failure(self.store, Writing.of(self.task))
            self._require_charge()
        ranks, shards = sorted(missing.values()), len(self.task.job.shards)
        names = ", ".join(map(str, ranks[:_SHOWN])) + (" and more" if len(ranks) > _SHOWN else "")
        problem = f"{len(ranks)} of {shards} shards were not written within {timeout_s:.0f} s: of rank {names}"
        raise NotPublishedError(problem)

    def _accept(self, rank: int, content: bytes) -> tuple[ShardPart, FileEntry]:
        try:
            part = ShardPart.from_bytes(content)
        except (ValueError, TypeError, KeyError) as error:
            raise NotPublishedError(f"{part_name(rank)} cannot be read ({error})") from None
        expected = Writing.of(self.task)
        # Parts of two attempts at the same step would make a checkpoint that nobody ever had.
        if (part.writing, part.rank) != (expected, rank):
            raise NotPublishedError(f"{part_name(rank)} belongs to {part.writing}, not {expected}")
        digest = hashlib.sha256(content).hexdigest()
        return part, FileEntry(name=part_name(rank), size_bytes=len(content), sha256=digest)

    def _describe(self, area: str, parts: list[ShardPart], part_files: list[FileEntry]) -> str:
        """Write index, manifest and sums; SHA-256 of the manifest."""
        job, record = self.task.job, self.task.record
        assert job is not None, "a publisher has the plan of the job"
        files = [self.store.write(area, _INDEX, [job.index]), *(part.file for part in parts), *part_files]
        taken = datetime.fromtimestamp(record.unix_ns / 1e9, UTC) if record.unix_ns else datetime.now(UTC)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            step=record.step,
            created=taken.isoformat(timespec="milliseconds"),
            phalanx_version=__version__,
            torch_version=job.torch_version,
            attempt=record.attempt,
            config_sha256=manifests.config_sha256(job.config),
            config=dict(job.config),
            state=parse_state(record.state)[0] if record.state else None,
            metrics=record.metrics,
            layout=job.layout,
            tensors={name: TensorEntry.model_validate(entry) for name, entry in job.tensors.items()},
            files=files,
        )
        content = manifests.encode(manifest)
        digest = hashlib.sha256(content).hexdigest()
        # SHA256SUMS comes last: in an object store its being there is what makes the area a checkpoint.
        self.store.write(area, MANIFEST, [content])
        self.store.write(area, SUMS, [manifests.sums_text(manifest.files, digest)])
        return digest

    def _judge(self, area: str, parts: list[ShardPart]) -> None:
        """Quarantine what must not be restored: after numbers that are not finite, or with an optimizer that does
        nothing, training would go on from a state that is lost already."""
        records = [part.record for part in parts]
        sick = sick_tensors(records)
        if sick:
            names = ", ".join(sick[:_SHOWN]) + (f" and {len(sick) - _SHOWN} more" if len(sick) > _SHOWN else "")
            self._quarantine(area, "sick", f"numbers that are not finite in {names}")
        if is_stale(records):
            self._quarantine(area, "stale", "steps were taken, and yet no trained tensor changed")

    def _quarantine(self, area: str, why: str, reason: str) -> None:
        problem = f"the checkpoint of step {self.task.record.step} is {why}: {reason}; it is kept aside"
        report_failure(self.store, Writing.of(self.task), problem)
        raise NotPublishedError(f"{problem} as {self.store.quarantine(area, why)}")


def describe(error: BaseException) -> str:
    """An error in one line that names the file and the cause."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = (str(error).splitlines() or [""])[0]
    meant = (NotPublishedError, SupersededError, ValueError, OSError)
    return text if text and isinstance(error, meant) else f"{type(error).__name__}: {text}"


_PROBLEM_CHARACTERS = 4000


def _open_destination(task: PersistTask) -> Store:
    return open_store(task.destination.url, task.destination.options)


@dataclass
class PersistWork:
    """One task, done in a thread of its own.

    Args:
        task: its descriptor is closed at the end.
        report: called with the two outcomes, one after the other, whatever happens.
        turn: shards are written within this context, so that not too many are at a time.
        endings: of the tasks of this process.
    """

    task: PersistTask
    points: Points
    report: Callable[[PersistOutcome], None]
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)
    open_storage: Callable[[PersistTask], Store] = _open_destination
    endings: Endings = field(default_factory=Endings)

    def run(self) -> None:
        """Do it. Never raises."""
        self._begun_s = time.monotonic()
        self._is_written_reported = False
        try:
            store = self.open_storage(self.task)
            if self.task.job is None:
                name = self._contribute(store)
            else:
                try:
                    name = Publisher(store, self.task, self.points, self._written, self.turn).publish()
                finally:
                    self.endings.settle(Writing.of(self.task))
        except Exception as error:
            who = f"step {self.task.record.step}, rank {self.task.plan.rank}"
            problem = f"{who}: {describe(error)}"[:_PROBLEM_CHARACTERS]
            print(f"phalanx persister: {problem}", file=sys.stderr, flush=True)
            # A rank waits for both outcomes, so both come, whatever went wrong.
            if not self._is_written_reported:
                self.report(self._outcome(published=False, problem=problem))
            self.report(self._outcome(published=True, problem=problem))
        else:
            self.report(self._outcome(published=True, name=name))
        finally:
            os.close(self.task.descriptor)

    def _contribute(self, store: Store) -> str:
        """Write a shard of what another task publishes, here or on another host."""
        writing, timeout_s = Writing.of(self.task), self.task.destination.timeout_s
        # As it is before this part is there: the publisher can move the pointer only after, so a change is its doing.
        before = read_latest(store)
        require_charge(before, writing.attempt)
        area = join(store, writing, timeout_s)
        # A rank without pieces, a copy of another's state, writes nothing, and still waits for the end.
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
            report_failure(store, Writing.of(self.task), f"the shard of rank {self.task.plan.rank}: {describe(error)}")
            raise
        return part.file.size_bytes

    def _written(self, size_bytes: int) -> None:
        self.report(self._outcome(published=False, size_bytes=size_bytes))
        self._is_written_reported = True

    def _outcome(self, *, published: bool, problem: str = "", name: str = "", size_bytes: int = 0) -> PersistOutcome:
        seconds = time.monotonic() - self._begun_s
        return PersistOutcome(self.task.plan.rank, self.task.record.step, published, problem, name, seconds, size_bytes)
