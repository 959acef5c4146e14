"""Reading part of one ``torch.save`` archive that lies somewhere in a file, without reading the rest of it.

The archive is a ZIP file whose entry ``data/0`` holds the elements as they are, uncompressed, and whose entry
``data.pkl`` says their dtype, shape and strides. Rows of a tensor stored in order are one run of bytes.
"""

from __future__ import annotations

import errno
import io
import struct
import sys
import zipfile
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from typing_extensions import Buffer

SLAB_BYTES = 1 << 25
"""How much is read at a time where the elements cannot go straight to their place."""

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
        OSError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile: it is no archive of a tensor.
    """
    view = cast(BinaryIO, _Slice(file, *place))
    if place[1] <= _SMALL_BYTES:  # at once: its directory is at its end, and a store would be asked for each part of it
        view = io.BytesIO(view.read())
    require_stored(view)
    shape, dtype = stored
    data = None
    if shape and place[1] > _SMALL_BYTES:
        described = _load(view, "meta", shape, dtype)
        data = _elements(view, described.nbytes) if _in_order(described) else None
    if data is None:
        view.seek(0)
        out.copy_(_narrow(_load(view, "cpu", shape, dtype), start, out.shape))
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
    """See that nothing in an archive is packed, as torch never does it: what is would take memory that the file does
    not account for.

    Raises:
        ValueError: something is. zipfile.BadZipFile: it is no archive.
    """
    with zipfile.ZipFile(view) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{entry.filename[:80]} in an archive is packed")
    view.seek(0)


class _Slice(io.RawIOBase):
    """Part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "before the beginning of an archive")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = cast(io.BufferedReader, self._file).readinto(target)
        self._at += count
        return count


def _load(view: BinaryIO, device: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    tensor = torch.load(view, map_location=device, weights_only=True)
    if not isinstance(tensor, Tensor) or list(tensor.shape) != list(shape) or tensor.dtype != dtype:
        raise ValueError(f"an archive does not hold a {dtype} tensor of shape {list(shape)}")
    return tensor.detach()


def _in_order(tensor: Tensor) -> bool:
    is_all = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.is_contiguous() and tensor.storage_offset() == 0 and is_all and not tensor.is_conj()


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
    """As `read_box`, where the elements of a tensor of at least one dimension lie in order from `position` on.

    Raises:
        ValueError: the file ends too early.
    """
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
        target.copy_(_narrow(part, (0, *start[1:]), target.shape))


def _read_into(file: BinaryIO, tensor: Tensor) -> None:
    left = memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))
    while left:
        count = cast(io.BufferedReader, file).readinto(left)
        if not count:
            raise ValueError("a file ends within a tensor")
        left = left[count:]


def _narrow(tensor: Tensor, start: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dimension, (first, size) in enumerate(zip(start, sizes, strict=True)):
        tensor = tensor.narrow(dimension, first, size)
    return tensor
