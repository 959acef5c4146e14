"""The kernel's log: its lines in all formats, their times, and reading them without waiting."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_MAX_RECORD_BYTES = 8192  # the kernel gives a whole record or EINVAL; this is its own limit
_MOST_RECORDS = 1_000_000  # more than the kernel keeps: a flood does not hold a reader forever
_LEVELS = ("emerg", "alert", "crit", "err", "warn", "notice", "info", "debug")
_UNKNOWN = 6
_KERNEL = 0  # facility: what programs have written has another

_PRIORITY = re.compile(r"(?:<(\d+)>|(\w+)\s*:\s*(\w+)\s*:\s*)?")
_TIME = re.compile(
    r"(?:(?P<iso>\d{4}-\d\d-\d\dT[\d:]+(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)\s+"
    r"|\[(?P<date>[^\]]*\d:\d\d:\d\d[^\]]*)\] "
    r"|\[\s*(?P<uptime>\d+\.\d+)\](?:\[[^\]]*\])? ?(?:\S+ kernel: )?)(?P<text>.*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class KernelLine:
    """One line.

    Attributes:
        level: from 0, worst, to 7; 6 where the format does not say.
        is_kernel: the kernel has written it, rather than a program.
        sequence: its number; -1 where the format does not say.
        age_s: how long ago it was written; None: it is not known.
    """

    text: str
    level: int = _UNKNOWN
    is_kernel: bool = True
    sequence: int = -1
    age_s: float | None = None


def read_kernel_lines(dev: Path = Path("/dev")) -> list[KernelLine] | None:
    """All lines that the kernel still has, oldest first; None where this user may not read them."""
    try:
        descriptor = os.open(dev / "kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        records, _, error = take_records(descriptor, most=_MOST_RECORDS)
    finally:
        os.close(descriptor)
    if isinstance(error, PermissionError):
        return None
    return parse_lines(records, uptime_s=time.clock_gettime(time.CLOCK_MONOTONIC))


def take_records(
    descriptor: int, read: Callable[[int, int], bytes] = os.read, *, most: int
) -> tuple[list[str], int, OSError | None]:
    """Read what ``/dev/kmsg``, or what plays it, has to give now: one record at a time.

    Args:
        descriptor: does not block.
        most: records.

    Returns:
        The records; how many times some were overwritten before they were read; why no more will come, if so.
    """
    records: list[str] = []
    overruns = 0
    while len(records) < most:
        try:
            content = read(descriptor, _MAX_RECORD_BYTES)
        except BlockingIOError:
            break
        except BrokenPipeError:  # the ring went over what we had not read; reading goes on at its beginning
            overruns += 1
            continue
        except OSError as error:
            return records, overruns, error
        if not content:
            return records, overruns, OSError(errno.ENODATA, "it has ended")
        records.append(content.decode(errors="replace"))
    return records, overruns, None


def parse_lines(lines: Iterable[str], *, uptime_s: float | None = None, now_s: float | None = None) -> list[KernelLine]:
    """All lines that are not empty; what `parse_line` does not know is taken as it is.

    Args:
        uptime_s, now_s: see `parse_line`.
    """
    return [
        parse_line(line, uptime_s=uptime_s, now_s=now_s) or KernelLine(line.rstrip("\n"))
        for line in lines
        if line.strip()
    ]


def parse_line(content: str, *, uptime_s: float | None = None, now_s: float | None = None) -> KernelLine | None:
    """A record of /dev/kmsg, or a line of dmesg (raw, decoded, with dates), journalctl or a crash dump; None: no line.

    A record of /dev/kmsg is ``priority,number,microseconds,flags;text``, and may go on with lines that begin with a
    space, which describe the device.

    Args:
        uptime_s: the kernel's clock now, against which it counts.
        now_s: Unix time now, for formats with dates.
    """
    head, semicolon, rest = content.partition(";")
    fields = head.split(",")
    if semicolon and len(fields) >= 3 and all(field.isdigit() for field in fields[:3]):
        priority, number, microseconds = map(int, fields[:3])
        # The kernel writes what is not printable, and the backslash, as ``\x0a``.
        text = re.sub(r"\\x([0-9a-f]{2})", lambda match: chr(int(match[1], 16)), rest.split("\n")[0])
        return _line(text, priority, number, _since(microseconds / 1e6, uptime_s))
    line = content.rstrip("\n")
    before = _PRIORITY.match(line)
    found = _TIME.fullmatch(line, before.end() if before else 0)
    if found is None or before is None:
        return None
    age_s = _since(float(found["uptime"]), uptime_s) if found["uptime"] else _since(_unix_s(found), now_s)
    priority_text, facility, level = before.groups()
    if priority_text:
        return _line(found["text"], int(priority_text), -1, age_s)
    known = _LEVELS.index(level) if level in _LEVELS else _UNKNOWN
    return KernelLine(found["text"], known, facility in (None, "kern"), -1, age_s)


def _line(text: str, priority: int, number: int, age_s: float | None) -> KernelLine:
    return KernelLine(text, priority & 7, priority >> 3 == _KERNEL, number, age_s)


def _since(when_s: float | None, now_s: float | None) -> float | None:
    return None if when_s is None or now_s is None else now_s - when_s


def _unix_s(found: re.Match[str]) -> float | None:
    """Unix time of a line with a date; None where the date is written in a way that is not known."""
    with suppress(ValueError, OverflowError):
        if found["iso"]:
            return datetime.fromisoformat(found["iso"]).timestamp()
        return datetime.strptime(found["date"], "%a %b %d %H:%M:%S %Y").timestamp()
    return None
