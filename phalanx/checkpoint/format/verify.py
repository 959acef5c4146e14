"""Is this checkpoint whole? Without torch, and reading files in small blocks."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.evaluation import read_evaluation
from phalanx.checkpoint.format.files import Files, Span, files_of
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, DamagedCheckpointError, FileEntry, Manifest

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
        DamagedCheckpointError, UserError: as `examine`.
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
    """
    files = files_of(place)
    try:
        digest = _digest(files, file.name)
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
    except OSError as error:
        raise DamagedCheckpointError(files.url, f"{file.name} {_missing(error)}") from None
    if size_bytes != file.size_bytes:
        raise DamagedCheckpointError(files.url, f"{file.name} has {size_bytes} of its {file.size_bytes} bytes")


def _read(files: Files, name: str) -> bytes:
    try:
        return files.read(name)
    except OSError as error:
        raise DamagedCheckpointError(files.url, f"{name} {_missing(error)}") from None


def _missing(error: OSError) -> str:
    absent = isinstance(error, FileNotFoundError | NotADirectoryError)
    return f"is missing ({_cause(error)})" if absent else f"cannot be read ({_cause(error)})"


def _cause(error: OSError) -> str:
    return error.strerror or (str(error).splitlines() or [type(error).__name__])[0]
