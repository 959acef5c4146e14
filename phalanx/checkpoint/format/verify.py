"""Is this checkpoint whole? Without torch, and reading files in small blocks."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, DamagedCheckpointError, FileEntry, Manifest


def examine(path: Path, *, checksums: bool = True) -> Manifest:
    """Read the manifest of the checkpoint at `path` and hold its files against it.

    Args:
        path: the folder of one checkpoint.
        checksums: read and hash every byte; otherwise only names, sizes and the manifest itself are checked.

    Raises:
        DamagedCheckpointError: with the first thing found wrong.
        UserError: the format is newer than this program.
    """
    content = _read(path, MANIFEST)
    sums = _read(path, SUMS)
    digest = hashlib.sha256(content).hexdigest()
    if not sums.endswith(f"{digest}  {MANIFEST}\n".encode()):
        raise DamagedCheckpointError(path, f"{MANIFEST} does not match its checksum")
    manifest = manifests.decode(content, path)
    if sums != manifests.sums_text(manifest.files, digest):
        raise DamagedCheckpointError(path, f"{SUMS} does not match {MANIFEST}")
    for file in manifest.files:
        _check_size(path, file)
    if checksums:
        for file in manifest.files:
            check_file(path, file)
    return manifest


def check_file(path: Path, file: FileEntry) -> None:
    """Hash one file of the checkpoint at `path`.

    Raises:
        DamagedCheckpointError: it is missing or its bytes are not those that were written.
    """
    try:
        with (path / file.name).open("rb", buffering=0) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DamagedCheckpointError(path, f"{file.name} cannot be read ({error.strerror})") from None
    if digest != file.sha256:
        raise DamagedCheckpointError(path, f"{file.name} does not match its checksum")


def _check_size(path: Path, file: FileEntry) -> None:
    try:
        status = (path / file.name).stat()
    except OSError as error:
        raise DamagedCheckpointError(path, f"{file.name} is missing ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(path, f"{file.name} is not a file")
    if status.st_size != file.size_bytes:
        raise DamagedCheckpointError(path, f"{file.name} has {status.st_size} of its {file.size_bytes} bytes")


def _read(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(path, f"{name} is missing ({error.strerror})") from None
