"""Stacks that a process writes to a file when it gets a signal, also while Python does not run in it. Torch-free."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path


def dump_signal() -> int:
    """The signal on which a process that has called `register` writes its stacks: nothing else uses it."""
    return int(signal.SIGRTMAX) - 3


def dump_beside(page: str | os.PathLike[str]) -> Path:
    """Where a rank with this progress page writes its stacks."""
    return Path(f"{os.fspath(page)}.stacks")


def register(path: Path) -> None:
    """Have this process add the stacks of all its threads to a file whenever it gets `dump_signal`.

    It does so although Python does not run. What it waits for in the kernel goes on, as after any signal that restarts
    system calls; sleeping and polling in C, which are never restarted, return early. The file stays open.

    Raises:
        OSError: it cannot be written to.
    """
    file = path.open("a")  # faulthandler keeps it
    faulthandler.register(dump_signal(), file=file, all_threads=True, chain=False)
