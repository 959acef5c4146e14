"""The kernel's log: reading it without waiting, and the time of its lines. Torch-free."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_KMSG = re.compile(r"^(\d+),(\d+),(\d+),[^;]*;(.*)$")
_ISO = re.compile(r"^(?:\w+\s*:\s*\w+\s*:\s*)?(\d{4}-\d\d-\d\dT[\d:]+)(?:[.,](\d+))?([+-]\d\d:?\d\d|Z)?\s+(.*)$")
_CTIME = re.compile(r"^\[(\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})\] (.*)$")

_MAX_RECORD_BYTES = 8192


@dataclass(frozen=True)
class KernelLine:
    """One line.

    Attributes:
        age_s: how long ago it was written; None: the log does not say.
    """

    text: str
    age_s: float | None = None


def read_kernel_lines(dev: Path = Path("/dev")) -> list[KernelLine] | None:
    """All lines that the kernel still has, oldest first; None where this user may not read them."""
    try:
        descriptor = os.open(dev / "kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        records = list(_records(descriptor))
    except PermissionError:
        return None
    finally:
        os.close(descriptor)
    return parse_lines(records, uptime_s=time.clock_gettime(time.CLOCK_MONOTONIC))


def _records(descriptor: int) -> Iterable[str]:
    while True:
        try:
            record = os.read(descriptor, _MAX_RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # it was overwritten while it was read; the next read goes on behind it
            continue
        if not record:
            return
        yield record.decode(errors="replace").split("\n", 1)[0]


def parse_lines(lines: Iterable[str], *, uptime_s: float | None = None, now_s: float | None = None) -> list[KernelLine]:
    """Lines of /dev/kmsg, or of dmesg with ISO or readable times.

    Args:
        uptime_s: the kernel's clock now, against which /dev/kmsg counts.
        now_s: Unix time now, for the others.
    """
    return [_parse(line, uptime_s, now_s) for line in lines if line.strip()]


def _parse(line: str, uptime_s: float | None, now_s: float | None) -> KernelLine:
    if match := _KMSG.match(line):
        age = None if uptime_s is None else uptime_s - int(match[3]) / 1e6
        return KernelLine(match[4], age)
    if match := _ISO.match(line):
        return KernelLine(match[4], _age(datetime.fromisoformat(match[1] + (match[3] or "")), now_s))
    if match := _CTIME.match(line):
        return KernelLine(match[2], _age(datetime.strptime(match[1], "%a %b %d %H:%M:%S %Y"), now_s))
    return KernelLine(line)


def _age(when: datetime, now_s: float | None) -> float | None:
    return None if now_s is None else now_s - when.timestamp()
