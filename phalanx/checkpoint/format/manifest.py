"""What a checkpoint contains, as JSON: the one description of it that is ever read.

A checkpoint is a folder ``step-00001200`` with

- ``__0_0.distcp`` (and more, one per writer): the tensors, as torch.distributed.checkpoint (DCP) writes them;
- ``.metadata``: DCP's own index, a pickle, for other tools; never read here, since unpickling runs code;
- ``manifest.json``: a `Manifest`, which says the same and more;
- ``SHA256SUMS``: the checksum of every other file, so that ``sha256sum --check SHA256SUMS`` verifies a checkpoint too.

SHA-256 because it is in the standard library and in every shell, fast where the processor has instructions for it
(1.8 GB/s per core measured, BLAKE2b 0.9 GB/s; both outrun most disks), and also names contents beyond doubt.
The chunks of a tensor are boxes, which have to cover it exactly once (`cover_fault`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from phalanx.core.errors import UserError


class Box(Protocol):
    """A block ``[offsets, offsets + sizes)``, such as a `phalanx.core.layout.Shard` or a chunk of a file."""

    @property
    def offsets(self) -> Sequence[int]:
        """First index in every dimension."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of indices in every dimension."""


B = TypeVar("B", bound=Box)


def overlap(left: Box, right: Box) -> tuple[list[int], list[int]] | None:
    """Offsets and sizes of what two boxes of one tensor share; None if that is nothing."""
    offsets, sizes = [], []
    for a, a_size, b, b_size in zip(left.offsets, left.sizes, right.offsets, right.sizes, strict=True):
        start = a if a > b else b
        size = min(a + a_size, b + b_size) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return offsets, sizes


def cover_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once, in a few words; None if they do."""
    pair = clash(boxes)
    if pair is not None:
        return f"{written(pair[0])} and {written(pair[1])} overlap"
    elements, covered = math.prod(shape), sum(math.prod(box.sizes) for box in boxes)
    if covered != elements:
        return f"its chunks do not fill it: {covered} of {elements} elements"
    return None


def clash(boxes: Sequence[B]) -> tuple[B, B] | None:
    """Two of `boxes` that share an element, if there are such.

    A sweep along the dimension with the most borders, in which only boxes that reach the present place are compared:
    n log n for a tensor cut along one dimension into n parts.
    """
    if len(boxes) < 2:
        return None
    dimensions = range(len(boxes[0].offsets))
    axis = max(dimensions, key=lambda d: len({box.offsets[d] for box in boxes}), default=None)
    if axis is None:
        return boxes[0], boxes[1]  # two writers of one number
    reaching: list[B] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        reaching = [other for other in reaching if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
        for other in reaching:
            if overlap(other, box) is not None:
                return other, box
        reaching.append(box)
    return None


def written(box: Box) -> str:
    """``[0:4, 2:6]``."""
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True)) + "]"


FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"

Count = Annotated[int, Field(ge=0)]


def is_plain_name(file: object) -> bool:
    """Whether this can be the name of a file of a checkpoint: no path, nothing that dots hide."""
    return isinstance(file, str) and re.fullmatch("[A-Za-z0-9_.-]+", file) is not None and file not in (".", "..")


def plain(file: str) -> str:
    """`file`; ValueError if it cannot be the name of a file of a checkpoint."""
    if not is_plain_name(file):
        raise ValueError(f"{file!r} is no plain file name")
    return file


def first_line(error: BaseException) -> str:
    """The first line of an error, or its type where it has no message; libraries append stack traces and hints."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class DamagedCheckpointError(UserError):
    """A checkpoint that is torn, corrupted or not one at all; `reason` says how in a few words."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"is damaged: {reason}", cure="use an earlier checkpoint, or restore this folder", field=str(path)
        )


@dataclass(frozen=True)
class Meta:
    """Where a checkpoint comes from."""

    config: Mapping[str, Any] = field(default_factory=dict)  # the resolved config of the run, as plain JSON values
    attempt: int = 1  # number of the attempt (restart) of the run that wrote it, from 1
    metrics: Mapping[str, float] = field(default_factory=dict)  # to keep the best by, such as {"validation_loss": 3.1}
    layout: str = ""  # of the ranks that wrote it, such as pp2·dp2·tp2; for people


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Chunk(_Part):
    """A box of one tensor and the bytes that hold it: a ``torch.save`` archive of `length` bytes in `file`."""

    offsets: list[Count]
    sizes: list[Count]
    file: str
    offset: Count
    length: Count


class TensorEntry(_Part):
    """One tensor: dtype as in torch without the prefix (``float32``), global shape, and the chunks that fill it."""

    dtype: str
    shape: list[Count]
    chunks: list[Chunk]

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @model_validator(mode="after")
    def _chunks_fit(self) -> TensorEntry:
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(self.shape):
                raise ValueError("a chunk has not the dimensions of its tensor")
            if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, self.shape, strict=True)):
                raise ValueError("a chunk lies outside its tensor")
        if any(math.prod(chunk.sizes) > chunk.length for chunk in self.chunks):
            raise ValueError("a chunk has fewer bytes than elements")  # before memory is taken for it
        fault = cover_fault(self.shape, self.chunks)
        if fault is not None:
            raise ValueError(fault)
        return self


class FileEntry(_Part):
    """One file beside the manifest; `sums`: of its runs (see `phalanx.checkpoint.format.run_sums`), or none."""

    name: str
    size_bytes: Count
    sha256: str
    sums: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _stays_inside(self) -> FileEntry:
        if not is_plain_name(self.name) or self.name in (MANIFEST, SUMS):
            raise ValueError(f"{self.name!r} is no name of a file of a checkpoint")
        return self


class Manifest(_Part):
    """The contents of ``manifest.json``.

    `state` is whatever the caller wants back besides tensors (position in the data, schedule, ...); floats that are
    not finite are written as ``NaN`` and ``Infinity``, which Python's json reads and strict readers do not.
    `metrics` are figures to keep the best by; `layout` is such as ``pp2·dp2·tp2``. Older writers left both out.
    """

    format_version: int
    step: Count
    created: str
    phalanx_version: str
    torch_version: str
    attempt: int
    config_sha256: str
    config: dict[str, Any]
    state: Any
    metrics: dict[str, float] = Field(default_factory=dict)
    layout: str = ""
    tensors: dict[str, TensorEntry]
    files: list[FileEntry]

    @model_validator(mode="after")
    def _chunks_lie_in_files(self) -> Manifest:
        size_bytes = {file.name: file.size_bytes for file in self.files}
        for name, tensor in self.tensors.items():
            if any(c.offset + c.length > size_bytes.get(c.file, -1) for c in tensor.chunks):
                raise ValueError(f"tensor {name!r} lies outside the files")
        return self

    @cached_property
    def needed(self) -> frozenset[str]:
        """Names of the files that tensors are read from; others (``.metadata``, ``part-0.json``) are not needed."""
        return frozenset(chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together, without the manifest."""
        return sum(file.size_bytes for file in self.files)


