"""The files of one checkpoint, wherever they lie: reading them, verifying all, and the evaluation beside them.

An evaluation comes after its checkpoint is durable, so it has a file of its own beside the manifest: whatever ends the
process meanwhile costs the evaluation alone. The file is not a part of the checkpoint's checksums, and has one of its
own: what is torn, or of another step, counts for nothing. Files are read in small blocks.
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
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, DamagedCheckpointError, FileEntry, Manifest
from phalanx.core.files import StoreFailedError, open_regular, read_regular

_MOST_BYTES = {"manifest.json": 4 << 30, "SHA256SUMS": 64 << 20, "evaluation.json": 1 << 20}
_ELSE_BYTES = 1 << 30


def most_bytes(file: str) -> int:
    """How large a file can be that is read as a whole, bytes; what is larger was never written by anybody.

    A manifest has about 150 bytes for each chunk of a tensor: 4 GiB are enough for 2,200 tensors (weights and moments
    of 80 layers) in 10,000 parts each, with the state of training. ``SHA256SUMS`` has at most 330 for each file: 64 MiB
    are 200,000 files, two for each rank. What is left are records of a rank (``part-0.json``): 20 bytes for each run of
    its elements, and rank 0's state.
    """
    return _MOST_BYTES.get(file, _ELSE_BYTES)


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
        ...

    @property
    def url(self) -> str:
        """Where it lies, for people."""
        ...

    def identity(self) -> str:
        """Tells it from another that later bears its name; empty if it is gone."""
        ...

    def read(self, file: str) -> bytes:
        """A small file; OddFileError: it is none, or larger than `most_bytes`."""
        ...

    def open(self, file: str) -> BinaryIO:
        """A file for reading anywhere in it (`seek`, `readinto`); OddFileError: it is none."""
        ...

    def size_bytes(self, file: str) -> int:
        """Length of a file; FileNotFoundError: it is not there, IsADirectoryError: it is not a file."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Length of every file, by name, from one look at all of them; empty if there are none."""
        ...

    def ahead(self, spans: Iterable[Span], sizes: Mapping[str, int]) -> AbstractContextManager[Files]:
        """The same files, for reading in one thread, where that makes it faster with `spans` on their way already.

        Args:
            spans: what will be read, best in that order.
            sizes: of files that will be opened, so that storage need not be asked.
        """
        ...


@dataclass(frozen=True)
class FolderFiles:
    """Those in the folder at `path`."""

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
        return read_regular(self.path / file, most_bytes(file))

    def open(self, file: str) -> BinaryIO:
        """See `Files`."""
        return open_regular(self.path / file)

    def size_bytes(self, file: str) -> int:
        """See `Files`."""
        path = self.path / file
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


EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class Evaluation:
    """Of the checkpoint of `step`.

    Attributes:
        metrics: figures for keeping the best, besides those of the manifest.
        state: JSON values that take the place of those of the same names in the checkpoint's state.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As JSON with a checksum of itself."""
        tree = asdict(self)
        return json.dumps(tree | {"sha256": _sum(tree)}, indent=1).encode() + b"\n"


def read_evaluation(files: Files, step: int, note: Callable[[str], None] = lambda _: None) -> Evaluation:
    """What lies beside the checkpoint of `step`; one that says nothing where there is none, or a damaged one.

    Raises:
        StoreFailedError: whether there is one cannot be found out.

    Args:
        files: of the checkpoint.
        step: of it.
        note: is given what is wrong with a damaged one.
    """
    try:
        tree = json.loads(files.read(EVALUATION))
        if tree.pop("sha256") != _sum(tree):
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


def _sum(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


_STEP = re.compile(r"(?:[a-z]+-)?step-([0-9]{8,})(?![0-9])")  # also of those kept aside
_BLOCK_BYTES = 4 << 20  # of an object store, each is a request


Spare = Callable[[str, DamagedCheckpointError], None]
"""Is given the name of a file that the tensors do without, and what is wrong with it."""


def examine(
    place: Path | Files, *, checksums: bool = True, manifest_sha256: str = "", spare: Spare | None = None
) -> Manifest:
    """Read the manifest of the checkpoint at `place` and hold its files against it.

    Its metrics are those of the evaluation that was made after it was written, too.

    Args:
        place: the folder of one checkpoint, or its files.
        checksums: read and hash every byte; otherwise only names, sizes and the manifest itself are checked.
        manifest_sha256: what the manifest's checksum has to be, where that is known.
        spare: told of damage to files that nothing is restored from; None: they count like all others.

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
    """The manifest of a checkpoint, as it was written and decoded, held against names and sizes of the files.

    ``SHA256SUMS`` is needed only where the checksum of the manifest is not known from elsewhere.

    Args:
        files: of the checkpoint.
        manifest_sha256: what the manifest's checksum has to be, where that is known.
        spare: see `examine`.

    Raises:
        DamagedCheckpointError, UserError, StoreFailedError: as `examine`.
    """
    content = _read(files, MANIFEST)
    digest = hashlib.sha256(content).hexdigest()
    is_known = spare is not None and digest == manifest_sha256
    try:
        sums = _read(files, SUMS)
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
    _check_sizes(files, manifest, spare)
    return content, manifest


@contextmanager
def _sparing(manifest: Manifest, file: str, spare: Spare | None) -> Iterator[None]:
    """Damage to a file without tensors is told, if there is somebody to tell it to."""
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
    try:
        digest = _digest(files, file.name)
    except StoreFailedError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(files.url, f"{file.name} cannot be read ({_cause(error)})") from None
    if digest != file.sha256:
        raise DamagedCheckpointError(files.url, f"{file.name} does not match its checksum")


def _digest(files: Files, name: str) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with files.open(name) as stream:
        while count := cast(io.BufferedReader, stream).readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def _check_sizes(files: Files, manifest: Manifest, spare: Spare | None) -> None:
    """Hold the files against one listing; only what is not right there is asked for by its name."""
    try:
        sizes = files.sizes()
    except OSError:  # it may be forbidden to list them
        sizes = {}
    for file in manifest.files:
        if sizes.get(file.name) != file.size_bytes:
            with _sparing(manifest, file.name, spare):
                _check_size(files, file)


def _check_size(files: Files, file: FileEntry) -> None:
    try:
        size_bytes = files.size_bytes(file.name)
    except IsADirectoryError:
        raise DamagedCheckpointError(files.url, f"{file.name} is not a file") from None
    except StoreFailedError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(files.url, f"{file.name} {_missing(error)}") from None
    if size_bytes != file.size_bytes:
        raise DamagedCheckpointError(files.url, f"{file.name} has {size_bytes} of its {file.size_bytes} bytes")


def _read(files: Files, name: str) -> bytes:
    try:
        return files.read(name)
    except StoreFailedError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(files.url, f"{name} {_missing(error)}") from None


def _missing(error: OSError) -> str:
    absent = isinstance(error, FileNotFoundError | NotADirectoryError)
    return f"is missing ({_cause(error)})" if absent else f"cannot be read ({_cause(error)})"


def _cause(error: OSError) -> str:
    return error.strerror or (str(error).splitlines() or [type(error).__name__])[0]
