"""torch.distributed.checkpoint (DCP) as the file format, and the only place that touches its private parts.

Writing is DCP's own, with the checksum of each file taken as it is written. Reading goes through DCP's planners too, so
that later layouts reshard on load, but the index comes from our JSON manifest instead of the pickled ``.metadata``, and
tensors are read with ``torch.load(weights_only=True)`` (DCP's own way for tensors). DCP unpickles freely only what is
not a tensor; a manifest describes nothing else and `_TensorsOnly` refuses it.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from phalanx.core.errors import UserError

_ARCHIVE_OVERHEAD_BYTES = 2048  # of one torch.save archive: records, alignment and directory, about 1.6 kB measured


def write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorEntry], list[FileEntry]]:
    """Write `tensors` into the folder `path` with fsync; return their table and the files with sizes and checksums.

    Tensors may be on any device and need not be contiguous; of a view only its own elements are written. At most one
    tensor at a time is copied to host memory.

    Raises:
        OSError: the disk refused.
    """
    files = _HashingFileSystem()
    writer = _Writer(path, files)
    try:
        with _own_errors():
            save(dict(tensors), storage_writer=writer, no_dist=True)
    except Exception:
        # torch's archive writer covers up what the disk said while it unwinds.
        if files.refusal is not None:
            raise files.refusal from None
        raise
    return writer.table, files.entries()


def read(path: Path, manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    """Fill `targets` in place with the tensors of the same names; each stored chunk is in memory alone for a moment.

    Raises:
        OSError, pickle.UnpicklingError, RuntimeError: the files are not what the manifest says.
    """
    with _own_errors():
        load(dict(targets), storage_reader=ManifestReader(path, manifest), planner=_TensorsOnly(), no_dist=True)


def bytes_needed(tensors: Mapping[str, Tensor]) -> int:
    """About how many bytes `write` will take, a little more rather than less."""
    return sum(t.numel() * t.element_size() + _ARCHIVE_OVERHEAD_BYTES + 512 for t in tensors.values()) + 4096


class _Writer(FileSystemWriter):
    """DCP's writer of local files, through a file system of ours, keeping the table of what it wrote where."""

    def __init__(self, path: Path, files: _HashingFileSystem) -> None:
        super().__init__(path, sync_files=True, single_file_per_rank=True)
        self.fs = files
        self.table: dict[str, TensorEntry] = {}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # What `save` returns lacks the places in torch 2.11, so they are noted here, where every version has them.
        self.table = _table(metadata, {result.index: result.storage_data for part in results for result in part})
        super().finish(metadata, results)


class ManifestReader(FileSystemReader):
    """DCP's reader of local files with the index built from a `Manifest`; the ``.metadata`` pickle is not opened."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in DCP's terms."""
        tensors = self._manifest.tensors
        return Metadata(
            state_dict_metadata={name: _storage_metadata(entry) for name, entry in tensors.items()},
            planner_data={name: (name,) for name in tensors},
            storage_data=dict(_storage_data(self._manifest)),
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id),
        )


class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor, and nothing else is unpickled")


class _HashingFileSystem(FileSystem):
    """Local files, remembering the size and checksum of each one written."""

    def __init__(self) -> None:
        self._written: dict[str, _HashingStream] = {}
        self.refusal: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with super().create_stream(path, mode) as raw:
                stream = _HashingStream(raw, self._note)
                self._written[Path(path).name] = stream
                yield cast(io.IOBase, stream)
        except OSError as error:
            self._note(error)
            raise

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self._written[Path(new_path).name] = self._written.pop(Path(path).name)

    def _note(self, refusal: OSError) -> None:
        self.refusal = self.refusal or refusal

    def entries(self) -> list[FileEntry]:
        """The files written, by name."""
        return [
            FileEntry(name=name, size_bytes=stream.size_bytes, sha256=stream.digest.hexdigest())
            for name, stream in sorted(self._written.items())
        ]


class _HashingStream:
    """The part of a binary file that DCP's writer uses; append only, so the checksum can be taken on the way."""

    def __init__(self, raw: io.IOBase, note: Callable[[OSError], None]) -> None:
        self._raw = cast(io.BufferedWriter, raw)
        self._note = note
        self.digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._raw.write(view)
        except OSError as error:
            self._note(error)
            raise
        self.digest.update(view)
        self.size_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        # Asked for by DCP to fsync, which it does without flushing our buffer first.
        self._raw.flush()
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what went wrong rather than DCP's wrapper (a BaseException), without its remark on single processes."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as wrapped:
        first = next(iter(wrapped.failures.values()))[0]
        raise first from None


def _table(metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(
            dtype=str(entry.properties.dtype).removeprefix("torch."),
            shape=list(entry.size),
            chunks=[_chunk(name, chunk, places) for chunk in entry.chunks],
        )
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def _chunk(name: str, chunk: ChunkStorageMetadata, places: Mapping[MetadataIndex, _StorageInfo]) -> Chunk:
    place = places[MetadataIndex(name, chunk.offsets)]
    return Chunk(
        offsets=list(chunk.offsets),
        sizes=list(chunk.sizes),
        file=place.relative_path,
        offset=place.offset,
        length=place.length,
    )


def _storage_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(entry.dtype)), torch.Size(entry.shape), chunks)


def _storage_data(manifest: Manifest) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            yield MetadataIndex(name, chunk.offsets), _StorageInfo(chunk.file, chunk.offset, chunk.length)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name` (``bfloat16``).

    Raises:
        UserError: torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{name!r} is no dtype of torch {torch.__version__}", cure="use the torch it was written with")
    return dtype
