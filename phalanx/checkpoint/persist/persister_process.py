"""The keeper's handle of its persister process, and the messages between the two.

What is longer than a packet travels as the descriptor of memory that holds it.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

from phalanx.checkpoint.format.shard_plan import Record
from phalanx.checkpoint.keeper_contract import Destination, PersistOutcome, PersistTask
from phalanx.checkpoint.persist.publication import Writing
from phalanx.ipc.codec import PacketDecoder
from phalanx.ipc.local_socket import receive, send
from phalanx.ipc.shared_memory import read_document, write_document

T = TypeVar("T")
_KEPT = 64  # plans; a host has one per rank


@dataclass(frozen=True)
class Submit:
    """A task. Descriptors: the slot, `TaskDetails`, the plan and, where there is one, the job's plan. By the numbers of
    the plans each is read once; job 0 is none."""

    plan: int
    job: int
    hurry: bool


@dataclass(frozen=True)
class Abandon:
    """A process that was to write a shard or publish has died: report it, and clear up. Descriptor: `TaskDetails`."""


TO_PERSISTER = PacketDecoder(Submit, Abandon)
TO_KEEPER = PacketDecoder(PersistOutcome)


@dataclass(frozen=True)
class TaskDetails:
    """What differs from task to task, and is too long for a packet; of an `Abandon` the record is without sums, and
    `problem` says what happened."""

    destination: Destination
    record: Record
    problem: str = ""

    @property
    def writing(self) -> Writing:
        """Which checkpoint it is about."""
        return Writing(*self.record.snapshot, self.destination.nonce)

    def to_bytes(self) -> bytes:
        """For `from_bytes`."""
        return json.dumps([asdict(self.destination), self.record.to_text(), self.problem]).encode()

    @staticmethod
    def from_bytes(content: bytes) -> TaskDetails:
        """The reverse of `to_bytes`."""
        destination, record, problem = json.loads(content)
        return TaskDetails(Destination(**destination), Record.from_text(record), problem)


class SentPlans:
    """Plans in memory, each written once, numbered from 1; those least recently used are closed."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._places: OrderedDict[int, tuple[Any, int, int]] = OrderedDict()

    def put(self, plan: Any) -> tuple[int, int]:
        """The number of a plan, which has a method `to_bytes`, and the descriptor of its memory."""
        known = self._places.get(id(plan))
        if known is None:
            known = (plan, next(self._numbers), write_document(plan.to_bytes()))
            self._places[id(plan)] = known  # it holds the plan, so its id stays its own
        self._places.move_to_end(id(plan))
        # A plan that was closed is written again, under a new number, when it is next used.
        if len(self._places) > _KEPT:
            os.close(self._places.popitem(last=False)[1][2])
        return known[1:]

    def close(self) -> None:
        """Close all memory."""
        for _, _, descriptor in self._places.values():
            os.close(descriptor)
        self._places.clear()


class ReceivedPlans(Generic[T]):
    """The same at the other end: what was read, by its number."""

    def __init__(self, parse: Callable[[bytes], T]) -> None:
        self._parse = parse
        self._values: OrderedDict[int, T] = OrderedDict()

    def get(self, number: int, descriptor: int) -> T:
        """The plan of this number, read from memory if it is new."""
        if number not in self._values:
            self._values[number] = self._parse(read_document(descriptor))
        self._values.move_to_end(number)
        if len(self._values) > _KEPT:
            self._values.popitem(last=False)
        return self._values[number]


_DYING_S = 1.0  # from hanging up to its end
_REAP_S = 5.0
_STDERR = 2


@dataclass
class _SubmittedTask:
    """A task that the process has."""

    task: PersistTask
    written: bool = False


