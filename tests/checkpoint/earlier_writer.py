"""Checkpoints as the blocking mode once wrote them: archives back to back, views as they were, no parts of ranks."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.dcp import dtype_name
from phalanx.checkpoint.format.dcp_index import index_bytes
from phalanx.checkpoint.format.manifest import Chunk, FileEntry, Manifest, TensorEntry
from phalanx.checkpoint.format.run_sums import RunSums

FILE = "__0_0.distcp"


def write_earlier(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Any = None) -> Path:
    """By one rank; transposed tensors are stored transposed."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    content, sums, entries = bytearray(), RunSums(), {}
    for name, tensor in tensors.items():
        chunks = []
        if tensor.numel():
            archive = _archive(tensor.detach())
            place = {"file": FILE, "offset": len(content), "length": len(archive)}
            chunks.append(Chunk(offsets=[0] * tensor.ndim, sizes=list(tensor.shape), **place))
            sums.cut()
            sums.update(archive)
            content += archive
        entries[name] = TensorEntry(dtype=dtype_name(tensor), shape=list(tensor.shape), chunks=chunks)
    files = [_written(path, ".metadata", index_bytes(entries)), _written(path, FILE, bytes(content), sums)]
    manifest = Manifest(
        format_version=1,
        step=step,
        created="",
        phalanx_version="",
        torch_version=str(torch.__version__),
        attempt=1,
        config_sha256=manifests.config_sha256({}),
        config={},
        state=state,
        tensors=entries,
        files=files,
    )
    encoded = manifests.encode(manifest)
    (path / "manifest.json").write_bytes(encoded)
    (path / "SHA256SUMS").write_bytes(manifests.sums_text(files, hashlib.sha256(encoded).hexdigest()))
    return path


def _archive(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def _written(path: Path, name: str, content: bytes, sums: RunSums | None = None) -> FileEntry:
    (path / name).write_bytes(content)
    entry = FileEntry(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return entry if sums is None else entry.model_copy(update={"sums": sums.finish()})
