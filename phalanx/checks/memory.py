"""What a check remembers of this host from one time to the next: a small file each. Torch-free.

A file takes the place of the one before at once. It is not forced to the disk: after a power failure the memory is lost
and is learnt again, and a check that only reads must not wait for a disk.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def recall(cache: Path, name: str) -> dict[str, Any]:
    """What `remember` has written last; empty where there is nothing that can be read."""
    try:
        value = json.loads((cache / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def remember(cache: Path, name: str, value: dict[str, Any]) -> None:
    """Keep `value` for the next time, all at once; where the folder cannot be written, it is forgotten."""
    aside = cache / f".{name}.{os.getpid()}"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(value))
        aside.replace(cache / f"{name}.json")
