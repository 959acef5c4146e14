"""What the driver's shell has to do. Every action may be performed twice, and then changes nothing more."""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.detect.detection import Detection
from phalanx.run.decide.events import CheckKind

# Exit statuses of a job.
# Schedulers and scripts tell by these whether to start the job again, so they never change.
DONE = 0
USER_CODE = 1
BAD_INPUT = 2
NO_HOSTS = 3
NO_PROGRESS = 4
STOPPED = 5
TIME_SHORT = 6

IncidentResult = Literal["recovered", "gave up", "stopped", "false alarm"]
"""How an incident has ended: training goes on; the job had to end; a person or the clock ended it; it was none."""


class ActionBase(msgspec.Struct, frozen=True, tag_field="action", forbid_unknown_fields=True):
    """Common to all actions."""


class OpenStore(ActionBase, frozen=True, tag="open-store"):
    """Let this host open a rendezvous store for the attempt; asked again it answers with the same port."""

    attempt: int
    host: str


class Start(ActionBase, frozen=True, tag="start"):
    """Start ranks on these hosts; a host that has started them answers so again."""

    attempt: int
    hosts: tuple[str, ...]  # that start their ranks now
    # All of them, though only some may start now: a rank needs its number and the size of the world.
    placement: tuple[str, ...]  # all hosts of the attempt; the ranks of the i-th are `ranks_of(i, workers_per_host)`
    workers_per_host: int
    store_port: int  # of the store at the first of `placement`
    restarts: int
    version: str = ""  # of the code; empty: the present one


class Gather(ActionBase, frozen=True, tag="gather"):
    """Have these hosts gather evidence of their ranks, judge it, and answer with suspects."""

    attempt: int
    hosts: tuple[str, ...]


class Stop(ActionBase, frozen=True, tag="stop"):
    """Have these hosts end what they have of this attempt and of lower ones, and report it."""

    attempt: int
    hosts: tuple[str, ...]
    grace_s: float = 0.0  # between SIGTERM and SIGKILL; 0: SIGKILL at once. Of two such actions the earlier end counts.


class Check(ActionBase, frozen=True, tag="check"):
    """Test a host, and its network with `peers`; one that has been asked this number before answers again."""

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

    # Not how many more: performed twice, the action still asks for the same number.
    count: int


class Alert(ActionBase, frozen=True, tag="alert"):
    """Alert people."""

    level: Literal["info", "warning", "error"]
    text: str
    host: str = ""


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where something was seen: empty and -1: not at one place; the rank's step: -1: not known."""

    host: str = ""
    rank: int = -1
    step: int = -1


class OpenIncident(ActionBase, frozen=True, tag="open-incident"):
    """A report begins."""

    number: int  # from 1
    attempt: int
    seen_by: str  # such as ``executor of node7``
    text: str
    where: Where = Where()
    is_own: bool = False  # it does not only follow from something else


class AddToIncident(ActionBase, frozen=True, tag="add-to-incident"):
    """What else was seen (`by` an executor, the back end, a person), or what the driver decided, and why."""

    number: int
    by: str
    text: str
    where: Where = Where()
    is_decision: bool = False
    why: str = ""
    is_own: bool = False  # it is what is wrong with the attempt, and does not only follow from something else


class CloseIncident(ActionBase, frozen=True, tag="close-incident"):
    """The job runs again, or has ended."""

    number: int
    text: str
    # By phase; ``detecting`` was before the report began; ``first step`` is since the last rank was started.
    seconds: dict[str, float]
    lost_steps: int | None = None  # that have to be made again; None: not known
    result: IncidentResult = "recovered"
    from_step: int = -1  # training was at this one and goes on from `to_step`; -1: not known
    to_step: int = -1
    status: int = -1  # with which the job has ended; -1: it goes on
    ranks: int = 0  # how many the attempt had that was hit
    # msgspec copies such a default for each value.
    hosts: dict[str, str] = {}  # that have left the job meanwhile, and why
    to_do: tuple[str, ...] = ()


class KeepDetection(ActionBase, frozen=True, tag="keep-detection"):
    """Keep what a judge has found, for whoever asks what was found in this job."""

    number: int  # of the job's, from 1
    unix_s: float
    attempt: int
    judge: str
    found: Detection
    incident: int = 0  # that it belongs to; 0: none


class Finish(ActionBase, frozen=True, tag="finish"):
    """The job is over: let every host end, and leave with this status; `requeue`: it may begin again as it is."""

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
    | KeepDetection
    | Finish
)


def ranks_of(place: int, workers_per_host: int) -> range:
    """Ranks of the host at this place of a placement."""
    return range(place * workers_per_host, (place + 1) * workers_per_host)


GO_ON_PAGE = "docs/run.md#what-a-script-must-do-to-go-on"
"""What a person should read whose script loses its steps."""

# Texts that the report of an incident knows again.

# What writes the text and what looks for it in a report use the same constant.
LEFT = "left with exit status 0 while others had not ended"
HELD_UP = "held up by"
"""Begins the text about ranks that are named and not blamed."""


def read_log(rank: int, last_line: str = "") -> str:
    """What a person should do about a rank that its own script has ended."""
    return f"read the log of rank {rank}{f' ({last_line[:160]})' if last_line else ''}: phalanx run logs {rank}"
