"""An object store as a store, through fsspec: no renames and no locks, but one conditional operation.

    step-00001200.a3-1f…/         an area, by step, attempt and job; a checkpoint once it holds SHA256SUMS,
                                  which is written last
    stale-step-00001100.a3-1f…    marks the area of that name as kept aside (also ``sick-…``)
    latest-00000007.json          the pointer, see `phalanx.checkpoint.storage.latest`

Nothing is ever written over, so what a leftover of an earlier attempt writes meets nobody else's names.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, cast

import fsspec
from typing_extensions import Buffer

from phalanx.checkpoint.format.checkpoint_files import Span, most_bytes
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, FileEntry
from phalanx.checkpoint.storage import checkpoint_store
from phalanx.checkpoint.storage.checkpoint_store import KEY_MOST_BYTES, Stored
from phalanx.checkpoint.storage.object_requests import LISTING_S, bounded, creator, retried
from phalanx.checkpoint.storage.object_streams import Ahead, RangeFile, Take, abandon, upload
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.files import StoreFailedError, too_large

_S3 = ("s3://", "s3a://")
_CONNECTIONS = 64  # kept by the client library, whose own default is 10: streams of all ranks of a host's persister


class ObjectStore:
    """A `phalanx.checkpoint.storage.checkpoint_store.Store` under a prefix of an object store.

    Args:
        url: ``s3://bucket/run/checkpoints``.
        options: of fsspec's file system.
        points: ``checkpoint.before-rename`` is reached before a checkpoint is there, ``checkpoint.published`` after,
            and ``checkpoint.deleting`` when one has lost its name and not yet its files.

    Raises:
        UserError: the file system cannot make an object only if there is none.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, points: Points = NO_POINTS) -> None:
        self._fs, root = fsspec.core.url_to_fs(url, **_defaults(url, options or {}))
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")
        self._points = points
        self._create = creator(self._fs, self._url)
        self._held: dict[str, dict[str, bytes]] = {}

    @property
    def url(self) -> str:
        """As given."""
        return self._url

    def names(self) -> list[str]:
        """See `Store`."""
        return checkpoint_store.newest_first([name for name in self._prefixes() if self._is_published(name)])

    def quarantined(self) -> list[str]:
        """See `Store`."""
        return checkpoint_store.newest_first([key for key in self.keys("") if checkpoint_store.quarantined(key)])

    def identity(self, name: str) -> str:
        """See `Store`. A name is used once, but for copies by hand."""
        return name if self._is_published(name) else ""

    def files(self, name: str) -> list[str]:
        """See `Store`."""
        held, there = self._held.get(name, {}), set(self.sizes(name))
        if there and checkpoint_store.quarantined(name):
            there.add(SUMS)  # which is in the mark
        return sorted({*held, *there})

    def sizes(self, name: str) -> Mapping[str, int]:
        """See `Store`. A thousand of them are one request."""
        there = [entry for entry in self._list(name) if entry["type"] == "file"]
        found = {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in there}
        return {file: size_bytes for file, size_bytes in found.items() if file}

    def read(self, name: str, file: str) -> bytes:
        """See `Store`."""
        return self._whole(self._path(name, file), most_bytes(file))

    def open(self, name: str, file: str) -> BinaryIO:
        """See `Store`. Read by ranges: only what is asked for, and a little ahead."""
        return self.ranges(name, file, self.size_bytes(name, file))

    def ranges(self, name: str, file: str, size_bytes: int, **options: Take) -> BinaryIO:
        """A file whose length is known already; `options` are of `RangeFile`."""
        path = self._path(name, file)
        return cast(BinaryIO, RangeFile(partial(self._cat, path), size_bytes, path, **options))

    def size_bytes(self, name: str, file: str) -> int:
        """See `Store`."""
        return self._size(self._path(name, file))

    @contextmanager
    def ahead(self, name: str, spans: Iterable[Span], sizes: Mapping[str, int]) -> Iterator[Stored]:
        """See `Store`."""

        def fetch(file: str, start: int, end: int) -> bytes:
            return self._cat(self._path(name, file), start, end)

        with Ahead(fetch, spans) as ahead:
            yield _Fetched(self, name, self, ahead, sizes)

    def begin(self, step: int, attempt: int, nonce: str) -> str:
        """See `Store`.

        Raises:
            FileExistsError: it has been published.
        """
        area = checkpoint_store.full_name(step, attempt, nonce)
        if self._is_published(area):
            raise FileExistsError(f"{self._url}/{area} has been published already")
        self._held[area] = {}
        return area

    def join(self, step: int, attempt: int, nonce: str, timeout_s: float) -> str:
        """See `Store`. There is nothing to wait for: an area is a beginning of names."""
        return checkpoint_store.full_name(step, attempt, nonce)

    def write(self, area: str, file: str, content: Iterable[Buffer]) -> FileEntry:
        """See `Store`. ``SHA256SUMS`` is kept back until `publish`."""
        path = self._path(area, file)
        if file == SUMS:
            held = b"".join(bytes(piece) for piece in content)
            self._begun(area)[SUMS] = held
            size_bytes, sha256 = len(held), hashlib.sha256(held).hexdigest()
        else:
            size_bytes, sha256 = upload(self._fs, path, content)
        return FileEntry.model_construct(name=file, size_bytes=size_bytes, sha256=sha256)

    def publish(self, area: str, step: int) -> str:
        """See `Store`."""
        if checkpoint_store.step_of(area) != step:
            raise ValueError(f"{area} is not an area of step {step}")
        held = self._begun(area)
        self.size_bytes(area, MANIFEST)
        if SUMS not in held:
            raise FileNotFoundError(self._path(area, SUMS))
        self._points.reach("checkpoint.before-rename", path=area)
        upload(self._fs, self._path(area, SUMS), [held[SUMS]])
        del self._held[area]
        self._points.reach("checkpoint.published", path=area)
        return area

    def discard(self, area: str) -> None:
        """See `Store`."""
        if self._held.pop(area, None) is not None:
            self._remove_all(area)

    def quarantine(self, area: str, why: str) -> str:
        """See `Store`. A mark beside it says so, with what would have been its ``SHA256SUMS``."""
        target = checkpoint_store.quarantine_name(why, area)
        mark = self._begun(area).get(SUMS) or b"no checksums\n"
        upload(self._fs, f"{self._root}/{target}", [mark])
        del self._held[area]
        return target

    def delete(self, name: str) -> None:
        """See `Store`."""
        if checkpoint_store.quarantined(name):
            self._remove_all(_area_of(name))
            self.remove(name)
            return
        sums = self._path(name, SUMS)
        self._rm(sums)
        self._points.reach("checkpoint.deleting", path=name)
        self._remove_all(name)

    def clean(self, attempt: int) -> None:
        """See `Store`: areas of attempts below `attempt` that were not published, and parts of files sent half way."""
        aside = {_area_of(name) for name in self.quarantined()}
        for name in self._prefixes():
            parsed = checkpoint_store.parse(name)
            ours = parsed is not None and 0 < parsed.attempt < attempt
            if ours and name not in aside and not self._is_published(name):
                self._remove_all(name)
        abandon(
            self._fs,
            self._root,
            lambda name: 0 < (checkpoint_store.parse(name) or checkpoint_store.Parsed(0)).attempt < attempt,
        )

    def create(self, key: str, content: bytes) -> bool:
        """See `Store`.

        Raises:
            UserError: the server does not heed the condition.
        """
        return self._create(f"{self._root}/{checkpoint_store.plain(key)}", content)

    def keys(self, prefix: str) -> list[str]:
        """See `Store`."""
        there = [entry["name"].rpartition("/")[2] for entry in self._list() if entry["type"] == "file"]
        return sorted(key for key in there if key and key.startswith(prefix))

    def get(self, key: str) -> bytes:
        """See `Store`."""
        return self._whole(f"{self._root}/{checkpoint_store.plain(key)}", KEY_MOST_BYTES)

    def remove(self, key: str) -> None:
        """See `Store`."""
        self._rm(f"{self._root}/{checkpoint_store.plain(key)}")

    def _prefixes(self) -> list[str]:
        there = [entry["name"].rstrip("/").rpartition("/")[2] for entry in self._list() if entry["type"] == "directory"]
        return [name for name in there if checkpoint_store.parse(name)]

    def _is_published(self, name: str) -> bool:
        try:
            self.size_bytes(name, SUMS)
        except FileNotFoundError:
            return False
        return True

    def _begun(self, area: str) -> dict[str, bytes]:
        if area not in self._held:
            raise ValueError(f"{area} was not begun here, or has been published or discarded")
        return self._held[area]

    def _path(self, name: str, file: str) -> str:
        if file == SUMS and checkpoint_store.quarantined(name):
            return f"{self._root}/{checkpoint_store.plain(name)}"  # the mark holds them
        return f"{self._root}/{_area_of(checkpoint_store.plain(name))}/{checkpoint_store.plain(file)}"

    def _ask(
        self,
        path: str,
        call: Callable[..., Any],
        *args: Any,
        require: Callable[[Any], None] = lambda answer: None,
        **options: Any,
    ) -> Any:
        """Call a method of the file system: tried again, and never waited for for ever.

        Args:
            require: raises where the answer is not what was asked for, and so is asked again.
        """

        def asked() -> Any:
            answer = bounded(self._fs, call, *args, **options)
            require(answer)
            return answer

        return retried(path, asked)

    def _list(self, name: str = "") -> list[dict[str, Any]]:
        path = f"{self._root}/{_area_of(name)}".rstrip("/")
        try:
            found: list[dict[str, Any]] = self._ask(path, self._fs.ls, path, detail=True, limit_s=LISTING_S)
        except FileNotFoundError:
            return []
        return found

    def _size(self, path: str) -> int:
        info = self._ask(path, self._fs.info, path)
        if info["type"] != "file":
            raise IsADirectoryError(path)
        return int(info["size"])

    def _whole(self, path: str, most: int) -> bytes:
        size_bytes = self._size(path)
        if size_bytes > most:
            raise too_large(path, size_bytes, most)
        return self._cat(path, 0, size_bytes) if size_bytes else b""

    def _cat(self, path: str, start: int, end: int) -> bytes:
        """Bytes ``[start, end)``, neither fewer nor more.

        Raises:
            StoreFailedError: something else came for good. OSError: the object is shorter than that.
        """

        def require_all(content: bytes) -> None:
            if len(content) < end - start:
                raise OSError(errno.EIO, f"{len(content)} of {end - start} bytes came", path)

        where = {"start": start, "end": end, "size_bytes": end - start}
        try:
            content = bytes(self._ask(path, self._fs.cat_file, path, require=require_all, **where))
        except StoreFailedError as error:
            there = self._shortened(path, end) if error.errno in (errno.EIO, errno.EINVAL) else None
            if there is None:
                raise
            problem = f"it has {there} bytes now, and bytes {start} to {end} are wanted"
            raise OSError(errno.EIO, problem, path) from error
        if len(content) > end - start:
            problem = f"the store answers ranges with all of an object: {len(content)} bytes came, not {end - start}"
            raise StoreFailedError(errno.EIO, problem, path)
        return content

    def _shortened(self, path: str, end: int) -> int | None:
        """Length of an object that ends before `end`; None: it does not, so the store's answer was wrong."""
        size_bytes = self._size(path)
        return size_bytes if size_bytes < end else None

    def _rm(self, path: str) -> None:
        try:
            self._ask(path, self._fs.rm_file, path)
        except FileNotFoundError:
            return

    def _remove_all(self, area: str) -> None:
        path = f"{self._root}/{area}"
        try:
            self._ask(path, self._fs.rm, path, recursive=True, limit_s=LISTING_S)
        except FileNotFoundError:
            return