class PersisterProcess:
    """The keeper's handle of the persister: a new Python process, which imports no torch.

    It is started at the first task, and again when it has died; it ends when this process does, which hangs up. A rank
    has at most one task in flight: the next one may be submitted when the second outcome of the last has come. To be
    used by one thread.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._flights: dict[int, _SubmittedTask] = {}
        self._late: list[PersistOutcome] = []
        self._plans = SentPlans()
        # One descriptor for whatever process there is, and for outcomes that no process will send.
        self._ready: select.epoll | None = None
        self._event = -1

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Start the process, unless there is one; where it cannot be started, the first task reports that."""
        with suppress(OSError):
            # Not an error yet: ranks may finish before anything is to be persisted.
            if self._connection is None:
                self._start()

    def submit(self, task: PersistTask) -> None:
        """Hand over a task; the process is started if there is none. The descriptor of the slot stays the caller's."""
        rank = task.plan.rank
        assert rank not in self._flights, f"rank {rank} has a task in flight"
        try:
            self._hand_over(task)
        except OSError as error:  # BlockingIOError: it is alive and does not listen
            self._fail(_SubmittedTask(task), f"the persister process could not be given it ({error.strerror})")
            self._wake()
        else:
            self._flights[rank] = _SubmittedTask(task)

    def fileno(self) -> int:
        """Readable when there is an outcome, or the process has died; -1 before the first task."""
        return -1 if self._ready is None else self._ready.fileno()

    def outcomes(self) -> list[PersistOutcome]:
        """What has come; of tasks of a process that died, failures."""
        found = self._received()
        found += self._late
        self._late.clear()
        # Taken back after all was collected, or it would stay readable, and the keeper's loop never rest.
        if self._event >= 0:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
        return found

    def close(self) -> None:
        """End the process, also in the middle of a task."""
        if self._process is not None:
            self._process.kill()
        self._end()
        self._flights.clear()
        self._late.clear()
        self._plans.close()
        if self._ready is not None:
            self._ready.close()
            os.close(self._event)
            self._ready = None

    def _hand_over(self, task: PersistTask) -> None:
        plan, plan_memory = self._plans.put(task.plan)
        job, job_memory = self._plans.put(task.job) if task.job is not None else (0, -1)
        details = write_document(TaskDetails(task.destination, task.record).to_bytes())
        memories = [task.descriptor, details, plan_memory] + ([job_memory] if job else [])
        try:
            self._send(Submit(plan, job, task.hurry), memories)
        finally:
            os.close(details)

    def _send(self, message: Submit | Abandon, descriptors: list[int]) -> None:
        """Send to the process, or to a new one; OSError: it cannot be started, or does not listen."""
        if self._connection is not None:
            try:
                send(self._connection, message, descriptors)
                return
            except (BrokenPipeError, ConnectionError):  # it has died, and nobody has looked yet
                # What it sent before it died still counts.
                self._late = self._received() + self._late
                self._wake()
        send(self._connection or self._start(), message, descriptors)

    def _received(self) -> list[PersistOutcome]:
        """What the process has sent; if it has died, its tasks fail."""
        found: list[PersistOutcome] = []
        while self._connection is not None:
            try:
                outcome, _ = receive(self._connection, TO_KEEPER)
            except BlockingIOError:
                break
            except ConnectionError:
                outcome = None
            if outcome is None:
                self._fail_all()
                break
            # Of the two outcomes of a task this is the last.
            if outcome.published:
                self._flights.pop(outcome.rank, None)
            elif outcome.rank in self._flights:
                self._flights[outcome.rank].written = True
            found.append(outcome)
        return found

    def _start(self) -> socket.socket:
        if self._ready is None:
            self._ready, self._event = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._ready.register(self._event, select.EPOLLIN)
        # Packets: a message and its descriptors come whole or not at all.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = _execute(theirs.fileno())
            except OSError:
                ours.close()
                raise
        # The keeper's one loop must not wait for a persister that does not listen.
        ours.setblocking(False)
        self._ready.register(ours, select.EPOLLIN)
        self._connection = ours
        return ours

    def _fail_all(self) -> None:
        """It has died: its tasks have failed, which is reported to those that wait for them, on other hosts too."""
        how = self._end()
        flights, self._flights = list(self._flights.values()), {}
        for flight in flights:
            self._fail(flight, f"the persister process {how}")
        # Others wait for a publisher, or for a shard that is missing; of shards that are written nothing is lost. One
        # report for each checkpoint, however many ranks this host has.
        waited_for = [flight.task for flight in flights if flight.task.job is not None or not flight.written]
        for task in {Writing.of(task): task for task in waited_for}.values():
            problem = f"the persister process of rank {task.plan.rank}'s host {how}"
            record = replace(task.record, sums=(), state="", state_sum=0)
            memory = write_document(TaskDetails(task.destination, record, problem).to_bytes())
            with suppress(OSError):  # then they wait until their time is over
                self._send(Abandon(), [memory])
            os.close(memory)

    def _fail(self, flight: _SubmittedTask, how: str) -> None:
        rank, step = flight.task.plan.rank, flight.task.record.step
        if flight.written:
            problem = f"{how} while step {step} was being published"
        else:
            problem = f"{how} while it wrote rank {rank}'s shard of step {step}"
            self._late.append(PersistOutcome(rank, step, published=False, problem=problem))
        self._late.append(PersistOutcome(rank, step, published=True, problem=problem))

    def _end(self) -> str:
        """Make sure that the process is gone; how it ended."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()  # which takes it out of the epoll
            self._connection = None
        if process is None:
            return "was not there"
        is_forced = False
        try:
            process.wait(_DYING_S)  # its own status is worth more than that of the kill
        except subprocess.TimeoutExpired:
            is_forced = True
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in storage that does not answer: the kernel ends it later
            process.wait(_REAP_S)
        status = process.returncode
        if status is None:
            return "does not end"
        killed = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        # Else people would look for whoever else has killed it: the kernel, for want of memory.
        return f"had hung up and did not end, so that it {killed}" if is_forced else killed

    def _wake(self) -> None:
        """Make `fileno` readable."""
        if self._event >= 0:
            os.eventfd_write(self._event, 1)


def _execute(connection: int) -> subprocess.Popen[bytes]:
    # The kernel's signal at the end of a parent comes at the end of the *thread* that started the child.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    # With this process's search path: the keeper may have been started from a folder that Python would not look in.
    program = f"import sys; sys.path[:] = {sys.path!r}; from phalanx.checkpoint.persist.main import main"
    return subprocess.Popen(
        [sys.executable, "-c", f"{program}; main({connection}, {parent})"],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        pass_fds=[connection],
    )
