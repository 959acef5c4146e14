"""Writing a checkpoint: aside, durably, and published by one rename."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx import __version__
from phalanx.checkpoint import dcp
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.folder import clean, publish, writing
from phalanx.checkpoint.manifest import FORMAT_VERSION, MANIFEST, SUMS, FileEntry, Manifest, Meta, TensorEntry
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.core.points import NO_POINTS, Points

STAGES = (
    "checkpoint.begin",
    "checkpoint.tensors-written",
    "checkpoint.manifest-written",
    "checkpoint.before-rename",
    "checkpoint.between-renames",  # only where one of the same step is replaced and names cannot be exchanged
    "checkpoint.after-rename",
    "checkpoint.published",
)
"""The points of a save, in order, at which a fault can be injected."""


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Any = None,
    meta: Meta | None = None,
    *,
    points: Points = NO_POINTS,
) -> Path:
    """Write the checkpoint of `step` into `folder` (made if absent) and return its path.

    It is there whole or not at all, whatever happens; a checkpoint of the same step is replaced. When this returns it
    is on the disk, not only in caches. Leftovers of killed saves in `folder` are removed first.

    Args:
        folder: the folder of the run's checkpoints.
        step: optimizer steps done.
        tensors: by logical name (``model.layers.0.attention.q``); on any device; views are written without their base.
        state: anything made of dicts with string keys, lists, strings, numbers and None, returned unchanged on resume.
        meta: where it comes from.
        points: where tests inject faults, see `STAGES`.

    Raises:
        UserError: the disk is full or the folder cannot be written; earlier checkpoints are untouched.
        TypeError: `state` holds something JSON cannot.
    """
    meta = meta or Meta()
    manifests.check_state(state)
    needed_bytes = dcp.bytes_needed(tensors)
    with _disk_errors(folder, needed_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        _require_room(folder, needed_bytes)
        with writing(folder, step) as aside:
            points.reach("checkpoint.begin", path=aside)
            table, files = dcp.write(aside, tensors)
            points.reach("checkpoint.tensors-written", path=aside)
            _write_manifest(aside, _describe(step, table, files, state, meta))
            points.reach("checkpoint.manifest-written", path=aside)
            return publish(aside, points)


def _describe(step: int, table: dict[str, TensorEntry], files: list[FileEntry], state: Any, meta: Meta) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        step=step,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        phalanx_version=__version__,
        torch_version=str(torch.__version__),
        attempt=meta.attempt,
        config_sha256=manifests.config_sha256(meta.config),
        config=dict(meta.config),
        state=state,
        tensors=table,
        files=files,
    )


def _write_manifest(path: Path, manifest: Manifest) -> None:
    content = manifests.encode(manifest)
    write_bytes(path / MANIFEST, content)
    write_bytes(path / SUMS, manifests.sums_text(manifest.files, hashlib.sha256(content).hexdigest()))


def _require_room(folder: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def _disk_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn refusals of the disk into one line with the cure."""
    try:
        yield
    except OSError as error:
        raise _explain(error, folder, needed_bytes) from error


def _explain(error: OSError, folder: Path, needed_bytes: int) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        need = f"{needed_bytes} bytes ({units.size(needed_bytes)})"
        cure = "free space there, lower checkpoint.keep_last, or put the run on another disk"
        return UserError(f"has no room for a checkpoint of {need}", cure=cure, field=str(folder))
    problem = f"a checkpoint cannot be written ({error.strerror})"
    return UserError(problem, cure="make the folder writable, or put the run elsewhere", field=str(folder))
