"""Slots and files made from plans by hand, as plainly as possible, to hold the real ones against."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.manifest import FileEntry, Manifest, TensorEntry
from phalanx.checkpoint.format.shard_plan import JobPlan, ShardPlan, with_crc32

assert sys.byteorder == "little"


def elements(tensor: Tensor) -> bytes:
    """Row-major, without gaps."""
    flat = tensor.detach().resolve_conj().contiguous().clone().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def slot(plan: ShardPlan, tensors: Mapping[str, Tensor]) -> bytearray:
    """What a rank copies of its tensors into a slot."""
    memory = bytearray(plan.data_bytes)
    for piece in plan.pieces:
        memory[piece.start_bytes : piece.start_bytes + piece.length_bytes] = elements(tensors[piece.name])
    return memory


def file_content(plan: ShardPlan, memory: bytearray) -> bytes:
    content = bytearray(plan.file_bytes)
    for piece, offset in zip(plan.pieces, plan.offsets, strict=True):
        data = bytes(memory[piece.start_bytes : piece.start_bytes + piece.length_bytes])
        content[offset : offset + piece.archive_bytes] = piece.head + data + with_crc32(piece.tail, zlib.crc32(data))
    return bytes(content)


def write_folder(path: Path, job: JobPlan, files: Mapping[str, bytes], state: Any = None) -> None:
    """A whole checkpoint of step 5."""
    entries = []
    for name, content in {".metadata": job.index, **files}.items():
        (path / name).write_bytes(content)
        entries.append(FileEntry(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
    manifest = Manifest(
        format_version=1,
        step=5,
        created="",
        phalanx_version="",
        torch_version=job.torch_version,
        attempt=1,
        config_sha256=manifests.config_sha256(job.config),
        config=dict(job.config),
        state=state,
        tensors={name: TensorEntry.model_validate(entry) for name, entry in job.tensors.items()},
        files=entries,
    )
    encoded = manifests.encode(manifest)
    (path / "manifest.json").write_bytes(encoded)
    (path / "SHA256SUMS").write_bytes(manifests.sums_text(entries, hashlib.sha256(encoded).hexdigest()))


def round_tripped(job: JobPlan) -> JobPlan:
    """As it comes to the persister."""
    again = JobPlan.from_bytes(job.to_bytes())
    assert json.loads(again.to_bytes()) == json.loads(job.to_bytes())
    return again
