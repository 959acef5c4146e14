"""Runs that Weights & Biases kept in files: ``wandb/offline-run-…/run-ID.wandb``, also of a run that was killed.

Read without the wandb package, whose own reader is private and changes from version to version, while its files stay: a
log of LevelDB's form (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind seven bytes of its own, of
protobuf messages whose fields wandb's ``wandb_internal.proto`` numbers.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.core.files import open_regular

_IDENTITY = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 1 << 15
_RECORD = struct.Struct("<IHB")  # checksum of type and content, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MOST_RECORD_BYTES = 64 << 20

# Numbers of fields in wandb_internal.proto.
_HISTORY, _SUMMARY, _CONFIG, _RUN, _EXIT = 2, 3, 5, 17, 18
_RUN_ID, _RUN_PROJECT, _RUN_CONFIG, _RUN_NAME, _RUN_NOTES, _RUN_TAG = 1, 3, 4, 8, 9, 10
_UPDATE, _REMOVE = 1, 2
_KEY, _NESTED_KEY, _BOOLEAN, _INTEGER, _NUMBER, _TEXT, _VALUE_JSON = 1, 2, 4, 5, 6, 7, 16
_HISTORY_ITEM, _HISTORY_STEP, _STEP_NUMBER, _EXIT_CODE = 1, 2, 1, 1

_STRANGE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class NotWandbError(ValueError):
    """The file is not such a log."""


@dataclass
class WandbRun:
    """What a file holds.

    Attributes:
        history: a row for each call of ``log``, with ``_step`` and ``_timestamp`` (seconds since 1970); values as JSON
            has them, numbers that are not finite as floats.
        exit_code: None: it was killed, or goes on.
        damaged: blocks of 32 KiB, parts of which could not be read.
    """

    run_id: str = ""
    project: str = ""
    name: str = ""
    notes: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    damaged: int = 0


def read_wandb(path: Path) -> WandbRun:
    """All of a file, up to where its writer was killed.

    Raises:
        NotWandbError: it is not such a file.
        OSError: it cannot be read.
    """
    run = WandbRun()
    with open_regular(path) as file:
        if file.read(_HEADER_BYTES)[: len(_IDENTITY)] != _IDENTITY:
            raise NotWandbError("it does not begin as a file of W&B")
        for record in _records(file, run):
            try:
                _take(run, record)
            except (ValueError, IndexError, KeyError, TypeError, struct.error):
                run.damaged += 1
    run.config.pop("_wandb", None)
    return run


def flat_numbers(row: dict[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row, those of tables in it as ``table.name``; pictures, histograms and texts are left out."""
    for name, value in row.items():
        if isinstance(value, dict) and "_type" not in value:
            yield from flat_numbers(value, f"{above}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}{name}", value


def _take(run: WandbRun, record: bytes) -> None:
    """Note what a record says; kinds that mean nothing here are passed over."""
    for number, content in _fields(record):
        if number == _RUN:
            values = list(_fields(content))
            texts = {key: value.decode(errors="replace") for key, value in values if isinstance(value, bytes)}
            run.run_id, run.project = texts.get(_RUN_ID, ""), texts.get(_RUN_PROJECT, "")
            run.name, run.notes = texts.get(_RUN_NAME, ""), texts.get(_RUN_NOTES, "")
            run.tags = [value.decode(errors="replace") for key, value in values if key == _RUN_TAG]
            for key, value in values:
                if key == _RUN_CONFIG:
                    _update(run.config, value)
        elif number == _CONFIG:
            _update(run.config, content)
        elif number == _SUMMARY:
            _update(run.summary, content)
        elif number == _HISTORY:
            run.history.append(_row(content))
        elif number == _EXIT:
            run.exit_code = next((_signed(value) for key, value in _fields(content) if key == _EXIT_CODE), 0)


def _row(content: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, value in _fields(content):
        if number == _HISTORY_ITEM:
            _update(row, value, is_item=True)
        elif number == _HISTORY_STEP:
            row.setdefault("_step", next((_signed(n) for key, n in _fields(value) if key == _STEP_NUMBER), 0))
    return row


def _update(tree: dict[str, Any], content: bytes, *, is_item: bool = False) -> None:
    """Apply an item, or a record of items that are set and items that are removed."""
    if not is_item:
        for number, value in _fields(content):
            if number == _UPDATE:
                _update(tree, value, is_item=True)
            elif number == _REMOVE:
                tree.pop(next(v.decode() for key, v in _fields(value) if key == _KEY), None)
        return
    path: list[str] = []
    found: Any = None
    for number, value in _fields(content):
        if number in (_KEY, _NESTED_KEY):
            path.append(value.decode(errors="replace"))
        elif number == _BOOLEAN:
            found = bool(value)
        elif number == _INTEGER:
            found = (value >> 1) ^ -(value & 1)
        elif number == _NUMBER:
            (found,) = struct.unpack("<d", value)
        elif number == _TEXT:
            found = value.decode(errors="replace")
        elif number == _VALUE_JSON:
            found = json.loads(value)
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = _STRANGE.get(found, found) if isinstance(found, str) else found


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: a whole number, or bytes.

    Raises:
        ValueError, IndexError: it is torn.
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            length, place = _varint(message, place)
        elif not length:
            raise ValueError(f"fields of kind {kind} are not known")
        if place + length > len(message):
            raise ValueError("a field is longer than its message")
        yield key >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("a number is too long")


def _signed(value: int) -> int:
    """Of int32 and int64, which protobuf writes as unsigned numbers of 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _records(file: BinaryIO, run: WandbRun) -> Iterator[bytes]:
    """Whole records; what is damaged is passed over to the next block, and a torn end is the end."""
    file.seek(0)
    parts: list[bytes] = []
    is_first = True
    while block := file.read(_BLOCK_BYTES):
        place, is_first = (_HEADER_BYTES if is_first else 0), False
        while place + _RECORD.size <= len(block):
            checksum, length, kind = _RECORD.unpack_from(block, place)
            begin = place + _RECORD.size
            content = block[begin : begin + length]
            if not checksum and not length and not kind:  # a block's end that was filled up, or space made ahead
                break
            if len(content) < length or zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum:
                is_torn_end = len(block) < _BLOCK_BYTES and len(content) < length
                run.damaged += not is_torn_end
                parts.clear()
                break
            place = begin + length
            if kind in (_FULL, _FIRST):
                parts = [content]
            elif parts and kind in (_MIDDLE, _LAST) and sum(map(len, parts)) < _MOST_RECORD_BYTES:
                parts.append(content)
            else:
                parts.clear()  # its beginning was damaged
                continue
            if kind in (_FULL, _LAST):
                yield b"".join(parts)
                parts.clear()
