"""Collectives and messages of a rank: from the start until the result may be used, and what of that nothing hid.

Groups of `phalanx.parallel` note theirs by `noted`; a loop of somebody else says which block is one:

    with span("all-reduce", group=pg, bytes=x.nbytes):
        dist.all_reduce(x, group=pg)

Both note a ``collective`` and the ``wait`` for it under the group's name and members, so that who waits for whom is
known where a job stands still, and whom a group waited for where it is slow.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from phalanx.core.errors import UserError
from phalanx.telemetry.spans import NONE, Recorder, SpanType

DESCRIBED_RANKS = 1024
"""Larger groups are recorded without their members: every member would write all of them down."""

_UNNAMED = ("", "undefined")
_OF_ALL = ("default_pg", "world", "WORLD")


def types_of(recorder: Recorder, name: str, group: str, ranks: Sequence[int]) -> tuple[SpanType, SpanType]:
    """Of a collective or message of this name, and of the wait for it.

    Args:
        group: its name, the same on all members; by its axes where it has some (``tensor``, ``shard·context``).
        ranks: its members, numbered as in the whole job; empty: not known.
    """
    ranks = ranks if len(ranks) <= DESCRIBED_RANKS else ()
    return (
        recorder.type("collective", name, group=group, ranks=ranks),
        recorder.type("wait", name, group=group, ranks=ranks),
    )


def noted(
    recorder: Recorder, types: tuple[SpanType, SpanType], num_bytes: int = 0, peer: int = NONE, micro_batch: int = NONE
) -> Noted:
    """Begin to record a collective or message, by the time of the device where there is one."""
    kind = Noted if recorder.device is None else NotedOnDevice
    return kind(recorder, types, num_bytes, peer, micro_batch)


class Noted:
    """A collective that is recorded: from its start until its result may be used, and in that how long it was waited
    for, which nothing hid."""

    __slots__ = ("_began_ns", "_micro_batch", "_num_bytes", "_number", "_peer", "_recorder", "_types")

    def __init__(
        self, recorder: Recorder, types: tuple[SpanType, SpanType], num_bytes: int, peer: int, micro_batch: int
    ) -> None:
        self._recorder, self._types, self._num_bytes = recorder, types, num_bytes
        self._peer, self._micro_batch = peer, micro_batch
        self._began_ns = began_ns = recorder.clock_ns()
        self._number = recorder.enter(types[0], began_ns, micro_batch=micro_batch, peer=peer)

    def started(self, work: Any) -> None:
        """It is under way, as `work` of torch's."""

    def waits(self) -> int:
        """Somebody begins to wait for it; when, for `ended`."""
        now_ns = self._recorder.clock_ns()
        if self._number:
            micro_batch, peer = self._micro_batch, self._peer
            self._recorder.enter(self._types[1], now_ns, micro_batch=micro_batch, peer=peer, number=self._number)
        return now_ns

    def ended(self, waits_since_ns: int) -> None:
        """Its result may be used."""
        now_ns, (collective, wait) = self._recorder.clock_ns(), self._types
        record, peer, micro_batch = self._recorder.record, self._peer, self._micro_batch
        record(collective, self._began_ns, now_ns, micro_batch=micro_batch, peer=peer, num_bytes=self._num_bytes)
        record(wait, waits_since_ns, now_ns, micro_batch=micro_batch, peer=peer)


class NotedOnDevice(Noted):
    """The same of a device, by its own time.

    The collective is from where its inputs are ready until it is done, on the stream where it runs where that can be
    found out; else until its result may be used. The wait is how long the stream that goes on with the result stood
    still for it.
    """

    __slots__ = ("_ends_itself", "_running", "_waiting")

    def __init__(
        self, recorder: Recorder, types: tuple[SpanType, SpanType], num_bytes: int, peer: int, micro_batch: int
    ) -> None:
        super().__init__(recorder, types, num_bytes, peer, micro_batch)
        self._running: Any = recorder.begin(types[0], micro_batch=micro_batch, peer=peer, num_bytes=num_bytes)
        self._waiting: Any = self._running
        self._ends_itself = False

    def started(self, work: Any) -> None:
        """See `Noted`."""
        device = self._recorder.device
        self._ends_itself = device is not None and device.end_with(self._running, work)

    def waits(self) -> int:
        """See `Noted`."""
        self._waiting = self._recorder.begin(self._types[1], micro_batch=self._micro_batch, peer=self._peer)
        return 0

    def ended(self, waits_since_ns: int) -> None:
        """See `Noted`."""
        self._waiting.end()
        if not self._ends_itself:
            self._running.end()


