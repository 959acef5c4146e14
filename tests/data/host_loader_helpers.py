"""A corpus with everything in it, loader processes, and forks, for the tests of one loader per host."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
from data_helpers import lines, make_config, write_jsonl, write_text

from phalanx.data.batch import Batch
from phalanx.data.config import SourceConfig
from phalanx.data.host_loader import HostLoader, start_host_loader
from phalanx.data.loader import Loader
from phalanx.data.prepare import prepare

LIMIT_S = 120.0  # for what must happen at once


def make_corpus(folder: Path) -> Loader:
    """Two sources, one of them with prompts that have no loss, several documents in a sample."""
    text = write_text(folder / "text.txt", lines(300))
    records = [{"q": f"question {i}", "text": f"answer {i}"} for i in range(200)]
    questions = write_jsonl(folder / "qa.jsonl", records)
    sources = (
        SourceConfig(kind="text", path=str(text), document_separator="\n", weight=2.0),
        SourceConfig(kind="jsonl", path=str(questions), prompt_field="q", weight=1.0),
    )
    config = make_config(folder, sources=sources)
    return Loader(prepare(config, workers=1), config)


def started(loader: Loader, indices: list[int], **settings: Any) -> HostLoader:
    settings = {"method": "fork"} | settings
    return start_host_loader(loader.prepared, loader.config, indices=indices, **settings)


def same(one: Batch, other: Batch) -> bool:
    pairs = list(zip(vars(one).values(), vars(other).values(), strict=True))
    return all(
        (a is None and b is None) or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)) for a, b in pairs
    )


def ended(pid: int) -> bool:
    """Wait until a process that may be nobody's child of ours is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with contextlib.closing(os.fdopen(descriptor)):
        return bool(wait([descriptor], LIMIT_S))


def count_of(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def memory_descriptors(pid: int) -> int:
    """How many descriptors of memory without a name a process holds."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += str(link.readlink()).startswith("/memfd:phalanx")
    return found


@contextlib.contextmanager
def forked(body: Callable[[Connection], None]) -> Iterator[tuple[int, Connection]]:
    """Run `body` in a fork of this process; its process id, and a connection to it. Killed at the end."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            body(theirs)
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield pid, ours
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()


def heard(connection: Connection) -> Any:
    assert connection.poll(LIMIT_S), "nothing was said in time"
    return connection.recv()
