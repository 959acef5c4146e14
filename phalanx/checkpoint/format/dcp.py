"""The files of torch.distributed.checkpoint (DCP): blocks of tensors in archives.

A ``.distcp`` file is a run of ``torch.save`` archives, one per chunk; ``.metadata`` is a pickled index of all files
(`phalanx.checkpoint.format.dcp_index`). `phalanx.checkpoint.restoring.durable_source` reads the same files by our JSON
manifest and never opens the pickle. DCP itself is not imported here: that takes a second.

An archive is a ZIP file whose entry ``data/0`` holds the elements as they are, uncompressed, and whose entry
``data.pkl`` says their dtype, shape and strides. Rows of a tensor stored in order are one run of bytes, so part of an
archive can be read without the rest.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeGuard, cast

import torch
from torch import Tensor
from typing_extensions import Buffer

from phalanx.checkpoint.format.run_sums import SeekableFile
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Block:
    """Memory of shape ``shard.sizes`` that holds the block `shard` of a logical tensor."""

    tensor: Tensor
    shard: Shard


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor knows its own place in a mesh; who has made one has imported its module."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def held(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Block]:
    """The blocks of `tensors`: by `shards` where they are there, DTensors by their own placement, others whole.

    Raises:
        ValueError: a shard does not have the size of its tensor.
    """
    blocks: dict[str, Block] = {}
    for name, tensor in ((name, tensor.detach()) for name, tensor in tensors.items()):
        shape, shard = tuple(tensor.shape), shards.get(name)
        if shard is None and is_dtensor(tensor):
            [box] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            blocks[name] = Block(tensor.to_local(), Shard(shape, tuple(box.offsets), tuple(box.sizes)))
        elif shard is None:
            blocks[name] = Block(tensor, Shard.whole(shape))
        elif shape != shard.sizes:
            raise ValueError(f"{name} has shape {shape} in memory, but its shard has {shard.sizes}")
        else:
            blocks[name] = Block(tensor, shard)
    return blocks


SLAB_BYTES = 1 << 25  # read at a time where the elements cannot go straight to their place
_SMALL_BYTES = 1 << 18  # below this, reading all of an archive costs less than looking into it
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and of the extra field (APPNOTE.TXT 4.3.7)


def read_box(
    file: BinaryIO, place: tuple[int, int], stored: tuple[Sequence[int], torch.dtype], start: Sequence[int], out: Tensor
) -> None:
    """Fill `out` with the box at `start`, of the shape of `out`, of the tensor in an archive.

    Args:
        file: open for reading.
        place: where the archive begins in `file`, and its length.
        stored: shape and dtype that the tensor must have.
        start: first index of the box in every dimension.
        out: on any device, of any dtype and strides.

    Raises:
        ValueError: the archive holds something else.
        OSError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile: it is not an archive of a tensor.
    """
    view = cast(BinaryIO, _Slice(file, *place))
    if place[1] <= _SMALL_BYTES:  # at once: its directory is at its end, and a store would be asked for each part of it
        view = io.BytesIO(view.read())
    require_stored(view)
    shape, dtype = stored
    data = None
    if shape and place[1] > _SMALL_BYTES:
        # Loaded without its elements, to see whether they lie in the file simply in order.
        described = _load(view, "meta", shape, dtype)
        is_all = described.untyped_storage().nbytes() == described.nbytes and described.storage_offset() == 0
        if is_all and described.is_contiguous() and not described.is_conj():
            data = _elements(view, described.nbytes)
    if data is None:
        view.seek(0)
        out.copy_(narrow(_load(view, "cpu", shape, dtype), start, out.shape))
    else:
        read_rows(file, place[0] + data, stored, start, out)


def read_spans(
    length: int, stored: tuple[Sequence[int], torch.dtype], start: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Which bytes of an archive of `length` bytes `read_box` reads, in its order: first and end of each span.

    A little more rather than less, since where in the archive the elements begin is not known before it is read.

    Args:
        stored: shape and dtype of the tensor.
        start, sizes: of the box.
    """
    shape, dtype = stored
    row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()
    around = max(length - row_bytes * (shape[0] if shape else 1), 0)
    if not shape or length <= _SMALL_BYTES or not sizes[0]:
        return [(0, length)]
    directory, first, end = max(length - around, 0), start[0] * row_bytes, (start[0] + sizes[0]) * row_bytes + around
    rows = (first, min(end, directory)) if first > around else (0, min(end, directory))
    return [(directory, length), *([(0, around)] if rows[0] else []), rows]


