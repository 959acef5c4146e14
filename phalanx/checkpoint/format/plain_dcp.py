"""Checkpoints that plain torch.distributed.checkpoint (DCP) wrote, torchtitan's among them, read in any layout.

Such a folder has no checksums and no list of its files: what can be checked is that every chunk lies within its file
and is an archive of the tensor that the index says. Nothing is unpickled, see
`phalanx.checkpoint.format.plain_dcp_index`; what is not a tensor is read with torch's ``weights_only``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.format.checkpoint_files import Files, files_of
from phalanx.checkpoint.format.dcp import held, misfits, require_stored, torch_dtype
from phalanx.checkpoint.format.manifest import Chunk, DamagedCheckpointError, TensorEntry, first_line
from phalanx.checkpoint.format.plain_dcp_index import PLAIN_INDEX, PlainIndex, decode_index
from phalanx.checkpoint.format.stored_tensors import Reader
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard

_SHOWN = 8
_LARGEST_OTHER_BYTES = 1 << 28  # what is not a tensor is read whole, so what is larger is not read


@dataclass(frozen=True)
class PlainCheckpoint:
    """A checkpoint of plain DCP."""

    files: Files
    index: PlainIndex

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """By flattened name."""
        return self.index.tensors

    @cached_property
    def _others(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, problems = {}, {}
        for name, place in self.index.others.items():
            try:
                values[name] = self._value(place)
            except Exception as error:
                problems[name] = first_line(error)
        return values, problems

    @property
    def other(self) -> Mapping[str, Any]:
        """What is not a tensor (schedules, counters …), as far as it can be read without unpickling."""
        return self._others[0]

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Names of the rest, and why."""
        return self._others[1]

    def reader(self) -> Reader:
        """For reading blocks one after another."""
        return Reader(self.files.url, self.tensors, self.files.open)

    def load_into(
        self,
        tensors: Mapping[str, Tensor],
        *,
        shards: Mapping[str, Shard] | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> tuple[str, ...]:
        """Fill `tensors` in place, on whatever device they are; nothing is changed if anything does not fit.

        Args:
            tensors: by flattened name.
            shards: which block of its tensor each is; DTensors carry theirs, others not named here are whole.
            strict: every one of `tensors` must be there (others may be there besides).
            cast: convert where the dtypes differ instead of refusing.

        Returns:
            Those of `tensors` that are not there; none when strict.

        Raises:
            UserError: listing what is missing or of another shape or dtype.
            DamagedCheckpointError: the files are not what the index says; only then may some have been filled.
        """
        blocks = held(tensors, shards or {})
        missing = tuple(name for name in blocks if name not in self.tensors)
        problems = [f"{name} is missing" for name in missing if strict]
        found = {name: block for name, block in blocks.items() if name in self.tensors}
        problems += [p for name, block in found.items() for p in misfits(name, self.tensors[name], block, cast=cast)]
        if problems:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            cure = "see `phalanx checkpoint show` for its tensors"
            raise UserError(f"does not fit: {'; '.join(problems[:_SHOWN])}{more}", cure=cure, field=self.files.url)
        with torch.no_grad(), self.reader() as reader:
            for name, block in sorted(found.items(), key=lambda item: _first_place(self.tensors[item[0]])):
                reader.fill(name, block)
        return missing

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors called `names` (default: all) as new tensors in host memory.

        Raises:
            UserError: one of the names is not there.
            DamagedCheckpointError: the files are not what the index says.
        """
        wanted = list(self.tensors) if names is None else list(names)
        fresh = {
            name: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
            for name in wanted
            for entry in [self.tensors.get(name)]
            if entry is not None
        }
        self.load_into({name: fresh.get(name, torch.empty(0)) for name in wanted})
        return fresh

    def _value(self, place: Chunk) -> Any:
        if place.length > _LARGEST_OTHER_BYTES:
            raise ValueError(f"it has {place.length} bytes, more than are read at once")
        with self.files.open(place.file) as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        require_stored(content)
        return torch.load(content, map_location="cpu", weights_only=True)


def is_plain(path: Path) -> bool:
    """Whether the folder looks like one that DCP wrote, and not we."""
    return (path / PLAIN_INDEX).is_file() and not (path / "manifest.json").exists()


def open_plain(place: Path | Files) -> PlainCheckpoint:
    """Open the checkpoint that plain DCP wrote, such as torchtitan's ``checkpoint/step-1000``.

    Raises:
        UserError: there is none, or its index names what it must not, see `decode_index`.
        DamagedCheckpointError: the index cannot be read, or its files are not as long as it says.
    """
    files = files_of(place)
    try:
        content = files.read(PLAIN_INDEX)
    except OSError as error:
        cure = "give the folder that holds .metadata and the .distcp files"
        raise UserError(f"its {PLAIN_INDEX} cannot be read ({_cause(error)})", cure=cure, field=files.url) from None
    index = decode_index(content, files.url)
    ends: dict[str, int] = {}
    for chunk in [*index.others.values(), *(c for entry in index.tensors.values() for c in entry.chunks)]:
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    for file, end in sorted(ends.items()):
        try:
            there = files.size_bytes(file)
        except OSError as error:
            raise DamagedCheckpointError(files.url, f"{file} is missing ({_cause(error)})") from None
        if there < end:
            raise DamagedCheckpointError(files.url, f"{file} has {there} of at least {end} bytes")
    return PlainCheckpoint(files, index)


def _cause(error: OSError) -> str:
    return error.strerror or first_line(error)


def _first_place(entry: TensorEntry) -> tuple[str, int]:
    return min(((chunk.file, chunk.offset) for chunk in entry.chunks), default=("", 0))
