"""Starting all ranks of a job on this host, where they write, and how they ended.

Where ranks write. Rank 0 keeps the terminal, as a single process would have it, so that a live display works.

The others' stdout and stderr together go to the launcher's stderr line by line, each line under the mark of its rank,
or into a file per rank where a folder is given.

    launch_local ── starts ──► template ── forks ──► rank 0 … rank N-1
         ▲                        │                      │
         └── Ready, Exited … ─────┴── word of its end ◄──┘

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
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol, TextIO

from phalanx.core.addresses import stay_here
from phalanx.core.layout import Layout
from phalanx.ipc.processes import STOP_SIGNALS, ReceivedSignals
from phalanx.launch.cores import Share, local_shares, wanted_threads
from phalanx.launch.environment import Worker, without_worker
from phalanx.launch.launch_messages import Broken, Exited, RankSpec, Ready, Returned, Send
from phalanx.launch.rank_failures import Ending, Failure, describe, failure_of_exit, find_culprit, signal_name

_BLOCK_BYTES = 1 << 16
_LAST_LINES = 20


class Output(Protocol):
    """What the ranks but the first write, as the launcher holds it."""

    descriptors: dict[int, int]
    """Rank -> the descriptor that is to be its stdout and stderr; closed by `started`."""

    def started(self) -> None:
        """The template has the descriptors now."""

    def sources(self) -> list[int]:
        """Descriptors to wait for."""

    def read(self, ready: Collection[Any]) -> None:
        """Take what has come from those of `sources` that are ready."""

    def last_lines(self, rank: int) -> list[str]:
        """The last lines that a rank wrote; empty where they are not known."""

    def close(self) -> None:
        """Show the rest."""


class _Descriptors:
    """Descriptors that are passed on to the template and then closed here."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}

    def started(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()


class MarkedOutput(_Descriptors):
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


class FileOutput(_Descriptors):
    """Rank 3 appends to ``rank-3.log`` in `folder`."""

    def __init__(self, ranks: Iterable[int], folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = {rank: folder / f"rank-{rank}.log" for rank in ranks}
        for rank, path in self._paths.items():
            self.descriptors[rank] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def sources(self) -> list[int]:
        """None: the ranks write to their files themselves."""
        return []

    def read(self, ready: Collection[Any]) -> None:
        """Nothing comes this way."""

    def last_lines(self, rank: int) -> list[str]:
        """Up to 20 lines, of this start or an earlier one."""
        if rank not in self._paths:
            return []
        with self._paths[rank].open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _BLOCK_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]

    def close(self) -> None:
        """Let go of the files, if the template never had them."""
        self.started()


_LOOPBACK = "127.0.0.1"

# Once all ranks are gone: how long what they wrote, and the template, may take to come to an end.
_REST_S = 0.5

_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class _Options:
    """Arguments of `launch_local`, which says what they are."""

    preload: Sequence[str]
    layout: Layout | None
    attempt: int
    threads: int | None
    bind: bool
    fork: bool


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
) -> int:
    """Run ``target(worker, *arguments)`` in `count` new processes on this host, and wait for them.

    A rank that fails ends all within 2 s, and its traceback is written last. Signals that mean "stop soon" are passed
    on to every rank once each; ranks that then end by themselves are no failures. No rank outlives this process.

    Args:
        count: ranks, at least 1.
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

    Returns:
        Exit status: 0; the first that a rank returned and is not 0; 2 for a `UserError` of a rank, 1 for another
        exception; 128 and the number of the signal that killed a rank, or stopped all.
    """
    if count < 1 or ":" not in target:
        raise ValueError(f"launch_local({count}, {target!r}): needs at least one rank and a target 'module:function'")
    options = _Options(preload, layout, attempt, threads, bind, fork)
    report = sys.stderr if report is None else report
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with ExitStack() as stack:
        signals = stack.enter_context(ReceivedSignals([*STOP_SIGNALS, signal.SIGTSTP]))
        others = range(1, count)
        output = MarkedOutput(others, report) if log_folder is None else FileOutput(others, log_folder)
        stack.callback(output.close)
        store = stack.enter_context(socket.create_server((_LOOPBACK, 0), backlog=max(count, 128)))
        job = _Job(count, target, arguments, options, signals, output, report, store)
        stack.callback(job.close)
        return job.run()