def require_stored(view: BinaryIO) -> None:
    """Raise ValueError where something in an archive is packed, and zipfile.BadZipFile where it is not an archive.

    torch never packs, and what is packed would take memory that the file does not account for.
    """
    with zipfile.ZipFile(view) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{entry.filename[:80]} in an archive is packed")
    view.seek(0)


class _Slice(SeekableFile):
    """Part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__(length)
        self._file, self._offset = file, offset

    def readinto(self, buffer: Buffer) -> int:
        self._file.seek(self._offset + self.at)
        count = cast(io.BufferedReader, self._file).readinto(self.left(buffer))
        self.at += count
        return count


def _load(view: BinaryIO, device: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    tensor = torch.load(view, map_location=device, weights_only=True)
    if not isinstance(tensor, Tensor) or list(tensor.shape) != list(shape) or tensor.dtype != dtype:
        raise ValueError(f"an archive does not hold a {dtype} tensor of shape {list(shape)}")
    return tensor.detach()


def _elements(view: BinaryIO, length: int) -> int | None:
    """Where in the archive the elements begin; None if they are not simply there."""
    view.seek(0)
    with zipfile.ZipFile(view) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        order, data = entries.get("byteorder"), entries.get("data/0")
        if order is None or data is None or archive.read(order).decode() != sys.byteorder:
            return None
        if data.compress_type != zipfile.ZIP_STORED or data.file_size != length:
            return None
    view.seek(data.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(view.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile("an entry of an archive is not where its directory says")
    return data.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


def read_rows(
    file: BinaryIO, position: int, stored: tuple[Sequence[int], torch.dtype], start: Sequence[int], out: Tensor
) -> None:
    """As `read_box`, where the elements of a tensor of at least one dimension lie in order from `position` on;
    ValueError: the file ends too early."""
    shape, dtype = torch.Size(stored[0]), stored[1]
    row_bytes = dtype.itemsize * shape[1:].numel()
    file.seek(position + start[0] * row_bytes)
    whole_rows = out.shape[1:] == shape[1:]
    if whole_rows and out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous():
        _read_into(file, out)
        return
    rows = max(1, SLAB_BYTES // row_bytes)
    slab = torch.empty((min(rows, out.shape[0]), *shape[1:]), dtype=dtype)
    for first in range(0, out.shape[0], rows):
        target = out[first : first + rows]
        part = slab[: target.shape[0]]
        _read_into(file, part)
        target.copy_(narrow(part, (0, *start[1:]), target.shape))


def _read_into(file: BinaryIO, tensor: Tensor) -> None:
    left = memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))
    while left:
        count = cast(io.BufferedReader, file).readinto(left)
        if not count:
            raise ValueError("a file ends within a tensor")
        left = left[count:]


def narrow(tensor: Tensor, start: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The box of `sizes` at `start` of a tensor, as a view."""
    for dimension, (first, size) in enumerate(zip(start, sizes, strict=True)):
        tensor = tensor.narrow(dimension, first, size)
    return tensor


_ARCHIVE_OVERHEAD_BYTES = 2048  # of one torch.save archive: records, alignment and directory, about 1.6 kB measured
_INDEX_BYTES = 512  # of one chunk in the two indexes together


def bytes_needed(blocks: Mapping[str, Block]) -> int:
    """About how many bytes a file with `blocks` takes, with their part of the index; a little more rather than less."""
    each = _ARCHIVE_OVERHEAD_BYTES + _INDEX_BYTES
    return sum(b.shard.numel * b.tensor.element_size() + each for b in blocks.values()) + 4096


def dtype_name(tensor: Tensor) -> str:
    """``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name` (``bfloat16``); UserError: torch has none of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{name!r} is no dtype of torch {torch.__version__}", cure="use the torch it was written with")
    return dtype


class SavedTensor(Protocol):
    """What has to be known of a tensor that was saved: dtype as in torch without the prefix, and global shape."""

    @property
    def dtype(self) -> str:
        """Such as ``float32``."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""


def misfits(name: str, saved: SavedTensor, block: Block, *, cast: bool, there: str = "there") -> list[str]:
    """What keeps `saved` from being read into `block`; with `cast`, dtypes may differ. Messages call the place where it
    was saved `there`."""
    shape = tuple(saved.shape)
    if block.shard.shape != shape:
        return [f"{name} has shape {block.shard.shape} here and {shape} {there}"]
    if not cast and block.tensor.dtype != torch_dtype(saved.dtype):
        return [f"{name} has dtype {dtype_name(block.tensor)} here and {saved.dtype} {there}"]
    return []
