"""What the interface answers, as JSON with names.

A body is a value of the driver in which everything has a name: messages between driver and executors are arrays. So
the client gives what it has read to whatever takes the driver's values. Unknown fields are no error: what a later
version adds does not keep an earlier client from reading the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from phalanx.run import messages
from phalanx.run.decide.state import HostState as StateOfHost
from phalanx.run.incidents.report import Incident
from phalanx.run.logs.log_files import LoggedLine
from phalanx.run.reports.recent_events import HostView, Overview, Told, Wrote


class Device(messages.Accelerator, frozen=True, array_like=False, forbid_unknown_fields=False):
    """One accelerator of a host; negative: not known."""


class NetworkInterface(messages.Interface, frozen=True, array_like=False, forbid_unknown_fields=False):
    """A network interface that training uses: counters since it came up."""


class HostReport(messages.HostState, frozen=True, array_like=False, forbid_unknown_fields=False):
    """A host, as its executor saw it last."""

    interfaces: list[NetworkInterface] = msgspec.field(default_factory=list)  # type: ignore[assignment]
    accelerators: list[Device] = msgspec.field(default_factory=list)  # type: ignore[assignment]


class Worker(messages.WorkerState, frozen=True, array_like=False, forbid_unknown_fields=False):
    """One rank, as its executor saw it last. A loss that is not a number is null in JSON."""

    loss: float | None = 0.0  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.loss is None:
            msgspec.structs.force_setattr(self, "loss", math.nan)


class HostBody(HostView, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """One host."""

    seen: HostReport | None = None
    workers: tuple[Worker, ...] = ()


class Status(Overview, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The job at one moment. Of very many hosts only some are listed, those in trouble first."""

    hosts: tuple[HostBody, ...]


class Hosts(msgspec.Struct, frozen=True):
    """Hosts, a page of them; next: `after` for the page that follows, empty: there is none."""

    hosts: list[HostBody]
    next: str = ""


class IncidentLine(msgspec.Struct, frozen=True):
    """One of the list of incidents; result ``open`` and seconds null: it has not ended; lost_steps null: not known."""

    number: int
    began_unix_s: float
    attempt: int
    title: str
    result: str
    seconds: float | None
    lost_steps: int | None


class Incidents(msgspec.Struct, frozen=True):
    """Of the job, the oldest first."""

    incidents: list[IncidentLine]


class LogLine(msgspec.Struct, frozen=True):
    """A line of a rank; attempt 0 and unix_s 0: not known."""

    rank: int
    attempt: int
    unix_s: float
    text: str


class LogLines(msgspec.Struct, frozen=True):
    """Of ranks, the oldest first."""

    lines: list[LogLine]


class Items(msgspec.Struct, frozen=True):
    """What has been said, the oldest first; last: the number to ask on from."""

    items: list[Told | Wrote]
    last: int


class Done(msgspec.Struct, frozen=True):
    """An order was taken."""

    done: str


class Wrong(msgspec.Struct, frozen=True):
    """What is wrong, and what to do about it."""

    problem: str
    cure: str


class Health(msgspec.Struct, frozen=True):
    """The driver answers."""

    status: str = "ok"


STATES: tuple[str, ...] = tuple(StateOfHost.__args__)  # type: ignore[attr-defined]
BODIES = (Status, Hosts, HostBody, Incidents, Incident, LogLines, Items, Done, Wrong, Health, LogLine, Told, Wrote)


def status_body(overview: Overview) -> Status:
    """An overview for JSON."""
    return msgspec.convert(overview, Status, from_attributes=True)


def host_bodies(hosts: Iterable[HostView]) -> list[HostBody]:
    """Hosts for JSON."""
    return [msgspec.convert(host, HostBody, from_attributes=True) for host in hosts]


def line_body(line: LoggedLine) -> LogLine:
    """A line for JSON."""
    return LogLine(line.rank, line.attempt, line.unix_s, line.text)
