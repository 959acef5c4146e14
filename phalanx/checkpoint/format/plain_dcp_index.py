"""The index of a checkpoint of plain torch.distributed.checkpoint (DCP), read without unpickling it.

``.metadata`` is a pickle, and a pickle can name any function and have it called. `load` reads it as data: nothing is
imported, called or set, and the file can name nothing but the classes and dtypes below, which stay names (`Inert`; see
`pickletools` for the opcodes). Any other name is refused before anything is done with it.

Python's own unpickler can be kept from calling functions, but not from taking memory: ten bytes that say ``put this
under number 2,147,483,648``, or ``two GB of bytes follow``, make it allocate GBs before it looks for the rest; a tuple
that holds itself twice, forty times over, takes for ever to be a key; one nested a hundred thousand deep ends the
process. Here memory is taken for what is in the file, keys are names and numbers, and what no index of tensors needs
(bytes, numbers of more than 64 bits, the first protocols' text) is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.checkpoint.format.manifest import Chunk, DamagedCheckpointError, TensorEntry, first_line, is_plain_name
from phalanx.core.errors import UserError

_MOST_LONG_BYTES = 9  # an unsigned number of 64 bits with its sign


class Inert:
    """An object in a pickle, as data: the name of its class (`kind`), arguments and state."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None

    state: Any

    def attribute(self, name: str) -> Any:
        """What a dataclass' field was; None where it was not written."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class InertClass(str):
    """A class that may have instances; the name is its own."""

    __slots__ = ()


class NotInertError(ValueError):
    """The file is damaged, or holds what is not read here."""


Find = Callable[[str, str], Any]
"""What a module's name stands for: a `InertClass`, or a value; raises what should end the reading."""


def load(content: bytes, find: Find) -> Any:
    """The one value in a pickle of protocol 2 to 5; NotInertError: it is not such a pickle. Besides: what `find`
    raises."""
    reader = _Reader(content, find)
    try:
        return reader.run()
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, TypeError) as error:
        raise NotInertError(f"byte {reader.at}: {type(error).__name__}") from None


