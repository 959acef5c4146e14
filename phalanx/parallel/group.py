"""A group of ranks and its collectives, counted; all messages of this room to other ranks go through it.

A `Group` wraps one torch process group (gloo or NCCL) that was built for its members alone, see
`phalanx.parallel.mesh`. It belongs to no registry, so several ranks can live in one process as threads, which is how
most tests of this room run. Collectives return a `Work`; a group of one does nothing and returns one that is done.

Shapes: the gathered or scattered dimension is always the first one, so that blocks of ranks are runs in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.core.layout import AXES, Axis, Layout
from phalanx.parallel import process_groups
from phalanx.telemetry.collective_spans import Noted, noted, types_of
from phalanx.telemetry.spans import NONE, Recorder, SpanType

_SHOWN_RANKS = 8


@dataclass(frozen=True)
class RankPlace:
    """One rank of a run, for messages."""

    rank: int
    host: str
    layout: Layout

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (layout {self.layout})"


class CollectiveError(RuntimeError):
    """A collective failed or timed out. The cause is seldom here: some other rank is gone, late or elsewhere."""

    def __init__(
        self, operation: str, axes: Sequence[str], ranks: Sequence[int], place: RankPlace | None, cause: BaseException
    ) -> None:
        # `place`: the rank that reports it, or None where it is not known.
        # `ranks`: global ranks of the group's members.
        # `operation`: such as ``all_gather``, or ``meeting`` where the group could not be made.
        self.operation, self.ranks, self.place = operation, tuple(ranks), place
        who = "" if place is None else f"{place}: "
        over = "·".join(axes) or "named ranks"
        # Without the stack of C++ frames that torch puts below its message.
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        super().__init__(
            f"{who}{operation} failed in the group over {over}, ranks {_shortened(ranks)}: {reason}\n"
            "A member of the group has ended, is later than parallel.timeout_s allows (parallel.first_timeout_s until "
            "the first step is done), or has gone on to another operation. The first error of the job is the cause: "
            "look for a rank that raised, or for the member that reports nothing."
        )


def _shortened(ranks: Sequence[int]) -> str:
    if len(ranks) <= _SHOWN_RANKS:
        return ", ".join(map(str, ranks))
    first = ", ".join(map(str, ranks[: _SHOWN_RANKS - 2]))
    return f"{first}, …, {ranks[-1]} ({len(ranks)} in all)"


class Waits:
    """Nanoseconds that the thread which makes this has waited in collectives of the groups that count here.

    Waiting in other threads goes on beside its work. On a GPU a collective is waited for by later work of the device,
    not by a thread: nothing is counted then.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.waited_ns = 0
        # Told of waits for values that ranks exchange, that one begins, and at its end from when to when it was;
        # collectives are recorded by their groups.
        self.begun: Callable[[int], object] | None = None
        self.recorded: Callable[[int, int], None] | None = None
        self._clock_ns = clock_ns
        self._thread = threading.get_ident()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block, also when it raises."""
        begin_ns = self._clock_ns()
        try:
            yield
        finally:
            if threading.get_ident() == self._thread:
                self.waited_ns += self._clock_ns() - begin_ns

    @contextmanager
    def counted_and_recorded(self) -> Iterator[None]:
        """The same, of what is no collective of a group."""
        begin_ns = self._clock_ns()
        if self.begun is not None and threading.get_ident() == self._thread:
            self.begun(begin_ns)
        try:
            with self.counted():
                yield
        finally:
            if self.recorded is not None and threading.get_ident() == self._thread:
                self.recorded(begin_ns, self._clock_ns())


@dataclass
class Traffic:
    """What a group has carried so far, as this rank sees it: calls, and bytes that left this rank, by operation.

    Bytes are what a bandwidth-optimal algorithm sends: ``(n - 1) / n`` of the whole for gathering and scattering,
    twice that for an all-reduce.
    """

    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, operation: str, sent_bytes: int) -> None:
        """Count one call."""
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self.sent_bytes[operation] = self.sent_bytes.get(operation, 0) + sent_bytes


class Work:
    """A collective on its way: `wait` returns when its result may be used (on a GPU: by later work of the stream)."""

    def __init__(
        self,
        handles: Sequence[Any] = (),
        finish: Callable[[], None] | None = None,
        explain: Callable[[Exception], Exception] | None = None,
        ended: Callable[[], None] | None = None,
        waits: Waits | None = None,
        noted: Noted | None = None,
    ) -> None:
        self._handles, self._waits, self._noted = list(handles), waits, noted
        self._finish, self._explain, self._ended = finish, explain, ended

    def wait(self) -> None:
        """Wait, once; later calls do nothing.

        Raises:
            CollectiveError: a peer is gone, or the time is up; it names the group, the operation and this rank.
        """
        # Taken out first: a collective that has failed is not waited for again.
        handles, self._handles = self._handles, []
        noted, self._noted = self._noted, None
        waits_since_ns = noted.waits() if noted is not None else 0
        try:
            with self._waits.counted() if self._waits is not None and handles else nullcontext():
                for handle in handles:
                    handle.wait()
        except RuntimeError as error:
            if self._explain is None:
                raise
            raise self._explain(error) from error
        finally:
            if noted is not None:  # also one that failed: it is what a person looks for
                noted.ended(waits_since_ns)
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(handle.is_completed() for handle in self._handles)

    is_completed = is_done  # a work may be a handle of another


class Group:
    """The members of one group, as one of them sees it."""

    def __init__(
        self,
        ranks: Sequence[int],  # global ranks of the members, in order
        index: int,  # this rank's place among them
        # torch's process group of the members, made when it is first needed; never for a group of one
        backend: Callable[[], Any] | None,
        axes: Sequence[Axis] = (),  # what the group spans, for messages
        place: RankPlace | None = None,  # which rank of which layout this is, for messages
        waits: Waits | None = None,  # where it is counted how long this rank waits for the others
        recorder: Recorder | None = None,  # where its collectives are recorded
    ) -> None:
        self.ranks, self.index, self.axes = tuple(ranks), index, tuple(axes)
        self.traffic = Traffic()
        self.label = ""  # what it is called in records; empty: by its axes
        self._recorder = recorder
        self._types: dict[str, tuple[SpanType, SpanType]] = {}
        self._place, self._waits = place, waits
        self._under_way = 0
        self._make, self._made = backend, None

    @staticmethod
    def alone(rank: int = 0) -> Group:
        """A group of one: every collective is the identity."""
        return Group((rank,), 0, None)

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ranks)

    @property
    def backend(self) -> Any:
        """The torch process group; made now if it was not needed before (then all members must ask).

        Raises:
            CollectiveError: the members did not all come in time.
        """
        if self._made is None:
            assert self._make is not None, "a group of one has no process group"
            try:
                self._made = self._make()
            except RuntimeError as error:
                raise self._failure("meeting", error) from error
        return self._made

    @property
    def is_busy(self) -> bool:
        """Whether something was started here that has not been waited for, or failed."""
        return self._under_way > 0

    @property
    def keeps_order(self) -> bool:
        """Whether what is started here is done one at a time, in that order, messages too: not with gloo."""
        return process_groups.keeps_order(self.backend)

    def forget(self) -> None:
        """Let go of the torch process group and never make it again."""
        self._made, self._make = None, _closed

    def all_reduce(self, x: Tensor, op: Any = ReduceOp.SUM) -> Work:
        """Reduce `x` in place over the members."""
        if self.size == 1:
            return Work()
        noted = self._count("all_reduce", 2 * _share(x, self.size))
        options = torch._C._distributed_c10d.AllreduceOptions()
        options.reduceOp = op
        return self._start("all_reduce", lambda backend: backend.allreduce([x], options), noted=noted)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """`out` (n * rows, …) = the members' `x` (rows, …) under one another; `x` may be this rank's block of `out`."""
        if self.size == 1:
            _copy(out, x)
            return Work()
        noted = self._count("all_gather", (self.size - 1) * _bytes(x))
        return self._start("all_gather", lambda backend: backend._allgather_base(out, x), noted=noted)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """`out` (rows, …) = the sum over members of their `x` (n * rows, …) at this rank's block.

        `out` may be of a wider type than what travels. NCCL adds in the type that travels, gloo in that of `out`.
        """
        if self.size == 1:
            _copy(out, x)
            return Work()
        noted = self._count("reduce_scatter", _share(x, self.size))
        # gloo's own reduce-scatter is an all-reduce of everything. So the blocks travel by all-to-all and are added
        # here, in rank order: half the bytes, and the same bits every time.
        if x.device.type == "cpu" and not self.keeps_order:
            blocks = torch.empty_like(x)
            return self._start(
                "reduce_scatter",
                lambda backend: backend.alltoall_base(blocks, x, [], []),
                lambda: _add_blocks(out, blocks, self.size),
                noted,
            )
        narrow = out if out.dtype == x.dtype else torch.empty_like(out, dtype=x.dtype)
        return self._start(
            "reduce_scatter",
            lambda backend: backend._reduce_scatter_base(narrow, x),
            None if narrow is out else lambda: _copy(out, narrow),
            noted,
        )

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, rows: Sequence[int] | None = None
    ) -> Work:
        """Block j of `x` goes to member j, whose block from here is block i of its `out`; equal blocks by default."""
        if self.size == 1:
            _copy(out, x)
            return Work()
        noted = self._count("all_to_all", _share(x, self.size))
        split = list(out_rows or []), list(rows or [])
        return self._start("all_to_all", lambda backend: backend.alltoall_base(out, x, *split), noted=noted)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        """`x` of member `root` for all, in place."""
        if self.size == 1:
            return Work()
        noted = self._count("broadcast", _bytes(x) if self.index == root else 0)
        options = torch._C._distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._start("broadcast", lambda backend: backend.broadcast([x], options), noted=noted)

    def send(self, x: Tensor, to: int, tag: int = 0, what: str = "", micro_batch: int = NONE) -> Work:
        """Send contiguous `x` to member `to`; keep it unchanged until the work is done.

        `what` is sent, and of which micro-batch, is recorded: with the same words, the n-th send is the n-th receive.
        """
        peer, size_bytes = self.ranks[to], _bytes(x)
        self.traffic.add("send", size_bytes)
        noted = self._note(f"send {what}".rstrip(), size_bytes, peer, micro_batch)
        return self._start(f"send to rank {peer}", lambda backend: backend.send([x], to, tag), noted=noted)

    def receive(self, x: Tensor, source: int, tag: int = 0, what: str = "", micro_batch: int = NONE) -> Work:
        """Receive into contiguous `x` what member `source` sends under `tag` (on NCCL: in the order it was sent)."""
        peer = self.ranks[source]
        self.traffic.add("receive", 0)
        noted = self._note(f"receive {what}".rstrip(), _bytes(x), peer, micro_batch)
        return self._start(f"receive from rank {peer}", lambda backend: backend.recv([x], source, tag), noted=noted)

    def exchange(self, x: Tensor | None, to: int, out: Tensor | None, source: int, tag: int = 0) -> Work:
        """Send contiguous `x` to member `to` while `out` is received from member `source`; None: nothing goes there.

        Every member of the group calls it, in the same order.
        """
        if not self.keeps_order:
            works = [] if out is None else [self.receive(out, source, tag)]
            works += [] if x is None else [self.send(x, to, tag)]
            return Work(works)
        if x is not None:
            self.traffic.add("send", _bytes(x))
        if out is not None:
            self.traffic.add("receive", 0)
        # NCCL does one thing at a time: where each member sent before it received, or the other way round, all would
        # wait for each other. So there it is one operation, an all-to-all of unequal blocks.
        some = x if x is not None else out
        if some is None:
            return Work()
        sent, received = (some.new_empty(0) if tensor is None else tensor.view(-1) for tensor in (x, out))
        rows, out_rows = [0] * self.size, [0] * self.size
        rows[to], out_rows[source] = sent.numel(), received.numel()
        noted = self._note("exchange", _bytes(sent))
        operation = f"exchange with ranks {self.ranks[to]} and {self.ranks[source]}"
        call = lambda backend: backend.alltoall_base(received, sent, out_rows, rows)  # noqa: E731
        return self._start(operation, call, noted=noted)

    def barrier(self) -> None:
        """Wait until every member is here."""
        if self.size > 1:
            noted = self._count("barrier", 0)
            self._start("barrier", lambda backend: backend.barrier(), noted=noted).wait()

    def _start(
        self,
        operation: str,
        call: Callable[[Any], Any],
        finish: Callable[[], None] | None = None,
        noted: Noted | None = None,
    ) -> Work:
        # Methods of the process group itself: torch.distributed's functions look groups up in a registry of the
        # process, in which ranks that are threads would meet each other's.
        backend = self.backend
        # Before the call, which may fail half way: a group that something went wrong in counts as busy.
        self._under_way += 1
        try:
            explain = lambda error: self._failure(operation, error)  # noqa: E731
            work = call(backend)
            if noted is not None:
                noted.started(work)
            return Work([work], finish, explain, self._ended, self._waits, noted)
        except RuntimeError as error:
            raise self._failure(operation, error) from error

    def _note(self, name: str, num_bytes: int, peer: int = NONE, micro_batch: int = NONE) -> Noted | None:
        """Begin to record a collective, or a message, of this name."""
        recorder = self._recorder
        if recorder is None:
            return None
        types = self._types.get(name)
        if types is None:
            ranks, label = self.ranks, self.label
            if not label and self._place is not None:
                # Of a pipeline each pair has a group of its own; what is recorded is that over the axis, which says
                # what stage a rank is.
                layout = self._place.layout
                label = "·".join(axis for axis in AXES if axis in self.axes and layout.size(axis) > 1)
                ranks = layout.members(self._place.rank, self.axes) if label else ranks
            types = self._types[name] = types_of(recorder, name, label, ranks)
        return noted(recorder, types, num_bytes, peer, micro_batch)

    def _ended(self) -> None:
        self._under_way -= 1

    def _failure(self, operation: str, error: Exception) -> CollectiveError:
        return CollectiveError(operation, self.axes, self.ranks, self._place, error)

    def _count(self, operation: str, sent_bytes: int) -> Noted | None:
        self.traffic.add(operation, sent_bytes)
        return self._note(operation, sent_bytes)

    def __repr__(self) -> str:
        spans = "·".join(self.axes) or "alone"
        return f"Group({spans}, ranks {list(self.ranks)}, index {self.index})"


class Groups(Protocol):
    """The groups of one rank; each is made once, when it is first asked for."""

    @property
    def layout(self) -> Layout:
        """Which rank sits where."""

    @property
    def rank(self) -> int:
        """This rank."""

    def group(self, *axes: Axis) -> Group:
        """The group of this rank over `axes`."""

    def named(self, name: str, ranks: Sequence[int], axes: Sequence[Axis] = ()) -> Group:
        """A group of `ranks`, this one among them, that all of them ask for under `name`."""


def _closed() -> Any:
    raise RuntimeError("the mesh of this group is closed")


def _add_blocks(out: Tensor, blocks: Tensor, size: int) -> None:
    parts = blocks.view(size, -1)
    flat = out.view(-1)
    flat.copy_(parts[0])
    for part in parts[1:]:
        flat.add_(part)


def _copy(out: Tensor, x: Tensor) -> None:
    # The same memory where a rank gathers into a tensor that holds its block already.
    if out.data_ptr() != x.data_ptr() or out.dtype != x.dtype:
        out.copy_(x.view(out.shape))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _share(x: Tensor, size: int) -> int:
    return _bytes(x) * (size - 1) // size
