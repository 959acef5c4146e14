"""The index of a checkpoint of plain torch.distributed.checkpoint (DCP), read without unpickling it. Torch-free.

``.metadata`` is a pickle, and a pickle can name any function and have it called. Here it is read as data (see
`phalanx.checkpoint.format.inert_pickle`) and can name nothing but the classes and dtypes below, which stay names: not
even torch is imported. Any other name is refused before anything is done with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.checkpoint.format.inert_pickle import Inert, Kind, load
from phalanx.checkpoint.format.manifest import Chunk, DamagedCheckpointError, TensorEntry
from phalanx.core.errors import UserError

PLAIN_INDEX = ".metadata"
"""The file's name."""

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.3
_PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "PurePath")
_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DESCRIBING = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"),
)
_CLASSES = {
    **{(_METADATA, name): name for name in _DESCRIBING},
    (_OLD_METADATA, "TensorProperties"): "TensorProperties",
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): "_MEM_FORMAT_ENCODING",
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch", "Size"): "Size",
    ("torch.serialization", "_get_layout"): "Layout",
    **{(module, name): "Path" for module in ("pathlib", "pathlib._local") for name in _PATHS},  # StorageMeta's place
}

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class PlainIndex:
    """What ``.metadata`` says.

    Attributes:
        tensors: by flattened name (``optimizer.state.layers.0.weight.exp_avg``).
        others: where what is no tensor lies, by flattened name: a chunk without dimensions.
        paths: keys and positions that lead to each name in the nested state that was saved.
    """

    tensors: Mapping[str, TensorEntry]
    others: Mapping[str, Chunk]
    paths: Mapping[str, tuple[str | int, ...]]


def decode_index(content: bytes, path: Path | str) -> PlainIndex:
    """Read the bytes of the ``.metadata`` of the checkpoint at `path`.

    Raises:
        UserError: it names something that no index of a checkpoint needs, and may be an attack; or its files are
            compressed, which is not read here.
        DamagedCheckpointError: it is no index, or says things that cannot be.
    """
    try:
        return _index(load(content, partial(_find, path)), path)
    except UserError:
        raise
    except Exception as error:  # whatever a damaged file makes of who reads it
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DamagedCheckpointError(path, f"{PLAIN_INDEX} cannot be read ({reason})") from None


class _Named(str):
    """A dtype."""

    __slots__ = ()


def _find(path: Path | str, module: str, name: str) -> Kind | _Named:
    kind = _CLASSES.get((module, name))
    if kind is not None:
        return Kind(kind)
    if module == "torch" and name in _DTYPES:
        return _Named(name)
    culprit = f"{module}.{name}"[:100]
    problem = f"{PLAIN_INDEX} names {culprit}, which no index of a checkpoint needs: refused, nothing of it was run"
    cure = "do not trust this folder; get the checkpoint again from whoever trained it"
    raise UserError(problem, cure=cure, field=str(path))


def _index(root: Any, path: Path | str) -> PlainIndex:
    _require(_is(root, "Metadata"), "does not hold the index of a checkpoint")
    described, places = root.attribute("state_dict_metadata"), root.attribute("storage_data")
    _require(isinstance(described, dict) and isinstance(places, dict), "lacks its tables")
    where = _places(places, path)
    tensors: dict[str, TensorEntry] = {}
    others: dict[str, Chunk] = {}
    for name, entry in described.items():
        _require(isinstance(name, str), "has a name that is no text")
        if _is(entry, "BytesStorageMetadata"):
            others[name] = _place(where, name, None, path)
        else:
            tensors[name] = _tensor(name, entry, where, path)
    return PlainIndex(tensors, others, _paths(root.attribute("planner_data")))


_Places = dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


def _places(table: dict[Any, Any], path: Path | str) -> _Places:
    found: _Places = {}
    for index, info in table.items():
        _require(_is(index, "MetadataIndex") and _is(info, "_StorageInfo"), "has no table of places")
        name, offset = index.attribute("fqn"), index.attribute("offset")
        _require(isinstance(name, str), "has a name that is no text")
        if info.attribute("transform_descriptors"):
            problem = f"{name} was compressed on the way to its file, which is not read here"
            raise UserError(problem, cure="load and save it with torch once, without extensions", field=str(path))
        file, start, length = (info.attribute(key) for key in ("relative_path", "offset", "length"))
        plain = isinstance(file, str) and _PLAIN_NAME.fullmatch(file) and file not in (".", "..")
        named = file[:80] if isinstance(file, str) else type(file).__name__  # it may hold itself, many times over
        _require(plain, f"names {named!r}, which is no file of this folder")
        _require(type(start) is int and type(length) is int, f"says of {name} no place in a file")
        found[name, None if offset is None else _size(offset)] = (file, start, length)
    return found


def _place(where: _Places, name: str, offsets: tuple[int, ...] | None, path: Path | str) -> Chunk:
    place = where.get((name, offsets))
    if place is None:
        raise DamagedCheckpointError(path, f"{PLAIN_INDEX} does not say where {name} lies")
    return Chunk(offsets=[], sizes=[], file=place[0], offset=place[1], length=place[2])


def _tensor(name: str, entry: Any, where: _Places, path: Path | str) -> TensorEntry:
    _require(_is(entry, "TensorStorageMetadata"), f"describes {name} in an unknown way")
    chunks = []
    for box in entry.attribute("chunks"):
        offsets, sizes = _size(box.attribute("offsets")), _size(box.attribute("sizes"))
        if 0 not in sizes:
            place = _place(where, name, offsets, path)
            chunks.append(place.model_copy(update={"offsets": list(offsets), "sizes": list(sizes)}))
    dtype = _dtype(entry.attribute("properties"))
    try:
        tree = {"dtype": dtype, "shape": list(_size(entry.attribute("size"))), "chunks": chunks}
        return TensorEntry.model_validate(tree)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DamagedCheckpointError(path, f"{PLAIN_INDEX}: {name}: {said}") from None


def _dtype(properties: Any) -> str:
    """The first of the fields that torch writes as a tuple."""
    told = properties.told if _is(properties, "TensorProperties") else None
    dtype = told.get("dtype") if isinstance(told, dict) else told[0] if isinstance(told, tuple) and told else None
    _require(isinstance(dtype, _Named), "has a tensor without a dtype")
    return str(dtype)


def _size(value: Any) -> tuple[int, ...]:
    inner = value.given[0] if _is(value, "Size") and len(value.given) == 1 else value
    whole = isinstance(inner, tuple | list) and all(type(n) is int for n in inner)
    _require(whole, "has a shape that is none")
    return tuple(inner)


def _paths(planner: Any) -> dict[str, tuple[str | int, ...]]:
    """DCP's own planner writes them; another need not."""
    if not isinstance(planner, dict):
        return {}
    pairs = ((name, path) for name, path in planner.items() if isinstance(name, str) and isinstance(path, tuple))
    return {name: path for name, path in pairs if all(type(key) in (str, int) for key in path)}


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Inert) and value.kind == kind


def _require(condition: Any, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
