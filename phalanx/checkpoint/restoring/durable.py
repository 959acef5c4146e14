"""Checkpoints in durable storage, as places to restore from: what is read is checked, and read once."""

from __future__ import annotations

import hashlib
import io
import pickle
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from typing_extensions import Buffer

from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format import tables
from phalanx.checkpoint.format.archive import read_box
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, DamagedCheckpointError, FileEntry, Manifest, TensorEntry
from phalanx.checkpoint.format.runs import BadSumError, CheckedFile, run_starts
from phalanx.checkpoint.restoring.parts import Part, SavedBlock, SavedTensor
from phalanx.checkpoint.restoring.restored import Rate
from phalanx.checkpoint.restoring.source import Fault, Reading
from phalanx.checkpoint.storage.base import Store
from phalanx.checkpoint.storage.order import Order
from phalanx.checkpoint.together import at_first
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers

_HASH_BYTES = 1 << 20
_DAMAGES = (OSError, ValueError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError)


class DurableSource:
    """One checkpoint.

    Args:
        verify: check what is read: while it is read, by the sums of runs; files that have none are hashed before, each
            by one of the ranks.
    """

    kind = "durable"

    def __init__(self, store: Store, name: str, manifest: Manifest, verify: bool, peers: Peers) -> None:
        self._store, self._manifest, self._verify, self._peers = store, manifest, verify, peers
        self.name, self.step, self.attempt = name, manifest.step, manifest.attempt
        self.state = manifest.state
        self._files = {file.name: file for file in manifest.files}
        self._numbers = {name: number for number, name in enumerate(self._files)}
        self.tensors = {key: _saved(entry, self._numbers) for key, entry in manifest.tensors.items()}
        self._archives = _archives(manifest.tensors)

    def distance(self, rank: int, holder: int) -> int:
        """All are far."""
        return 1

    def check(self) -> Reading:
        """Hash this rank's share of the files that have no sums."""
        sizes = {name: self._files[name].size_bytes for name in self._archives if not self._files[name].sums}
        share = tables.share_out(sizes, self._peers.size)[self._peers.rank] if self._verify and sizes else []
        reading = Reading()
        began_s = time.monotonic()
        for name in share:
            self._attempt(reading, name, lambda name=name: self._hash(name))  # type: ignore[misc]
        size_bytes = sum(sizes[name] for name in share)
        if share:
            reading.add(Rate("durable", "durable", size_bytes, time.monotonic() - began_s))
        return reading

    def read(self, wanted: Sequence[Part]) -> Reading:
        """Fill the targets of `wanted`, which are in the order of their files."""
        names, reading = list(self._files), Reading()
        for number, group in groupby(wanted, key=lambda part: part.block.holder):
            self._attempt(reading, names[number], lambda: self._read(names[number], list(group), reading))  # noqa: B023
        return reading

    def _attempt(self, reading: Reading, file: str, work: Callable[[], None]) -> None:
        try:
            work()
        except (MemoryError, torch.OutOfMemoryError, UserError):
            raise
        except BadSumError as error:
            reading.faults.append(Fault("", -1, f"{file}: {error}"))
        except _DAMAGES as error:
            reading.faults.append(Fault("", -1, f"{file} cannot be read ({_first_line(error)})"))

    def _read(self, name: str, wanted: list[Part], reading: Reading) -> None:
        began_s = time.monotonic()
        with self._store.open(self.name, name) as raw:
            counted = _Counted(raw)
            file = cast(BinaryIO, self._checked(cast(BinaryIO, counted), self._files[name]))
            try:
                for part in wanted:
                    place = (part.block.start_bytes, part.block.length_bytes)
                    read_box(file, place, (part.block.sizes, part.dtype), part.start, part.out)
            finally:
                reading.add(Rate("durable", "durable", counted.bytes_read, time.monotonic() - began_s))

    def _checked(self, raw: BinaryIO, entry: FileEntry) -> Any:
        if not self._verify or not entry.sums:
            return raw
        starts = run_starts(self._archives[entry.name], entry.size_bytes)

        def describe(number: int, found: int) -> str:
            held = self._names_at(entry.name, starts[number])
            return f"bytes {starts[number]} and following{held} do not match their checksum"

        return CheckedFile(raw, starts, entry.size_bytes, [int(text, 16) for text in entry.sums], describe)

    def _names_at(self, file: str, start: int) -> str:
        for name, entry in self._manifest.tensors.items():
            for chunk in entry.chunks:
                if chunk.file == file and chunk.offset <= start < chunk.offset + chunk.length:
                    return f", of {name},"
        return ""

    def _hash(self, name: str) -> None:
        digest, buffer = hashlib.sha256(), bytearray(_HASH_BYTES)
        with self._store.open(self.name, name) as raw:
            while count := cast(io.BufferedReader, raw).readinto(buffer):
                digest.update(memoryview(buffer)[:count])
        if digest.hexdigest() != self._files[name].sha256:
            raise BadSumError("does not match its checksum")


class Found(NamedTuple):
    """A durable checkpoint in which nothing is wrong at first sight."""

    attempt: int
    step: int
    name: str


