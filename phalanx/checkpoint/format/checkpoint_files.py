"""The files of one checkpoint, wherever they lie: reading them, verifying all, and the evaluation beside them.

An evaluation comes after its checkpoint is durable, so it has a file of its own beside the manifest: whatever ends the
process meanwhile costs the evaluation alone. The file is not a part of the checkpoint's checksums, and has one of its
own: what is torn, or of another step, is ignored.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, DamagedCheckpointError, FileEntry, Manifest, plain
from phalanx.core.files import StoreFailedError, open_regular, read_regular

EVALUATION = "evaluation.json"

SUSPECT = "suspect.json"
"""Beside a checkpoint that is whole and was passed over: no rule of retention counts it as kept."""

# A manifest has about 150 bytes for each chunk of a tensor: 4 GiB are enough for 2,200 tensors (weights and moments of
# 80 layers) in 10,000 parts each, with the state of training. SHA256SUMS has at most 330 for each file: 64 MiB are
# 200,000 files, two for each rank.
_MOST_BYTES = {MANIFEST: 4 << 30, SUMS: 64 << 20, EVALUATION: 1 << 20}
_PART_BYTES = 1 << 30  # records of a rank (part-0.json): 20 bytes for each run of its elements, and rank 0's state


def most_bytes(file: str) -> int:
    """How large a file can be that is read as a whole, bytes; what is larger was never written by this program."""
    return _MOST_BYTES.get(file, _PART_BYTES)


class Span(NamedTuple):
    """Bytes ``[start, end)`` of a file."""

    file: str
    start: int
    end: int


class Files(Protocol):
    """The files of one checkpoint. Refusals are `OSError`s; `StoreFailedError` says nothing about the file."""

    @property
    def name(self) -> str:
        """Of the checkpoint: the last part of `url`."""

    @property
    def url(self) -> str:
        """Where it lies, for people."""

    def identity(self) -> str:
        """Tells it from another that later bears its name; empty if it is gone."""

    def read(self, file: str) -> bytes:
        """A small file; OddFileError: it is none, or larger than `most_bytes`."""

    def open(self, file: str) -> BinaryIO:
        """A file for reading anywhere in it (`seek`, `readinto`); OddFileError: it is none."""

    def size_bytes(self, file: str) -> int:
        """Length of a file; FileNotFoundError: it is not there, IsADirectoryError: it is not a file."""

    def sizes(self) -> Mapping[str, int]:
        """Length of every file, by name, from one listing; empty if there are none."""

    def ahead(self, spans: Iterable[Span], sizes: Mapping[str, int]) -> AbstractContextManager[Files]:
        """The same files, for reading in one thread; where that is faster, `spans` are fetched ahead, in their order.

        Args:
            spans: what will be read.
            sizes: of files that will be opened, so that storage need not be asked.
        """


@dataclass(frozen=True)
class FolderFiles:
    """The files in the folder at `path`; see `Files`."""

    path: Path

    @property
    def name(self) -> str:
        """See `Files`."""
        return self.path.name

    @property
    def url(self) -> str:
        """See `Files`."""
        return str(self.path)

    def identity(self) -> str:
        """See `Files`."""
        try:
            status = self.path.stat()
        except OSError:
            return ""
        return f"{status.st_ino}-{status.st_ctime_ns}"

    def read(self, file: str) -> bytes:
        """See `Files`."""
        return read_regular(self.path / plain(file), most_bytes(file))

    def open(self, file: str) -> BinaryIO:
        """See `Files`."""
        return open_regular(self.path / plain(file))

    def size_bytes(self, file: str) -> int:
        """See `Files`."""
        path = self.path / plain(file)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is not a file", str(path))
        return status.st_size

    def sizes(self) -> Mapping[str, int]:
        """See `Files`."""
        found: dict[str, int] = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # renamed since, by a writer
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def ahead(self, spans: Iterable[Span], sizes: Mapping[str, int]) -> AbstractContextManager[FolderFiles]:
        """See `Files`. The kernel reads ahead."""
        return nullcontext(self)


def files_of(place: Path | Files) -> Files:
    """The files of the checkpoint in a folder, or as given."""
    return FolderFiles(place) if isinstance(place, Path) else place


@dataclass(frozen=True)
class Evaluation:
    """Of the checkpoint of `step`: `metrics` to keep the best by, besides those of the manifest, and JSON values that
    take the place of those of the same names in the checkpoint's `state`."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As JSON with a checksum of itself."""
        return summed_json(asdict(self))


def read_evaluation(files: Files, step: int, note: Callable[[str], None] = lambda _: None) -> Evaluation:
    """The evaluation beside the checkpoint of `step`; an empty one where there is none, or a damaged one.

    Args:
        note: called with what is wrong with a damaged one.

    Raises:
        StoreFailedError: the store does not say whether there is one.
    """
    try:
        tree = json.loads(files.read(EVALUATION))
        if tree.pop("sha256") != json_sum(tree):
            raise ValueError("does not match its checksum")
        if tree["step"] != step:
            raise ValueError(f"is of step {tree['step']}")
        metrics = {str(name): float(value) for name, value in tree["metrics"].items()}
        return Evaluation(step, metrics, dict(tree["state"]))
    except FileNotFoundError:
        pass
    except StoreFailedError:
        raise
    except OSError as error:
        note(f"{EVALUATION} cannot be read ({error.strerror or error})")
    except (ValueError, ArithmeticError, TypeError, KeyError, AttributeError, RecursionError) as error:
        note(f"{EVALUATION} is damaged ({error})")
    return Evaluation(step)


def is_suspect(files: Files) -> bool:
    """Whether a checkpoint is marked as one that is not to be gone on from."""
    try:
        files.read(SUSPECT)
    except OSError:
        return False
    return True


