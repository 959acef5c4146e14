"""What was observed of a case, as dated facts: the referee's only source besides the manifest. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from phalanx.faults.agenda import Record

What = Literal["happened", "refused", "detected", "blamed", "acted", "progress", "loss", "ended", "left"]


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One observation; which fields count depends on `what`.

    ========  ==========================================================================================
    happened  an incident has taken place, by its own record or the controller's check: incident, attempt
    refused   it has not, and why: incident, text
    detected  the supervisor has noticed that something is wrong and acts, or would, on it
    blamed    it has named these: ranks, hosts
    acted     one per recovery, the strongest of what it did: action (restart, evict …), hosts
    progress  the first rank has reported the end of an optimizer step: attempt, step
    loss      of a step, as ``float.hex`` has it: attempt, step, loss
    ended     the job is over: status, step (the last one done)
    left      processes that are still there afterwards: pids
    ========  ==========================================================================================

    Attributes:
        at_s: of the campaign machine's monotonic clock.
    """

    at_s: float
    what: What
    incident: int = -1
    attempt: int = 0
    step: int = -1
    ranks: list[int] = []
    hosts: list[int] = []
    action: str = ""
    loss: str = ""
    status: int = 0
    pids: list[int] = []
    text: str = ""


def facts_of(records: Iterable[Record]) -> list[Fact]:
    """What workers have put on record of what they did to themselves (on the campaign's own machine)."""
    return [
        Fact(
            at_s=record.monotonic_ns / 1e9,
            what="refused" if record.refused else "happened",
            incident=record.number,
            attempt=record.attempt,
            step=record.step,
            ranks=[record.rank],
            text=record.refused,
        )
        for record in records
    ]
