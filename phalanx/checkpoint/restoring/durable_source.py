"""Checkpoints in durable storage, as places to restore from: what is read is checked, and read once."""

from __future__ import annotations

import hashlib
import heapq
import io
import pickle
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import groupby, pairwise
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import torch
from typing_extensions import Buffer

from phalanx.checkpoint.all_ranks import at_first, pack, unpack
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.checkpoint_files import (
    SUSPECT,
    Files,
    Span,
    read_evaluation,
    read_manifest,
    summed_json,
)
from phalanx.checkpoint.format.dcp import read_box, read_spans
from phalanx.checkpoint.format.manifest import DamagedCheckpointError, FileEntry, Manifest, first_line
from phalanx.checkpoint.format.run_sums import RUN_BYTES, BadSumError, CheckedFile, run_starts
from phalanx.checkpoint.restoring.compatibility import ReadItem, SavedBlock, SavedBlocks
from phalanx.checkpoint.restoring.source import Rate, ReadFault, ReadReport
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.latest import RestoreOrder
from phalanx.core.errors import UserError
from phalanx.core.files import StoreFailedError, store_failures_told
from phalanx.core.peers import ALONE, Peers

T = TypeVar("T")

_HASH_BYTES = 1 << 20
_NEXT = "; trying the one before it"
_DAMAGES = (OSError, ValueError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError)


