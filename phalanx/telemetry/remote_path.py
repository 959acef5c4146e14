"""A folder or file of object storage, read as `pathlib.Path` is: what questions about a run need, and no more.

Nothing is kept of listings: writers add files while somebody looks.
"""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import IO, Any, NamedTuple, cast

import fsspec
from fsspec.registry import known_implementations

from phalanx.core.errors import UserError
from phalanx.core.object_requests import LISTING_S, bounded, retried

_PATIENT = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60}}


class _Stat(NamedTuple):
    st_size: int


@dataclass(frozen=True, order=True)
class RemotePath:
    """One name on a file system of fsspec.

    Attributes:
        path: without the protocol, such as ``bucket/runs/a/telemetry``.
        size_bytes, modified_s: as a listing had them (Unix seconds); None: it did not, or there was none.
    """

    path: str
    protocol: str = field(compare=False)
    fs: Any = field(compare=False, repr=False)
    size_bytes: int | None = field(default=None, compare=False)
    modified_s: float | None = field(default=None, compare=False)

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any] | None = None) -> RemotePath:
        """The place of a URL such as ``s3://bucket/run``; nothing is read yet.

        Args:
            options: of fsspec's file system (``endpoint_url`` …), beside what the environment says.

        Raises:
            UserError: fsspec does not know its kind, or the package for it is missing.
        """
        protocol = url.partition("://")[0]
        chosen: dict[str, Any] = {"use_listings_cache": False, **(options or {})}
        if protocol in ("s3", "s3a"):
            chosen["config_kwargs"] = {**_PATIENT["config_kwargs"], **chosen.get("config_kwargs", {})}
        try:
            fs, path = fsspec.core.url_to_fs(url, **chosen)
        except ImportError:
            problem = f"{protocol}:// needs a package that is not here"
            raise UserError(problem, cure=_cure(protocol), value=url) from None
        except ValueError:
            cure = "give a folder, or a URL such as s3://bucket/run"
            raise UserError(f"fsspec knows no {protocol}://", cure=cure, value=url) from None
        return cls(path.rstrip("/"), protocol, fs)

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path.lstrip('/')}"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.path}/{name}", self.protocol, self.fs)

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Where it lies."""
        return RemotePath(self.path.rpartition("/")[0], self.protocol, self.fs)

    def resolve(self) -> RemotePath:
        """Itself: there are no links."""
        return self

    def is_dir(self) -> bool:
        """Whether anything lies below it. OSError: storage does not say."""
        return any(True for _ in self._below())

    def is_file(self) -> bool:
        """Whether there is an object of this name. OSError: storage does not say."""
        return bool(retried(str(self), lambda: bounded(self.fs, self.fs.isfile, self.path)))

    def exists(self) -> bool:
        """Whether there is an object of this name, or any below it. OSError: storage does not say."""
        return bool(retried(str(self), lambda: bounded(self.fs, self.fs.exists, self.path)))

    def stat(self) -> _Stat:
        """Its length."""
        if self.size_bytes is not None:
            return _Stat(self.size_bytes)
        return _Stat(int(retried(str(self), lambda: bounded(self.fs, self.fs.size, self.path))))

    def read_bytes(self) -> bytes:
        """All of it. FileNotFoundError: it is not there."""
        return cast(bytes, retried(str(self), lambda: bounded(self.fs, self.fs.cat_file, self.path)))

    def read_text(self) -> str:
        """The same, as text."""
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Write all of it, at once. OSError: storage refused, after some tries."""
        retried(str(self), lambda: bounded(self.fs, self.fs.pipe_file, self.path, content, size_bytes=len(content)))

    def open(self, mode: str = "rb") -> IO[bytes]:
        """To be read in parts."""
        return cast(IO[bytes], self.fs.open(self.path, mode))

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove it."""
        try:
            retried(str(self), lambda: bounded(self.fs, self.fs.rm_file, self.path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What lies below and matches, such as ``spans/*/*.parquet``; a star stands for part of one name."""
        first, _, rest = pattern.partition("/")
        if first == "*" and rest and "/" not in rest:  # all hosts of a table: one listing, not one for each
            yield from (one for one in self._deeper() if fnmatch.fnmatchcase(one.name, rest))
            return
        if "*" not in first:
            yield from (self / first).glob(rest) if rest else [self / first]
            return
        for found in self._below():
            if fnmatch.fnmatchcase(found.name, first):
                yield from found.glob(rest) if rest else [found]

    def _below(self) -> list[RemotePath]:
        """Files and folders directly in it; none where there is no such folder."""

        def listed() -> list[dict[str, Any]]:
            return cast(list[dict[str, Any]], bounded(self.fs, self.fs.ls, self.path, detail=True, limit_s=LISTING_S))

        try:
            found = retried(str(self), listed)
        except (FileNotFoundError, NotADirectoryError):
            return []
        every = (self._listed(one["name"].rstrip("/"), one) for one in found)
        return sorted(one for one in every if one.path != self.path)

    def _listed(self, path: str, found: Mapping[str, Any]) -> RemotePath:
        at = found.get("LastModified", found.get("mtime", found.get("created")))
        modified_s = at.timestamp() if isinstance(at, datetime) else float(at) if isinstance(at, int | float) else None
        is_file = found.get("type") != "directory"
        return RemotePath(path, self.protocol, self.fs, found.get("size") if is_file else None, modified_s)

    def iterdir(self) -> Iterator[RemotePath]:
        """Files and folders directly in it; of a folder `size_bytes` is None. OSError: storage does not say."""
        return iter(self._below())

    def files_below(self) -> list[RemotePath]:
        """All files at any depth, with their sizes. OSError: storage does not say."""
        return sorted(self._listed(path, one) for path, one in self._found_below().items())

    def _found_below(self) -> dict[str, dict[str, Any]]:
        def listed() -> dict[str, dict[str, Any]]:
            return cast(
                dict[str, dict[str, Any]],
                bounded(self.fs, self.fs.find, self.path, detail=True, limit_s=LISTING_S),
            )

        try:
            return retried(str(self), listed)
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _deeper(self) -> list[RemotePath]:
        """Files in the folders of it."""
        depth = self.path.count("/") + 2
        return [one for one in self.files_below() if one.path.count("/") == depth]


def check_url(url: str) -> None:
    """Refuse a URL that `RemotePath.of` would refuse, at no cost: clients of storage take a second to import.

    Raises:
        UserError: see there.
    """
    protocol, separator, place = url.partition("://")
    known = known_implementations.get(protocol)
    if not separator or not place or known is None:
        problem = f"fsspec knows no {protocol}://" if separator and place else "is no URL of storage"
        raise UserError(problem, cure="give a URL such as s3://bucket/run", value=url)
    if importlib.util.find_spec(known["class"].partition(".")[0]) is None:
        raise UserError(f"{protocol}:// needs a package that is not here", cure=_cure(protocol), value=url)


def _cure(protocol: str) -> str:
    hint = known_implementations.get(protocol, {}).get("err", "install the fsspec package for it")
    return "pip install 'phalanx-train[s3]'" if protocol in ("s3", "s3a") else hint[:1].lower() + hint[1:]
