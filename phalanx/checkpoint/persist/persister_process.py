"""The keeper's handle of its persister process, and what the two say to each other.

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

T = TypeVar("T")
_KEPT = 64  # plans; a host has one per rank


@dataclass(frozen=True)
class Submit:
    """A task. Descriptors beside it: the slot, `Errand.submitted`, the plan and, where there is one, the job's plan.

    Attributes:
        plan, job: numbers of the plans, so that each is read once; job 0 is none.
        hurry: as in `PersistTask`.
    """

    plan: int
    job: int
    hurry: bool


@dataclass(frozen=True)
class Abandon:
    """A process that was to write a shard or publish has died: tell the others, and clear up. Descriptor: `Errand`."""


TO_PERSISTER = PacketDecoder(Submit, Abandon)
TO_KEEPER = PacketDecoder(PersistOutcome)


@dataclass(frozen=True)
class Errand:
    """What differs from task to task, and is too long for a packet.

    Attributes:
        destination: where to write.
        record: of the slot; of an `Abandon`, with no sums.
        problem: of an `Abandon`, what happened.
    """

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
    def from_bytes(content: bytes) -> Errand:
        """The reverse of `to_bytes`."""
        destination, record, problem = json.loads(content)
        return Errand(Destination(**destination), Record.from_text(record), problem)


def in_memory(content: bytes) -> int:
    """The descriptor of new memory that holds `content`."""
    descriptor = os.memfd_create("phalanx")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    return descriptor


def read_memory(descriptor: int) -> bytes:
    """All that memory holds."""
    with open(os.dup(descriptor), "rb") as file:  # noqa: PTH123
        file.seek(0)
        return file.read()


class Shelf:
    """Plans in memory, each written once, numbered from 1. What has not been asked for for long is let go."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._places: OrderedDict[int, tuple[Any, int, int]] = OrderedDict()

    def put(self, plan: Any) -> tuple[int, int]:
        """The number of a plan, which has a method `to_bytes`, and the descriptor of its memory."""
        known = self._places.get(id(plan))
        if known is None:
            known = (plan, next(self._numbers), in_memory(plan.to_bytes()))
            self._places[id(plan)] = known  # it holds the plan, so its id stays its own
        self._places.move_to_end(id(plan))
        if len(self._places) > _KEPT:
            os.close(self._places.popitem(last=False)[1][2])
        return known[1:]

    def close(self) -> None:
        """Let go of all memory."""
        for _, _, descriptor in self._places.values():
            os.close(descriptor)
        self._places.clear()


class Known(Generic[T]):
    """The other side's: what was read, by its number."""

    def __init__(self, parse: Callable[[bytes], T]) -> None:
        self._parse = parse
        self._values: OrderedDict[int, T] = OrderedDict()

    def get(self, number: int, descriptor: int) -> T:
        """What has this number, read from memory if it is new."""
        if number not in self._values:
            self._values[number] = self._parse(read_memory(descriptor))
        self._values.move_to_end(number)
        if len(self._values) > _KEPT:
            self._values.popitem(last=False)
        return self._values[number]


_DYING_S = 1.0  # from hanging up to its end
_REAP_S = 5.0
_STDERR = 2


@dataclass
class _Flight:
    """A task that the process has."""

    task: PersistTask
    written: bool = False


