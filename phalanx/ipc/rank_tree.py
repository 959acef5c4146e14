"""What one rank does in a tree of ranks that exchange small values: pure, no sockets, no clock.

Rank r hears its children, ranks 32 r + 1 to 32 r + 32, and sends to its parent; so what a rank holds open and what it
receives grow with the depth of the tree, not with the job. Values go up, put together on the way; results come down.
Operations are numbered, as every rank makes the same ones in the same order; many may be under way.

A failure is final: the rank that sees it sends it to its neighbours, so that all ranks raise the same error, which
names the cause. A rank that waits too long asks which others have not come: ranks pass the question on to those that
they wait for themselves, whatever else they are doing, and the answers come back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from phalanx.core.peers import PeerError

FAN_OUT = 32
_ENTRY = struct.Struct("!IQ")  # rank, bytes of its value
_SHOWN = 8


class OperationKind(IntEnum):
    """Of operations."""

    GATHER = 1
    COLLECT = 2
    BROADCAST = 3
    LOWEST = 4


class MessageType(IntEnum):
    """A value on its way up or down; the job has failed; who is missing?; these ranks are."""

    UP = 1
    DOWN = 2
    FAILED = 3
    WHO = 4
    MISSING = 5


class TreeMessage(NamedTuple):
    """One message between neighbours.

    Attributes:
        kind: of the operation; 0 where it makes no difference.
        number: of the operation, from 0 on.
        body: a value, a text, or names as JSON.
    """

    type: int
    kind: int
    number: int
    body: bytes


def parent_of(rank: int) -> int | None:
    """The rank that `rank` sends its values to; None: it is the first."""
    return (rank - 1) // FAN_OUT if rank else None


def children_of(rank: int, size: int) -> range:
    """The ranks that send `rank` theirs."""
    return range(FAN_OUT * rank + 1, min(FAN_OUT * (rank + 1), size - 1) + 1)


@dataclass
class _Operation:
    kind: OperationKind
    begun_by: str
    parts: dict[int, bytes] = field(default_factory=dict)
    answer: Future[bytes] = field(default_factory=Future)
    is_mine: bool = False
    is_sent_up: bool = False
    result: bytes | None = None
    askers: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    missing: dict[str, None] = field(default_factory=dict)


class TreeNode:
    """One rank of the tree. Not for several threads at once.

    Args:
        name: of this rank, for others' errors, such as ``rank 5 on node1``.
        send: sends a message to a neighbour; where that is gone, it does nothing.

    Attributes:
        failed: why nothing more can be exchanged; empty while it can.
    """

    def __init__(self, rank: int, size: int, name: str, send: Callable[[int, TreeMessage], None]) -> None:
        self.rank, self.size, self.name, self._send = rank, size, name, send
        self.parent, self.children = parent_of(rank), children_of(rank, size)
        self.failed = ""
        self._names: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        self._unsent: dict[int, list[TreeMessage]] = {}
        self._next = 0
        self._open: dict[int, _Operation] = {}

    def met(self, neighbour: int, name: str) -> None:
        """A neighbour is connected: it hears what it has missed."""
        self._names[neighbour] = name
        for message in self._unsent.pop(neighbour, []):
            self._send(neighbour, message)
        if self.failed:
            self._post(neighbour, MessageType.FAILED, 0, self.failed.encode())

    def start(self, kind: OperationKind, value: bytes) -> tuple[int, Future[bytes]]:
        """This rank takes part in its next operation; its number, and what it comes to.

        A gather and a collection come to the `entries` of all (the latter elsewhere than on rank 0 to nothing), a
        broadcast to rank 0's value, `LOWEST` to the lowest JSON value that is not null.
        """
        number, self._next = self._next, self._next + 1
        operation = self._open.setdefault(number, _Operation(kind, self.name))
        answer = operation.answer
        operation.is_mine = True
        if self.failed:
            answer.set_exception(PeerError(self.failed))
            return number, answer
        if kind in (OperationKind.GATHER, OperationKind.COLLECT):
            value = _ENTRY.pack(self.rank, len(value)) + value
        operation.parts[self.rank] = value
        if operation.kind is kind:
            self._advance(number, operation)
            for neighbour, why in self._gone.items():
                self._miss(number, operation, neighbour, why)
        else:
            self._fail_mixed(operation, self.name, kind)
        return number, answer

    def hear(self, neighbour: int, message: TreeMessage) -> None:
        """A message has come."""
        message_type, kind, number, body = message
        if self.failed:
            return
        if message_type == MessageType.FAILED:
            self.fail(body.decode(), by=neighbour)
        elif message_type == MessageType.WHO:
            self._hear_question(neighbour, number, OperationKind(kind))
        elif message_type == MessageType.MISSING:
            self._hear_missing(neighbour, number, json.loads(body))
        else:
            operation = self._open.setdefault(number, _Operation(OperationKind(kind), self._name(neighbour)))
            if operation.kind != kind:
                self._fail_mixed(operation, self._name(neighbour), OperationKind(kind))
            elif message_type == MessageType.UP:
                operation.parts[neighbour] = body
                self._advance(number, operation)
            else:
                self._deliver(number, operation, body)

    def lost(self, neighbour: int, why: str) -> None:
        """A neighbour is gone; that matters as soon as something is needed of it."""
        self._gone[neighbour] = why
        for number, operation in list(self._open.items()):
            self._miss(number, operation, neighbour, why)

    def fail(self, why: str, by: int | None = None) -> None:
        """Nothing more can be exchanged: raise that here, and send it to the neighbours (but `by`)."""
        if self.failed:
            return
        self.failed = why
        for neighbour in list(self._names):
            if neighbour != by and neighbour not in self._gone:
                self._post(neighbour, MessageType.FAILED, 0, why.encode())
        for operation in self._open.values():
            if operation.is_mine and not operation.answer.done():
                operation.answer.set_exception(PeerError(why))
        self._open.clear()

    def ask_who_is_missing(self, number: int) -> None:
        """Begin to ask which ranks have not come to an operation of this rank."""
        if number in self._open:
            self._hear_question(self.rank, number, self._open[number].kind)

    def knows_who_is_missing(self, number: int) -> bool:
        """Whether some rank is known not to have come, and all neighbours that were asked have answered."""
        operation = self._open.get(number)
        return operation is not None and bool(operation.missing) and operation.asked <= operation.answered

    def missing(self, number: int) -> str:
        """The ranks that have not come, in words, as far as answers have come since `ask_who_is_missing`."""
        operation = self._open.get(number)
        if operation is None:
            return "nobody"
        silent = [f"{self._name(n)}, which does not answer" for n in sorted(operation.asked - operation.answered)]
        names = [*operation.missing, *silent]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return "; ".join(names[:_SHOWN]) + more or "nobody"

    def is_owing(self) -> bool:
        """Children that have not connected are still to receive something."""
        return bool(self.failed or self._unsent) and any(child not in self._names for child in self.children)

    def _fail_mixed(self, operation: _Operation, name: str, kind: OperationKind) -> None:
        # Either of the two may be the one that went astray: both are named.
        self.fail(f"{name} is to {described(kind)} while {operation.begun_by} is to {described(operation.kind)}")

    def _advance(self, number: int, operation: _Operation) -> None:
        if operation.kind is OperationKind.BROADCAST:
            if self.rank == 0:
                self._deliver(number, operation, operation.parts[0])
            elif operation.result is not None:
                self._deliver(number, operation, operation.result)
            return
        whole = operation.is_mine and len(operation.parts) == 1 + len(self.children)
        if whole and not operation.is_sent_up:
            operation.is_sent_up = True
            if operation.kind is OperationKind.LOWEST:
                values = [value for value in map(json.loads, operation.parts.values()) if value is not None]
                body = json.dumps(min(values, default=None)).encode()
            else:
                body = b"".join(operation.parts.values())
            if self.parent is None:
                self._deliver(number, operation, body)
            else:
                self._post(self.parent, MessageType.UP, number, body, operation.kind)
                # The keys say which ranks have come; the values are not needed any more.
                operation.parts = dict.fromkeys(operation.parts, b"")
                if operation.kind is OperationKind.COLLECT:
                    del self._open[number]
        if operation.kind is OperationKind.COLLECT and self.rank and not operation.answer.done():
            operation.answer.set_result(b"")

    def _deliver(self, number: int, operation: _Operation, body: bytes) -> None:
        """Pass the result of an operation on to the children, once, and hand it out here."""
        if operation.result is None and operation.kind is not OperationKind.COLLECT:
            for child in self.children:
                self._post(child, MessageType.DOWN, number, body, operation.kind)
        operation.result = body
        if operation.is_mine:
            operation.answer.set_result(body)
            del self._open[number]

    def _miss(self, number: int, operation: _Operation, neighbour: int, why: str) -> None:
        if self.failed or not operation.is_mine or number not in self._open:
            return
        # Of a parent the result is needed, of a child its part, unless that has come.
        is_part_needed = operation.kind is not OperationKind.BROADCAST and neighbour not in operation.parts
        if neighbour == self.parent or is_part_needed:
            self.fail(f"{self._name(neighbour)} {why}")

    def _hear_question(self, asker: int, number: int, kind: OperationKind) -> None:
        # Answer with what is known, and ask those that are waited for here.
        if number < self._next and number not in self._open:
            self._post(asker, MessageType.MISSING, number, b"[]")
            return
        operation = self._open.setdefault(number, _Operation(kind, self._name(asker)))
        operation.askers.add(asker)
        goes_down = kind is not OperationKind.BROADCAST
        if not operation.is_mine and (goes_down or self.rank == 0):
            operation.missing[self.name] = None
        waited_for = [child for child in self.children if goes_down and child not in operation.parts]
        if self.parent is not None and operation.result is None:
            waited_for.append(self.parent)
        for neighbour in waited_for:
            if neighbour not in self._names:
                operation.missing[f"rank {neighbour}, which has not connected"] = None
            elif neighbour != asker and neighbour not in operation.asked:
                operation.asked.add(neighbour)
                self._post(neighbour, MessageType.WHO, number, b"", kind)
        self._post(asker, MessageType.MISSING, number, json.dumps(list(operation.missing)).encode())

    def _hear_missing(self, neighbour: int, number: int, names: Sequence[str]) -> None:
        operation = self._open.get(number)
        if operation is None:
            return
        operation.answered.add(neighbour)
        new = [name for name in names if name not in operation.missing]
        operation.missing |= dict.fromkeys(new)
        for asker in operation.askers - {neighbour}:
            if new:
                self._post(asker, MessageType.MISSING, number, json.dumps(new).encode())

    def _post(self, neighbour: int, type: MessageType, number: int, body: bytes, kind: int = 0) -> None:
        message = TreeMessage(type, kind, number, body)
        if neighbour in self._names:
            self._send(neighbour, message)
        elif neighbour != self.rank:
            self._unsent.setdefault(neighbour, []).append(message)

    def _name(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")


def entries(body: bytes) -> list[bytes]:
    """The values of a gather, in order of rank."""
    found, at = {}, 0
    while at < len(body):
        rank, length = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size + length
        found[rank] = body[at - length : at]
    return [found[rank] for rank in sorted(found)]


def described(kind: OperationKind) -> str:
    """What a rank does in such an operation, for messages."""
    return {
        OperationKind.GATHER: "gather values",
        OperationKind.COLLECT: "collect values on rank 0",
        OperationKind.BROADCAST: "hear rank 0",
        OperationKind.LOWEST: "meet",
    }[kind]
