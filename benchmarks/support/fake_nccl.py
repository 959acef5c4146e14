"""A back end that does things in the order in which NCCL does them, for ranks that are threads of this process.

gloo forgives what NCCL does not: it tells messages apart by tags, runs many operations of a group at a time, and lets a
send go before anyone receives. Here, as with NCCL: what is started in a group is done one at a time, in the order in
which it was started; tags mean nothing; a send is done when its receive is, and both must be at the head of their
queues; operations that are started together (`alltoall_base`) are one. Members of a group that start different
collectives, or sizes that differ, are an error here, where NCCL would hang or mix up data.

What would hang is found at once: when all whom a rank waits for wait themselves, in a circle or for someone who has
ended, an error says who waits for what. The matching alone (`Communicator`) needs no threads and no tensors, so that
the schedules of any number of ranks can be walked through, see `walk`.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import _disable_current_modes

_LOOK_S = 0.5


class HangError(RuntimeError):
    """What was started can never be done."""


@dataclass
class Part:
    """A send or a receive; alone, or of several that are started together."""

    sends: bool
    peer: int
    x: Tensor | None = None
    is_matched: bool = False


@dataclass(eq=False)
class Operation:
    """What one member has started.

    Attributes:
        kind: of a collective, or ``messages``.
        says: what must be equal on all members of a collective.
        parts: of messages.
        xs: the tensors of a collective, of which `run` makes sense.
    """

    kind: str
    member: int = 0
    says: tuple[Any, ...] = ()
    parts: list[Part] = field(default_factory=list)
    xs: tuple[Tensor, ...] = ()
    run: Callable[[Sequence[Operation]], None] | None = None
    is_done: bool = False

    def __str__(self) -> str:
        if self.kind != "messages":
            return self.kind
        return " and ".join(f"{'send to' if p.sends else 'receive from'} {p.peer}" for p in self.parts)


class Communicator:
    """The members of one group, what each has started, and what of it can be done."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.queues: list[deque[Operation]] = [deque() for _ in range(size)]
        self.threads: list[threading.Thread | None] = [None] * size
        self.broken = ""
        self.done = 0

    def post(self, member: int, operation: Operation) -> None:
        """A member starts something; whatever can be done because of it is done.

        Raises:
            RuntimeError: others have started something else.
        """
        operation.member = member
        self.queues[member].append(operation)
        waiting = [member]
        while waiting:
            waiting += self._try(waiting.pop())

    def blockers(self, operation: Operation) -> tuple[list[Operation], list[int]]:
        """What an operation waits for: others that were started, and members that have not started any."""
        head = self.queues[operation.member][0]
        if head is not operation:
            return [head], []
        if operation.kind == "messages":
            others = [part.peer for part in operation.parts if not part.is_matched]
        else:
            others = [member for member in range(self.size) if not self._joins(member, operation)]
        started = [self.queues[other][0] for other in others if self.queues[other]]
        return started, [other for other in others if not self.queues[other]]

    def told(self, operation: Operation) -> str:
        """Who has started it, and what it is."""
        thread = self.threads[operation.member]
        return f"{thread.name + ', ' if thread else ''}member {operation.member} of {self.name}: {operation}"

    def _joins(self, member: int, operation: Operation) -> bool:
        return bool(self.queues[member]) and self.queues[member][0].kind == operation.kind

    def _try(self, member: int) -> list[int]:
        """Do what the head of a queue allows; members that have a new head because of it."""
        if not self.queues[member]:
            return []
        head = self.queues[member][0]
        return self._match(head) if head.kind == "messages" else self._meet()

    def _meet(self) -> list[int]:
        heads = [queue[0] for queue in self.queues if queue and queue[0].kind != "messages"]
        if len({(head.kind, head.says) for head in heads}) > 1:
            said = "; ".join(f"member {head.member}: {head.kind} {head.says}" for head in heads)
            self.broken = f"members of {self.name} have started different things: {said}"
            raise RuntimeError(self.broken)
        if len(heads) < self.size:
            return []
        if heads[0].run is not None:
            heads[0].run(heads)
        return [self._done(head) for head in heads]

    def _match(self, head: Operation) -> list[int]:
        free: list[int] = []
        for part in head.parts:
            queue = self.queues[part.peer]
            if part.is_matched or not queue or queue[0].kind != "messages":
                continue
            theirs = (p for p in queue[0].parts if p.peer == head.member and not p.is_matched)
            other = next((p for p in theirs if p.sends != part.sends), None)
            if other is None:
                continue
            part.is_matched = other.is_matched = True
            self._carry(*((part, other) if part.sends else (other, part)), head.member)
            if queue[0] is not head and all(p.is_matched for p in queue[0].parts):
                free.append(self._done(queue[0]))
        if all(part.is_matched for part in head.parts):
            free.append(self._done(head))
        return free

    def _carry(self, sent: Part, received: Part, member: int) -> None:
        if sent.x is None or received.x is None:
            return
        if sent.x.numel() != received.x.numel() or sent.x.dtype != received.x.dtype:
            told = [f"{tuple(x.shape)} of {x.dtype}" for x in (sent.x, received.x)]
            self.broken = f"{self.name}, member {member}: {told[0]} is sent where {told[1]} is received"
            raise RuntimeError(self.broken)
        received.x.copy_(sent.x.view(received.x.shape))

    def _done(self, head: Operation) -> int:
        self.queues[head.member].popleft()
        head.is_done = True
        self.done += 1
        return head.member


