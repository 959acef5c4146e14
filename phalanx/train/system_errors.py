"""What the system refuses while a run goes on, in words and with a cure: memory, disk space, the right to write."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phalanx.core.errors import UserError
from phalanx.train.config import RunConfig

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EIO, *_FULL)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device, or the host, has no memory left."""
    # The host's allocator raises a plain RuntimeError.
    words = ("can't allocate memory", "Cannot allocate memory")
    # oneDNN's word for it; what it does not support is a "primitive descriptor" that it could not create.
    onednn = str(error).strip().endswith("could not create a primitive")
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError) or onednn or any(word in str(error) for word in words)
    )


def out_of_threads(error: BaseException) -> bool:
    """Whether an error says that no thread or process can be started: a limit of their number, seldom of memory."""
    refused = isinstance(error, OSError) and error.errno == errno.EAGAIN and error.filename is None
    return refused or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))


def too_big(config: RunConfig, micro_batch: int, error: BaseException, where: str = "") -> UserError:
    """What to do when a step does not fit into memory; `where`: which of several ranks it was."""
    settings = [f"train.micro_batch={micro_batch // 2}"] if micro_batch > 1 else []
    settings += ["train.recompute=full"] if config.train.recompute != "full" else []
    cures = [f"set {' or '.join(settings)}"] if settings else []
    cures.append("take a smaller model or data.sequence_length")
    tokens = f"{micro_batch} x {config.data.sequence_length} tokens"
    return UserError(
        f"{tokens} at once do not fit into memory{where} ({first_line(error)})",
        cure=", or ".join(cures),
        field="train.micro_batch",
        value=micro_batch,
    )


@contextmanager
def explained(what: str, cure: str) -> Iterator[None]:
    """Turn what the system refuses inside the block into a `UserError`; errors of the program itself pass.

    Args:
        what: the memory was wanted for.
        cure: what to do where there was none.
    """

    def no_more_threads(error: BaseException) -> UserError:
        return UserError(
            f"there are no more threads or processes to be had for {what} ({first_line(error)})",
            cure="end what takes them, raise their limit (ulimit -u, pids.max of the cgroup; ulimit -v where they lack "
            "memory), or set train.threads lower",
        )

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if out_of_threads(error):
            raise no_more_threads(error) from error
        if not out_of_memory(error):
            raise
        raise UserError(f"there is no memory left for {what} ({first_line(error)})", cure=cure) from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise UserError(f"there is no memory left for {what}", cure=cure) from error
        if out_of_threads(error):
            raise no_more_threads(error) from error
        full = error.errno in _FULL
        if error.errno not in _REFUSED or (error.filename is None and not full):
            raise
        cure = "free some space" if full else "make it readable and writable, or choose another place"
        where = {} if error.filename is None else {"value": str(error.filename)}
        raise UserError(f"cannot be read or written ({error.strerror})", cure=cure, **where) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the C++ frames that torch appends, or its type."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line.partition("] ")[2] or line if line.startswith("[enforce fail") else line or type(error).__name__
