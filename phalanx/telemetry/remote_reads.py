"""Object storage as DuckDB reads it: what is known of a file from its listing is not asked again, and reads are few.

DuckDB asks dozens of times whether a file is there and how long it is, each time a request. Files of telemetry do not
change once they are there, but for those of lines, and one connection answers one question.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, cast

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from phalanx.core.object_requests import bounded, retried
from phalanx.telemetry.remote_path import RemotePath

_WHOLE_BYTES = 8 << 20  # fetched by one request
_BLOCK_BYTES = 4 << 20  # of longer ones, of which often a few columns are read

_HELD_BYTES = 256 << 20  # of short ones

_LONG_AGO = datetime.fromtimestamp(0, UTC)


class RemoteReads(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system of fsspec that only reads, for one connection.

    Args:
        place: some path on the file system that is read.
    """

    cachable = False

    def __init__(self, place: RemotePath) -> None:
        super().__init__()
        self.protocol, self._fs = place.fs.protocol, place.fs
        self._known: dict[str, dict[str, Any] | None] = {}
        self._held: dict[str, bytes] = {}

    def know(self, paths: Iterable[RemotePath]) -> None:
        """What listings said of files."""
        for path in paths:
            if path.size_bytes is not None:
                self._known[path.path] = {"name": path.path, "size": path.size_bytes, "type": "file"}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, length and type. FileNotFoundError: it is not there."""
        name = self._name(path)
        if name not in self._known:
            try:
                self._known[name] = retried(name, lambda: bounded(self._fs, self._fs.info, name))
            except FileNotFoundError:
                self._known[name] = None
        found = self._known[name]
        if found is None:
            raise FileNotFoundError(path)
        return found

    def exists(self, path: str, **_: Any) -> bool:
        """Whether it is there."""
        try:
            return bool(self.info(path))
        except FileNotFoundError:
            return False

    def glob(self, path: str, **_: Any) -> list[str]:
        """The file itself: whoever asks has chosen by name."""
        return [path] if self.exists(path) else []

    def modified(self, path: str) -> datetime:
        """The same for all: what is read here does not change."""
        return _LONG_AGO

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise PermissionError(f"{path} is only read here")
        name, size_bytes = self._name(path), int(self.info(path)["size"])
        if size_bytes > _WHOLE_BYTES:
            return _Reads(self._fs, name, size_bytes)
        content = self._held.get(name)
        if content is None:  # DuckDB opens a file a dozen times
            content = fetched(self._fs, name, 0, size_bytes)
            if sum(map(len, self._held.values())) < _HELD_BYTES:
                self._held[name] = content
        return io.BytesIO(content)

    def _name(self, path: str) -> str:
        return str(self._fs._strip_protocol(path)).rstrip("/")


class _Reads(AbstractBufferedFile):  # type: ignore[misc]
    def __init__(self, fs: Any, path: str, size_bytes: int) -> None:
        super().__init__(fs, path, "rb", block_size=_BLOCK_BYTES, cache_type="blockcache", size=size_bytes)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return fetched(self.fs, self.path, start, end)


def fetched(fs: Any, path: str, start: int, end: int) -> bytes:
    """Some bytes of a file. OSError: storage does not give them, after some tries."""
    if end <= start:
        return b""

    def fetch() -> bytes:
        return cast(bytes, bounded(fs, fs.cat_file, path, start=start, end=end, size_bytes=end - start))

    return retried(path, fetch)