def encode(manifest: Manifest) -> bytes:
    """The manifest as the bytes of ``manifest.json``, with a line for each tensor and each file."""
    tree = manifest.model_dump()
    tensors = [f"{_line(name)}: {_line(entry)}" for name, entry in tree.pop("tensors").items()]
    files = [_line({key: value for key, value in entry.items() if value != []}) for entry in tree.pop("files")]
    fields = [f"{_line(name)}: {json.dumps(value, indent=1, ensure_ascii=False)}" for name, value in tree.items()]
    fields += ['"tensors": {\n' + ",\n".join(tensors) + "\n}", '"files": [\n' + ",\n".join(files) + "\n]"]
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()


def decode(content: bytes, path: Path | str) -> Manifest:
    """The manifest in the bytes of ``manifest.json`` of the checkpoint at `path`.

    Raises:
        DamagedCheckpointError: it is not JSON, or says things that cannot be.
        UserError: it was written by a later version of this program.
    """
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"{MANIFEST} is no JSON ({error})") from None
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        problem = f"has format version {version}, newer than {FORMAT_VERSION}, the latest this program reads"
        raise UserError(problem, cure="update phalanx", field=str(path))
    try:
        return Manifest.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        raise DamagedCheckpointError(path, f"{MANIFEST}: {where}: {problem}") from None


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def sums_text(files: Iterable[FileEntry], manifest_sha256: str) -> bytes:
    """The bytes of ``SHA256SUMS``: the listed files in order, then the manifest."""
    lines = [f"{file.sha256}  {file.name}\n" for file in files] + [f"{manifest_sha256}  {MANIFEST}\n"]
    return "".join(lines).encode()


def config_sha256(config: Mapping[str, Any]) -> str:
    """A name for a resolved config that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_state(value: Any, where: str = "state") -> None:
    """Raise TypeError, naming the place, for what JSON would silently change (keys other than strings) or cannot hold;
    tuples are accepted and come back as lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: keys must be strings, tensors go with the tensors")
            check_state(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_state(item, f"{where}.{index}")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{where} is a {type(value).__name__}: only plain JSON values can be saved as state")