class Checkpoints:
    """The durable checkpoints of a store, newest first; rank 0 looks at the storage, and tells the others.

    Args:
        tell: called on every rank with a line for each one that is passed over.
    """

    def __init__(self, store: Store, verify: bool, peers: Peers, tell: Callable[[str], None]) -> None:
        self._store, self._verify, self._peers, self._tell = store, verify, peers, tell
        self._lines: list[str] = []
        self._order = Order(store, self._lines.append)
        self._tried: set[str] = set()
        self._content = b""
        self._found: Found | None = None

    def peek(self) -> Found | None:
        """Called by all ranks together: the next one, if there is any.

        Raises:
            UserError: the storage cannot be read.
        """
        if self._found is None:
            told = at_first(self._peers, self._look)
            for line in told["lines"]:
                self._tell(line)
            self._found = None if told["found"] is None else Found(*told["found"])
        return self._found

    def take(self) -> DurableSource:
        """Called by all ranks together, after `peek` has found one: that one, which is not found again."""
        assert self._found is not None
        name, self._found = self._found.name, None
        text = at_first(self._peers, lambda: tables.pack(self._content.decode()))
        manifest = manifests.decode(tables.unpack(text).encode(), Path(self._store.url) / name)
        return DurableSource(self._store, name, manifest, self._verify, self._peers)

    def _look(self) -> dict[str, Any]:
        found = self._first_untried()
        lines, self._lines[:] = list(self._lines), []
        return {"found": found, "lines": lines}

    def _first_untried(self) -> Found | None:
        for name, sha256 in self._listed():
            if self._identity(name) in self._tried:
                continue
            self._tried.add(self._identity(name))
            try:
                self._content = read_manifest(self._store, name, sha256)
                manifest = manifests.decode(self._content, Path(self._store.url) / name)
            except DamagedCheckpointError as damage:
                self._lines.append(refusal(name, damage.reason))
            else:
                return Found(manifest.attempt, manifest.step, name)
        return None

    def _listed(self) -> list[tuple[str, str]]:
        try:
            return self._order.names()
        except OSError as error:
            problem = f"checkpoints cannot be listed ({error.strerror or error})"
            cure = "make the storage readable, or give another"
            raise UserError(problem, cure=cure, field=self._store.url) from error

    def _identity(self, name: str) -> str:
        """Another may be published under the name of one that is being read."""
        return f"{name} {self._store.identity(name)}"


def refusal(name: str, cause: str) -> str:
    """What to tell of a checkpoint that is not used."""
    return f"checkpoint {name} is damaged ({cause}); trying the one before it"


def read_manifest(store: Store, name: str, sha256: str = "") -> bytes:
    """The manifest of a checkpoint, held against its checksum and against names and sizes of the files.

    Args:
        sha256: what the pointer says that of the manifest is; empty where it says nothing.

    Raises:
        DamagedCheckpointError: with the first thing found wrong.
        UserError: the format is newer than this program.
    """
    path = Path(store.url) / name
    content, sums = (_small(store, name, file, path) for file in (MANIFEST, SUMS))
    digest = hashlib.sha256(content).hexdigest()
    if not sums.endswith(f"{digest}  {MANIFEST}\n".encode()):
        raise DamagedCheckpointError(path, f"{MANIFEST} does not match its checksum in {SUMS}")
    if sha256 and digest != sha256:
        raise DamagedCheckpointError(path, f"{MANIFEST} is not the one that the pointer to the latest names")
    manifest = manifests.decode(content, path)
    if sums != manifests.sums_text(manifest.files, digest):
        raise DamagedCheckpointError(path, f"{SUMS} does not match {MANIFEST}")
    for file in manifest.files:
        try:
            size_bytes = store.size_bytes(name, file.name)
        except OSError as error:
            raise DamagedCheckpointError(path, f"{file.name} is missing ({error.strerror})") from None
        if size_bytes != file.size_bytes:
            raise DamagedCheckpointError(path, f"{file.name} has {size_bytes} of its {file.size_bytes} bytes")
    return content


class _Counted(io.RawIOBase):
    """Counts what is read."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = cast(io.BufferedReader, raw)
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
        count = self._raw.readinto(buffer)
        self.bytes_read += count
        return count


def _saved(entry: TensorEntry, numbers: Mapping[str, int]) -> SavedTensor:
    blocks = [SavedBlock(tuple(c.offsets), tuple(c.sizes), numbers[c.file], c.offset, c.length) for c in entry.chunks]
    return SavedTensor(entry.dtype, tuple(entry.shape), blocks)


def _archives(tensors: Mapping[str, TensorEntry]) -> dict[str, list[int]]:
    """Where archives begin, by file."""
    found: dict[str, list[int]] = {}
    for entry in tensors.values():
        for chunk in entry.chunks:
            found.setdefault(chunk.file, []).append(chunk.offset)
    return found


def _small(store: Store, name: str, file: str, path: Path) -> bytes:
    try:
        return store.read(name, file)
    except OSError as error:
        raise DamagedCheckpointError(path, f"{file} is missing ({error.strerror})") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
