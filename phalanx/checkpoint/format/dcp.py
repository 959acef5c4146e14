"""The files of torch.distributed.checkpoint (DCP), written; the only place that touches DCP's private parts.

A ``.distcp`` file is a run of ``torch.save`` archives, one per chunk; ``.metadata`` is a pickled index of all files.
The archives are written here, one file per rank, with the checksum taken on the way; the index is written by DCP's own
writer, from the tables of all ranks, so that other tools read the folder. `phalanx.checkpoint.restoring.durable` reads
the same files by our JSON manifest and never opens the pickle.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.checkpoint.format.blocks import Block
from phalanx.checkpoint.format.manifest import Chunk, FileEntry, TensorEntry
from phalanx.checkpoint.format.runs import RunSums
from phalanx.checkpoint.format.tables import Written
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes

INDEX = ".metadata"
_ARCHIVE_OVERHEAD_BYTES = 2048  # of one torch.save archive: records, alignment and directory, about 1.6 kB measured
_INDEX_BYTES = 512  # of one chunk in the two indexes together


def write(path: Path, rank: int, blocks: Mapping[str, Block]) -> Written:
    """Write `blocks` into a file of `rank` in the folder `path`, with fsync.

    Tensors may be on any device and need not be contiguous; of a view only its own elements are written. At most one
    tensor at a time is copied to host memory. Empty blocks take no room. A rank with no block writes no file, but
    rank 0, whose file is always there.

    Raises:
        OSError: the disk refused.
    """
    files = _HashingFileSystem()
    name = f"__{rank}_0.distcp"
    filled = {key: block for key, block in blocks.items() if block.shard.numel}
    chunks: dict[str, Chunk] = {}
    if filled or rank == 0:
        with files.create_stream(path / name, "wb") as stream:
            for key, block in filled.items():
                offset = files.begin_archive(stream)
                files.save(_on_host(block.tensor), stream)
                offsets, sizes = list(block.shard.offsets), list(block.shard.sizes)
                chunks[key] = Chunk(
                    offsets=offsets, sizes=sizes, file=name, offset=offset, length=stream.tell() - offset
                )
            os.fsync(stream.fileno())
    table = {
        key: (dtype_name(block.tensor), list(block.shard.shape), chunks.get(key))
        for key, block in blocks.items()
        if key in chunks or 0 in block.shard.shape
    }
    return Written(next(iter(files.entries()), None), table)


def write_index(path: Path, tensors: Mapping[str, TensorEntry]) -> FileEntry:
    """Write DCP's own index, ``.metadata``, of the files of all ranks.

    Raises:
        OSError: the disk refused.
    """
    content = index_bytes(tensors)
    write_bytes(path / INDEX, content)
    return FileEntry(name=INDEX, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def index_bytes(tensors: Mapping[str, TensorEntry]) -> bytes:
    """The bytes of ``.metadata`` of a checkpoint with these tensors."""
    writer = FileSystemWriter("", sync_files=False)
    writer.fs = memory = _MemoryFileSystem()
    metadata = Metadata(
        state_dict_metadata={name: _storage_metadata(entry) for name, entry in tensors.items()},
        planner_data={name: (name,) for name in tensors},
    )
    writer.finish(metadata, [list(_places(tensors))])
    return memory.content.getvalue()


def bytes_needed(blocks: Mapping[str, Block]) -> int:
    """About how many bytes `write` will take, with the index; a little more rather than less."""
    each = _ARCHIVE_OVERHEAD_BYTES + _INDEX_BYTES
    return sum(b.shard.numel * b.tensor.element_size() + each for b in blocks.values()) + 4096


def dtype_name(tensor: Tensor) -> str:
    """``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name` (``bfloat16``).

    Raises:
        UserError: torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{name!r} is no dtype of torch {torch.__version__}", cure="use the torch it was written with")
    return dtype


def _on_host(tensor: Tensor) -> Tensor:
    """In host memory, in order, and without the rest of a memory that it is a view of (torch.save writes all of it)."""
    host = tensor.detach().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def _storage_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(entry.dtype)), torch.Size(entry.shape), chunks)


def _places(tensors: Mapping[str, TensorEntry]) -> Iterator[WriteResult]:
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            place = _StorageInfo(chunk.file, chunk.offset, chunk.length)
            yield WriteResult(MetadataIndex(name, chunk.offsets), chunk.length, place)


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


class _HashingFileSystem(FileSystem):
    """Local files, remembering the size and checksum of each one written."""

    def __init__(self) -> None:
        self._written: dict[str, _HashingStream] = {}
        self._refusal: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as raw:
            stream = _HashingStream(raw, self._note)
            self._written[Path(path).name] = stream
            yield cast(io.IOBase, stream)

    def save(self, tensor: Tensor, stream: io.IOBase) -> None:
        """Append an archive with `tensor` to one of the files."""
        try:
            torch.save(tensor, cast(Any, stream))
        except Exception:
            # torch's archive writer covers up what the disk said while it unwinds.
            if self._refusal is not None:
                raise self._refusal from None
            raise

    def begin_archive(self, stream: io.IOBase) -> int:
        """An archive begins here; where that is."""
        cast(_HashingStream, stream).sums.cut()
        return stream.tell()

    def _note(self, refusal: OSError) -> None:
        self._refusal = self._refusal or refusal

    def entries(self) -> list[FileEntry]:
        """The files written, by name."""
        return [
            FileEntry(
                name=name, size_bytes=stream.size_bytes, sha256=stream.digest.hexdigest(), sums=stream.sums.finish()
            )
            for name, stream in sorted(self._written.items())
        ]


class _HashingStream:
    """The part of a binary file that is needed here; append only, so the checksum can be taken on the way."""

    def __init__(self, raw: io.IOBase, note: Callable[[OSError], None]) -> None:
        self._raw = cast(io.BufferedWriter, raw)
        self._note = note
        self.digest = hashlib.sha256()
        self.sums = RunSums()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._raw.write(view)
        except OSError as error:
            self._note(error)
            raise
        self.digest.update(view)
        self.sums.update(view)
        self.size_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        # Asked for to fsync, before which our buffer has to be flushed; DCP does not.
        self._raw.flush()
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
