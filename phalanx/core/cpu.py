"""What the operating system says of this machine's processor. Torch-free."""

from __future__ import annotations

from pathlib import Path


def cpu_line(name: str) -> str:
    """What ``/proc/cpuinfo`` has first under `name`, such as ``model name``; empty where there is nothing."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""
