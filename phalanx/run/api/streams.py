"""What goes on as it goes on: one JSON value a line, until the job ends or the client leaves. Torch-free.

An empty line every few seconds keeps connections open and shows either side that the other is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from phalanx.core.errors import UserError
from phalanx.run.api.bodies import LogLine, line_body
from phalanx.run.api.job import Job
from phalanx.run.logs.files import Follower, last_lines, rank_folders
from phalanx.run.people.hub import Hub, Wrote

MOST_RANKS = 64
"""Logs of so many ranks together are read from files; of more, what executors have told is shown."""

QUIET_S = 10.0
_AT_ONCE = 1000
"""Lines that are handed over together: what a slow client does not take must not pile up."""

_POLL_S = 0.25


async def follow_items(hub: Hub, number: int, seconds: float) -> AsyncIterator[bytes]:
    """Items after this number."""
    until_s = time.monotonic() + seconds
    while True:
        if new := hub.since(number)[:_AT_ONCE]:
            number = new[-1].number
            yield _lines(new)
            continue
        left_s = until_s - time.monotonic()
        if left_s <= 0 or (hub.is_over and hub.last <= number):
            return
        if not await hub.changed(number, min(QUIET_S, left_s)):
            yield b"\n"


async def newest_lines(job: Job, rank: int | None, last: int) -> list[LogLine]:
    """The newest lines of a rank, or of all together."""
    if await asyncio.to_thread(_is_in_files, job, rank):
        return [line_body(line) for line in await asyncio.to_thread(last_lines, job.logs, rank, last)]
    return _told(job, rank)[-last:] if last else []


async def follow_lines(job: Job, rank: int | None, last: int, seconds: float) -> AsyncIterator[bytes]:
    """Lines of a rank, or of all together, as they are written, after the `last` that are there."""
    until_s = time.monotonic() + seconds
    is_over: Callable[[], bool] = lambda: job.hub.is_over or time.monotonic() >= until_s  # noqa: E731
    if not await asyncio.to_thread(_is_in_files, job, rank):
        async for block in _follow_told(job, rank, last, is_over):
            yield block
        return
    follower = await asyncio.to_thread(lambda: Follower(job.logs, rank, last=last))
    quiet_s = time.monotonic()
    try:
        while True:
            was_over = is_over()
            if lines := await asyncio.to_thread(follower.poll):
                for start in range(0, len(lines), _AT_ONCE):
                    yield _lines(map(line_body, lines[start : start + _AT_ONCE]))
                quiet_s = time.monotonic()
            elif was_over:
                return
            else:
                await asyncio.sleep(_POLL_S)
            if time.monotonic() - quiet_s > QUIET_S:
                quiet_s = time.monotonic()
                yield b"\n"
    finally:
        follower.close()


async def _follow_told(job: Job, rank: int | None, last: int, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    number = job.hub.last
    if last and (lines := _told(job, rank)[-last:]):
        yield _lines(lines)
    while not is_over():
        new = job.hub.since(number)
        if lines := _of_rank(new, rank, job.state.attempt):
            yield _lines(lines)
        number = new[-1].number if new else number
        if not await job.hub.changed(number, QUIET_S if not new else _POLL_S) and not new:
            yield b"\n"


def _told(job: Job, rank: int | None) -> list[LogLine]:
    return _of_rank(job.hub.since(0), rank, 0)


def _of_rank(items: Iterable[object], rank: int | None, attempt: int) -> list[LogLine]:
    wrote = (item for item in items if isinstance(item, Wrote) and rank in (None, item.rank))
    return [LogLine(item.rank, attempt, item.unix_s, item.text) for item in wrote]


def _is_in_files(job: Job, rank: int | None) -> bool:
    """Whether the driver can read what is asked for, in a time that does not grow with the job."""
    if rank is not None:
        return bool(rank_folders(job.logs, rank))
    return 0 < len(rank_folders(job.logs)) <= MOST_RANKS


def _lines(values: Iterable[object]) -> bytes:
    return msgspec.json.Encoder().encode_lines(list(values))


def check_rank(job: Job, rank: int | None) -> None:
    """See that the job has, or had, this rank.

    Raises:
        UserError: it has not.
    """
    size = job.state.world_size
    if rank is not None and size and rank >= size and not rank_folders(job.logs, rank):
        raise UserError(f"there is no rank {rank}", cure=f"give 0 to {size - 1}")
