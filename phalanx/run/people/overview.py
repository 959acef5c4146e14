"""A job at one moment, for people: what `status` prints, the live view shows and the API answers. Torch-free."""

from __future__ import annotations

import msgspec

from phalanx.run.messages import HostState, WorkerState


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Any part of it."""


class HostView(Value, frozen=True):
    """One host.

    Attributes:
        state: as `phalanx.run.decide.state.HostState`.
        why: it is in this state; empty: nothing to say.
        leaves: why it shall leave; empty: it stays.
        address: where workers of other hosts reach it.
        place: among the hosts of the attempt; -1: it has no ranks.
        ranks: of the attempt, here.
        silent_s: since it was last heard of; negative: never by this driver.
        is_checking: it is being tested.
        seen: its last report; None: there is none.
        workers: by its last report.
    """

    name: str
    state: str
    why: str = ""
    leaves: str = ""
    rack: str = ""
    address: str = ""
    place: int = -1
    ranks: tuple[int, ...] = ()
    silent_s: float = -1.0
    is_checking: bool = False
    seen: HostState | None = None
    workers: tuple[WorkerState, ...] = ()


class IncidentView(Value, frozen=True):
    """The incident that is open."""

    number: int
    age_s: float
    why: str


class Overview(Value, frozen=True):
    """A job at one moment.

    Attributes:
        unix_s: when.
        phase: as `phalanx.run.decide.state.Phase`.
        phase_s: for so long.
        hosts_wanted: that take part when all is well.
        hosts: all of them, or of very many only some, those in trouble first; hosts_by_state counts all.
        step: the newest that any rank has done; -1: none is known.
        steps_per_s: over the last minute, of this attempt; negative: not known.
        step_age_s: since the last step; negative: not known.
        quiet_s: since anything of the job moved, a step or else; limit_s: after which it is looked into; negative: not
            known.
        age_s: since the job began.
        training_s: of that, while an attempt has made steps.
        checkpoints: what storage can keep up with, where it cannot keep up with what is asked for.
        recoveries: so far.
        incidents: so far.
        status: with which the job has ended; None: it has not.
        ended: why.
    """

    job: str
    unix_s: float
    phase: str
    phase_s: float
    attempt: int
    world_size: int
    hosts_wanted: int
    workers_per_host: int
    hosts: tuple[HostView, ...]
    hosts_by_state: dict[str, int] = {}
    step: int = -1
    steps_per_s: float = -1.0
    step_age_s: float = -1.0
    quiet_s: float = -1.0
    limit_s: float = -1.0
    age_s: float = 0.0
    training_s: float = 0.0
    recoveries: int = 0
    incidents: int = 0
    incident: IncidentView | None = None
    version: str = ""
    advise_only: bool = False
    status: int | None = None
    ended: str = ""
    checkpoints: str = ""
