"""What ranks and the keeper of their host say to each other. Torch-free.

See `phalanx.ipc.local_socket` for how. What may be long (plans, state, inventories) travels as the descriptor of a
*document*: memory that holds it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

VERSION = 2

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Hello:
    """A rank begins a conversation."""

    version: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class Begin:
    """See `phalanx.checkpoint.keeper.contract.Keeper.begin`."""

    attempt: int
    set_id: str
    shards: int


@dataclass(frozen=True)
class ResumeFrom:
    """Training goes on from this snapshot; see `Keeper.resume_from`; answered under `number`."""

    number: int
    step: int
    attempt: int
    set_id: str


@dataclass(frozen=True)
class Lease:
    """Asks for memory; documents: the plan, and the job's where there is one. `lease`: the rank's number for it."""

    lease: int
    slots: int
    destination: dict[str, Any] | None


@dataclass(frozen=True)
class Replicate:
    """See `Keeper.replicate_to`; `peer`: the fields of an `Endpoint`."""

    peer: list[Any] | None
    attempt: int
    secret: str


@dataclass(frozen=True)
class Writing:
    """From now on a slot does not hold what it held."""

    lease: int
    slot: int


@dataclass(frozen=True)
class Copied:
    """A slot holds a snapshot; the rest as in `phalanx.checkpoint.keeper.contract.Taken`. Document: state, metrics."""

    lease: int
    slot: int
    step: int
    stepped: bool
    persist: bool
    hurry: bool
    unix_ns: int


@dataclass(frozen=True)
class Ask:
    """For what is ``held``, or for the ``endpoint``; answered under `number`."""

    number: int
    what: str


@dataclass(frozen=True)
class Read:
    """For a committed copy; answered under `number` with descriptors of its memory and of its record and plan."""

    number: int
    step: int
    attempt: int
    set_id: str
    rank: int


@dataclass(frozen=True)
class Release:
    """The copy that was handed out under `number` is not being read any more."""

    number: int


@dataclass(frozen=True)
class Finish:
    """See `Keeper.finish`."""


@dataclass(frozen=True)
class Stay:
    """Somebody is about to connect: what ranks have finished so far is no reason to end; answered under 0."""


@dataclass(frozen=True)
class End:
    """The keeper shall end at once, whatever it holds."""


@dataclass(frozen=True)
class Welcome:
    """The answer to `Hello`; `attempt`: the highest that has been seen."""

    pid: int
    version: int
    attempt: int


@dataclass(frozen=True)
class Memory:
    """The slots of a lease, with a descriptor of each; or why there is none."""

    lease: int
    size_bytes: int
    slots: list[int] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True)
class Free:
    """A slot of the lease that may be written to; -1: none."""

    lease: int
    slot: int


@dataclass(frozen=True)
class Told:
    """The fields of a `phalanx.checkpoint.keeper.contract.Progress`."""

    fields: list[Any]


@dataclass(frozen=True)
class Answer:
    """To what was asked under `number`; what was asked for comes beside it, unless there is a problem."""

    number: int
    problem: str = ""


@dataclass(frozen=True)
class Refused:
    """The keeper hangs up, and why; `later_attempt`: as `phalanx.checkpoint.replicas.contract.RefusedError`."""

    why: str
    later_attempt: bool = True


KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Hello, Begin, ResumeFrom, Lease, Replicate, Writing, Copied, Ask, Read, Release, Finish, Stay, End),
        *(Welcome, Memory, Free, Told, Answer, Refused),
    )
}


def document(content: bytes) -> int:
    """The descriptor of memory that holds `content`, for another process to read; to be closed."""
    descriptor = os.memfd_create("checkpoint document", os.MFD_CLOEXEC)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def content_of(descriptor: int) -> bytes:
    """What is in a document."""
    parts: list[bytes] = []
    at = 0
    while part := os.pread(descriptor, _READ_BYTES, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)
