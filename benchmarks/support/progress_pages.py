"""One look at a rank's progress page."""

from __future__ import annotations

import contextlib
import os

from phalanx.core.progress import Progress, ProgressReader


def read_progress(path: str | os.PathLike[str]) -> Progress | None:
    with contextlib.closing(ProgressReader(path)) as reader:
        return reader.read()
