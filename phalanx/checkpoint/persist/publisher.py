"""Publishing a checkpoint, on the host of rank 0: all shards are there, none is stale or sick, then it is one.

Torch-free.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from phalanx import __version__
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.files import Span
from phalanx.checkpoint.format.manifest import FORMAT_VERSION, MANIFEST, SUMS, FileEntry, Manifest, TensorEntry
from phalanx.checkpoint.format.record import is_stale, parse_state, sick_tensors
from phalanx.checkpoint.persist.contract import Task
from phalanx.checkpoint.persist.ending import (
    NotPublishedError,
    forget_failures,
    pauses,
    require_no_failure,
    tell_failure,
)
from phalanx.checkpoint.persist.parts import Part, Writing, part_name
from phalanx.checkpoint.persist.writer import write_shard
from phalanx.checkpoint.storage.base import Store, SupersededError
from phalanx.checkpoint.storage.latest import advance, read_latest, require_charge
from phalanx.checkpoint.storage.prune import prune
from phalanx.core.points import Points

_INDEX = ".metadata"
_SHOWN = 8
_LONGEST_WAIT_S = 1.0


@dataclass(frozen=True)
class Publisher:
    """Publishes the checkpoint of one task.

    Args:
        store: durable storage.
        task: rank 0's, with the plan of the job.
        points: where tests inject faults.
        written: called when rank 0's own shard is written, with its bytes.
        turn: a context in which shards are written, so that not too many are at a time.
    """

    store: Store
    task: Task
    points: Points
    written: Callable[[int], None]
    turn: AbstractContextManager[object]

    def publish(self) -> str:
        """Do it all; the name of the checkpoint. What fails leaves nothing that bears the name of a checkpoint.

        Raises:
            NotPublishedError: a shard failed or did not come, or the checkpoint is quarantined.
            SupersededError: a higher attempt is in charge.
            OSError: storage refuses.
        """
        writing = Writing.of(self.task)
        area = ""
        try:
            require_charge(read_latest(self.store), writing.attempt)
            self.store.clean(writing.attempt)
            forget_failures(self.store, writing)
            require_no_failure(self.store, writing)
            area = self.store.begin(writing.step, writing.attempt, writing.nonce)
            self.points.reach("persist.begin")
            name = self._publish(area)
        except BaseException as error:
            tell_failure(self.store, writing, describe(error))
            self._discard(area)
            raise
        self._prune()
        self.points.reach("persist.pruned")
        return name

    def _discard(self, area: str) -> None:
        with suppress(OSError):
            if area:
                self.store.discard(area)
            self.store.clean(self.task.record.attempt)  # what others wrote into it while it was removed

    def _publish(self, area: str) -> str:
        with self.turn:
            own = write_shard(self.store, area, self.task, self.points)
        self.written(own.file.size_bytes)
        parts, files = self._gather(area)
        digest = self._describe(area, parts, files)
        self.points.reach("persist.manifest-written")
        self._judge(area, parts)
        writing = Writing.of(self.task)
        require_no_failure(self.store, writing)  # somebody may have been told that nothing will come of it
        require_charge(read_latest(self.store), writing.attempt)
        self.points.reach("persist.before-publish")
        try:
            name = self.store.publish(area, writing.step)
        except OSError:  # perhaps because a higher attempt has cleared it away
            require_charge(read_latest(self.store), writing.attempt)
            raise
        self.points.reach("persist.published")
        self._point_to(name, digest)
        self.points.reach("persist.pointer-moved")
        return name

    def _gather(self, area: str) -> tuple[list[Part], list[FileEntry]]:
        """The parts of all shards, in order of rank, and the files that they are in."""
        assert self.task.job is not None, "a publisher has the plan of the job"
        missing = {part_name(rank): rank for rank in self.task.job.shards}
        found: dict[int, tuple[Part, FileEntry]] = {}
        for _ in pauses(self.task.destination.timeout_s, _LONGEST_WAIT_S):
            sizes = self.store.sizes(area)
            come = [name for name in missing if name in sizes]
            with self.store.ahead(area, [Span(name, 0, sizes[name]) for name in come], sizes) as files:
                for name in come:
                    rank = missing.pop(name)
                    found[rank] = self._accept(rank, files.read(name))
            if not missing:
                in_order = [found[rank] for rank in sorted(found)]
                return [part for part, _ in in_order], [file for _, file in in_order]
            require_no_failure(self.store, Writing.of(self.task))
            require_charge(read_latest(self.store), self.task.record.attempt)
        raise NotPublishedError(self._late(sorted(missing.values())))

    def _accept(self, rank: int, content: bytes) -> tuple[Part, FileEntry]:
        try:
            part = Part.from_bytes(content)
        except (ValueError, TypeError, KeyError) as error:
            raise NotPublishedError(f"{part_name(rank)} cannot be read ({error})") from None
        expected = Writing.of(self.task)
        if (part.writing, part.rank) != (expected, rank):
            raise NotPublishedError(f"{part_name(rank)} belongs to {part.writing}, not {expected}")
        digest = hashlib.sha256(content).hexdigest()
        return part, FileEntry(name=part_name(rank), size_bytes=len(content), sha256=digest)

    def _late(self, ranks: list[int]) -> str:
        names = ", ".join(map(str, ranks[:_SHOWN])) + (" and more" if len(ranks) > _SHOWN else "")
        limit = f"within {self.task.destination.timeout_s:.0f} s"
        return f"{len(ranks)} of {self._shards} shards were not written {limit}: of rank {names}"

    @property
    def _shards(self) -> int:
        return len(self.task.job.shards) if self.task.job is not None else 0

    def _describe(self, area: str, parts: list[Part], part_files: list[FileEntry]) -> str:
        """Write index, manifest and sums; SHA-256 of the manifest."""
        assert self.task.job is not None, "a publisher has the plan of the job"
        files = [self.store.write(area, _INDEX, [self.task.job.index])]
        files += [part.file for part in parts]
        manifest = _manifest(self.task, files + part_files)
        content = manifests.encode(manifest)
        digest = hashlib.sha256(content).hexdigest()
        self.store.write(area, MANIFEST, [content])
        self.store.write(area, SUMS, [manifests.sums_text(manifest.files, digest)])
        return digest

    def _judge(self, area: str, parts: list[Part]) -> None:
        records = [part.record for part in parts]
        sick = sick_tensors(records)
        if sick:
            names = ", ".join(sick[:_SHOWN]) + (f" and {len(sick) - _SHOWN} more" if len(sick) > _SHOWN else "")
            self._quarantine(area, "sick", f"numbers that are not finite in {names}")
        if is_stale(records):
            self._quarantine(area, "stale", "steps were taken, and yet no trained tensor changed")

    def _quarantine(self, area: str, why: str, reason: str) -> None:
        problem = f"the checkpoint of step {self.task.record.step} is {why}: {reason}; it is kept aside"
        tell_failure(self.store, Writing.of(self.task), problem)
        raise NotPublishedError(f"{problem} as {self.store.quarantine(area, why)}")

    def _point_to(self, name: str, digest: str) -> None:
        record = self.task.record
        try:
            advance(self.store, record.attempt, record.step, name, digest)
        except SupersededError:
            # Gone while it was published. One of the same name that the other attempt has written meanwhile stays.
            if hashlib.sha256(self.store.read(name, MANIFEST)).hexdigest() == digest:
                self.store.delete(name)
            raise

    def _prune(self) -> None:
        try:
            prune(self.store, self.task.destination, good_step=self.task.record.step)
        except OSError as error:  # the checkpoint is there; the next one tries again
            print(
                f"phalanx persister: old checkpoints were not deleted: {describe(error)}", file=sys.stderr, flush=True
            )


def describe(error: BaseException) -> str:
    """An error in one line that names the file and the cause."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = (str(error).splitlines() or [""])[0]
    meant = (NotPublishedError, SupersededError, ValueError, OSError)
    return text if text and isinstance(error, meant) else f"{type(error).__name__}: {text}"


def _manifest(task: Task, files: list[FileEntry]) -> Manifest:
    job, record = task.job, task.record
    assert job is not None, "a publisher has the plan of the job"
    taken = datetime.fromtimestamp(record.unix_ns / 1e9, UTC) if record.unix_ns else datetime.now(UTC)
    return Manifest(
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
