"""A host with a warm template, for tests: attempts of a script in real processes, and what is said of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.launch.cores import Share
from phalanx.launch.environment import without_worker
from phalanx.launch.launch_messages import Exited, Over
from phalanx.launch.rendezvous_store import open_store_socket, store_spec
from phalanx.launch.user_script import Group, Places, Script, rank_specs
from phalanx.launch.warm_template import PRELOAD, AttemptReport, Gone, WarmTemplate

GUARD_S = 240.0
LOOPBACK = "127.0.0.1"
PRELOAD_TO_TRAIN = (*PRELOAD, "torch._dynamo")
"""torch's optimizers import the latter in their first step: each rank by itself, until a template has learnt it."""


@dataclass
class Attempt:
    """One attempt: process ids, lines as they come, and words."""

    number: int
    pids: dict[int, int] = field(default_factory=dict)
    lines: dict[int, asyncio.StreamReader] = field(default_factory=dict)
    pages: list[str] = field(default_factory=list)

    async def line(self, rank: int) -> str:
        """The next line that a rank wrote; empty at the end."""
        return (await asyncio.wait_for(self.lines[rank].readline(), GUARD_S)).decode().rstrip("\n")

    async def rest(self, rank: int) -> str:
        """All that a rank writes until it, and what it has started, is gone."""
        return (await asyncio.wait_for(self.lines[rank].read(), GUARD_S)).decode()


@dataclass
class Host:
    """The executor's part."""

    folder: Path
    script: Script
    environ: Mapping[str, str]
    options: dict[str, Any]
    words: list[tuple[int, AttemptReport]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.template = WarmTemplate(self.script, self.environ, self._hear, **self.options)
        self.template.start()

    def _hear(self, attempt: int, word: AttemptReport) -> None:
        self.words.append((attempt, word))
        self._note = asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def spawn(
        self, number: int, ranks: Sequence[int] = (0, 1), *, store: bool = False, group: Group | None = None
    ) -> Attempt:
        """Start an attempt, with a store if one is wanted, and a page for every rank."""
        attempt = Attempt(number, pages=[str(self.folder / f"page-{number}-{rank}") for rank in ranks])
        listener = open_store_socket(LOOPBACK)
        port = listener.getsockname()[1]
        group = group or Group(number, ranks, len(ranks), 0, 1, LOOPBACK, port, restarts=number - 1)
        ends = {rank: os.pipe() for rank in ranks}
        shares = [Share(None, 1)] * len(ranks)
        places = Places(shares, [theirs for _, theirs in ends.values()], attempt.pages)
        specs = rank_specs(self.script, group, places, self.environ)
        extra = [store_spec(listener, len(ranks), self.environ)] if store else []
        try:
            attempt.pids = await asyncio.wait_for(self.template.spawn(number, [*extra, *specs]), GUARD_S)
        finally:
            listener.close()
            for _, theirs in ends.values():
                os.close(theirs)
        for rank, (ours, _) in ends.items():
            attempt.lines[rank] = await _reader(ours)
        return attempt

    def of(self, attempt: int, kind: type) -> list[Any]:
        """The words of one kind, in order."""
        return [word for number, word in self.words if number == attempt and isinstance(word, kind)]

    async def until(self, attempt: int, kind: type, count: int = 1) -> list[Any]:
        """Wait for so many words of one kind."""
        async with asyncio.timeout(GUARD_S), self.changed:
            await self.changed.wait_for(lambda: len(self.of(attempt, kind)) >= count)
        return self.of(attempt, kind)

    async def end(self, attempt: Attempt) -> dict[int, int]:
        """Wait until all ranks have ended by themselves, end the rest; the codes by rank."""
        ranks = [rank for rank in attempt.pids if rank >= 0]
        async with asyncio.timeout(GUARD_S), self.changed:
            await self.changed.wait_for(
                lambda: (
                    {word.rank for word in self.of(attempt.number, Exited)} >= set(ranks)
                    or self.of(attempt.number, Gone)
                )
            )
        codes = {word.rank: word.code for word in self.of(attempt.number, Exited) if word.rank >= 0}
        await asyncio.wait_for(self.template.kill(attempt.number), GUARD_S)
        await self.until(attempt.number, Over)
        return codes


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    return reader


@asynccontextmanager
async def host(
    folder: Path,
    source: str = "",
    arguments: Sequence[str] = (),
    *,
    name: str = "script.py",
    is_module: bool = False,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Host]:
    """A host whose script is `source`; without torch unless `preload` says so."""
    if source:
        (folder / name).write_text(source)
    script = Script(name.removesuffix(".py") if is_module else name, arguments, is_module, str(folder))
    environ = without_worker(os.environ) if environ is None else environ
    here = Host(folder, script, environ, {"preload": (), "learnt": (), **options})
    try:
        yield here
    finally:
        await asyncio.wait_for(here.template.close(), GUARD_S)


def is_gone(pid: int) -> bool:
    """Whether no such process is left, zombies aside."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until_gone(pids: Iterable[int]) -> None:
    """Wait for the end of processes: one that is dying closes its pipes before it counts as dead."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), GUARD_S)
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