class CollectiveSpan:
    """A `with` block that is a collective or a message, and the wait for it: what a call does that returns when it is
    done (on a GPU: when later work of the stream may use the result)."""

    __slots__ = ("_micro_batch", "_noted", "_num_bytes", "_peer", "_recorder", "_since_ns", "_types")

    def __init__(
        self, recorder: Recorder, types: tuple[SpanType, SpanType], num_bytes: int, peer: int, micro_batch: int
    ) -> None:
        self._recorder, self._types, self._num_bytes = recorder, types, num_bytes
        self._peer, self._micro_batch = peer, micro_batch
        self._noted: Noted | None = None
        self._since_ns = 0

    def __enter__(self) -> CollectiveSpan:
        if self._noted is None:
            self._noted = noted(self._recorder, self._types, self._num_bytes, self._peer, self._micro_batch)
            self._since_ns = self._noted.waits()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Record it, also one that failed: it is what a person looks for. Once; later calls do nothing."""
        one, self._noted = self._noted, None
        if one is not None:
            one.ended(self._since_ns)


def described(group: Any, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Name and members of a group that somebody names.

    Args:
        group: a process group of torch, a device mesh of one dimension, a name, or members.
        ranks: members, numbered as in the whole job, where `group` is a name or nothing.

    Returns:
        Members ascending; none: not known. A group without a name gets one by its members: ``ranks 0-3``.

    Raises:
        UserError: it is none of these, or there are no such ranks.
    """
    if isinstance(group, str):
        return ("all" if group in _OF_ALL else group), _ranks(ranks)
    if group is None or isinstance(group, list | tuple | range):
        if group is not None and ranks:
            raise UserError("is given twice", cure="give the members once, as group or as ranks", field="ranks")
        members = _ranks(ranks if group is None else group)
        return _by_members(members), members
    if ranks:
        raise UserError("are known by the group", cure="leave ranks out, or give a name as group", field="ranks")
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):  # a device mesh
        names: tuple[str, ...] = tuple(group.mesh_dim_names or ())
        if len(names) > 1:
            cure = f"give one dimension of it, such as mesh[{names[0]!r}]"
            raise UserError(f"is a mesh of {len(names)} dimensions", cure=cure, field="group")
        group = group.get_group()
    try:
        found = import_module("torch.distributed").get_process_group_ranks(group)
    except Exception as error:  # torch has no word for what is no group of this process
        cure = "give a process group of torch that this rank is in, a name, or the ranks of its members"
        raise UserError(f"is no group ({error})", cure=cure, field="group", value=repr(group)[:80]) from error
    members, name = _ranks(found), str(getattr(group, "group_desc", ""))
    return "all" if name in _OF_ALL else _by_members(members) if name in _UNNAMED else name, members


def _ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(sorted(map(operator.index, ranks)))
    except TypeError:
        found = (-1,)
    if found and (found[0] < 0 or len(set(found)) < len(found)):
        cure = "give the number of each member in the whole job, once"
        raise UserError("are no ranks", cure=cure, field="ranks", value=str(ranks)[:80])
    return found


def _by_members(members: tuple[int, ...]) -> str:
    """A name that all members find by themselves."""
    if len(members) > 2 and members[-1] - members[0] == len(members) - 1:
        return f"ranks {members[0]}-{members[-1]}"
    shown = ", ".join(map(str, members[:8]))
    return f"ranks {shown}{f' and {len(members) - 8} more' if len(members) > 8 else ''}" if members else ""
