"""A template process that stays: it imports once and starts attempt after attempt; see `phalanx.launch.warm_template`.

Every rank is the leader of a session of its own, as torchrun has it. A process that has ended is reaped only when its
attempt is over, so that its number, which is that of its session, is nobody else's while what it has left is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from phalanx.ipc.processes import die_with_parent, is_dying, name_process, why_not_fork
from phalanx.launch.bytecode import kept_bytecode
from phalanx.launch.launch_messages import (
    Broken,
    Exited,
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
from phalanx.launch.optimizer_hook import import_learnt, stamps
from phalanx.launch.rank_failures import failure_of_exception
from phalanx.launch.template import (
    POLL_S,
    Child,
    descriptors_of,
    execute_child,
    fork_child,
    held_for,
    import_all,
    without_collections,
)

# What every rank of a script would import else.
_OF_RANKS = ("phalanx.launch.user_script",)


def serve_staying(launcher_fd: int, launcher: int) -> None:
    """Serve the process `launcher`, at the other end of the socket `launcher_fd`, until it hangs up."""
    die_with_parent(launcher)
    name_process("phalanx template")
    line = Line(socket.socket(fileno=launcher_fd))
    with contextlib.suppress(LineGoneError):
        prepare, _ = line.receive()
        assert isinstance(prepare, Prepare)
        base = list(sys.path)
        try:
            prepared = _prepare(prepare)
        except BaseException as error:
            line.send(Broken(failure_of_exception(0, time.monotonic_ns(), error)))
            return
        line.send(prepared)
        _Template(line, base, may_fork=prepared.fork_refused is None).run()


def _prepare(prepare: Prepare) -> Prepared:
    """Import everything as the script would."""
    sys.path.insert(0, prepare.path_entry)
    sys.argv[:] = prepare.argv
    with kept_bytecode(prepare.bytecode):
        import_all((*_OF_RANKS, *prepare.modules))
        fork_refused = why_not_fork(sys.modules)
        with without_collections():
            refused = import_learnt(prepare.learnt) if fork_refused is None else []
    if fork_refused is None and not refused and why_not_fork(sys.modules) is not None:
        refused = list(prepare.learnt)  # what did it could not be told
    import_all(())
    return Prepared(fork_refused, refused, stamps(sys.modules))


@dataclass
class _Attempt:
    """The processes of one attempt, by rank.

    Attributes:
        killed: that were told to end here, and were not ending by then.
    """

    children: dict[int, Child] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)

    def running(self) -> list[Child]:
        return [child for rank, child in self.children.items() if rank not in self.ended]


class _Template:
    """Looks after all attempts, and does what it is told, until the launcher is gone."""

    def __init__(self, line: Line, path: Sequence[str], *, may_fork: bool) -> None:
        self._line, self._path, self._may_fork = line, path, may_fork
        self._attempts: dict[int, _Attempt] = {}

    def run(self) -> None:
        """Raises LineGoneError when the launcher is."""
        try:
            while True:
                self._wait()
        finally:
            for attempt in self._attempts.values():
                _kill(attempt)

    def _wait(self) -> None:
        children = self._children()
        sources: list[Any] = [self._line.fileno(), *(source for child in children for source in child.sources())]
        polled = any(child.pidfd is None for child in children)
        ready = wait(sources, POLL_S if polled else None)
        if self._line.fileno() in ready:
            message, descriptors = self._line.receive()
            self._obey(message, descriptors)
        for number, attempt in list(self._attempts.items()):
            self._hear(number, attempt)

    def _children(self) -> list[Child]:
        """Those that have not ended."""
        return [child for attempt in self._attempts.values() for child in attempt.running()]

    def _obey(self, message: Any, descriptors: list[int]) -> None:
        if isinstance(message, Spawn):
            self._spawn(message, descriptors)
        elif isinstance(message, SendTo):
            for child in self._attempts.get(message.attempt, _Attempt()).running():
                if child.rank in message.ranks:
                    os.kill(child.pid, message.signal)
        elif isinstance(message, Kill):
            if message.attempt in self._attempts:
                self._hear(message.attempt, self._attempts[message.attempt])  # who is gone already was not killed here
            if (attempt := self._attempts.get(message.attempt)) is not None:
                # A large process that somebody has killed stays for a while, until its memory is freed.
                attempt.killed |= {child.rank for child in attempt.running() if not is_dying(child.pid)}
                _kill(attempt)
            else:
                self._line.send(Over(message.attempt))

    def _spawn(self, spawn: Spawn, descriptors: list[int]) -> None:
        """Start all processes of an attempt, or none."""
        begin_ns = time.monotonic_ns()
        attempt = self._attempts[spawn.attempt] = _Attempt()
        specs = [_with_descriptors(spec, descriptors, self._path) for spec in spawn.specs]
        try:
            for spec in specs:
                attempt.children[spec.worker.rank] = self._start(spec, begin_ns, descriptors, fork=spawn.fork)
        except OSError as error:
            _kill(attempt)
            self._line.send(Spawned(spawn.attempt, {}, f"{type(error).__name__}: {error}"))
        else:
            pids = {rank: child.pid for rank, child in attempt.children.items()}
            self._line.send(Spawned(spawn.attempt, pids))
        for descriptor in descriptors:  # an end is seen by others only when nobody else holds it open
            os.close(descriptor)

    def _start(self, spec: RankSpec, begin_ns: int, descriptors: list[int], *, fork: bool) -> Child:
        if not (fork and self._may_fork):
            return execute_child(spec, begin_ns, own_session=True)
        mine = descriptors_of(spec)
        others = [descriptor for descriptor in descriptors if descriptor not in mine]
        children = [child for attempt in self._attempts.values() for child in attempt.children.values()]
        return fork_child(spec, begin_ns, [self._line.fileno(), *others, *held_for(children)], own_session=True)

    def _hear(self, number: int, attempt: _Attempt) -> None:
        """Pass on what the processes of an attempt have said, and that they have ended."""

        def say(word: Any) -> None:
            self._line.send(Of(number, word))

        for child in attempt.running():
            child.pass_words_on(say)
            if (code := child.peek()) is not None:
                child.pass_words_on(say)  # the last ones, written before it ended
                attempt.ended.add(child.rank)
                say(Exited(child.rank, time.monotonic_ns(), code, child.rank in attempt.killed))
        if not attempt.running():
            self._bury(attempt)
            del self._attempts[number]
            self._line.send(Over(number))

    @staticmethod
    def _bury(attempt: _Attempt) -> None:
        """Kill what the processes have left in their groups, then reap them."""
        _kill(attempt)
        for child in attempt.children.values():
            child.poll()
            child.close()


def _kill(attempt: _Attempt) -> None:
    """All at once, with the process groups that they lead; a new process leads one in a moment only."""
    for child in attempt.children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def _with_descriptors(spec: RankSpec, descriptors: Sequence[int], path: Sequence[str]) -> RankSpec:
    """A spec as it is in this process: descriptors in place of their places, and the whole of `sys.path`."""
    output = None if spec.output_fd is None else descriptors[spec.output_fd]
    listen = None if spec.worker.listen_fd is None else descriptors[spec.worker.listen_fd]
    return replace(spec, output_fd=output, worker=replace(spec.worker, listen_fd=listen), path=[*spec.path, *path])
