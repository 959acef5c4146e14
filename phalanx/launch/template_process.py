"""The launcher's end of one template process that stays, on an asyncio loop."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import phalanx
from phalanx.core.errors import UserError
from phalanx.launch.launch_messages import (
    Broken,
    Kill,
    Line,
    LineGoneError,
    Of,
    Over,
    Prepare,
    Prepared,
    RankSpec,
    SendTo,
    Spawn,
    Spawned,
)
from phalanx.launch.rank_failures import Failure, signal_name

# NumPy's OpenBLAS starts its threads on import, and torch may look for devices through the driver: neither is for a
# process that is to be forked.
_QUIET = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

_END_S = 5.0


class TemplateGoneError(Exception):
    """A template process has ended, and all of its ranks with it."""


class TemplateProcess:
    """One template process, from its start on. For the loop's thread, which must be the one that starts processes for
    as long as these are to live: the kernel ends a child with the thread that made it.

    Args:
        prepare: what it imports.
        environ, folder: its environment and working directory.
        hear: called with what is said of attempts: `Of`, `Over`.
        gone: called once it has hung up, with the attempts that it had.
    """

    def __init__(
        self,
        prepare: Prepare,
        environ: Mapping[str, str],
        folder: str,
        hear: Callable[[Of | Over], None],
        gone: Callable[[TemplateProcess, list[int]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hear, self._gone = hear, gone
        self.tried = frozenset(prepare.learnt)
        self.ready: asyncio.Future[Prepared] = self._loop.create_future()
        self._spawned: dict[int, asyncio.Future[Spawned]] = {}
        self._over: dict[int, asyncio.Future[None]] = {}
        self._retired = False
        self.is_gone = False
        self._line, self._popen = _start(environ, folder)
        self._loop.add_reader(self._line.fileno(), self._read)
        self._tell(prepare)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._popen.pid

    @property
    def attempts(self) -> list[int]:
        """Those of which processes are left."""
        return list(self._over)

    def is_running(self) -> bool:
        """Whether there is still something to wait for."""
        return self._popen.poll() is None

    async def spawn(self, attempt: int, specs: Sequence[RankSpec], *, fork: bool) -> Spawned:
        """Start the processes of an attempt; the descriptors in `specs` stay open here.

        Raises:
            TemplateGoneError: it has ended.
        """
        placed, descriptors = _placed(specs)
        self._spawned[attempt] = self._loop.create_future()
        self._over[attempt] = self._loop.create_future()
        self._tell(Spawn(attempt, placed, fork), descriptors)
        return await self._spawned[attempt]

    def send(self, attempt: int, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks of an attempt; nothing where they are gone."""
        self._tell(SendTo(attempt, ranks, number))

    async def kill(self, attempt: int) -> None:
        """Kill all processes of an attempt at once; returns when the last has been reaped."""
        over = self._over.get(attempt)
        if over is not None:
            self._tell(Kill(attempt))
            await asyncio.shield(over)

    def retire(self) -> None:
        """End it once the attempts that it has are over."""
        self._retired = True
        if not self._over:
            self._end()

    async def close(self) -> None:
        """End it now, and all ranks with it; returns when it is gone."""
        self._end()
        try:
            await asyncio.to_thread(self._popen.wait, _END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            await asyncio.to_thread(self._popen.wait)

    def _end(self) -> None:
        """Hang up: it kills its ranks and leaves; one that has none need not come so far."""
        if not self.is_gone:
            self.is_gone = True
            if not self._over:
                self._popen.kill()
            self._loop.remove_reader(self._line.fileno())
            self._line.close()
            self._fail_waiting(TemplateGoneError("it was ended"))

    def _tell(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        if self.is_gone:
            raise TemplateGoneError("the template process has ended")
        try:
            self._line.send(message, descriptors)
        except LineGoneError as error:
            self._hung_up()
            raise TemplateGoneError(str(error)) from error

    def _read(self) -> None:
        try:
            while not self.is_gone:
                self._take(self._line.receive()[0])
        except BlockingIOError:
            return
        except LineGoneError:
            self._hung_up()

    def _take(self, message: Any) -> None:
        if isinstance(message, Prepared):
            self.ready.set_result(message)
        elif isinstance(message, Broken):
            self.ready.set_exception(_broken(message.failure))
        elif isinstance(message, Spawned):
            self._spawned.pop(message.attempt).set_result(message)
        elif isinstance(message, Over):
            self._over.pop(message.attempt).set_result(None)
            self._hear(message)
            if self._retired and not self._over:
                self._end()
        else:
            assert isinstance(message, Of)
            self._hear(message)

    def _hung_up(self) -> None:
        """It has ended by itself, or cannot be told anything any more."""
        if self.is_gone:
            return
        attempts = self.attempts
        self.is_gone = True
        self._loop.remove_reader(self._line.fileno())
        self._line.close()
        self._popen.kill()
        code = self._popen.wait()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit status {code}"
        self._fail_waiting(TemplateGoneError(f"the template process {how}"))
        self._gone(self, attempts)

    def _fail_waiting(self, error: TemplateGoneError) -> None:
        unanswered: list[asyncio.Future[Any]] = [self.ready, *self._spawned.values()]
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody need be waiting for it
        for over in self._over.values():
            over.set_result(None)  # the kernel has killed all ranks with their template
        self._over.clear()


def _start(environ: Mapping[str, str], folder: str) -> tuple[Line, subprocess.Popen]:
    """A new Python, in a process group of its own so that Ctrl-C does not reach it.

    Its `sys.path` is what a script would have there behind its own folder; this package comes last.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    home = str(Path(phalanx.__file__).parent.parent)
    program = (
        "import sys\n"
        "sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]\n"
        f"sys.path += [] if {home!r} in sys.path else [{home!r}]\n"
        "from phalanx.launch.persistent_template import serve_staying\n"
        f"serve_staying({theirs.fileno()}, {os.getpid()})\n"
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**environ, **_QUIET},
            cwd=folder,
            pass_fds=[theirs.fileno()],
            process_group=0,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        ours.close()
        raise UserError(
            f"cannot be worked in ({error.strerror})", cure="name a folder that is there", field="folder", value=folder
        ) from error
    finally:
        theirs.close()
    ours.setblocking(False)
    return Line(ours), process


def _placed(specs: Sequence[RankSpec]) -> tuple[list[RankSpec], list[int]]:
    """The specs with descriptors named by their place in the list that travels beside them."""
    descriptors: list[int] = []

    def place(descriptor: int | None) -> int | None:
        if descriptor is None:
            return None
        descriptors.append(descriptor)
        return len(descriptors) - 1

    placed = [
        replace(
            spec,
            output_fd=place(spec.output_fd),
            worker=replace(spec.worker, listen_fd=place(spec.worker.listen_fd)),
        )
        for spec in specs
    ]
    return placed, descriptors


def _broken(failure: Failure) -> UserError:
    """Why the template could not import what the ranks need."""
    return UserError(
        f"the template process cannot import what ranks need: {failure.summary}\n{failure.text}".rstrip(),
        cure="install it, or leave it out of preload",
    )
