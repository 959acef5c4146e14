"""Which files a source is made of, how they are cut into units of work, and which documents are held out.

Parquet is read through pyarrow, an optional package.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.data.config import SourceConfig, Split
from phalanx.data.shuffle import derive_key
from phalanx.data.sources.packed_files import ENDINGS, packing
from phalanx.data.sources.text_reader import cut_after

ROWS = 256


def _open_parquet(path: str) -> Any:
    """A `pyarrow.parquet.ParquetFile`; UserError: pyarrow is not installed, or the file is not Parquet."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        cure = "install it: pip install 'phalanx-train[parquet]'"
        raise UserError("reading Parquet needs the package pyarrow", cure=cure, value=path) from None
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"is no readable Parquet file ({error})", cure="check the file", value=path) from None


def parquet_rows(
    path: str, begin_group: int, end_group: int, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(row number in the file, {column: value})`` of some row groups, a few rows in memory at a time, without
    columns that are not in the file. UserError: it is damaged, or a text in it is not UTF-8."""
    file = _open_parquet(path)
    row = sum(file.metadata.row_group(group).num_rows for group in range(begin_group))
    there = [column for column in columns if column in file.schema_arrow.names]
    groups = list(range(begin_group, end_group))
    batches = file.iter_batches(batch_size=ROWS, row_groups=groups, columns=there, use_threads=False)
    while True:
        try:
            batch = next(batches, None)
            records = [] if batch is None else batch.to_pylist() if there else [{}] * batch.num_rows
        except (OSError, ValueError) as error:  # damaged, or a text that is not UTF-8
            cure = "write the file again, its text as UTF-8"
            raise UserError(f"from row {row} on cannot be read ({error})", cure=cure, value=path) from None
        if batch is None:
            return
        for record in records:
            yield row, record
            row += 1


MIN_UNIT_BYTES = 1 << 20
MAX_UNIT_BYTES = 256 << 20
UNITS = 64


@dataclass(frozen=True)
class InputFile:
    """A file as it was listed: `name` is its path below the source's root, the same on every machine."""

    path: str
    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class FilePart:
    """The documents of one file that start in ``[begin, end)`` (bytes; row groups for Parquet).

    `split` is set where a part belongs to one split as a whole. `fresh` says whether the first byte starts a document
    (a plain text file is one document, and may be cut into several parts).
    """

    path: str
    name: str
    begin: int
    end: int
    num_bytes: int
    file_size: int
    mtime_ns: int
    split: Split | None = None
    fresh: bool = True


@dataclass(frozen=True)
class WorkUnit:
    """What one worker does at a time, and what one shard holds."""

    parts: tuple[FilePart, ...]

    @property
    def num_bytes(self) -> int:
        """Input bytes, packed as they lie on disk."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def signature(self) -> str:
        """A hash of what is read, by names and sizes: it names the unit's files."""
        return _digest(f"{p.name}\0{p.begin}\0{p.end}\0{p.file_size}\0{p.split}" for p in self.parts)[:20]

    @property
    def times(self) -> str:
        """A hash of the files' places and times of change."""
        return _digest(f"{p.path}\0{p.mtime_ns}" for p in self.parts)


def _digest(lines: Iterable[str]) -> str:
    result = hashlib.blake2b(digest_size=16)
    for line in lines:
        result.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return result.hexdigest()


def list_files(source: SourceConfig) -> list[InputFile]:
    """Every input file of `source`, in order of name, without those that are empty; UserError: there is none."""
    found = dict(_standard_library(source.include_tests)) if source.kind == "python-stdlib" else _named(source)
    files = []
    for name in sorted(found):
        try:
            status = found[name].stat()
        except OSError as error:
            raise _refusal(error, found[name]) from None
        if status.st_size:
            files.append(InputFile(str(found[name]), name, status.st_size, status.st_mtime_ns))
    if not files:
        raise UserError(
            f"source of kind {source.kind!r} is empty: {len(found)} files, none with a byte in it",
            cure="check the path and the extensions",
            field="data.sources.path",
            value=list(source.path),
        )
    return files


def _named(source: SourceConfig) -> dict[str, Path]:
    """The files of all paths by name; where several have one name, each by the number of its path and that name."""
    places: dict[str, list[tuple[int, Path]]] = {}
    for number, pattern in enumerate(source.path):
        for path, name in _matches(pattern, source):
            places.setdefault(name, []).append((number, path))
    found = {name: same[-1][1] for name, same in places.items() if len(same) == 1 or len(_different(same)) == 1}
    for name in places.keys() - found.keys():
        for number, path in _different(places[name]):
            numbered = f"{number}:{name}"
            while numbered in found:  # a file may be called so
                numbered = f"{number}:{numbered}"
            found[numbered] = path
    return found


def _different(places: list[tuple[int, Path]]) -> list[tuple[int, Path]]:
    return list({os.path.realpath(path): (number, path) for number, path in places}.values())


def _refusal(error: OSError, path: object) -> UserError:
    """The error for a file or folder that is there and cannot be read: what is in it shall not be missing silently."""
    problem, cure = f"cannot be read ({error.strerror})", "check it and its rights"
    return UserError(problem, cure=cure, field="data.sources.path", value=str(error.filename or path))


def listing_digest(files: Iterable[InputFile]) -> str:
    """A hash by which a later run sees, without reading them, that the inputs are the same."""
    return _digest(f"{f.path}\0{f.name}\0{f.size}\0{f.mtime_ns}" for f in files)


Cut = Callable[[str, int], int]
"""The first place at or after a byte of a file where a document can be cut."""
between_words: Cut = partial(cut_after, words=True)
between_characters: Cut = partial(cut_after, words=False)


def plan_units(
    source: SourceConfig, files: list[InputFile], tail: float, cut: Cut | None = between_words
) -> list[WorkUnit]:
    """Cut the files into units of similar size; small files share a unit, large ones are cut where that is safe.

    The cut depends on files and tokenizer alone, never on the number of workers.

    Args:
        tail: share at the end of every file that is held out (0: none).
        cut: where documents can be cut; None: nowhere.
    """
    target = min(max(sum(f.size for f in files) // UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    units: list[WorkUnit] = []
    group: list[FilePart] = []
    for part in (part for file in files for part in _parts(source, file, target, tail, cut)):
        if group and sum(p.num_bytes for p in group) + part.num_bytes > target:
            units.append(WorkUnit(tuple(group)))
            group = []
        group.append(part)
    return [*units, WorkUnit(tuple(group))]


def _parts(source: SourceConfig, file: InputFile, target: int, tail: float, cut: Cut | None) -> Iterator[FilePart]:
    whole = FilePart(file.path, file.name, 0, file.size, file.size, file.size, file.mtime_ns)
    if source.kind == "parquet":
        metadata = _open_parquet(file.path).metadata
        begin, size = 0, 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).total_byte_size
            if size >= target or group + 1 == metadata.num_row_groups:
                yield replace(whole, begin=begin, end=group + 1, num_bytes=size)
                begin, size = group + 1, 0
    elif source.kind == "text" and tail:
        if packing(file.path):
            problem, field = "cannot hold out the tail of a packed file", "data.validation_split"
            raise UserError(problem, cure="unpack it first", field=field, value=file.path)
        border = between_characters(file.path, round(file.size * (1 - tail)))
        yield from _ranges(replace(whole, end=border, split="train"), target, cut)
        yield from _ranges(replace(whole, begin=border, split="validation"), target, cut)
    elif packing(file.path) or source.utf8_policy == "skip":
        yield whole
    elif source.kind == "jsonl" or (source.document_separator and not _overlaps_itself(source.document_separator)):
        yield from _ranges(whole, target, lambda path, place: place)
    elif source.document_separator:
        yield whole
    else:
        yield from _ranges(whole, target, cut)


def _ranges(part: FilePart, target: int, cut: Cut | None) -> Iterator[FilePart]:
    """Cut ``[begin, end)`` into about equal ranges of at most `target` bytes; those after the first are not fresh."""
    length = part.end - part.begin
    pieces = -(-length // target)
    places = [part.begin + length * k // pieces for k in range(1, pieces)]
    borders = [part.begin, *(cut(part.path, place) for place in places if cut is not None), part.end]
    for begin, end in itertools.pairwise(borders):
        end = min(end, part.end)
        if begin < end:
            yield replace(part, begin=begin, end=end, num_bytes=end - begin, fresh=begin == part.begin)


def _overlaps_itself(separator: str) -> bool:
    """Whether an occurrence can start within another one; then a search from the middle may find other places."""
    return any(separator.startswith(separator[k:]) for k in range(1, len(separator)))


def _matches(pattern: str, source: SourceConfig) -> Iterator[tuple[Path, str]]:
    """The files a path or pattern stands for, each with its name below the pattern's root."""
    try:
        found, root, is_folder = _found(Path(pattern).expanduser(), source.kind)
    except OSError as error:
        raise _refusal(error, pattern) from None
    endings = source.extensions or (_ENDINGS.get(source.kind, ()) if is_folder else ())
    if endings:
        found = [file for file in found if (file.name if source.extensions else file.name.lower()).endswith(endings)]
    if not found:
        raise UserError(
            f"no file found for the source of kind {source.kind!r}"
            + (f" with extensions {endings}" if endings else ""),
            cure="check the path (it is relative to the folder you start phalanx in)",
            field="data.sources.path",
            value=pattern,
        )
    for file in found:
        yield file, file.relative_to(root).as_posix() if file.is_relative_to(root) else file.as_posix()


def _found(path: Path, kind: str) -> tuple[list[Path], Path, bool]:
    """Files, the folder that they are named from, and whether that is all there is in `path`.

    Raises:
        UserError: it is no file or folder.
        OSError: something of it cannot be read.
    """
    if path.is_dir():
        return [Path(folder, file) for folder, _, files in _walk(path) for file in files], path, True
    if path.exists():
        if not path.is_file():
            cure = "write what it gives into a file first, since text is read several times and in parts"
            raise UserError("is no regular file", cure=cure, field="data.sources.path", value=str(path))
        return [path], path.parent, False
    if kind == "megatron" and path.with_name(path.name + ".bin").exists():
        return [path.with_name(path.name + ".bin")], path.parent, False
    plain = list(itertools.takewhile(lambda part: not _is_pattern(part), path.parts))
    root, rest = Path(*plain), path.parts[len(plain) :]
    return [match for match in _expand(root, rest) if not match.is_dir()] if rest else [], root, False


def _walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` that raises what it cannot read, and goes into linked folders too: once, after all that are no links,
    so that a folder has one name and a loop an end."""
    seen: set[tuple[int, int]] = set()
    starts = [str(root)]
    for start in starts:
        for folder, folders, files in os.walk(start, onerror=_refuse):
            status = Path(folder).stat()
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            starts += [str(link) for name in sorted(folders) if (link := Path(folder, name)).is_symlink()]
            yield folder, folders, files


def _refuse(error: OSError) -> None:
    raise _refusal(error, error.filename)


def _is_pattern(part: str) -> bool:
    return bool(set(part) & set("*?["))


def _expand(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """What a pattern stands for below `folder`, as `Path.glob` says, which leaves out what it cannot read."""
    if not parts:
        yield folder
    elif parts[0] == "**":
        below = [Path(place) for place, _, _ in _walk(folder)] if folder.is_dir() else []
        yield from {path: None for place in below for path in _expand(place, parts[1:])}
    elif _is_pattern(parts[0]):
        for path in folder.iterdir() if folder.is_dir() else ():
            if fnmatch.fnmatchcase(path.name, parts[0]):
                yield from _expand(path, parts[1:])
    elif os.path.lexists(folder / parts[0]):
        yield from _expand(folder / parts[0], parts[1:])


_ENDINGS: dict[str, tuple[str, ...]] = {
    "text": tuple(f".txt{packed}" for packed in ("", *ENDINGS)),
    "jsonl": tuple(f"{plain}{packed}" for plain in (".jsonl", ".json") for packed in ("", *ENDINGS)),
    "parquet": (".parquet",),
    "nanogpt": (".bin",),
    "megatron": (".bin", ".idx"),
}


def _standard_library(include_tests: bool) -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root, onerror=_refuse):
        left_out = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
        left_out |= set() if include_tests else {"test", "tests", "idle_test"}
        folders[:] = [name for name in folders if name not in left_out]
        for name in files:
            if name.endswith(".py"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


@dataclass(frozen=True)
class HoldOutRule:
    """Which split a document belongs to: held out with probability `held_out`, by a keyed hash of its name."""

    held_out: float
    seed: int

    def split(self, name: str, part: FilePart) -> Split:
        """The split of the document called `name` (unless its whole part belongs to one)."""
        if part.split is not None:
            return part.split
        return "validation" if derive_key("held out", self.seed, name) < self.held_out * 2**64 else "train"
