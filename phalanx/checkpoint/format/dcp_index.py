"""DCP's own index of a checkpoint, ``.metadata``, written by DCP's own writer so that other tools read the folder.

This is the only place that touches DCP's private parts, and is imported by who writes an index: that takes a second.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.checkpoint.format.dcp import torch_dtype
from phalanx.checkpoint.format.manifest import TensorEntry

INDEX = ".metadata"


def index_bytes(tensors: Mapping[str, TensorEntry]) -> bytes:
    """The bytes of ``.metadata`` of a checkpoint with these tensors."""
    described: dict[str, Any] = {}
    places: list[WriteResult] = []
    for name, entry in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
        properties = TensorProperties(dtype=torch_dtype(entry.dtype))
        described[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for chunk in entry.chunks:
            place = _StorageInfo(chunk.file, chunk.offset, chunk.length)
            places.append(WriteResult(MetadataIndex(name, chunk.offsets), chunk.length, place))
    writer = FileSystemWriter("", sync_files=False)
    writer.fs = memory = _MemoryFileSystem()
    writer.finish(Metadata(described, planner_data={name: (name,) for name in tensors}), [places])
    return memory.content.getvalue()


class _MemoryFileSystem(FileSystem):
    """One file, kept in memory."""

    def __init__(self) -> None:
        self.content = io.BytesIO()

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        yield self.content

    def exists(self, path: str | os.PathLike) -> bool:
        return False

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """It has no name."""