class FakeNccl:
    """Makes the process groups of ranks that are threads, see `phalanx.parallel.process_groups.Maker`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[threading.Thread, tuple[Communicator, Operation]] = {}
        self._made: dict[int, Communicator] = {}
        self._numbers = itertools.count()

    def make(self, store: Any, index: int, size: int, timeout_s: float, name: str) -> FakeGroup:
        """One member of the group that meets at `store`."""
        if store.add("fake members", 1) == 1:
            number = next(self._numbers)
            self._made[number] = Communicator(name, size)
            store.set("fake number", str(number))
        communicator = self._made[int(store.get("fake number"))]
        communicator.threads[index] = threading.current_thread()
        return FakeGroup(self, communicator, index)

    def start(self, communicator: Communicator, member: int, operation: Operation) -> FakeWork:
        """Queue an operation."""
        with self.changed:
            self._require_whole(communicator)
            before = communicator.done
            try:
                with _unseen():
                    communicator.post(member, operation)
            except Exception as error:
                communicator.broken = communicator.broken or f"{communicator.name}: {error}"
                raise
            finally:
                if communicator.done > before or communicator.broken:
                    self.changed.notify_all()
        return FakeWork(self, communicator, operation)

    def wait(self, communicator: Communicator, operation: Operation) -> None:
        """Wait until it is done.

        Raises:
            HangError: that can never be.
        """
        me = threading.current_thread()
        with self.changed:
            while not operation.is_done:
                self._require_whole(communicator)
                self.waiting[me] = communicator, operation
                if circle := self._circle(me):
                    communicator.broken = "these wait for each other: " + "; ".join(circle)
                    self.changed.notify_all()
                    self._require_whole(communicator)
                self.changed.wait(_LOOK_S)
                del self.waiting[me]

    def _require_whole(self, communicator: Communicator) -> None:
        if communicator.broken:
            self.waiting.pop(threading.current_thread(), None)
            raise HangError(communicator.broken)

    def _circle(self, first: threading.Thread) -> list[str]:
        """Who waits for what, if nobody whom `first` waits for can go on; else nothing."""
        seen, told = {first}, []
        threads = [first]
        while threads:
            thread = threads.pop()
            if thread not in self.waiting:
                if thread.is_alive():
                    return []
                told.append(f"{thread.name} has ended")
                continue
            communicator, operation = self.waiting[thread]
            if operation.is_done:
                return []
            queued, awaited = _awaited(communicator, operation)
            told += [communicator.told(one) for one in queued]
            for member in awaited:
                other = communicator.threads[member]
                if other is None:
                    return []  # it may still come
                if other not in seen:
                    seen.add(other)
                    threads.append(other)
        return list(dict.fromkeys(told))


class FakeWork:
    """As torch's `Work`."""

    def __init__(self, nccl: FakeNccl, communicator: Communicator, operation: Operation) -> None:
        self._nccl, self._communicator, self._operation = nccl, communicator, operation

    def wait(self) -> None:
        self._nccl.wait(self._communicator, self._operation)

    def is_completed(self) -> bool:
        return self._operation.is_done


