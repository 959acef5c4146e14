"""From the pipes of ranks to their log files, without ever blocking the event loop.

A block that was read is written by a thread, and only then is the next one read from the same pipe. So a rank that
writes faster than the disk takes it is slowed by its full pipe, the others are not, and nothing is dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from phalanx.core.asyncio_tasks import report_failure
from phalanx.run.logs.log_files import RankLog
from phalanx.run.logs.log_lines import LineSplitter, Tails

_BLOCK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # the most that a pipe holds, unless root made it larger


class Pump:
    """The output of the ranks of one attempt. To be made and used within a running event loop.

    Whatever fails goes to the loop's exception handler, and the output of all ranks is taken on.

    Args:
        on_lines: called with rank and lines as soon as they are read, before they are written; must be quick.
    """

    def __init__(
        self, tails: Tails, on_lines: Callable[[int, Sequence[str]], None], unix_s: Callable[[], float]
    ) -> None:
        self._tails, self._on_lines, self._unix_s = tails, on_lines, unix_s
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="phalanx-logs")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._splitters: dict[int, LineSplitter] = {}
        self._logs: dict[int, RankLog] = {}
        self._wakes: dict[int, asyncio.Event] = {}
        self._unwritten: dict[int, list[str]] = {}
        self._descriptors: dict[int, int] = {}
        self._is_closing = False
        self._taken_bytes: dict[int, int] = {}

    def add(self, rank: int, descriptor: int, log: RankLog) -> None:
        """Take over the reading end of a rank's pipe, and its log."""
        os.set_blocking(descriptor, False)
        self._splitters[rank], self._logs[rank], self._unwritten[rank] = LineSplitter(), log, []
        self._descriptors[rank] = descriptor
        self._tasks[rank] = report_failure(
            self._loop.create_task(self._serve(rank, descriptor)), f"the output of rank {rank}"
        )

    def last_lines(self, rank: int) -> list[str]:
        """The newest lines of a rank, and the one that it has begun."""
        splitter = self._splitters.get(rank)
        pending = splitter.pending if splitter else ""
        return [*self._tails.last(rank), *([pending] if pending else [])]

    def taken_bytes(self, rank: int) -> int:
        """What a rank has written so far."""
        return self._taken_bytes.get(rank, 0)

    def take_now(self, rank: int) -> None:
        """Take what a rank has written and is in its pipe, so that it is known before its end is reported."""
        descriptor, rest = self._descriptors.get(rank), _PIPE_BYTES
        while descriptor is not None and rest > 0 and (block := _read(descriptor)):
            rest -= len(block)
            self._take(rank, block)
        if descriptor in self._wakes:
            self._wakes[descriptor].set()

    async def until_ended(self) -> None:
        """Wait until every process that could write has closed its end of the pipes."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self) -> None:
        """Take what still is in the pipes, write it, and let go of all; whether or not a process still holds an end."""
        self._is_closing = True
        for wake in self._wakes.values():
            wake.set()
        try:
            await self.until_ended()
        finally:
            self._threads.shutdown(wait=False)

    async def _serve(self, rank: int, descriptor: int) -> None:
        splitter, rest = self._splitters[rank], _PIPE_BYTES
        try:
            while rest > 0 and (block := await self._block(rank, descriptor)) != b"":
                if block is not None:
                    self._take(rank, block)
                    if self._is_closing:  # a process that escaped may write for ever
                        rest -= len(block)
                await self._write(rank)
            self._show(rank, splitter.finish())
            await self._write(rank)
        finally:
            del self._descriptors[rank]
            self._wakes.pop(descriptor, None)
            os.close(descriptor)
            self._logs[rank].close()

    async def _block(self, rank: int, descriptor: int) -> bytes | None:
        """What has come; empty when there will be no more, or when there is no more and the pump closes.

        None: it has been taken already, and is to be written.
        """
        while (block := _read(descriptor)) is None:
            if self._unwritten[rank]:
                return None
            if self._is_closing:
                return b""
            wake = self._wakes.setdefault(descriptor, asyncio.Event())
            wake.clear()
            self._loop.add_reader(descriptor, wake.set)
            try:
                await wake.wait()  # `close` and `take_now` set it too
            finally:
                self._loop.remove_reader(descriptor)
        return block

    def _take(self, rank: int, block: bytes) -> None:
        self._taken_bytes[rank] = self.taken_bytes(rank) + len(block)
        self._show(rank, self._splitters[rank].feed(block))

    def _show(self, rank: int, lines: Sequence[str]) -> None:
        if not lines:
            return
        self._unwritten[rank] += lines
        self._tails.add(rank, lines)
        try:
            self._on_lines(rank, lines)
        except Exception as error:
            self._report_failure(f"looking at the lines of rank {rank}", error)

    async def _write(self, rank: int) -> None:
        lines, self._unwritten[rank] = self._unwritten[rank], []
        if not lines:
            await asyncio.sleep(0)  # a flood without line ends must not starve the loop
            return
        try:
            await self._loop.run_in_executor(self._threads, self._logs[rank].write, lines, self._unix_s())
        except Exception as error:  # a rank must not be stopped by its log
            self._report_failure(f"writing the log of rank {rank}", error)

    def _report_failure(self, what: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": f"{what} has failed", "exception": error})


def _read(descriptor: int) -> bytes | None:
    """What is there; empty at the end, None where nothing is there now."""
    try:
        return os.read(descriptor, _BLOCK_BYTES)
    except BlockingIOError:
        return None
    except OSError:  # of a terminal without its other end
        return b""