@dataclass(frozen=True)
class _Fetched(Stored):
    """A checkpoint of which spans are on their way; the lengths of its files are known."""

    objects: ObjectStore
    ahead_of_reads: Ahead
    known: Mapping[str, int] = field(default_factory=dict)

    def read(self, file: str) -> bytes:
        """See `Store`."""
        size_bytes = self.known.get(file)
        if size_bytes is None:
            return super().read(file)
        if size_bytes > most_bytes(file):
            raise too_large(f"{self.url}/{file}", size_bytes, most_bytes(file))
        with self.open(file) as stream:
            return stream.read()

    def open(self, file: str) -> BinaryIO:
        """See `Store`."""
        size_bytes = self.known[file] if file in self.known else self.size_bytes(file)
        return self.objects.ranges(self.name, file, size_bytes, take=partial(self.ahead_of_reads.take, file))


def _defaults(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the file system: those given, and before them what suits many streams."""
    # A listing that was kept would hide what other hosts have written meanwhile.
    chosen: dict[str, Any] = {"use_listings_cache": False, **options}
    if url.startswith(_S3):
        chosen["config_kwargs"] = {"max_pool_connections": _CONNECTIONS, **options.get("config_kwargs", {})}
    return chosen


def _area_of(name: str) -> str:
    """Where the files of `name` lie: those of what is kept aside lie where they were."""
    return name.partition("-")[2] if checkpoint_store.quarantined(name) else name