class DurableSource:
    """One checkpoint, whose manifest has been checked against names and sizes of its files.

    Args:
        verify: check what is read: while it is read, by the sums of runs; files without sums are hashed before, each by
            one of the ranks.
        peers: the ranks that read.
        spared: files that are not needed, and known to be damaged.
        later: values of its state that were learnt after it was written.
    """

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        *,
        verify: bool = True,
        peers: Peers = ALONE,
        spared: Sequence[str] = (),
        later: Mapping[str, Any] | None = None,
    ) -> None:
        self.files, self.manifest, self._verify, self._peers = files, manifest, verify, peers
        self._spared = frozenset(spared)
        self.name, self.step, self.attempt = files.name, manifest.step, manifest.attempt
        self.state = {**manifest.state, **later} if later else manifest.state
        self.config = manifest.config
        self._files = {file.name: file for file in manifest.files}
        numbers = {name: number for number, name in enumerate(self._files)}
        self.tensors: dict[str, SavedBlocks] = {}
        self._archives: dict[str, list[int]] = {}  # where archives begin, by file
        for key, entry in manifest.tensors.items():
            blocks = []
            for c in entry.chunks:
                blocks.append(SavedBlock(tuple(c.offsets), tuple(c.sizes), numbers[c.file], c.offset, c.length))
                self._archives.setdefault(c.file, []).append(c.offset)
            self.tensors[key] = SavedBlocks(entry.dtype, tuple(entry.shape), blocks)
        self._ends = {  # of archives, with what fills the gap to the next one
            (name, begin): end
            for name, begins in self._archives.items()
            for begin, end in pairwise([*sorted(begins), self._files[name].size_bytes])
        }

    def distance(self, rank: int, holder: int) -> int:
        """Storage is equally far from all ranks."""
        return 1

    def check(self) -> ReadReport:
        """Hash this rank's share of the files that are needed and have no sums of runs."""
        return self._through([name for name in self._archives if not self._files[name].sums], self._hash)

    def check_beside(self) -> ReadReport:
        """Hash this rank's share of the files that are not needed; damage is only noted."""
        names = [name for name in self._files if name not in self._archives and name not in self._spared]
        return self._through(names, self._hash)

    def verify(self) -> ReadReport:
        """Read this rank's share of the files that have sums of runs, and check them."""

        def read_all(name: str, raw: _CountedFile) -> None:
            file, buffer = self._checked(raw, self._files[name]), memoryview(bytearray(RUN_BYTES))
            while file.readinto(buffer):
                pass

        return self._through([name for name in self._archives if self._files[name].sums], read_all)

    def read(self, wanted: Sequence[ReadItem]) -> ReadReport:
        """Fill the targets of `wanted`, which are in the order of their files."""
        names, reading = list(self._files), ReadReport()
        runs = (run for part in wanted for run in self._runs(names[part.block.holder], part))
        # What will be read is known from the manifest, so storage can fetch it ahead, each run once and in this order.
        with self._fetching(list(dict.fromkeys(runs))) as files:
            for number, group in groupby(wanted, key=lambda part: part.block.holder):
                read = partial(self._read, names[number], list(group), reading)
                self._attempt(reading, files, names[number], read)
        return reading

    def _fetching(self, spans: Sequence[Span]) -> AbstractContextManager[Files]:
        return self.files.ahead(spans, {span.file: self._files[span.file].size_bytes for span in spans})

    def _runs(self, file: str, part: ReadItem) -> Iterator[Span]:
        """What is read for a part, in that order, in whole runs, since those are what is checked."""
        block, stored = part.block, (part.block.sizes, part.dtype)
        begin, end = block.start_bytes, self._ends[file, block.start_bytes]
        for first, last in read_spans(block.length_bytes, stored, part.start, part.out.shape):
            for start in range(begin + first // RUN_BYTES * RUN_BYTES, begin + last, RUN_BYTES):
                yield Span(file, start, min(start + RUN_BYTES, end))

    def _through(self, names: Sequence[str], work: Callable[[str, _CountedFile], None]) -> ReadReport:
        """Do `work` on this rank's share of some files."""
        sizes = {name: self._files[name].size_bytes for name in names} if self._verify else {}
        # All ranks work out the same division, so nothing has to be exchanged for it.
        share = share_out(sizes, self._peers.size)[self._peers.rank] if sizes else []
        reading = ReadReport()
        if not share:
            return reading
        began_s = time.monotonic()
        with self._fetching([Span(name, 0, sizes[name]) for name in share]) as files:
            for name in share:
                self._attempt(reading, files, name, partial(work, name))
        seconds = time.monotonic() - began_s
        reading.add(Rate("durable", "durable", sum(sizes[name] for name in share), seconds))
        return reading

    def _attempt(self, reading: ReadReport, files: Files, file: str, work: Callable[[_CountedFile], None]) -> None:
        """Do `work` on a file, and note the damage that it meets; UserError: the store fails, which is not damage."""
        failures: list[OSError] = []
        try:
            with files.open(file) as raw:
                work(_CountedFile(raw, failures))
        except (MemoryError, torch.OutOfMemoryError, UserError):
            raise
        except BadSumError as error:
            self._note(reading, file, f"{file}: {error}")
        except _DAMAGES as error:
            # Readers of archives turn any OSError into a bad archive, so the file has kept the first one.
            cause = failures[0] if failures else error
            if isinstance(cause, StoreFailedError):
                raise cause.to_user() from error
            self._note(reading, file, f"{file} cannot be read ({first_line(cause)})")

    def _note(self, reading: ReadReport, file: str, cause: str) -> None:
        if file in self._archives:
            reading.faults.append(ReadFault("", -1, cause))
        else:
            reading.notes.append(remark(self.name, cause))

    def _read(self, name: str, wanted: list[ReadItem], reading: ReadReport, raw: _CountedFile) -> None:
        began_s = time.monotonic()
        file = cast(BinaryIO, self._checked(raw, self._files[name]))
        try:
            for part in wanted:
                place = (part.block.start_bytes, part.block.length_bytes)
                read_box(file, place, (part.block.sizes, part.dtype), part.start, part.out)
        finally:
            reading.add(Rate("durable", "durable", raw.bytes_read, time.monotonic() - began_s))

    def _checked(self, raw: _CountedFile, entry: FileEntry) -> Any:
        if not self._verify or not entry.sums:
            return raw
        starts = run_starts(self._archives[entry.name], entry.size_bytes)

        def describe(number: int) -> str:
            start = starts[number]
            for name, tensor in self.manifest.tensors.items():
                for c in tensor.chunks:
                    if c.file == entry.name and c.offset <= start < c.offset + c.length:
                        return f"bytes {start} and following, of {name}, do not match their checksum"
            return f"bytes {start} and following do not match their checksum"

        sums = [int(text, 16) for text in entry.sums]
        return CheckedFile(cast(BinaryIO, raw), starts, entry.size_bytes, sums, describe)

    def _hash(self, name: str, raw: _CountedFile) -> None:
        digest, buffer = hashlib.sha256(), bytearray(_HASH_BYTES)
        while count := raw.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
        if digest.hexdigest() != self._files[name].sha256:
            raise BadSumError("does not match its checksum")


class FoundCheckpoint(NamedTuple):
    """A durable checkpoint in which nothing is wrong at first sight; `spared`: files that are not needed, and damaged:
    their names, and what is wrong."""

    attempt: int
    step: int
    name: str
    spared: dict[str, str]


class DurableCheckpoints:
    """The durable checkpoints of a store, newest first; rank 0 looks at the storage, and broadcasts what it finds.

    Args:
        verify: see `DurableSource`.
        peers: the ranks; every method is called by all together.
        refused: what was refused before, which is not tried again, and why; grows. Rank 0's counts.
        report: called on every rank with a line for each one that is passed over.
        note: called on every rank with a line for each damaged file of one that is used all the same.
    """

    def __init__(
        self,
        store: Store,
        verify: bool,
        peers: Peers,
        refused: dict[str, str],
        report: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._store, self._verify, self._peers, self._report, self._note = store, verify, peers, report, note
        self._lines: list[str] = []
        self._order = RestoreOrder(store, self._lines.append)
        self._refused = refused
        self._suspect: dict[str, str] = {}  # names of those passed over, and why; rank 0's
        self._identity = ""
        self._content = b""
        self._manifest: Manifest | None = None
        self._found: FoundCheckpoint | None = None

    def peek(self) -> FoundCheckpoint | None:
        """The next one, if there is any; UserError: the storage cannot be read."""
        if self._found is None:
            answer: list[Any] = self._at_first(lambda: [self._first(), self._new_lines()])
            found, lines = answer
            for line in lines:
                self._report(line)
            self._found = None if found is None else FoundCheckpoint(*found)
        return self._found

    def take(self) -> DurableSource:
        """After `peek` has found one: that one, which is found again until it is refused."""
        assert self._found is not None
        found, self._found = self._found, None
        files = self._store.at(found.name)

        def contents() -> list[Any]:
            notes: list[str] = []
            later = read_evaluation(files, found.step, notes.append).state
            return [pack(self._content.decode()), later, notes]

        # Storage is asked by rank 0 alone, whatever the number of ranks.
        text, later, notes = self._at_first(contents)
        for cause in [*found.spared.values(), *notes]:
            self._note(remark(found.name, cause))
        manifest = self._manifest or manifests.decode(unpack(text).encode(), files.url)
        spared = tuple(found.spared)
        return DurableSource(files, manifest, verify=self._verify, peers=self._peers, spared=spared, later=later)

    def refuse(self, cause: str) -> None:
        """The one that was taken last is damaged."""

        def refused() -> list[str]:
            self._refuse(self._identity, cause)
            return self._new_lines()

        for line in self._at_first(refused):
            self._report(line)

    def pass_over(self, cause: str) -> None:
        """The one that was taken last is whole, and not to be used."""
        if self._peers.rank == 0:
            self._suspect[self._identity.partition(" ")[0]] = cause
        self.refuse(cause)

    def mark_suspect(self) -> None:
        """Mark those that were passed over, now that another is used: retention counts them as kept no longer."""

        def mark() -> None:
            for name, cause in self._suspect.items():
                with suppress(OSError):  # it may be forbidden, or deleted meanwhile
                    self._store.write(name, SUSPECT, [summed_json({"cause": cause})])

        self._at_first(mark)

    def unusable(self) -> list[str]:
        """Why none can be used, a line for each that is there or was; empty: there never was one."""

        def lines() -> list[str]:
            known = [(name, self._refused.get(self._identify(name))) for name, _ in self._listed()]
            damaged = [refusal(name, cause) for name, cause in known if cause is not None]
            return [line.removesuffix(_NEXT) for line in [*self._order.passed_over(), *damaged]]

        return self._at_first(lines)

    def _at_first(self, work: Callable[[], T]) -> T:
        """Let rank 0 look at the storage; a failure of the store is not damage, and ends the restore (UserError)."""

        def looked() -> T:
            with store_failures_told():
                return work()

        return at_first(self._peers, looked)

    def _new_lines(self) -> list[str]:
        lines, self._lines[:] = list(self._lines), []
        return lines

    def _first(self) -> FoundCheckpoint | None:
        # Listed anew each time: a writer or pruner may have changed what there is, and what was refused stays refused.
        while fresh := [row for row in self._listed() if self._identify(row[0]) not in self._refused]:
            name, sha256 = fresh[0]
            self._identity = self._identify(name)
            spared: dict[str, str] = {}
            try:
                self._content, manifest = read_manifest(
                    self._store.at(name),
                    manifest_sha256=sha256,
                    spare=lambda file, damage: spared.update({file: damage.reason}),  # noqa: B023
                )
            except DamagedCheckpointError as damage:
                self._refuse(self._identity, damage.reason)
            else:
                self._manifest = manifest  # which the others have to decode
                return FoundCheckpoint(manifest.attempt, manifest.step, name, spared)
        return None

    def _refuse(self, identity: str, cause: str) -> None:
        """Report it, unless another has meanwhile taken its place, which is tried next, or it was deleted."""
        self._refused[identity] = cause
        name, _, rest = identity.partition(" ")
        if rest and self._identify(name) == identity:
            self._lines.append(refusal(name, cause))

    def _listed(self) -> list[tuple[str, str]]:
        try:
            return self._order.names()
        except OSError as error:
            where = f", at {error.filename}" if isinstance(error, StoreFailedError) else ""
            problem = f"checkpoints cannot be listed ({error.strerror or error}{where})"
            cure = "make the storage readable, or give another"
            raise UserError(problem, cure=cure, field=self._store.url) from error

    def _identify(self, name: str) -> str:
        # Another may be published under the name of one that is being read.
        return f"{name} {self._store.at(name).identity()}"


def refusal(name: str, cause: str) -> str:
    """The line for a checkpoint that is not used."""
    return f"checkpoint {name} is damaged ({cause}){_NEXT}"


def remark(name: str, cause: str) -> str:
    """The line for damage for which nothing is refused."""
    return f"checkpoint {name}: {cause}; nothing is restored from that file, so the checkpoint is used all the same"


class _CountedFile(io.RawIOBase):
    """Counts what is read, and keeps what failed."""

    def __init__(self, raw: BinaryIO, failures: list[OSError]) -> None:
        self._raw, self._failures = cast(io.BufferedReader, raw), failures
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: Buffer) -> int:
        try:
            count = self._raw.readinto(buffer)
        except OSError as error:
            self._failures.append(error)
            raise
        self.bytes_read += count
        return count


def share_out(files: Mapping[str, int], workers: int) -> list[list[str]]:
    """Divide files (name -> bytes) among `workers` so that all read about as many bytes; the same answer everywhere."""
    shares: list[list[str]] = [[] for _ in range(workers)]
    loads = [(0, index) for index in range(workers)]
    for name, size_bytes in sorted(files.items(), key=lambda item: (-item[1], item[0])):
        load, index = loads[0]
        shares[index].append(name)
        heapq.heapreplace(loads, (load + size_bytes, index))
    return shares
