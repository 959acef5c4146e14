"""The kernel's log, followed from the moment it is opened.

It comes from ``/dev/kmsg``; where that may not be read, from ``journalctl`` or ``dmesg``, which a site may allow; else
`problem` says why not. Its lines report devices (``NVRM: Xid``), memory, disks and links.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from phalanx.checks.kernel_lines import KernelLine, parse_line, take_records
from phalanx.ipc.processes import StartChild

KMSG = Path("/dev/kmsg")

_MOST_RECORDS = 10_000  # at once
_WARNING = 4
_TRY_S = 0.3

_COMMANDS = (
    ("journalctl", "--dmesg", "--follow", "--lines=0", "--output=short-monotonic"),
    ("dmesg", "--follow-new", "--decode", "--time-format=iso"),
)


class Kmsg:
    """``/dev/kmsg``, or what plays it: each read gives one record. Raises OSError: it may not be read."""

    def __init__(self, path: Path = KMSG, read: Callable[[int, int], bytes] = os.read) -> None:
        self.name = str(path)
        self._read = read
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # a pipe in a test
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def fileno(self) -> int:
        """Readable when there may be records."""
        return self._descriptor

    def take(self) -> tuple[list[str], int, str]:
        """Records that are there, how often some were overwritten before they were read, and why it has ended."""
        records, overruns, error = take_records(self._descriptor, self._read, most=_MOST_RECORDS)
        return records, overruns, f"{self.name}: {error.strerror}" if error else ""

    def close(self) -> None:
        """Stop following."""
        os.close(self._descriptor)


class LogCommand:
    """A program that writes a line for each record.

    Raises:
        OSError: it cannot be run, or ended at once; the words say why.
    """

    def __init__(self, command: Sequence[str], start: StartChild) -> None:
        self.name = command[0]
        self._process = start(
            lambda: subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
        self._rest = b""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_TRY_S)
            assert self._process.stderr is not None
            words = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            self.close()
            raise OSError(f"{self.name}: {words[0] if words else 'it ended at once'}")
        os.set_blocking(self.fileno(), False)

    def fileno(self) -> int:
        """Of its output."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def take(self) -> tuple[list[str], int, str]:
        """Whole lines that are there now."""
        try:
            content = os.read(self.fileno(), 1 << 20)
        except BlockingIOError:
            return [], 0, ""
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace") for line in lines], 0, "" if content else f"{self.name} has ended"

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


Source = Kmsg | LogCommand


@dataclass(frozen=True)
class KernelRecords:
    """What was read at once."""

    records: list[KernelLine]
    dropped: int = 0  # left out, because there were more than may be passed on
    overruns: int = 0  # how often the kernel had overwritten records before they were read


class KernelLog:
    """Follows the log from now on; never blocks.

    Args:
        per_s, burst: how many records are passed on, for long and at once; warnings and worse go first.
        keep: how many of the last records `since` knows.

    Attributes:
        source: what is followed; empty: nothing.
        problem: why nothing is followed, or not the best; empty: all is well.
    """

    def __init__(
        self,
        sources: Sequence[Callable[[], Source]],
        *,
        per_s: float = 50.0,
        burst: int = 500,
        keep: int = 2000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._per_s, self._burst = per_s, burst
        self._allowed, self._counted_s = float(burst), clock()
        self._kept: deque[tuple[float, KernelLine]] = deque(maxlen=keep)
        self._source: Source | None = None
        problems = []
        for make in sources:
            try:
                self._source = make()
                break
            except OSError as error:
                problems.append(str(error))
        self.source = self._source.name if self._source is not None else ""
        self.problem = "; ".join(problems)

    def fileno(self) -> int:
        """Readable when `read` may find something; -1: nothing is followed."""
        return -1 if self._source is None else self._source.fileno()

    def read(self) -> KernelRecords:
        """What has been written since the last call."""
        if self._source is None:
            return KernelRecords([])
        contents, overruns, ended = self._source.take()
        if ended:
            self.close()
            self.problem = ended
        parsed = (parse_line(content) for content in contents)
        records = passed = [record for record in parsed if record is not None]
        now_s = self._clock()
        self._allowed = min(float(self._burst), self._allowed + (now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        room = int(self._allowed)
        if len(records) > room:
            worst = sorted(range(len(records)), key=lambda index: (records[index].level > _WARNING, index))[:room]
            passed = [records[index] for index in sorted(worst)]
        self._allowed -= len(passed)
        self._kept.extend((now_s, record) for record in passed)
        return KernelRecords(passed, len(records) - len(passed), overruns)

    def since(self, at_s: float) -> list[str]:
        """Lines of the kernel read at or after this time of the clock, the oldest first."""
        return [record.text for read_s, record in self._kept if read_s >= at_s and record.is_kernel]

    def close(self) -> None:
        """Stop following."""
        if self._source is not None:
            self._source.close()
            self._source = None


def open_sources(start: StartChild = lambda make: make()) -> list[Callable[[], Source]]:
    """The ways of following the log on this host, the best first."""
    return [Kmsg, *(partial(LogCommand, command, start) for command in _COMMANDS)]
