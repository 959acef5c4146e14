"""Starting all ranks of a job on this host, where they write, and how they ended.

Rank 0 keeps the terminal, as a single process would have it, so that a live display works. The others' stdout and
stderr together go to the launcher's stderr line by line, each line under the mark of its rank, or into a file per rank
where a folder is given.

    launch_local ── starts ──► template ── forks ──► rank 0 … rank N-1
         ▲                        │                      │
         └── Ready, Exited … ─────┴── how it ended ◄─────┘

The launcher decides, the template does: see `phalanx.launch.template`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TextIO

from phalanx.core.addresses import stay_here
from phalanx.core.layout import Layout
from phalanx.ipc.stop_request import STOP_SIGNALS, ReceivedSignals
from phalanx.launch.cores import Share, local_shares, wanted_threads
from phalanx.launch.environment import Worker, without_worker
from phalanx.launch.launch_messages import QUIET_IMPORTS, Broken, Exited, RankSpec, Ready, Returned, Send
from phalanx.launch.rank_failures import (
    SETTLE_S,
    Ending,
    Failure,
    describe,
    failure_of_exit,
    find_culprit,
    signal_name,
)

_BLOCK_BYTES = 1 << 16
_LAST_LINES = 20


class Output:
    """What the ranks but the first write, as the launcher has it."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}  # by rank, its stdout and stderr

    def started(self) -> None:
        """The template has the descriptors now."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()

    def sources(self) -> list[int]:
        """Descriptors to wait for."""
        return []

    def read(self, ready: Collection[Any]) -> None:
        """Take what has come from those of `sources` that are ready."""

    def last_lines(self, rank: int) -> list[str]:
        """The last 20 lines that a rank wrote; empty where they are not known."""
        raise NotImplementedError

    def close(self) -> None:
        """Show the rest."""
        self.started()


class MarkedOutput(Output):
    """Every line of rank 3 becomes ``[rank 3] …`` on `stream`."""

    def __init__(self, ranks: Iterable[int], stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._ranks: dict[int, int] = {}
        self._partial: dict[int, bytes] = {}
        self._last: dict[int, deque[str]] = {}
        for rank in ranks:
            ours, self.descriptors[rank] = os.pipe()
            self._ranks[ours], self._partial[rank], self._last[rank] = rank, b"", deque(maxlen=_LAST_LINES)

    def sources(self) -> list[int]:
        """The pipes that are still open."""
        return list(self._ranks)

    def read(self, ready: Collection[Any]) -> None:
        """Show the lines that have come whole."""
        for descriptor in [source for source in self._ranks if source in ready]:
            if block := os.read(descriptor, _BLOCK_BYTES):
                self._show(self._ranks[descriptor], block)
            else:
                self._finish(descriptor)

    def last_lines(self, rank: int) -> list[str]:
        """Up to 20 lines, without their marks."""
        return list(self._last.get(rank, ()))

    def close(self) -> None:
        """Show what is left, lines that have no end too."""
        self.started()
        for descriptor in list(self._ranks):
            self._finish(descriptor)

    def _show(self, rank: int, block: bytes) -> None:
        *lines, self._partial[rank] = (self._partial[rank] + block).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").rsplit("\r", 1)[-1]  # of a line drawn over and over, the last state
            self._last[rank].append(text)
            self._stream.write(f"[rank {rank}] {text}\n")
        if lines:
            self._stream.flush()

    def _finish(self, descriptor: int) -> None:
        rank = self._ranks.pop(descriptor)
        if self._partial[rank]:
            self._show(rank, b"\n")
        os.close(descriptor)


class FileOutput(Output):
    """Rank 3 appends to ``rank-3.log`` in `folder`."""

    def __init__(self, ranks: Iterable[int], folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = {rank: folder / f"rank-{rank}.log" for rank in ranks}
        for rank, path in self._paths.items():
            self.descriptors[rank] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def last_lines(self, rank: int) -> list[str]:
        """Up to 20 lines, of this start or an earlier one."""
        if rank not in self._paths:
            return []
        with self._paths[rank].open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _BLOCK_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]


_LOOPBACK = "127.0.0.1"

# Once all ranks are gone: how long what they wrote, and the template, may take to come to an end.
_REST_S = 0.5

_SHOW_CURSOR = "\x1b[?25h"


def launch_local(
    count: int,
    target: str,
    arguments: Sequence[Any] = (),
    *,
    preload: Sequence[str] = (),
    layout: Layout | None = None,
    attempt: int = 0,
    log_folder: Path | None = None,
    threads: int | None = None,
    bind: bool = True,
    fork: bool = True,
    report: TextIO | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    settle_s: float = SETTLE_S,
) -> int:
    """Run ``target(worker, *arguments)`` in `count` new processes on this host, and wait for them.

    A rank that fails ends all within 2 s, and its traceback is written last. Signals that mean "stop soon" are passed
    on to every rank once each; ranks that then end by themselves are no failures. No rank outlives this process.

    Args:
        target: ``module:function``; what it returns is the rank's exit status, None for 0.
        arguments: handed to it pickled.
        preload: modules that the template imports before it forks, besides that of the target.
        layout: where ranks sit, for reports of errors.
        attempt: how often the job was started before; handed to the ranks.
        log_folder: the ranks but the first write to ``rank-N.log`` in it; None: to `report`, each line marked.
        threads: arithmetic threads of a rank; None: OMP_NUM_THREADS if that is set, else the cores of its share.
        bind: whether every rank is kept on its share of the cores.
        fork: False starts a new Python per rank, each of which imports for itself.
        report: where errors, and the other ranks' lines, are written; None: stderr.
        on_failure: called with the failure for which the other ranks are ended, as soon as they have been asked to, and
            again where it turns out that another one explains it.
        settle_s: how long the others go on where a rank only says that it has lost a peer, whose word is waited for.

    Returns:
        Exit status: 0; the first that a rank returned and is not 0; 2 for a `UserError` of a rank, 1 for another
        exception; 128 and the number of the signal that killed a rank, or stopped all.
    """
    if count < 1 or ":" not in target:
        raise ValueError(f"launch_local({count}, {target!r}): needs at least one rank and a target 'module:function'")
    report = sys.stderr if report is None else report
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with ExitStack() as stack:
        signals = stack.enter_context(ReceivedSignals([*STOP_SIGNALS, signal.SIGTSTP]))
        others = range(1, count)
        output = MarkedOutput(others, report) if log_folder is None else FileOutput(others, log_folder)
        stack.callback(output.close)
        store = stack.enter_context(socket.create_server((_LOOPBACK, 0), backlog=max(count, 128)))
        shares = [
            Share(share.cpus if bind else None, threads or wanted_threads(os.environ) or share.threads)
            for share in local_shares(count)
        ]
        ending = Ending(settle_s)
        job = _LocalJob(
            count, target, arguments, attempt, layout, shares, signals, output, report, store, ending, on_failure
        )
        stack.callback(job.close)
        return job.run(preload, may_fork=fork)


class _TemplateGoneError(Exception):
    """The template hung up."""


@dataclass
class _LocalJob:
    """The launcher's side of a job."""

    count: int
    target: str
    arguments: Sequence[Any]
    attempt: int
    layout: Layout | None
    shares: Sequence[Share]
    signals: ReceivedSignals
    output: Output
    report: TextIO
    store: socket.socket
    ending: Ending
    on_failure: Callable[[Failure], None] | None = None
    told: Failure | None = None
    running: set[int] = field(default_factory=set)
    statuses: dict[int, int] = field(default_factory=dict)
    forwarded: set[int] = field(default_factory=set)
    stopped_by: int = 0

    def __post_init__(self) -> None:
        self.started_s = time.monotonic()
        threads = {"OMP_NUM_THREADS": str(self.shares[0].threads)}
        self.environ = stay_here() | without_worker(os.environ) | threads
        self.output_fds = dict(self.output.descriptors)
        self.store_fd, self.store_port = self.store.fileno(), self.store.getsockname()[1]
        self.connection, self.template = _start_template(self.environ, [self.store_fd, *self.output_fds.values()])
        self.output.started()
        self.store.close()

    def run(self, preload: Sequence[str], *, may_fork: bool) -> int:
        """Start the ranks, wait for them, and return the job's exit status."""
        try:
            self._send([*preload, self.target.partition(":")[0]])
            if (status := self._start_ranks(may_fork)) is not None:
                return status
            while self.running:
                self._wait()
        except _TemplateGoneError:  # and the ranks with it
            self.running.clear()
            code = self.template.wait()
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit status {code}"
            self.report.write(f"the template process {how}; all ranks ended with it\n")
            return 128 - code if code < 0 else code or 1
        # Show what the ranks wrote before they ended, unless something they started keeps writing.
        deadline_s = time.monotonic() + _REST_S
        while (sources := self.output.sources()) and (ready := wait(sources, max(deadline_s - time.monotonic(), 0))):
            self.output.read(ready)
        return self._conclude()

    def close(self) -> None:
        """End the template, and whatever its ranks have left in its process group."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.template.pid, signal.SIGKILL)
        self.template.wait()

    def _start_ranks(self, may_fork: bool) -> int | None:
        """Wait until the template can start the ranks; or return an exit status, where it cannot."""
        while not self.connection.poll():
            if self.signals.fileno() in wait([self.connection, self.signals.fileno()]):
                for number in self.signals.take():
                    if number in STOP_SIGNALS:
                        return 128 + number
                    self._pass_on(number)
        message = self._receive()
        if isinstance(message, Broken):
            failure = message.failure
            user = f"error: {failure.summary}\n"
            other = f"{failure.text}the ranks were not started: {failure.summary}\n"
            self.report.write(user if failure.kind == "user" else other)
            return failure.status
        assert isinstance(message, Ready)
        if message.fork_refused and may_fork:
            self.report.write(f"the ranks are not forked, each imports for itself: {message.fork_refused}\n")
        phases_s = {"template": round(time.monotonic() - self.started_s, 6)}
        specs = []
        for rank in range(self.count):
            worker = Worker(
                rank=rank,
                local_rank=rank,
                world_size=self.count,
                local_world_size=self.count,
                host=_LOOPBACK,
                port=self.store_port,
                attempt=self.attempt,
                hosts_store=rank == 0,
                listen_fd=self.store_fd if rank == 0 else None,
                phases_s=phases_s,
            )
            environ = self.environ | worker.to_environment()
            path, argv = list(sys.path), list(sys.argv)
            share, output_fd = self.shares[rank], self.output_fds.get(rank)
            specs.append(RankSpec(worker, share, output_fd, self.target, self.arguments, environ, path, argv))
        self._send((specs, may_fork))
        self.running = set(range(self.count))
        return None

    def _wait(self) -> None:
        """Wait for the next thing to happen and act on it."""
        timeout_s = max(self.ending.due_s - time.monotonic(), 0)
        sources: list[Any] = [self.connection, self.signals.fileno(), *self.output.sources()]
        ready = wait(sources, None if math.isinf(timeout_s) else timeout_s)
        self.output.read(ready)
        if self.connection in ready:
            self._handle(self._receive())
        if self.signals.fileno() in ready:
            for number in self.signals.take():
                self._pass_on(number)
        if (due := self.ending.signal_due(time.monotonic())) is not None:
            self._signal(due)
            self._tell()

    def _tell(self) -> None:
        culprit = find_culprit(self.ending.failures.values()) if self.ending.failures else None
        if self.on_failure is not None and culprit is not None and culprit is not self.told:
            self.told = culprit
            self.on_failure(culprit)

    def _handle(self, message: Failure | Returned | Exited) -> None:
        if isinstance(message, Failure):
            self.ending.fail(message, time.monotonic())
        elif isinstance(message, Returned):
            self.statuses[message.rank] = message.status
        else:
            self.running.discard(message.rank)
            self._judge_exit(message)

    def _judge_exit(self, exited: Exited) -> None:
        if exited.rank in self.statuses or exited.rank in self.ending.failures or exited.code == 0:
            return
        if -exited.code in self.forwarded:
            self.stopped_by = -exited.code
            self.ending.end(time.monotonic() + self.ending.settle_s)  # the others cannot go on without it
            return
        lines = self.output.last_lines(exited.rank)
        self.ending.fail(failure_of_exit(exited.rank, exited.time_ns, exited.code, lines), time.monotonic())

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGTSTP:
            self._signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._signal(signal.SIGCONT)
        else:
            self.forwarded.add(number)
            self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        """Have the ranks that run signalled; where they and the template are gone, its last messages say how."""
        if self.running:
            with contextlib.suppress(_TemplateGoneError):
                self._send(Send(sorted(self.running), number))

    def _send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _TemplateGoneError from error

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise _TemplateGoneError from error

    def _conclude(self) -> int:
        """Report what has to be reported, and choose the exit status."""
        self._tell()
        failures = list(self.ending.failures.values())
        ends = ", ".join(f"rank {rank}: {status}" for rank, status in sorted(self.statuses.items()))
        first_status = next((self.statuses[rank] for rank in sorted(self.statuses) if self.statuses[rank]), 0)
        if failures:
            culprit = find_culprit(failures)
            if self.report.isatty():
                self.report.write(_SHOW_CURSOR)  # a live display that was cut off has left it hidden
            if culprit.follows and ends:
                self.report.write(f"some ranks had returned before the others lost them, with exit status: {ends}\n")
            self.report.write(describe(failures, self.count, socket.gethostname(), self.layout))
            self.report.flush()
            return first_status if culprit.follows and first_status else culprit.status
        if self.stopped_by:
            return 128 + self.stopped_by
        if len(set(self.statuses.values())) > 1:
            self.report.write(f"not all ranks returned the same exit status: {ends}\n")
        return first_status


def _start_template(environ: Mapping[str, str], descriptors: Sequence[int]) -> tuple[Connection, subprocess.Popen]:
    """A new Python in a process group of its own, so that Ctrl-C reaches the ranks only through the launcher."""
    ours, theirs = Pipe()
    program = f"import sys; sys.path[:] = {sys.path!r}; from phalanx.launch.template import serve"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}; serve({theirs.fileno()}, {os.getpid()})"],
        env={**environ, **QUIET_IMPORTS},
        pass_fds=[theirs.fileno(), *descriptors],
        process_group=0,
        stdin=subprocess.DEVNULL,  # in the background of a terminal, a process that reads from it is stopped
    )
    theirs.close()
    return ours, process
