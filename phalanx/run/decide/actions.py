"""What the driver's shell has to do. Every action may be performed twice, and then changes nothing more."""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.run.decide.policy import CheckKind

IncidentResult = Literal["recovered", "gave up", "stopped", "false alarm"]
"""How an incident has ended: training goes on; the job had to end; a person or the clock ended it; it was none."""


class ActionBase(msgspec.Struct, frozen=True, tag_field="action", forbid_unknown_fields=True):
    """Any of them."""


class OpenStore(ActionBase, frozen=True, tag="open-store"):
    """Let this host open a rendezvous store for the attempt; asked again it answers with the same port."""

    attempt: int
    host: str


class Start(ActionBase, frozen=True, tag="start"):
    """Start ranks on these hosts; a host that has started them answers so again.

    Attributes:
        hosts: to whom it is said now.
        placement: all hosts of the attempt; the ranks of the i-th are `ranks_of(i, workers_per_host)`.
        store_port: of the store at the first of `placement`.
        restarts: attempts before this one.
        version: of the code; empty: the present one.
    """

    attempt: int
    hosts: tuple[str, ...]
    placement: tuple[str, ...]
    workers_per_host: int
    store_port: int
    restarts: int
    version: str = ""


class Gather(ActionBase, frozen=True, tag="gather"):
    """Have these hosts gather evidence of their ranks, judge it, and answer with suspects."""

    attempt: int
    hosts: tuple[str, ...]


class Stop(ActionBase, frozen=True, tag="stop"):
    """Have these hosts end what they have of this attempt and of lower ones, and say so.

    Attributes:
        grace_s: between SIGTERM and SIGKILL; 0: SIGKILL at once. Said again, the earlier end counts.
    """

    attempt: int
    hosts: tuple[str, ...]
    grace_s: float = 0.0


class Check(ActionBase, frozen=True, tag="check"):
    """Test a host; one that has been asked this number before answers again.

    Attributes:
        peers: hosts to test the network with; where one host alone is suspected, they are believed good.
    """

    host: str
    number: int
    kind: CheckKind
    peers: tuple[str, ...] = ()


class Evict(ActionBase, frozen=True, tag="evict"):
    """The back end ends what the job has on this host, and does not use it again for this job."""

    host: str
    why: str


class Release(ActionBase, frozen=True, tag="release"):
    """The back end ends what the job has on this host. It may join again, and is then as new."""

    host: str
    why: str


class AskForHosts(ActionBase, frozen=True, tag="ask-for-hosts"):
    """So many hosts should still come, all together; 0: none any more."""

    count: int


class Alert(ActionBase, frozen=True, tag="alert"):
    """Tell people."""

    level: Literal["info", "warning", "error"]
    text: str
    host: str = ""


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where something was seen.

    Attributes:
        host, rank: empty and -1: not at one place.
        step: that the rank was at; -1: not known.
    """

    host: str = ""
    rank: int = -1
    step: int = -1


class OpenIncident(ActionBase, frozen=True, tag="open-incident"):
    """A report begins.

    Attributes:
        number: from 1.
        attempt: which was hit.
        seen_by: who saw it, such as ``executor of node7``.
        text: what was seen, with the place where it was.
        is_own: it does not only follow from something else.
    """

    number: int
    attempt: int
    seen_by: str
    text: str
    where: Where = Where()
    is_own: bool = False


class AddToIncident(ActionBase, frozen=True, tag="add-to-incident"):
    """More of it: what else was seen (`by` an executor, the back end, a person), or what the driver decided.

    Attributes:
        is_decision: it was decided, not seen.
        why: it was decided; empty: there is nothing to say.
        is_own: it is what is wrong with the attempt, and does not only follow from something else.
    """

    number: int
    by: str
    text: str
    where: Where = Where()
    is_decision: bool = False
    why: str = ""
    is_own: bool = False


class CloseIncident(ActionBase, frozen=True, tag="close-incident"):
    """The job runs again, or has ended.

    Attributes:
        seconds: by phase; ``detecting`` was before the report began; ``first step`` is since the last rank was started.
        lost_steps: that have to be made again; -1: not known.
        from_step, to_step: training was at the one and goes on from the other; -1: not known.
        status: with which the job has ended; -1: it goes on.
        ranks: of the attempt that was hit.
        hosts: that have left the job meanwhile, and why.
        to_do: what people should do.
    """

    number: int
    text: str
    seconds: dict[str, float]
    lost_steps: int = -1
    result: IncidentResult = "recovered"
    from_step: int = -1
    to_step: int = -1
    status: int = -1
    ranks: int = 0
    hosts: dict[str, str] = {}
    to_do: tuple[str, ...] = ()


class Finish(ActionBase, frozen=True, tag="finish"):
    """The job is over: let every host end, and leave with this status.

    Attributes:
        requeue: whether it makes sense to begin it again as it is.
    """

    status: int
    reason: str
    requeue: bool = False


Action = (
    OpenStore
    | Start
    | Gather
    | Stop
    | Check
    | Evict
    | Release
    | AskForHosts
    | Alert
    | OpenIncident
    | AddToIncident
    | CloseIncident
    | Finish
)


def ranks_of(place: int, workers_per_host: int) -> range:
    """Ranks of the host at this place of a placement."""
    return range(place * workers_per_host, (place + 1) * workers_per_host)
