"""Writing an object of any length with bounded memory: in parts, and there only when all of them are. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from fsspec.spec import AbstractBufferedFile
from typing_extensions import Buffer

from phalanx.checkpoint.storage.retry import retried

PART_BYTES = 32 << 20
"""Of a multipart upload: 10,000 of them, S3's limit, make 320 GB. About four are in memory at a time, counting the
client library's copies."""

_PIECE_BYTES = 4 << 20  # fsspec's files copy whatever they are given into their buffer before they send any of it


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

    pieces = summed()
    first = bytearray()
    for piece in pieces:
        first += piece
        if len(first) >= PART_BYTES:
            _in_parts(fs, path, first, pieces)
            break
    else:
        retried(path, partial(fs.pipe_file, path, bytes(first)))
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
    try:
        listed = retried(root, lambda: fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix))
        for one in listed.get("Uploads", []):
            area, slash, _ = one["Key"].removeprefix(prefix).partition("/")
            if one["Key"].startswith(prefix) and slash and is_dead(area):
                retried(one["Key"], partial(fs.abort_mpu, bucket, one["Key"], one["UploadId"]))
    except OSError:
        return  # it may be forbidden to list them, and it is only for tidiness


def _in_parts(fs: Any, path: str, first: bytearray, pieces: Iterator[memoryview]) -> None:
    file = retried(path, partial(_begin, fs, path, first))
    try:
        first.clear()
        for piece in pieces:
            _add(file, path, piece)
        _end(file, path)
    except BaseException:
        _give_up(file)
        raise


def _begin(fs: Any, path: str, first: bytearray) -> Any:
    """Open the object and send its first part: what begins a multipart upload cannot be tried again by itself."""
    file = fs.open(path, "wb", block_size=PART_BYTES, autocommit=False)
    try:
        file.write(first)
    except BaseException:
        _give_up(file)
        raise
    return file


def _add(file: Any, path: str, piece: memoryview) -> None:
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
