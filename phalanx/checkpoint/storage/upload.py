"""Writing an object of any length with bounded memory: in parts, several at a time on S3, and there only when all of
them are. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

from fsspec.spec import AbstractBufferedFile
from typing_extensions import Buffer

from phalanx.checkpoint.storage.ranges import STREAMS
from phalanx.checkpoint.storage.retry import LISTING_S, bounded, retried

PARTS = ((32, 5 << 20), (128, 8 << 20), (2000, 16 << 20), (10_000, 64 << 20))
"""Of a multipart upload, which S3 lets have 10,000 parts: up to which number they have how many bytes. Small ones
first, so that all streams have something to do; later such that waiting for an answer hardly counts, and an object can
have 540 GB."""

FIXED_BYTES = 32 << 20
"""Of a part where all have to be of one length, or go one by one."""

MEMORY_BYTES = STREAMS * (16 << 20)
"""Of parts that are being sent; beside them is that which is being filled."""

_PIECE_BYTES = 4 << 20  # summed at a time, while the processor still has it


def upload(fs: Any, path: str, content: Iterable[Buffer]) -> tuple[int, str]:
    """Write an object; its length and SHA-256.

    Raises:
        OSError: storage refused, also after some tries; names `path`. Nothing is there then.
    """
    digest, size_bytes = hashlib.sha256(), 0

    def summed() -> Iterator[memoryview]:
        nonlocal size_bytes
        for buffer in content:
            view = memoryview(buffer).cast("B")
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                digest.update(piece)
                size_bytes += len(piece)
                yield piece

    parts = _parts(summed(), fixed=getattr(fs, "fixed_upload_size", not hasattr(fs, "call_s3")))
    first, second = next(parts, b""), next(parts, None)
    if second is None:
        retried(path, lambda: bounded(fs, fs.pipe_file, path, first, size_bytes=len(first)))
    elif hasattr(fs, "call_s3"):
        _Multipart(fs, path).send(_chained(first, second, parts))
    else:
        _one_by_one(fs, path, _chained(first, second, parts))
    return size_bytes, digest.hexdigest()


def abandon(fs: Any, root: str, is_dead: Callable[[str], bool]) -> None:
    """Give up the uploads that killed writers left half way: S3 keeps their parts, unseen and paid for, for ever.

    Args:
        fs: the file system; of others than S3 nothing is done.
        root: prefix of the areas.
        is_dead: whether nobody writes into the area of a name any more.
    """
    if not hasattr(fs, "call_s3"):
        return
    bucket, key, _ = fs.split_path(root)
    prefix = f"{key}/" if key else ""
    ask = partial(bounded, fs, fs.call_s3, limit_s=LISTING_S)
    try:
        listed = retried(root, lambda: ask("list_multipart_uploads", Bucket=bucket, Prefix=prefix))
        for one in listed.get("Uploads", []):
            area, slash, _ = one["Key"].removeprefix(prefix).partition("/")
            if one["Key"].startswith(prefix) and slash and is_dead(area):
                retried(one["Key"], partial(bounded, fs, fs.abort_mpu, bucket, one["Key"], one["UploadId"]))
    except OSError:
        return  # it may be forbidden to list them, and it is only for tidiness


def _parts(pieces: Iterator[memoryview], *, fixed: bool) -> Iterator[bytes]:
    """The content in parts; all but the last of one length where storage wants that (`fixed`)."""
    part, number = bytearray(), 1
    for piece in pieces:
        while piece:
            limit = FIXED_BYTES if fixed else next((size for last, size in PARTS if number <= last), PARTS[-1][1])
            more = piece[: limit - len(part)]
            part += more
            piece = piece[len(more) :]
            if len(part) == limit:
                yield bytes(part)
                part.clear()
                number += 1
    if part:
        yield bytes(part)


def _chained(first: bytes, second: bytes, others: Iterator[bytes]) -> Iterator[bytes]:
    """Without holding on to the first ones."""
    yield first
    yield second
    yield from others


class _Multipart:
    """A multipart upload to S3: its parts are sent several at a time, each with its own tries."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        bucket, key, _ = fs.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._tags: dict[int, str] = {}
        self._under_way: dict[Future[str], tuple[int, int]] = {}
        self._size_bytes = 0

    def send(self, parts: Iterator[bytes]) -> None:
        """Send all, and make them one object.

        Raises:
            OSError: one could not be sent, or `parts` raised; nothing is left of the others.
        """
        self._object["UploadId"] = self._call("create_multipart_upload")["UploadId"]
        pool = ThreadPoolExecutor(STREAMS, "upload")
        try:
            for number, part in enumerate(parts, 1):
                self._make_room(len(part))
                self._size_bytes += len(part)
                self._under_way[pool.submit(self._send, number, part)] = number, len(part)
            while self._under_way:
                self._take_answers()
            self._complete()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            wait(list(self._under_way))  # a part that came after the end would be kept for ever
            with suppress(Exception):
                self._call("abort_multipart_upload")
            raise
        finally:
            pool.shutdown(wait=False)

    def _make_room(self, size_bytes: int) -> None:
        while self._under_way and sum(one for _, one in self._under_way.values()) + size_bytes > MEMORY_BYTES:
            self._take_answers()

    def _take_answers(self) -> None:
        """Of those that were sent by now, at least of one."""
        for sent in wait(list(self._under_way), return_when=FIRST_COMPLETED).done:
            number, _ = self._under_way.pop(sent)
            self._tags[number] = sent.result()

    def _send(self, number: int, part: bytes) -> str:
        answer = self._call("upload_part", PartNumber=number, Body=part, size_bytes=len(part))
        return str(answer["ETag"])

    def _complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": self._tags[number]} for number in sorted(self._tags)]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            # No such upload: the answer to a try before this one may have been lost.
            if self._fs.info(self._path)["size"] != self._size_bytes:
                raise

    def _call(self, method: str, *, size_bytes: int = 0, **options: Any) -> Any:
        given = {**self._object, **options}
        return retried(self._path, lambda: bounded(self._fs, self._fs.call_s3, method, size_bytes=size_bytes, **given))


def _one_by_one(fs: Any, path: str, parts: Iterator[bytes]) -> None:
    """By a file of the client library, which sends one part after the other."""
    file = retried(path, partial(_begin, fs, path, next(parts)))
    try:
        for part in parts:
            _add(file, path, part)
        _end(file, path)
    except BaseException:
        _give_up(file)
        raise


def _begin(fs: Any, path: str, first: bytes) -> Any:
    """Open the object and send its first part: what begins a multipart upload cannot be tried again by itself."""
    file = fs.open(path, "wb", block_size=FIXED_BYTES, autocommit=False)
    try:
        file.write(first)
    except BaseException:
        _give_up(file)
        raise
    return file


def _add(file: Any, path: str, piece: bytes) -> None:
    """The file keeps what it could not send, so a further try is to send, not to write again."""
    try:
        file.write(piece)
    except Exception:
        retried(path, file.flush)


def _end(file: Any, path: str) -> None:
    def flush() -> None:
        file.forced = False  # of a try that failed
        file.flush(force=True)

    if isinstance(file, AbstractBufferedFile):
        retried(path, flush)
        retried(path, file.commit)
        file.closed = True  # closing would send again
    else:
        file.close()


def _give_up(file: Any) -> None:
    if isinstance(file, AbstractBufferedFile):
        with suppress(Exception):
            file.discard()
        file.closed = True  # or what is left would be sent when the file is collected
    else:
        with suppress(Exception):
            file.fs.rm_file(file.path)