class _Reader:
    def __init__(self, content: bytes, find: Find) -> None:
        self._content, self._find = content, find
        self.at = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        content, end = self._content, len(self._content)
        while self.at < end:
            code = content[self.at]
            self.at += 1
            if code == _STOP:
                (value,) = self._stack
                if self._marked:
                    break
                return value
            step = _STEPS.get(code)
            if step is None:
                raise NotInertError(f"byte {self.at - 1}: {bytes([code])!r} is nothing that an index needs")
            step(self)
        raise NotInertError("it ends before its end")

    def _take(self, length: int) -> bytes:
        first = self.at
        if length > len(self._content) - first:
            raise NotInertError(f"byte {first}: {length} bytes are announced, {len(self._content) - first} are there")
        self.at += length
        return self._content[first : self.at]

    def _number(self, form: struct.Struct) -> int:
        (number,) = form.unpack_from(self._content, self.at)
        self.at += form.size
        return int(number)

    def _line(self) -> str:
        end = self._content.index(b"\n", self.at) if b"\n" in self._content[self.at : self.at + 512] else -1
        if end < 0:
            raise NotInertError(f"byte {self.at}: a name without an end")
        line = self._content[self.at : end].decode()
        self.at = end + 1
        return line

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, form: struct.Struct) -> None:
        self._stack.append(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def long(self) -> None:
        length = self._number(_U1)
        if length > _MOST_LONG_BYTES:
            raise NotInertError(f"byte {self.at}: a number of {length} bytes")
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def skip(self, length: int) -> None:
        self._take(length)

    def frame(self) -> None:
        length = self._number(_U8)
        if length > len(self._content) - self.at:
            raise NotInertError(f"byte {self.at}: a frame of {length} bytes, and {len(self._content) - self.at} follow")

    def mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def tuple_of(self, count: int) -> None:
        if count > len(self._stack):
            raise IndexError
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise NotInertError(f"byte {self.at}: items for what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise NotInertError(f"byte {self.at}: entries for what is no table")
        for place in range(0, len(items), 2):
            key = items[place]
            if not isinstance(key, str | int | Inert):
                raise NotInertError(f"byte {self.at}: a key that is no name")
            target[key] = items[place + 1]

    # The memo: a table, whatever the numbers

    def remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def recall(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def named(self, module: Any, name: Any) -> None:
        if not (type(module) is str and type(name) is str):
            raise NotInertError(f"byte {self.at}: a name that is none")
        self._stack.append(self._find(module, name))

    def make(self, more: int = 0) -> None:
        for _ in range(more):
            if self._stack.pop():
                raise NotInertError(f"byte {self.at}: arguments by name")
        arguments, kind = self._stack.pop(), self._stack.pop()
        if not (isinstance(kind, InertClass) and type(arguments) is tuple):
            raise NotInertError(f"byte {self.at}: something is called that is no class of an index")
        self._stack.append(Inert(str(kind), arguments))

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, Inert):
            raise NotInertError(f"byte {self.at}: a state for what has none")
        target.state = state


_U1, _U2, _U4, _U8 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I4 = struct.Struct("<i")
_STOP = ord(".")


_STEPS: dict[int, Callable[[_Reader], Any]] = {
    ord(code): step
    for code, step in {
        "\x80": lambda r: r.skip(1),  # PROTO
        "\x95": _Reader.frame,
        "(": _Reader.mark,
        "0": lambda r: r._stack.pop(),
        "N": lambda r: r.push(None),
        "\x88": lambda r: r.push(True),
        "\x89": lambda r: r.push(False),
        "K": lambda r: r.push(r._number(_U1)),
        "M": lambda r: r.push(r._number(_U2)),
        "J": lambda r: r.push(r._number(_I4)),
        "\x8a": _Reader.long,
        "G": _Reader.float,
        "\x8c": lambda r: r.text(_U1),
        "X": lambda r: r.text(_U4),
        "\x8d": lambda r: r.text(_U8),
        "]": lambda r: r.push([]),
        "}": lambda r: r.push({}),
        ")": lambda r: r.push(()),
        "\x85": lambda r: r.tuple_of(1),
        "\x86": lambda r: r.tuple_of(2),
        "\x87": lambda r: r.tuple_of(3),
        "t": lambda r: r.push(tuple(r.since_mark())),
        "a": lambda r: r.append([r._stack.pop()]),
        "e": lambda r: r.append(r.since_mark()),
        "s": lambda r: r.set_items([r._stack.pop(-2), r._stack.pop()]),
        "u": lambda r: r.set_items(r.since_mark()),
        "q": lambda r: r.remember(r._number(_U1)),
        "r": lambda r: r.remember(r._number(_U4)),
        "\x94": lambda r: r.remember(len(r._memo)),
        "h": lambda r: r.recall(r._number(_U1)),
        "j": lambda r: r.recall(r._number(_U4)),
        "c": lambda r: r.named(r._line(), r._line()),
        "\x93": lambda r: r.named(r._stack.pop(-2), r._stack.pop()),
        "R": _Reader.make,
        "\x81": _Reader.make,
        "\x92": lambda r: r.make(1),
        "b": _Reader.build,
    }.items()
}


PLAIN_INDEX = ".metadata"
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


@dataclass(frozen=True)
class PlainIndex:
    """The contents of ``.metadata``.

    Attributes:
        tensors: by flattened name (``optimizer.state.layers.0.weight.exp_avg``).
        others: where what is not a tensor lies, by flattened name: a chunk without dimensions.
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
        DamagedCheckpointError: it is not an index, or says things that cannot be.
    """
    try:
        return _index(load(content, partial(_find, path)), path)
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise DamagedCheckpointError(path, f"{PLAIN_INDEX} cannot be read ({first_line(error)})") from None


class _Named(str):
    """A dtype."""

    __slots__ = ()


def _find(path: Path | str, module: str, name: str) -> InertClass | _Named:
    kind = _CLASSES.get((module, name))
    if kind is not None:
        return InertClass(kind)
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
        named = file[:80] if isinstance(file, str) else type(file).__name__  # it may hold itself, many times over
        _require(is_plain_name(file), f"names {named!r}, which is no file of this folder")
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
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DamagedCheckpointError(path, f"{PLAIN_INDEX}: {name}: {problem}") from None


def _dtype(properties: Any) -> str:
    """The first of the fields that torch writes as a tuple."""
    state = properties.state if _is(properties, "TensorProperties") else None
    dtype = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
    _require(isinstance(dtype, _Named), "has a tensor without a dtype")
    return str(dtype)


def _size(value: Any) -> tuple[int, ...]:
    inner = value.arguments[0] if _is(value, "Size") and len(value.arguments) == 1 else value
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
