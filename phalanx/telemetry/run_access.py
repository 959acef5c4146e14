"""Looking at a run whose files others own: what is closed to this user is named, and never brings down a list.

Runs of several people lie in one folder, and one of them may keep a part of a run to herself.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from phalanx.core.files import read_regular

REFUSED = "cannot be read (permission denied)"

_SMALL_MOST_BYTES = 1 << 20
_PARTS = ("config.json", "telemetry", "telemetry/live", "telemetry/steps")


def as_text(path: Path) -> str:
    """A path that can be printed and sent: bytes that are not UTF-8 as ``\\xff``."""
    return os.fsencode(path).decode(errors="backslashreplace")


def is_there(path: Path) -> bool:
    """Whether something lies there, as far as this user may know; `Path.exists` raises where it may not."""
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: Path) -> bool:
    """The same of a folder."""
    return os.path.isdir(path)  # noqa: PTH112


def is_closed(folder: Path) -> bool:
    """Whether a folder is there that this user may not look into."""
    return is_folder(folder) and not os.access(folder, os.R_OK | os.X_OK)


def refused_part(run: Path) -> str:
    """What of a run this user may not read; empty: nothing. Files below its telemetry are not looked at."""
    for name in _PARTS:
        path = run / name
        if is_closed(path) or (is_there(path) and not os.access(path, os.R_OK)):
            return f"{name} {REFUSED}"
    return ""


def read_table(path: Path) -> dict[str, Any] | None:
    """A small JSON file that holds a table; None: it is not there, or holds none."""
    try:
        found = json.loads(read_regular(path, _SMALL_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def written_at(path: Path) -> float:
    """When a file was last written, or anything put into a folder; now, if it has just been taken away."""
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
