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
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO, cast

import fsspec
from typing_extensions import Buffer

from phalanx.checkpoint.format.checkpoint_files import Span, most_bytes
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, FileEntry, plain
from phalanx.checkpoint.storage import checkpoint_store
from phalanx.checkpoint.storage.checkpoint_store import KEY_MOST_BYTES
from phalanx.checkpoint.storage.conditional_writes import creator
from phalanx.checkpoint.storage.object_streams import Ahead, RangeFile, Take, abandon, upload
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.files import StoreFailedError, too_large
from phalanx.core.object_requests import LISTING_S, bounded, retried

_CONNECTIONS = 64  # kept by the S3 client, whose own default is 10: streams of all ranks of a host's persister


class ObjectStore:
    """A `Store` under a prefix of an object store, such as ``s3://bucket/run/checkpoints``.

    Args:
        options: of fsspec's file system.
        points: ``checkpoint.before-rename`` is reached before a checkpoint is there, ``checkpoint.published`` after,
            and ``checkpoint.deleting`` when one has lost its name and not yet its files.

    Raises:
        UserError: the file system cannot make an object only if there is none.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, points: Points = NO_POINTS) -> None:
        # A listing that was kept would hide what other hosts have written meanwhile.
        chosen: dict[str, Any] = {"use_listings_cache": False, **(options or {})}
        if url.startswith(("s3://", "s3a://")):
            chosen["config_kwargs"] = {"max_pool_connections": _CONNECTIONS, **chosen.get("config_kwargs", {})}
        self._fs, root = fsspec.core.url_to_fs(url, **chosen)
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
        return checkpoint_store.newest_first([name for name in self._prefixes() if self.is_published(name)])

    def quarantined(self) -> list[str]:
        """See `Store`."""
        return checkpoint_store.newest_first([key for key in self.keys("") if checkpoint_store.quarantined(key)])

    def at(self, name: str) -> _ObjectFiles:
        """See `Store`."""
        return _ObjectFiles(self, plain(name))

    def files(self, name: str) -> list[str]:
        """See `Store`."""
        held, there = self._held.get(name, {}), set(self.at(name).sizes())
        if there and checkpoint_store.quarantined(name):
            there.add(SUMS)  # which is in the mark
        return sorted({*held, *there})

    def begin(self, step: int, attempt: int, nonce: str) -> str:
        """See `Store`. FileExistsError: it has been published."""
        area = checkpoint_store.full_name(step, attempt, nonce)
        if self.is_published(area):
            raise FileExistsError(f"{self._url}/{area} has been published already")
        self._held[area] = {}
        return area

    def join(self, step: int, attempt: int, nonce: str, timeout_s: float) -> str:
        """See `Store`. There is nothing to wait for: an area is a beginning of names."""
        return checkpoint_store.full_name(step, attempt, nonce)

    def write(self, area: str, file: str, content: Iterable[Buffer]) -> FileEntry:
        """See `Store`. ``SHA256SUMS`` is kept back until `publish`."""
        path = self.path(area, file)
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
        self.size(self.path(area, MANIFEST))
        if SUMS not in held:
            raise FileNotFoundError(self.path(area, SUMS))
        self._points.reach("checkpoint.before-rename", path=area)
        upload(self._fs, self.path(area, SUMS), [held[SUMS]])
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
        self._rm(self.path(name, SUMS))
        self._points.reach("checkpoint.deleting", path=name)
        self._remove_all(name)

    def clean(self, attempt: int) -> None:
        """See `Store`: areas of attempts below `attempt` that were not published, and parts of files sent half way."""

        def is_dead(name: str) -> bool:
            parsed = checkpoint_store.parse(name)
            return parsed is not None and 0 < parsed.attempt < attempt

        aside = {_area_of(name) for name in self.quarantined()}
        for name in self._prefixes():
            if is_dead(name) and name not in aside and not self.is_published(name):
                self._remove_all(name)
        abandon(self._fs, self._root, is_dead)

    def create(self, key: str, content: bytes) -> bool:
        """See `Store`. UserError: the server ignores the condition."""
        return self._create(f"{self._root}/{plain(key)}", content)

    def keys(self, prefix: str) -> list[str]:
        """See `Store`."""
        there = [entry["name"].rpartition("/")[2] for entry in self.listed() if entry["type"] == "file"]
        return sorted(key for key in there if key and key.startswith(prefix))

    def get(self, key: str) -> bytes:
        """See `Store`."""
        return self.whole(f"{self._root}/{plain(key)}", KEY_MOST_BYTES)

    def remove(self, key: str) -> None:
        """See `Store`."""
        self._rm(f"{self._root}/{plain(key)}")

    def _prefixes(self) -> list[str]:
        folders = [entry["name"] for entry in self.listed() if entry["type"] == "directory"]
        there = [folder.rstrip("/").rpartition("/")[2] for folder in folders]
        return [name for name in there if checkpoint_store.parse(name)]

    def is_published(self, name: str) -> bool:
        """Whether ``SHA256SUMS``, which makes an area a checkpoint, is there."""
        try:
            self.size(self.path(name, SUMS))
        except FileNotFoundError:
            return False
        return True

    def _begun(self, area: str) -> dict[str, bytes]:
        if area not in self._held:
            raise ValueError(f"{area} was not begun here, or has been published or discarded")
        return self._held[area]

    def path(self, name: str, file: str) -> str:
        """Where a file of a checkpoint or an area lies."""
        if file == SUMS and checkpoint_store.quarantined(name):
            return f"{self._root}/{plain(name)}"  # the mark holds them
        return f"{self._root}/{_area_of(plain(name))}/{plain(file)}"

    def _ask(
        self,
        path: str,
        call: Callable[..., Any],
        *args: Any,
        require: Callable[[Any], None] = lambda answer: None,
        **options: Any,
    ) -> Any:
        """Call a method of the file system: tried again, also where `require` raises at its answer, and with a limit
        on the time."""

        def asked() -> Any:
            answer = bounded(self._fs, call, *args, **options)
            require(answer)
            return answer

        return retried(path, asked)

    def listed(self, name: str = "") -> list[dict[str, Any]]:
        """The entries in an area, or beside the areas."""
        path = f"{self._root}/{_area_of(name)}".rstrip("/")
        try:
            found: list[dict[str, Any]] = self._ask(path, self._fs.ls, path, detail=True, limit_s=LISTING_S)
        except FileNotFoundError:
            return []
        return found

    def size(self, path: str) -> int:
        """Length of an object; FileNotFoundError, IsADirectoryError: it is not one."""
        info = self._ask(path, self._fs.info, path)
        if info["type"] != "file":
            raise IsADirectoryError(path)
        return int(info["size"])

    def whole(self, path: str, most: int) -> bytes:
        """All of an object; OddFileError: it has more than `most` bytes."""
        size_bytes = self.size(path)
        if size_bytes > most:
            raise too_large(path, size_bytes, most)
        return self.cat(path, 0, size_bytes) if size_bytes else b""

    def cat(self, path: str, start: int, end: int) -> bytes:
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
            # A range behind the end of an object is damage of the object; all else is a failure of the store.
            there = self.size(path) if error.errno in (errno.EIO, errno.EINVAL) else end
            if there >= end:
                raise
            problem = f"it has {there} bytes now, and bytes {start} to {end} are wanted"
            raise OSError(errno.EIO, problem, path) from error
        if len(content) > end - start:
            problem = f"the store answers ranges with all of an object: {len(content)} bytes came, not {end - start}"
            raise StoreFailedError(errno.EIO, problem, path)
        return content

    def _rm(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(path, self._fs.rm_file, path)

    def _remove_all(self, area: str) -> None:
        path = f"{self._root}/{area}"
        with suppress(FileNotFoundError):
            self._ask(path, self._fs.rm, path, recursive=True, limit_s=LISTING_S)


class _ObjectFiles:
    """The `Files` of a checkpoint or an area; with `ahead`, spans are on their way and some lengths are known."""

    def __init__(
        self, store: ObjectStore, name: str, known: Mapping[str, int] | None = None, ahead: Ahead | None = None
    ) -> None:
        self._store, self.name, self._known, self._ahead = store, name, known or {}, ahead
        self.url = f"{store.url}/{name}"

    def identity(self) -> str:
        # A name is used once, but for copies by hand.
        return self.name if self._store.is_published(self.name) else ""

    def read(self, file: str) -> bytes:
        size_bytes = self._known.get(file)
        if size_bytes is None:
            return self._store.whole(self._store.path(self.name, file), most_bytes(file))
        if size_bytes > most_bytes(file):
            raise too_large(f"{self.url}/{file}", size_bytes, most_bytes(file))
        with self.open(file) as stream:
            return stream.read()

    def open(self, file: str) -> BinaryIO:
        # Read by ranges: only what is asked for, and a little ahead.
        path = self._store.path(self.name, file)
        size_bytes = self._known[file] if file in self._known else self.size_bytes(file)
        options: dict[str, Take] = {} if self._ahead is None else {"take": partial(self._ahead.take, file)}
        return cast(BinaryIO, RangeFile(partial(self._store.cat, path), size_bytes, path, **options))

    def size_bytes(self, file: str) -> int:
        return self._store.size(self._store.path(self.name, file))

    def sizes(self) -> Mapping[str, int]:
        # A thousand of them are one request.
        there = [entry for entry in self._store.listed(self.name) if entry["type"] == "file"]
        found = {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in there}
        return {file: size_bytes for file, size_bytes in found.items() if file}

    @contextmanager
    def ahead(self, spans: Iterable[Span], sizes: Mapping[str, int]) -> Iterator[_ObjectFiles]:
        def fetch(file: str, start: int, end: int) -> bytes:
            return self._store.cat(self._store.path(self.name, file), start, end)

        with Ahead(fetch, spans) as ahead:
            yield _ObjectFiles(self._store, self.name, sizes, ahead)


def _area_of(name: str) -> str:
    """Where the files of `name` lie: those of what is kept aside lie where they were."""
    return name.partition("-")[2] if checkpoint_store.quarantined(name) else name
