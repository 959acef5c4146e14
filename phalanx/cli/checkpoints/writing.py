"""Writing a checkpoint from the plan of a conversion: durable, with checksums, there whole or not at all."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from phalanx import __version__
from phalanx.checkpoint.format import dcp
from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.inspecting import Reader
from phalanx.checkpoint.format.manifest import FORMAT_VERSION, MANIFEST, SUMS, FileEntry, Manifest, Meta
from phalanx.checkpoint.format.recut import Recut
from phalanx.checkpoint.storage.base import Store
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself, besides its tensors."""

    step: int
    state: Any
    meta: Meta
    metrics: dict[str, float]


def write_checkpoint(
    folder: str, description: Description, recut: Recut, reader: Reader, done: Callable[[int], None]
) -> str:
    """Write a checkpoint into `folder` (a path or URL), which holds none yet, and return where it is.

    Args:
        done: called with the number of bytes written since.

    Raises:
        UserError: there are checkpoints already, or the storage refuses.
        DamagedCheckpointError: what is read is damaged.
    """
    store = open_store(folder)
    if store.names() or store.keys("latest-"):
        raise UserError("holds checkpoints already", cure="name a new folder", field="TARGET", value=folder)
    try:
        area = store.begin(description.step, description.meta.attempt, uuid.uuid4().hex)
        try:
            _fill(store, area, description, recut, reader, done)
            return f"{store.url.rstrip('/')}/{store.publish(area, description.step)}"
        except BaseException:
            store.discard(area)
            raise
    except OSError as error:
        cure = "free space there, or choose another folder"
        said = error.strerror or str(error)
        raise UserError(f"cannot be written ({said})", cure=cure, field="TARGET", value=folder) from error


def _fill(
    store: Store, area: str, description: Description, recut: Recut, reader: Reader, done: Callable[[int], None]
) -> None:
    def content(file: str) -> Iterator[memoryview]:
        for part in recut.content(file, reader):
            yield part
            done(len(part))

    files: list[FileEntry] = []
    for name in recut.names():
        written = store.write(area, name, content(name))
        files.append(FileEntry(**written.model_dump() | {"sums": recut.sums[name]}))
    tensors = recut.tensors()
    files.insert(0, store.write(area, dcp.INDEX, [dcp.index_bytes(tensors)]))
    files[0] = FileEntry(**files[0].model_dump())
    encoded = manifests.encode(Manifest(**_fields(description), tensors=tensors, files=files))
    store.write(area, MANIFEST, [encoded])
    store.write(area, SUMS, [manifests.sums_text(files, hashlib.sha256(encoded).hexdigest())])


def _fields(description: Description) -> dict[str, Any]:
    meta = description.meta
    return {
        "format_version": FORMAT_VERSION,
        "step": description.step,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "phalanx_version": __version__,
        "torch_version": str(torch.__version__),
        "attempt": meta.attempt,
        "config_sha256": manifests.config_sha256(meta.config),
        "config": dict(meta.config),
        "state": description.state,
        "metrics": description.metrics,
    }
