"""Spans from anywhere in a script: recorded where this rank records, and nothing at all where it does not.

    with phalanx.telemetry.span("forward", chunk=3):
        ...
    with phalanx.telemetry.span("all-reduce", group=pg, bytes=x.nbytes):
        ...

Which recording that is, is a value of the context (`contextvars`) and not of the module: `record_spans` and
`phalanx train` set it and put back what was there before, so nothing outlives them, and ranks that are threads of one
process do not meet each other's. A thread that a script starts has a context of its own: give it the recording, or run
it in `contextvars.copy_context()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.telemetry.recording import Recording
    from phalanx.telemetry.spans import Kind

CURRENT: ContextVar[Recording | None] = ContextVar("recording", default=None)

_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(
    name: str,
    *,
    kind: Kind | None = None,
    group: Any = None,
    ranks: Sequence[int] = (),
    peer: int = -1,
    bytes: int = 0,
    chunk: int = -1,
    micro_batch: int = -1,
) -> AbstractContextManager[Any]:
    """Record the block of a `with`, if this rank records.

    Args:
        name: of what is done.
        kind: one of `phalanx.telemetry.spans.KINDS`, by which queries add up; None: `name`, where that is one, else
            ``collective`` with a group and ``user`` without.
        group: of a collective: a process group of torch, a device mesh of one dimension, a name, or the members. Then
            it is known who waits for whom: see `phalanx.telemetry.recording.Recording.span`.
        ranks: its members, where `group` is a name; empty: not known.
        peer: the other rank of a message.
        bytes: that leave this rank.
        chunk, micro_batch: of the model and of the batch; -1: none.

    Raises:
        UserError: there is no such kind or group.
    """
    recording = CURRENT.get()
    if recording is None:
        return _NOTHING
    return recording.span(
        name, kind=kind, group=group, ranks=ranks, peer=peer, bytes=bytes, chunk=chunk, micro_batch=micro_batch
    )


def attach(model: Any, name: str = "model", chunk: int = -1) -> None:
    """Record every forward and backward pass of a torch module from now on, if this rank records: see
    `phalanx.telemetry.recording.Recording.attach`."""
    recording = CURRENT.get()
    if recording is not None:
        recording.attach(model, name, chunk)
