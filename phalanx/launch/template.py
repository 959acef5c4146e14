"""The template process: imports everything once and forks the ranks, so that N ranks do not import torch N times.

It must hold one thread only and touch no device, or the forked ranks could not work; where that cannot be had, each
rank is a new Python instead, which imports for itself. The template waits for the ranks, reports how they end, and
passes signals on, so the launcher needs to know nothing of how they were made. When the launcher is gone, so are they.

There are two kinds. `serve` starts the ranks of one job, cold (`phalanx.launch.local_ranks`). `serve_staying` starts
attempt after attempt, warm (`phalanx.launch.warm_template`): there every rank is the leader of a session of its own, as
torchrun has it, and a process that has ended is reaped only when its attempt is over, so that its number, which is that
of its session, is given to no other process while what it has left is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from phalanx.ipc.processes import die_with_parent, is_dying, name_process, why_not_fork
from phalanx.launch import launch_messages as messages
from phalanx.launch.bytecode import kept_bytecode
from phalanx.launch.launch_messages import HungUpError, MessageSocket, RankSpec
from phalanx.launch.learnt_imports import import_learnt, stamps
from phalanx.launch.rank_failures import failure_of_exception
from phalanx.launch.rank_process import RankProcess, descriptors_of, execute_rank, fork_rank, sources_of


def serve(launcher_fd: int, launcher: int) -> None:
    """Serve the process `launcher`, at the other end of the socket `launcher_fd`, until it hangs up."""
    die_with_parent(launcher)
    name_process("phalanx template")
    connection = Connection(launcher_fd)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        modules = connection.recv()
        try:
            _import_all(modules)
        except BaseException as error:
            connection.send(messages.Broken(failure_of_exception(0, time.monotonic_ns(), error)))
            return
        refused = why_not_fork(sys.modules)
        connection.send(messages.Ready(refused))
        specs, may_fork = connection.recv()
        _run(connection, specs, fork=may_fork and refused is None)


def _run(connection: Connection, specs: Sequence[RankSpec], *, fork: bool) -> None:
    """Start the ranks; then pass on signals, reports and ends until all are gone, or the launcher is (EOFError)."""
    started: list[RankProcess] = []
    begin_ns = time.monotonic_ns()
    try:
        for spec in specs:
            if fork:
                others = descriptors_of(*(other for other in specs if other is not spec))
                started.append(fork_rank(spec, begin_ns, [connection.fileno(), *others], started))
            else:
                started.append(execute_rank(spec, begin_ns))
        for descriptor in descriptors_of(*specs):  # others see an end only when no process holds it open
            os.close(descriptor)
        running = {process.rank: process for process in started}
        while running:
            sources, timeout_s = sources_of(list(running.values()))
            ready = wait([connection, *sources], timeout_s)
            if connection in ready:
                message = connection.recv()
                assert isinstance(message, messages.Send)
                for rank in message.ranks:
                    if rank in running:
                        running[rank].signal(message.signal)
            for process in list(running.values()):
                process.forward(connection.send)
                if (process.pidfd is None or process.pidfd in ready) and (code := process.poll()) is not None:
                    del running[process.rank]
                    process.forward(connection.send)  # the last reports, written before it ended
                    connection.send(messages.Exited(process.rank, time.monotonic_ns(), code))
                    process.close()
    finally:
        for process in started:
            process.signal(signal.SIGKILL)


def _import_all(modules: Sequence[str]) -> None:
    """Import `modules`, and keep what they made out of the garbage collector's way."""
    with _without_collections():
        for name in modules:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would else write to, and so copy, every page with an object on it


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """For imports: what they make stays, and looking through it for garbage again and again is an eighth of torch's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# A template that stays

_OF_RANKS = ("phalanx.launch.user_script",)  # what every rank of a script would import else


def serve_staying(launcher_fd: int, launcher: int) -> None:
    """Serve the process `launcher`, at the other end of the socket `launcher_fd`, until it hangs up."""
    die_with_parent(launcher)
    name_process("phalanx template")
    launcher_socket = MessageSocket(socket.socket(fileno=launcher_fd))
    with contextlib.suppress(HungUpError):
        prepare, _ = launcher_socket.receive()
        base = list(sys.path)
        try:
            prepared = _prepare(prepare)
        except BaseException as error:
            launcher_socket.send(messages.Broken(failure_of_exception(0, time.monotonic_ns(), error)))
            return
        launcher_socket.send(prepared)
        _StayingTemplate(launcher_socket, base, may_fork=prepared.fork_refused is None).run()


def _prepare(prepare: messages.Prepare) -> messages.Prepared:
    """Import everything as the script would."""
    sys.path.insert(0, prepare.path_entry)
    sys.argv[:] = prepare.argv
    with kept_bytecode(prepare.bytecode):
        _import_all((*_OF_RANKS, *prepare.modules))
        fork_refused = why_not_fork(sys.modules)
        with _without_collections():
            refused = import_learnt(prepare.learnt) if fork_refused is None else []
    if fork_refused is None and not refused and why_not_fork(sys.modules) is not None:
        refused = list(prepare.learnt)  # which of them did it is not known
    _import_all(())
    return messages.Prepared(fork_refused, refused, stamps(sys.modules))


@dataclass
class _Attempt:
    """The processes of one attempt, by rank."""

    processes: dict[int, RankProcess] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)  # on request, those that were not ending by then

    def running(self) -> list[RankProcess]:
        return [process for rank, process in self.processes.items() if rank not in self.ended]

    def kill(self, spared: Sequence[int] = ()) -> None:
        """All at once, with the process groups that they lead; a new process leads one in a moment only."""
        for process in (process for rank, process in self.processes.items() if rank not in spared):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


class _StayingTemplate:
    def __init__(self, launcher: MessageSocket, path: Sequence[str], *, may_fork: bool) -> None:
        self._launcher, self._path, self._may_fork = launcher, path, may_fork
        self._attempts: dict[int, _Attempt] = {}

    def run(self) -> None:
        """Look after all attempts, and do what the launcher asks; raises HungUpError when it is gone."""
        try:
            while True:
                running = [process for attempt in self._attempts.values() for process in attempt.running()]
                sources, timeout_s = sources_of(running)
                ready = wait([self._launcher.fileno(), *sources], timeout_s)
                if self._launcher.fileno() in ready:
                    self._handle(*self._launcher.receive())
                for number, attempt in list(self._attempts.items()):
                    self._forward(number, attempt)
        finally:
            for attempt in self._attempts.values():
                attempt.kill()

    def _handle(self, message: Any, descriptors: list[int]) -> None:
        if isinstance(message, messages.Spawn):
            self._spawn(message, descriptors)
        elif isinstance(message, messages.SendTo):
            for process in self._attempts.get(message.attempt, _Attempt()).running():
                if process.rank in message.ranks:
                    os.kill(process.pid, message.signal)
        elif isinstance(message, messages.Kill):
            if message.attempt in self._attempts:
                self._forward(message.attempt, self._attempts[message.attempt])  # what is gone was not killed here
            if (attempt := self._attempts.get(message.attempt)) is not None:
                # A large process that somebody has killed stays for a while, until its memory is freed.
                running = [process for process in attempt.running() if process.rank not in message.spared]
                attempt.killed |= {process.rank for process in running if not is_dying(process.pid)}
                attempt.kill(message.spared)
            else:
                self._launcher.send(messages.Over(message.attempt))

    def _spawn(self, spawn: messages.Spawn, descriptors: list[int]) -> None:
        """Start all processes of an attempt, or none."""
        begin_ns = time.monotonic_ns()
        others = [process for attempt in self._attempts.values() for process in attempt.processes.values()]
        attempt = self._attempts[spawn.attempt] = _Attempt()
        try:
            for placed in spawn.specs:
                spec = _with_descriptors(placed, descriptors, self._path)
                if self._may_fork and (spawn.fork or not spec.fresh):
                    own = descriptors_of(spec)
                    foreign = [descriptor for descriptor in descriptors if descriptor not in own]
                    before = [*others, *attempt.processes.values()]
                    foreign = [self._launcher.fileno(), *foreign]
                    process = fork_rank(spec, begin_ns, foreign, before, own_session=True)
                else:
                    process = execute_rank(spec, begin_ns, own_session=True)
                attempt.processes[spec.worker.rank] = process
        except OSError as error:
            attempt.kill()
            self._launcher.send(messages.Spawned(spawn.attempt, {}, f"{type(error).__name__}: {error}"))
        else:
            pids = {rank: process.pid for rank, process in attempt.processes.items()}
            self._launcher.send(messages.Spawned(spawn.attempt, pids))
        for descriptor in descriptors:  # others see an end only when no process holds it open
            os.close(descriptor)

    def _forward(self, number: int, attempt: _Attempt) -> None:
        """Pass on what the processes of an attempt have reported, and that they have ended."""

        def send(report: Any) -> None:
            self._launcher.send(messages.Of(number, report))

        for process in attempt.running():
            process.forward(send)
            if (code := process.peek()) is not None:
                process.forward(send)  # the last reports, written before it ended
                attempt.ended.add(process.rank)
                is_killed = process.rank in attempt.killed
                send(messages.Exited(process.rank, time.monotonic_ns(), code, is_killed))
        if not attempt.running():
            attempt.kill()  # what the processes have left in their groups
            for process in attempt.processes.values():
                process.poll()
                process.close()
            del self._attempts[number]
            self._launcher.send(messages.Over(number))


def _with_descriptors(spec: RankSpec, descriptors: Sequence[int], path: Sequence[str]) -> RankSpec:
    """A spec as it is in this process: descriptors in place of their places, and the whole of `sys.path`."""
    output = None if spec.output_fd is None else descriptors[spec.output_fd]
    listen = None if spec.worker.listen_fd is None else descriptors[spec.worker.listen_fd]
    return replace(spec, output_fd=output, worker=replace(spec.worker, listen_fd=listen), path=[*spec.path, *path])