class _TemplateGoneError(Exception):
    """The template hung up."""


@dataclass
class _Job:
    """The launcher's side of a job."""

    count: int
    target: str
    arguments: Sequence[Any]
    options: _Options
    signals: ReceivedSignals
    output: Output
    report: TextIO
    store: socket.socket
    ending: Ending = field(default_factory=Ending)
    running: set[int] = field(default_factory=set)
    statuses: dict[int, int] = field(default_factory=dict)
    forwarded: set[int] = field(default_factory=set)
    stopped_by: int = 0

    def __post_init__(self) -> None:
        self.started_s = time.monotonic()
        self.shares = self._shares()
        threads = {"OMP_NUM_THREADS": str(self.shares[0].threads)}
        self.environ = stay_here() | without_worker(os.environ) | threads
        self.output_fds = dict(self.output.descriptors)
        self.store_fd, self.store_port = self.store.fileno(), self.store.getsockname()[1]
        self.connection, self.template = _start_template(self.environ, [self.store_fd, *self.output_fds.values()])
        self.output.started()
        self.store.close()

    def run(self) -> int:
        """Start the ranks, wait for them, and return the job's exit status."""
        try:
            self._tell([*self.options.preload, self.target.partition(":")[0]])
            if (status := self._await_template()) is not None:
                return status
            while self.running:
                self._wait()
        except _TemplateGoneError:
            return self._template_is_gone()
        self._drain()
        return self._conclude()

    def close(self) -> None:
        """End the template, and whatever its ranks have left in its process group."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.template.pid, signal.SIGKILL)
        self.template.wait()

    def _await_template(self) -> int | None:
        """Wait until the ranks are started; or return an exit status, if that was not to be."""
        while not self.connection.poll():
            if self.signals.fileno() in wait([self.connection, self.signals.fileno()]):
                for number in self.signals.take():
                    if number in STOP_SIGNALS:
                        return 128 + number
                    self._pass_on(number)
        message = self._listen()
        if isinstance(message, Broken):
            self.report.write(_describe_broken(message.failure))
            return message.failure.status
        assert isinstance(message, Ready)
        if message.fork_refused and self.options.fork:
            self.report.write(f"the ranks are not forked, each imports for itself: {message.fork_refused}\n")
        elapsed_s = time.monotonic() - self.started_s
        specs = [self._spec(rank, {"template": round(elapsed_s, 6)}) for rank in range(self.count)]
        self._tell((specs, self.options.fork))
        self.running = set(range(self.count))
        return None

    def _wait(self) -> None:
        """Wait for the next thing to happen and act on it."""
        timeout_s = max(self.ending.due_s - time.monotonic(), 0)
        sources: list[Any] = [self.connection, self.signals.fileno(), *self.output.sources()]
        ready = wait(sources, None if math.isinf(timeout_s) else timeout_s)
        self.output.read(ready)
        if self.connection in ready:
            self._hear(self._listen())
        if self.signals.fileno() in ready:
            for number in self.signals.take():
                self._pass_on(number)
        if (due := self.ending.signal_due(time.monotonic())) is not None:
            self._send(due)

    def _hear(self, message: Failure | Returned | Exited) -> None:
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
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT)
        else:
            self.forwarded.add(number)
            self._send(number)

    def _send(self, number: signal.Signals) -> None:
        """Have the ranks that run signalled; where they and the template are gone by now, its last words tell how."""
        if self.running:
            with contextlib.suppress(_TemplateGoneError):
                self._tell(Send(sorted(self.running), number))

    def _tell(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _TemplateGoneError from error

    def _listen(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise _TemplateGoneError from error

    def _drain(self) -> None:
        """Show what the ranks wrote before they ended, unless something they started keeps writing."""
        deadline_s = time.monotonic() + _REST_S
        while (sources := self.output.sources()) and (ready := wait(sources, max(deadline_s - time.monotonic(), 0))):
            self.output.read(ready)

    def _conclude(self) -> int:
        """Tell what has to be told, and choose the exit status."""
        failures = list(self.ending.failures.values())
        ends = ", ".join(f"rank {rank}: {status}" for rank, status in sorted(self.statuses.items()))
        first_status = next((self.statuses[rank] for rank in sorted(self.statuses) if self.statuses[rank]), 0)
        if failures:
            culprit = find_culprit(failures)
            if self.report.isatty():
                self.report.write(_SHOW_CURSOR)  # a live display that was cut off has left it hidden
            if culprit.follows and ends:
                self.report.write(f"some ranks had returned before the others lost them, with exit status: {ends}\n")
            self.report.write(describe(failures, self.count, socket.gethostname(), self.options.layout))
            self.report.flush()
            return first_status if culprit.follows and first_status else culprit.status
        if self.stopped_by:
            return 128 + self.stopped_by
        if len(set(self.statuses.values())) > 1:
            self.report.write(f"not all ranks returned the same exit status: {ends}\n")
        return first_status

    def _template_is_gone(self) -> int:
        """The process that the ranks hung on has died, and they with it."""
        self.running.clear()
        code = self.template.wait()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit status {code}"
        self.report.write(f"the template process {how}; all ranks ended with it\n")
        return 128 - code if code < 0 else code or 1

    def _shares(self) -> list[Share]:
        """Cores and threads of every rank, as the options have it."""
        shares = local_shares(self.count)
        wanted = self.options.threads or wanted_threads(os.environ)
        return [Share(s.cpus if self.options.bind else None, wanted or s.threads) for s in shares]

    def _spec(self, rank: int, phases_s: Mapping[str, float]) -> RankSpec:
        first = rank == 0
        worker = Worker(
            rank=rank,
            local_rank=rank,
            world_size=self.count,
            local_world_size=self.count,
            host=_LOOPBACK,
            port=self.store_port,
            attempt=self.options.attempt,
            hosts_store=first,
            listen_fd=self.store_fd if first else None,
            phases_s=phases_s,
        )
        environ = self.environ | worker.to_environment()
        path, argv = list(sys.path), list(sys.argv)
        share, output_fd = self.shares[rank], self.output_fds.get(rank)
        return RankSpec(worker, share, output_fd, self.target, self.arguments, environ, path, argv)


def _start_template(environ: Mapping[str, str], descriptors: Sequence[int]) -> tuple[Connection, subprocess.Popen]:
    """A new Python in a process group of its own, so that Ctrl-C reaches the ranks only through the launcher."""
    ours, theirs = Pipe()
    program = f"import sys; sys.path[:] = {sys.path!r}; from phalanx.launch.template import serve"
    # NumPy's OpenBLAS starts its threads on import, and torch may look for devices through the driver: neither is for a
    # process that is to be forked.
    quiet = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}; serve({theirs.fileno()}, {os.getpid()})"],
        env={**environ, **quiet},
        pass_fds=[theirs.fileno(), *descriptors],
        process_group=0,
        stdin=subprocess.DEVNULL,  # in the background of a terminal, whoever reads from it is stopped
    )
    theirs.close()
    return ours, process


def _describe_broken(failure: Failure) -> str:
    """Why the template could not import what the ranks need."""
    if failure.kind == "user":
        return f"error: {failure.summary}\n"
    return f"{failure.text}the ranks were not started: {failure.summary}\n"