class PersisterProcess:
    """A `phalanx.checkpoint.keeper_contract.Persister`: a new Python process, which imports no torch.

    It is started at the first task, and again when it has died; it ends when this process does, which hangs up. A rank
    has at most one task in flight: the next one may be submitted when the second outcome of the last has come. To be
    used by one thread.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._flights: dict[int, _Flight] = {}
        self._late: list[PersistOutcome] = []
        self._shelf = Shelf()
        # One descriptor for whatever process there is, and for outcomes that no process will tell.
        self._ready: select.epoll | None = None
        self._bell = -1

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """See `Persister`. A process that cannot be started is tried again by the first task, which tells why."""
        with suppress(OSError):
            if self._connection is None:
                self._start()

    def submit(self, task: PersistTask) -> None:
        """See `Persister`. The descriptor of the slot stays the caller's."""
        rank = task.plan.rank
        assert rank not in self._flights, f"rank {rank} has a task in flight"
        try:
            self._hand_over(task)
        except OSError as error:  # BlockingIOError: it is alive and does not listen
            self._fail(_Flight(task), f"the persister process could not be given it ({error.strerror})")
            self._ring()
        else:
            self._flights[rank] = _Flight(task)

    def fileno(self) -> int:
        """See `Persister`; the same from the first task on, whatever process there is."""
        return -1 if self._ready is None else self._ready.fileno()

    def outcomes(self) -> list[PersistOutcome]:
        """See `Persister`."""
        found = self._heard()
        found += self._late
        self._late.clear()
        self._ring(loud=False)
        return found

    def close(self) -> None:
        """See `Persister`."""
        if self._process is not None:
            self._process.kill()
        self._end()
        self._flights.clear()
        self._late.clear()
        self._shelf.close()
        if self._ready is not None:
            self._ready.close()
            os.close(self._bell)
            self._ready = None

    def _hand_over(self, task: PersistTask) -> None:
        plan, plan_memory = self._shelf.put(task.plan)
        job, job_memory = self._shelf.put(task.job) if task.job is not None else (0, -1)
        errand = in_memory(Errand(task.destination, task.record).to_bytes())
        memories = [task.descriptor, errand, plan_memory] + ([job_memory] if job else [])
        try:
            self._send(Submit(plan, job, task.hurry), memories)
        finally:
            os.close(errand)

    def _send(self, message: Submit | Abandon, descriptors: list[int]) -> None:
        """Send to the process; where there is none, or it has died, to a new one.

        Raises:
            OSError: it cannot be started, or does not listen.
        """
        if self._connection is not None:
            try:
                send(self._connection, message, descriptors)
                return
            except (BrokenPipeError, ConnectionError):  # it has died, and nobody has looked yet
                self._late = self._heard() + self._late
                self._ring()
        send(self._connection or self._start(), message, descriptors)

    def _heard(self) -> list[PersistOutcome]:
        """What the process has told; buries it if it has died."""
        found: list[PersistOutcome] = []
        while self._connection is not None:
            try:
                outcome, _ = receive(self._connection, TO_KEEPER)
            except BlockingIOError:
                break
            except ConnectionError:
                outcome = None
            if outcome is None:
                self._bury()
            else:
                self._note(outcome)
                found.append(outcome)
        return found

    def _note(self, outcome: PersistOutcome) -> None:
        if outcome.published:
            self._flights.pop(outcome.rank, None)
        elif outcome.rank in self._flights:
            self._flights[outcome.rank].written = True

    def _start(self) -> socket.socket:
        if self._ready is None:
            self._ready, self._bell = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._ready.register(self._bell, select.EPOLLIN)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = _execute(theirs.fileno())
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._ready.register(ours, select.EPOLLIN)
        self._connection = ours
        return ours

    def _bury(self) -> None:
        """It has died: its tasks have failed, and those who wait for what it was to write or publish are told so."""
        how = self._end()
        flights, self._flights = list(self._flights.values()), {}
        for flight in flights:
            self._fail(flight, f"the persister process {how}")
        waited_for = [flight.task for flight in flights if flight.task.job is not None or not flight.written]
        for task in {Writing.of(task): task for task in waited_for}.values():
            problem = f"the persister process of rank {task.plan.rank}'s host {how}"
            with suppress(OSError):  # then they wait until their time is over
                self._abandon(Errand(task.destination, replace(task.record, sums=(), state="", state_sum=0), problem))

    def _abandon(self, errand: Errand) -> None:
        memory = in_memory(errand.to_bytes())
        try:
            self._send(Abandon(), [memory])
        finally:
            os.close(memory)

    def _fail(self, flight: _Flight, how: str) -> None:
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
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DYING_S)  # its own way of dying is to be told
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in storage that does not answer: the kernel ends it later
            process.wait(_REAP_S)
        return _way_of_dying(process.returncode)

    def _ring(self, *, loud: bool = True) -> None:
        """Make `fileno` readable, or no longer."""
        if self._bell < 0:
            return
        if loud:
            os.eventfd_write(self._bell, 1)
            return
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)


def _way_of_dying(status: int | None) -> str:
    if status is None:
        return "does not end"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _execute(connection: int) -> subprocess.Popen[bytes]:
    # The kernel's signal at the end of a parent comes at the end of the *thread* that started the child.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    program = f"import sys; sys.path[:] = {sys.path!r}; from phalanx.checkpoint.persist.main import main"
    return subprocess.Popen(
        [sys.executable, "-c", f"{program}; main({connection}, {parent})"],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        pass_fds=[connection],
    )
