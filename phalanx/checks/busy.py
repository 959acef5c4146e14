"""How much other work the host does while a check measures: what it slows down says nothing about the hardware."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.kernel_files import parse_cpu_ticks, read_text

MOST_OTHER_WORK = 0.2
"""Share of the host's cores; with more of it, a value that was measured is not held against this host's own past."""


@dataclass
class OtherWork:
    """Measures, as a context, how many cores all other processes have kept busy, the hypervisor's other guests too.

    Attributes:
        cores: how many, once the block has ended; 0 where the system does not tell.
        share: of all cores of the host.
    """

    proc: Path = Path("/proc")
    cores: float = 0.0
    share: float = 0.0
    _began: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), repr=False)

    def __enter__(self) -> OtherWork:
        self._began = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s, busy_s, own_s = (now - before for now, before in zip(self._read(), self._began, strict=True))
        if wall_s > 0:
            self.cores = max(0.0, (busy_s - own_s) / wall_s)
            self.share = self.cores / (os.cpu_count() or 1)

    def _read(self) -> tuple[float, float, float]:
        own_s = sum(os.times()[:4])  # with the children that it has waited for
        return time.monotonic(), busy_seconds(read_text(self.proc / "stat") or ""), own_s


def busy_seconds(stat: str) -> float:
    """CPU time of all cores since the boot that was not idle, from /proc/stat; 0 where it is not told."""
    ticks = parse_cpu_ticks(stat)
    return ticks[0] / os.sysconf("SC_CLK_TCK") if ticks else 0.0
