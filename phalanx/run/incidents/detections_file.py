"""What judges have found in a job: ``RUN/detections.jsonl``, a line each, for pages, histories of hosts and programs.

for kept in read_detections(Path("runs/night")):
    print(kept.judge, kept.found.sentence, kept.found.blamed_hosts)
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from phalanx.core.files import read_regular
from phalanx.run.decide.actions import KeepDetection
from phalanx.run.incidents.report import Scrub

NAME = "detections.jsonl"

_MOST_BYTES = 64 << 20


class DetectionsFile:
    """Appends to it, for one thread.

    What is there already is not added again: a driver that was restarted does it twice, to be sure.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: int | None = None

    def add(self, kept: KeepDetection, scrub: Scrub) -> None:
        """Add what was found.

        Raises:
            OSError: it cannot be written.
        """
        if self._last is None:
            self._last = max((one.number for one in read_detections(self._folder)), default=0)
        if kept.number <= self._last:
            return
        line = scrub(msgspec.json.encode(kept).decode()) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._folder / NAME, flags, 0o644)
        try:
            os.write(descriptor, line.encode(errors="replace"))
        finally:
            os.close(descriptor)
        self._last = kept.number


def read_detections(folder: Path) -> list[KeepDetection]:
    """All of a job, the oldest first; empty: there are none, or the file cannot be read."""
    found = []
    with suppress(OSError, ValueError):
        for line in read_regular(folder / NAME, _MOST_BYTES).splitlines():
            with suppress(msgspec.DecodeError):  # being written, or of another version
                found.append(msgspec.json.decode(line, type=KeepDetection))
    return found