def json_sum(tree: object) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def summed_json(tree: dict[str, Any]) -> bytes:
    """A small JSON file with the checksum of its other fields in the field ``sha256``."""
    return json.dumps(tree | {"sha256": json_sum(tree)}, indent=1).encode() + b"\n"


_STEP = re.compile(r"(?:[a-z]+-)?step-([0-9]{8,})(?![0-9])")  # also of those kept aside
_BLOCK_BYTES = 4 << 20  # each is a request to an object store

Spare = Callable[[str, DamagedCheckpointError], None]
"""Called with the name of a damaged file that the tensors do without, and the damage."""


def examine(
    place: Path | Files, *, checksums: bool = True, manifest_sha256: str = "", spare: Spare | None = None
) -> Manifest:
    """Read the manifest of the checkpoint at `place` and check its files against it.

    The metrics include those of an evaluation that was made after it was written.

    Args:
        place: the folder of one checkpoint, or its files.
        checksums: read and hash every byte; otherwise only names, sizes and the manifest itself are checked.
        manifest_sha256: what the manifest's checksum has to be, where that is known.
        spare: called for damage to files that nothing is restored from; None: they count like all others.

    Raises:
        DamagedCheckpointError: with the first thing found wrong.
        UserError: the format is newer than this program.
        StoreFailedError: the store does not give what has to be looked at.
    """
    files = files_of(place)
    _, manifest = read_manifest(files, manifest_sha256=manifest_sha256, spare=spare)
    if checksums:
        sizes = {file.name: file.size_bytes for file in manifest.files}
        with files.ahead([Span(name, 0, size_bytes) for name, size_bytes in sizes.items()], sizes) as fetched:
            for file in manifest.files:
                with _sparing(manifest, file.name, spare):
                    check_file(fetched, file)
    found = read_evaluation(files, manifest.step).metrics
    return manifest.model_copy(update={"metrics": manifest.metrics | found}) if found else manifest


def read_manifest(files: Files, *, manifest_sha256: str = "", spare: Spare | None = None) -> tuple[bytes, Manifest]:
    """The manifest of a checkpoint, as it was written and decoded, checked against names and sizes of the files; args
    and errors as of `examine`.

    ``SHA256SUMS`` is needed only where the checksum of the manifest is not known from elsewhere.
    """
    with _damage(files, MANIFEST):
        content = files.read(MANIFEST)
    digest = hashlib.sha256(content).hexdigest()
    is_known = spare is not None and digest == manifest_sha256
    try:
        with _damage(files, SUMS):
            sums = files.read(SUMS)
        if not sums.endswith(f"{digest}  {MANIFEST}\n".encode()):
            raise DamagedCheckpointError(files.url, f"{MANIFEST} does not match its checksum in {SUMS}")
        if manifest_sha256 not in ("", digest):
            raise DamagedCheckpointError(files.url, f"{MANIFEST} is another than the one that was published last")
        manifest = manifests.decode(content, files.url)
        if sums != manifests.sums_text(manifest.files, digest):
            raise DamagedCheckpointError(files.url, f"{SUMS} does not match {MANIFEST}")
    except DamagedCheckpointError as damage:
        if spare is None or not is_known:
            raise
        manifest = manifests.decode(content, files.url)
        spare(SUMS, damage)
    named = _STEP.match(files.name)
    if named is not None and int(named[1]) != manifest.step:
        problem = f"{MANIFEST} is of step {manifest.step}, and the name says {int(named[1])}"
        raise DamagedCheckpointError(files.url, problem)
    try:
        sizes = files.sizes()
    except OSError:  # it may be forbidden to list them
        sizes = {}
    for file in manifest.files:
        if sizes.get(file.name) != file.size_bytes:  # only what does not fit the listing is asked for by its name
            with _sparing(manifest, file.name, spare), _damage(files, file.name):
                size_bytes = files.size_bytes(file.name)
                if size_bytes != file.size_bytes:
                    problem = f"{file.name} has {size_bytes} of its {file.size_bytes} bytes"
                    raise DamagedCheckpointError(files.url, problem)
    return content, manifest


@contextmanager
def _sparing(manifest: Manifest, file: str, spare: Spare | None) -> Iterator[None]:
    """Report damage to a file without tensors to `spare`, and go on."""
    try:
        yield
    except DamagedCheckpointError as damage:
        if spare is None or file in manifest.needed:
            raise
        spare(file, damage)


def check_file(place: Path | Files, file: FileEntry) -> None:
    """Hash one file of the checkpoint at `place`.

    Raises:
        DamagedCheckpointError: it is missing or its bytes are not those that were written.
        StoreFailedError: the store does not give it.
    """
    files = files_of(place)
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with _damage(files, file.name, absent="cannot be read"), files.open(file.name) as stream:
        while count := cast(io.BufferedReader, stream).readinto(block):
            digest.update(block[:count])
    if digest.hexdigest() != file.sha256:
        raise DamagedCheckpointError(files.url, f"{file.name} does not match its checksum")


@contextmanager
def _damage(files: Files, name: str, absent: str = "is missing") -> Iterator[None]:
    """What keeps the block from a file is damage of the checkpoint, but for failures of the store."""
    try:
        yield
    except StoreFailedError:
        raise
    except OSError as error:
        what = absent if isinstance(error, FileNotFoundError | NotADirectoryError) else "cannot be read"
        cause = error.strerror or (str(error).splitlines() or [type(error).__name__])[0]
        problem = f"{name} is not a file" if isinstance(error, IsADirectoryError) else f"{name} {what} ({cause})"
        raise DamagedCheckpointError(files.url, problem) from None
