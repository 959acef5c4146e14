"""A module that starts a thread when it is imported, so that no template that holds it can be forked."""

from __future__ import annotations

import threading
from pathlib import Path

from phalanx.launch.environment import Worker

threading.Thread(target=threading.Event().wait, daemon=True).start()


def note_phases(worker: Worker, folder: str) -> None:
    Path(folder, str(worker.rank)).write_text(" ".join(worker.phases_s))