class FakeGroup:
    """One member's process group: what `phalanx.parallel.group.Group` asks of torch's."""

    def __init__(self, nccl: FakeNccl, communicator: Communicator, index: int) -> None:
        self._nccl, self._communicator, self._index = nccl, communicator, index

    def name(self) -> str:
        return "fake nccl"

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return self._communicator.size

    def _set_default_timeout(self, timeout: Any) -> None:
        pass

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> FakeWork:
        (x,), op = tensors, ReduceOp.SUM if options is None else options.reduceOp
        return self._collective("all_reduce", x, [x], lambda xs: [_reduced(xs, op)] * len(xs), _name(op))

    def broadcast(self, tensors: list[Tensor], options: Any) -> FakeWork:
        (x,), root = tensors, options.rootRank
        return self._collective("broadcast", x, [x], lambda xs: [xs[root].clone()] * len(xs), root)

    def _allgather_base(self, out: Tensor, x: Tensor) -> FakeWork:
        assert out.numel() == self.size() * x.numel()
        return self._collective("all_gather", x, [out], lambda xs: [torch.cat([x.flatten() for x in xs])] * len(xs))

    def _reduce_scatter_base(self, out: Tensor, x: Tensor) -> FakeWork:
        assert x.numel() == self.size() * out.numel() and out.dtype == x.dtype
        scattered = lambda xs: _reduced([x.flatten() for x in xs], ReduceOp.SUM).chunk(len(xs))  # noqa: E731
        return self._collective("reduce_scatter", x, [out], scattered)

    def alltoall_base(self, out: Tensor, x: Tensor, out_rows: list[int], rows: list[int]) -> FakeWork:
        """As with NCCL, a send and a receive for each member to or from which anything goes."""
        with _unseen():
            return self._messages(self._parts(out, x, out_rows, rows))

    def _parts(self, out: Tensor, x: Tensor, out_rows: list[int], rows: list[int]) -> list[Part]:
        blocks = x.split(rows) if rows else x.chunk(self.size())
        out_blocks = out.split(out_rows) if out_rows else out.chunk(self.size())
        parts = [Part(True, peer, block) for peer, block in enumerate(blocks) if block.numel()]
        return parts + [Part(False, peer, block) for peer, block in enumerate(out_blocks) if block.numel()]

    def send(self, tensors: list[Tensor], to: int, tag: int) -> FakeWork:
        return self._messages([Part(True, to, tensors[0])])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> FakeWork:
        return self._messages([Part(False, source, tensors[0])])

    def barrier(self) -> FakeWork:
        return self._nccl.start(self._communicator, self._index, Operation("barrier"))

    def _messages(self, parts: list[Part]) -> FakeWork:
        return self._nccl.start(self._communicator, self._index, Operation("messages", parts=parts))

    def _collective(
        self,
        kind: str,
        x: Tensor,
        outs: list[Tensor],
        compute: Callable[[list[Tensor]], Sequence[Tensor]],
        says: Any = None,
    ) -> FakeWork:
        def run(heads: Sequence[Operation]) -> None:
            results = compute([head.xs[0] for head in heads])
            for head, result in zip(heads, results, strict=True):
                head.xs[1].copy_(result.view(head.xs[1].shape))

        told = x.numel(), x.dtype, says
        operation = Operation(kind, says=told, xs=(x, outs[0]), run=run)
        return self._nccl.start(self._communicator, self._index, operation)


@contextmanager
def _unseen() -> Iterator[None]:
    """What is computed here is the back end's: neither autograd nor a mode of the rank's thread sees it."""
    with torch.no_grad(), _disable_current_modes():
        yield


def walk(programs: Mapping[Any, Iterator[tuple[Communicator, int, Operation] | Operation]]) -> None:
    """Go through what ranks do, without tensors: each rank's program starts operations, and waits for some.

    Args:
        programs: by rank; each gives ``(communicator, member, operation)`` to start one, and an operation to wait for.

    Raises:
        HangError: they wait for each other.
    """
    waits: dict[Any, Operation | None] = dict.fromkeys(programs)
    moved = True
    while waits and moved:
        moved = False
        for rank in list(waits):
            while (wait := waits[rank]) is None or wait.is_done:
                moved = True
                step = next(programs[rank], None)
                if step is None:
                    del waits[rank]
                    break
                if isinstance(step, Operation):
                    waits[rank] = step
                else:
                    communicator, member, operation = step
                    communicator.post(member, operation)
    if waits:
        raise HangError("; ".join(f"{rank} waits for: {operation}" for rank, operation in waits.items()))


def _awaited(communicator: Communicator, operation: Operation) -> tuple[list[Operation], set[int]]:
    """What must be done before or with an operation, and members of whom something is needed that is not started."""
    seen, awaited, left = {operation: None}, set(), [operation]
    while left:
        started, absent = communicator.blockers(left.pop())
        awaited.update(absent)
        left += [one for one in started if one not in seen]
        seen |= dict.fromkeys(started)
    return list(seen), awaited


def _name(op: Any) -> str:
    return next(name for name in ("SUM", "MAX", "MIN") if op == getattr(ReduceOp, name))


def _reduced(xs: Sequence[Tensor], op: Any) -> Tensor:
    stacked = torch.stack(list(xs))
    if _name(op) == "SUM":
        return stacked.sum(0)
    return stacked.amax(0) if _name(op) == "MAX" else stacked.amin(0)
