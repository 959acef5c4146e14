"""Dumps of NCCL's flight recorder, as torch writes them, read without trusting them.

A dump is a pickle, and a rank may write what it likes, so it is read by an unpickler that knows data only: text,
numbers, lists, tuples and dictionaries. It admits no globals, calls nothing, and allocates no more than the file's
size explains. The base class is private to Python; a test holds it to that.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

MAX_BYTES = 64 << 20
"""Of a dump. Those of 16 ranks of a real job have 3 to 5 kB each; the recorder's ring may be larger."""

_MAX_VALUES = 3_000_000  # after references to one value are written out: a short pickle can stand for billions
_MAX_DEPTH = 20

_DATA_ONLY = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET POP POP_MARK DUP"
)


class FlightRecordError(ValueError):
    """A file is not a dump of a flight recorder."""


class _DataUnpickler(pickle._Unpickler):
    """Knows the instructions for data; any other ends it."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _DATA_ONLY.split())
    }

    def find_class(self, module: str, name: str) -> Any:
        """No instruction that comes here is known; this is the second wall."""
        raise FlightRecordError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """As `find_class`."""
        raise FlightRecordError("it refers to something outside")


def parse_dump(content: bytes) -> dict[str, Any]:
    """What a dump holds: values that JSON has.

    Raises:
        FlightRecordError: it is not a dump, or holds more than data.
    """
    if len(content) > MAX_BYTES:
        raise FlightRecordError(f"it has {len(content)} bytes, more than {MAX_BYTES}")
    try:
        value = json.loads(content) if content[:1] == b"{" else _DataUnpickler(io.BytesIO(content)).load()
        plain = _plain(value, [_MAX_VALUES], 0)
    except FlightRecordError:
        raise
    except KeyError as error:
        raise FlightRecordError(f"it has an instruction, {error}, that is not for data") from error
    except Exception as error:  # an unpickler raises all kinds of them for what is not a pickle
        raise FlightRecordError("it is neither a pickle nor JSON, or was cut off") from error
    if isinstance(plain, dict) and "version" in plain:
        plain.setdefault("entries", [])  # text leaves out what is empty
    if not isinstance(plain, dict) or not isinstance(plain.get("entries"), list):
        raise FlightRecordError("it holds no entries")
    if not all(isinstance(entry, dict) for entry in plain["entries"]):
        raise FlightRecordError("an entry is not a table")
    return plain


def read_dump(path: Path) -> dict[str, Any]:
    """The dump in a file; see `parse_dump`.

    Raises:
        FlightRecordError: it is not a dump. OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO there shall not hold us up
    with os.fdopen(descriptor, "rb") as file:
        return parse_dump(file.read(MAX_BYTES + 1) or b"")


def _plain(value: Any, room: list[int], depth: int) -> Any:
    """A copy in which nothing is shared and nothing holds itself."""
    room[0] -= 1
    if room[0] < 0 or depth > _MAX_DEPTH:
        raise FlightRecordError("it holds more than a flight recorder writes")
    if isinstance(value, dict):
        return {_key(key): _plain(item, room, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, room, depth + 1) for item in value]
    if value is None or isinstance(value, str | bool | float) or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    raise FlightRecordError(f"it holds a value of type {type(value).__name__}")


def _key(key: Any) -> str:
    if isinstance(key, str | int) and not isinstance(key, bool):
        return str(key)
    raise FlightRecordError(f"it holds a key of type {type(key).__name__}")
