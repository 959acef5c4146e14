"""Figures of many runs as columns, read once: of a metrics.jsonl only what is new is read again.

A file that has grown is read on from where reading stood; one that was replaced (a resumed run drops steps) is read
anew. Large files are read by a thread beside; until one is done, a sample of its lines stands for it. What was read of
large files is kept as Arrow in a cache folder, where later starts of the dashboard map it into memory, so that 200 runs
of 100,000 steps cost neither time nor memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from phalanx.core.files import atomic_writer, open_regular
from phalanx.dashboard.metric_columns import Block, joined, parse_block, parse_entries
from phalanx.telemetry.loggers import parse_line

_INLINE_BYTES = 4 << 20
"""So much of a request is read at once; of more, the rest by threads."""
_KEPT_FROM_BYTES = 1 << 20
"""Smaller files are not kept in the cache folder: reading them takes milliseconds."""
_BLOCK_BYTES = 32 << 20
_READ_PER_S = 256 << 20
"""About so fast threads read; where that cannot be enough, nobody waits for them."""
_PROOF_BYTES = 256
_LINE_BYTES = 4096
_MOST_CACHE_BYTES = 4 << 30
_VERSION = 1


@dataclass(frozen=True)
class Figures:
    """What a metrics.jsonl holds; `is_whole`: all that is there was read, else this is a sample of its steps."""

    block: Block
    is_whole: bool


@dataclass
class _File:
    """How far a file was read, and what came of it. `proof`: hash of the bytes before `offset`."""

    inode: int = -1
    offset: int = 0
    proof: str = ""
    block: Block = field(default_factory=Block)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_cache_tried: bool = False
    kept_bytes: int = 0
    sample: tuple[tuple[int, int], Block] | None = None


class MetricsStore:
    """Figures by file; may be used from several threads.

    Args:
        cache: folder for what was read of large files; None: nothing is kept.
        threads: that read large files.
    """

    def __init__(self, cache: Path | None = None, threads: int = 1) -> None:
        self._cache = cache if cache is not None and _made(cache) else None
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="figures")
        self._pending: dict[Path, Future[None]] = {}

    def read(self, paths: Sequence[Path], *, within_s: float = 0.3, sample: int = 256) -> dict[Path, Figures]:
        """What the files hold now; those that are not there are left out.

        Args:
            within_s: so long is waited for threads that read large files; not at all where
                they need much longer.
            sample: lines of a file that stand for it until it is read.
        """
        budget, late, late_bytes = _INLINE_BYTES, [], 0
        for path in paths:
            file = self._file(path)
            new = _new_bytes(path, file)
            if new is None:
                continue
            if file.is_cache_tried and new <= budget and not file.lock.locked():
                budget -= new
                self._update(path)
            elif new:
                late.append(path)
                late_bytes += new
        futures = [self._later(path) for path in late]
        if futures and late_bytes <= 2 * within_s * _READ_PER_S:
            wait(futures, timeout=within_s)
        return {path: found for path in paths if (found := self._figures(path, sample)) is not None}

    def progress(self, paths: Iterable[Path]) -> tuple[object, ...]:
        """A value that changes whenever `read` would give something else."""
        states: list[object] = []
        for path in paths:
            try:
                now = path.stat()
            except OSError:
                states.append(None)
                continue
            file = self._file(path)
            states.append((now.st_ino, now.st_size, now.st_mtime_ns, file.offset == now.st_size))
        return tuple(states)

    def unread_bytes(self, paths: Iterable[Path]) -> int:
        """Bytes that threads still have to read."""
        return sum(_new_bytes(path, self._file(path)) or 0 for path in paths)

    def settle(self) -> None:
        """Wait until threads have read all that was asked for."""
        with self._lock:
            pending = list(self._pending.values())
        wait(pending)

    def close(self) -> None:
        """End the threads; what was not read yet is left."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _file(self, path: Path) -> _File:
        with self._lock:
            return self._files.setdefault(path, _File())

    def _later(self, path: Path) -> Future[None]:
        with self._lock:
            future = self._pending.get(path)
            if future is None or future.done():
                future = self._pending[path] = self._pool.submit(self._update, path)
            return future

    def _figures(self, path: Path, sample: int) -> Figures | None:
        file = self._file(path)
        new = _new_bytes(path, file)
        if file.offset:
            return Figures(file.block, new is not None and new <= _INLINE_BYTES)
        if not new:
            return None if new is None else Figures(Block(), True)
        state = new, sample
        if file.sample is None or file.sample[0] != state:
            file.sample = state, _sampled(path, new, sample)
        return Figures(file.sample[1], False)

    def _update(self, path: Path) -> None:
        """Read on to the last whole line."""
        file = self._file(path)
        with file.lock, suppress(OSError), open_regular(path) as source:
            now = os.fstat(source.fileno())
            if not file.is_cache_tried:
                self._restore(path, file, source, now)
                file.is_cache_tried = True
            if now.st_ino != file.inode or now.st_size < file.offset or not _is_proven(source, file.offset, file.proof):
                file.inode, file.offset, file.proof, file.block, file.kept_bytes = now.st_ino, 0, "", Block(), 0
            source.seek(file.offset)
            parts, offset = [file.block], file.offset
            while block := source.read(_BLOCK_BYTES):
                end = block.rfind(b"\n") + 1
                if not end:
                    break
                parts.append(parse_block(block[:end]))
                offset += end
                source.seek(offset)
            if len(parts) > 1:
                file.block = joined(parts)
                file.proof, file.sample = _proof(source, offset), None
                file.offset = offset
                if offset - file.kept_bytes > max(_KEPT_FROM_BYTES, file.kept_bytes // 4):
                    self._keep(path, file)

    def _cache_file(self, path: Path) -> Path:
        assert self._cache is not None, "asked for only where there is one"
        return self._cache / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.arrow"

    def _restore(self, path: Path, file: _File, source: Any, now: os.stat_result) -> None:
        """What an earlier start has kept, mapped into memory."""
        if self._cache is None:
            return
        try:
            kept = pa.ipc.open_file(pa.memory_map(str(self._cache_file(path)))).read_all()
            known = json.loads(kept.schema.metadata[b"phalanx"])
            inode, offset, proof = int(known["inode"]), int(known["offset"]), str(known["proof"])
            is_same = known["version"] == _VERSION and inode == now.st_ino and offset <= now.st_size
            if is_same and _is_proven(source, offset, proof):
                file.inode, file.offset, file.proof, file.kept_bytes = inode, offset, proof, offset
                columns = {name: pa.array(*column) for name, column in known["evaluations"].items()}
                file.block = Block(kept.replace_schema_metadata(None), pa.table(columns), list(known["marks"]))
                os.utime(self._cache_file(path))
        except (OSError, pa.ArrowException, ValueError, TypeError, KeyError):
            return

    def _keep(self, path: Path, file: _File) -> None:
        if self._cache is None:
            return
        known = {
            "version": _VERSION,
            "inode": file.inode,
            "offset": file.offset,
            "proof": file.proof,
            "marks": list(file.block.marks),
            "evaluations": {
                name: (file.block.evaluations[name].to_pylist(), str(file.block.evaluations.schema.field(name).type))
                for name in file.block.evaluations.column_names
            },
        }
        table = file.block.steps.combine_chunks().replace_schema_metadata({b"phalanx": json.dumps(known).encode()})
        with suppress(OSError):  # a full disk: it is read again next time
            with atomic_writer(self._cache_file(path)) as target, pa.ipc.new_file(target, table.schema) as writer:
                writer.write_table(table)
            file.kept_bytes = file.offset
            _prune(self._cache, _MOST_CACHE_BYTES)


def cache_folder() -> Path:
    """Where the cache of this user lies: ``$XDG_CACHE_HOME/phalanx/dashboard``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "phalanx" / "dashboard"


def _made(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _new_bytes(path: Path, file: _File) -> int | None:
    """Bytes after those that were read (a torn line too); None: there is no such file."""
    try:
        now = path.stat()
    except OSError:
        return None
    is_same = now.st_ino == file.inode and now.st_size >= file.offset
    return now.st_size - file.offset if is_same else now.st_size


def _proof(source: Any, offset: int) -> str:
    begin = max(offset - _PROOF_BYTES, 0)
    return hashlib.sha256(os.pread(source.fileno(), offset - begin, begin)).hexdigest()


def _is_proven(source: Any, offset: int, proof: str) -> bool:
    """Whether the same bytes stand before `offset` as when it was read."""
    return offset == 0 or _proof(source, offset) == proof


def _sampled(path: Path, size: int, lines: int) -> Block:
    """About so many lines of a file, at equal distances, with the last one."""
    decoder = msgspec.json.Decoder()
    found: list[dict[str, Any]] = []
    try:
        with open_regular(path) as source:
            places = sorted({size * n // lines for n in range(lines)} | {max(size - _LINE_BYTES, 0)})
            for place in places:
                block = os.pread(source.fileno(), _LINE_BYTES, place)
                begin = block.find(b"\n") + 1 if place else 0
                end = block.find(b"\n", begin) + 1
                while end:
                    with suppress(msgspec.DecodeError):
                        entry = decoder.decode(block[begin:end])
                        if isinstance(entry, dict) and entry.get("kind") == "step":
                            found.append(entry)
                            break
                    begin, end = end, block.find(b"\n", end) + 1
    except OSError:
        pass
    return parse_entries(entry for entry in found if parse_line(json.dumps(entry).encode() + b"\n"))


def _prune(folder: Path, most_bytes: int) -> None:
    """Take away what was not used for longest, until the cache is small enough."""
    kept = []
    for path in folder.glob("*.arrow"):
        with suppress(OSError):
            state = path.stat()
            kept.append((state.st_mtime, state.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= most_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size
