"""The job as the interface sees it: reading it without holding the driver up, ordering it, following it.

*Metrics* are what Prometheus reads: a few dozen numbers of the job, none of them per rank or per host. *Streams* are
what goes on, one JSON value a line, until the job ends or the client leaves; an empty line every few seconds keeps
connections open and shows either side that the other is there.
"""

from __future__ import annotations

import asyncio
import getpass
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from phalanx.core.errors import UserError
from phalanx.run.api.bodies import STATES, LogLine, line_body
from phalanx.run.clock import Now, read_clocks
from phalanx.run.decide import events
from phalanx.run.decide.state import PHASES, Host, State
from phalanx.run.driver.driver import Driver
from phalanx.run.driver.job_status import Known, host_views, overview
from phalanx.run.driver.write_ahead import Book
from phalanx.run.logs.log_files import Follower, last_lines, rank_folders
from phalanx.run.reports.recent_events import HostView, Hub, Overview, Wrote
from phalanx.telemetry.alerts.run_metrics import TrainingCollector, TrainingFigures

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Reading(NamedTuple):
    """What Prometheus reads at once.

    Attributes:
        heartbeats: that this driver has received.
        oldest_s: age of the oldest newest heartbeat of a host that is expected to report; None: there is none.
        training_s: in which attempts have made steps.
        job_s: since the job began.
    """

    overview: Overview
    heartbeats: int
    oldest_s: float | None
    training_s: float
    job_s: float


class Metrics(Collector):
    """The numbers of one job, in a registry of their own.

    Args:
        read: gives the job now, without its hosts.
        training: figures of what it trains; None: it is no training of ours, or they cannot be read here.
    """

    def __init__(
        self, read: Callable[[], Reading], training: Callable[[], TrainingFigures | None] = lambda: None
    ) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._registry.register(TrainingCollector(training))

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not read."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All numbers; what is not known is absent, as Prometheus wants it."""
        reading = self._read()
        now = reading.overview
        hosts = GaugeMetricFamily("phalanx_run_hosts", "Hosts by state.", labels=["state"])
        for state in STATES:
            hosts.add_metric([state], now.hosts_by_state.get(state, 0))
        yield hosts
        phases = GaugeMetricFamily("phalanx_run_phase", "1 for the phase that the job is in.", labels=["phase"])
        for phase in PHASES:
            phases.add_metric([phase], float(phase == now.phase))
        yield phases
        gauges = (
            ("hosts_wanted", "Hosts that take part when all is well.", now.hosts_wanted),
            ("ranks", "Ranks of the present attempt.", now.world_size),
            ("attempt", "Number of the present attempt.", now.attempt),
            ("incident_open", "1 while an incident is being dealt with.", now.incident is not None),
            ("step", "Newest step that any rank has done.", now.step),
            ("steps_per_second", "Over the last minute, of the present attempt.", now.steps_per_s),
            ("last_step_age_seconds", "Of the present attempt, while it runs.", now.step_age_s),
            ("last_movement_age_seconds", "The same of whatever moves, a step or else.", now.quiet_s),
            ("step_limit_seconds", "Without movement for so long, the job is looked into.", now.limit_s),
            ("exit_status", "With which the job has ended.", -1 if now.status is None else now.status),
        )
        for name, text, value in gauges:
            if value >= 0:
                yield GaugeMetricFamily(f"phalanx_run_{name}", text, value=float(value))
        share = "In which attempts have made steps; divided by job seconds, the share of effective training time."
        counters = (
            ("recoveries", "Recoveries of the job.", now.recoveries),
            ("incidents", "Incidents of the job.", now.incidents),
            ("heartbeats", "Heartbeats that this driver has heard.", reading.heartbeats),
            ("job_seconds", "Since the job began.", reading.job_s),
            ("training_seconds", share, reading.training_s),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"phalanx_run_{name}", text, value=float(value))
        if reading.oldest_s is not None:
            text = "Of all hosts that are expected to report, since the one that was silent longest was heard."
            yield GaugeMetricFamily("phalanx_run_heartbeat_age_max_seconds", text, value=float(reading.oldest_s))


class OrderError(Exception):
    """An order cannot be taken; `status` is HTTP's, 404, 409 or 503."""

    def __init__(self, status: int, problem: str, cure: str) -> None:
        self.status, self.problem, self.cure = status, problem, cure
        super().__init__(f"{problem}; {cure}")


def known(driver: Driver, addresses: Mapping[str, str]) -> Known:
    """What this driver knows now."""
    return Known(driver.state, addresses, driver.attempt, driver.hosts.hosts, driver.other_versions())


@dataclass(frozen=True)
class JobControl:
    """One job, for the event loop of its driver; ranks that share a file system with it write to `logs`."""

    driver: Driver
    book: Book
    hub: Hub
    folder: Path
    logs: Path
    clocks: Callable[[], Now] = read_clocks
    training: Callable[[], TrainingFigures | None] = lambda: None

    @property
    def state(self) -> State:
        """What was decided so far."""
        return self.driver.state

    def overview(self, most: int) -> Overview:
        """The job, with so many of its hosts."""
        return overview(self._known, self.clocks(), most)

    def hosts(self, names: list[str]) -> list[HostView]:
        """These hosts, as far as they are known."""
        return list(host_views(self._known, self.clocks(), names))

    def page(self, after: str, most: int, state: str | None) -> tuple[list[HostView], str]:
        """Up to `most` hosts in the order in which they came, and the last name where more follow.

        Raises:
            OrderError: there is no host of the name `after`.
        """
        names = list(self.state.hosts)
        if after and after not in self.state.hosts:
            raise unknown_host(after)
        start = names.index(after) + 1 if after else 0
        wanted = [name for name in names[start:] if state is None or self.state.hosts[name].state == state]
        shown = wanted[:most]
        return self.hosts(shown), shown[-1] if len(wanted) > most else ""

    def reading(self) -> Reading:
        """For metrics."""
        now = self.clocks()
        state = self.state
        lasts = [heard.last_s for heard in self.driver.hosts.hosts.values()]
        oldest_s = max(now.monotonic_s - min(lasts), 0.0) if lasts else None
        end_s = state.phase_since_s if state.phase == "ended" else now.unix_s
        training_s = state.training_s + (max(now.unix_s - state.phase_since_s, 0.0) if state.phase == "running" else 0)
        job_s = max(end_s - state.began_s, 0.0) if state.began_s else 0.0
        return Reading(overview(self._known, now, 0), self.driver.hosts.heartbeats, oldest_s, training_s, job_s)

    # Orders

    def stop(self, who: str, grace_s: float | None) -> str:
        """End the job, with `grace_s` between SIGTERM and SIGKILL, None: as the policy has it; what was done.

        Asked twice it is not done twice, unless with another grace.
        """
        self._require_running()
        ending = self.state.ending
        is_asked = ending is not None and ending.by_person
        if is_asked and grace_s is None:
            return "the job is being stopped already"
        self._ask(lambda at_s: events.StopAsked(at_s, who, grace_s))
        if grace_s == 0:
            return "stopping at once"
        if is_asked:
            return f"stopping; ranks have {grace_s:g} s from now on, or what is left of what they had"
        return f"stopping; ranks have {self.state.policy.grace_s if grace_s is None else grace_s:g} s after SIGTERM"

    def drain(self, name: str, who: str) -> str:
        """A host leaves as soon as another can take its place."""
        host = self._host(name)
        if host.state in ("evicted", "gone"):
            raise OrderError(409, f"{name} is {host.state}", "drain a host that takes part")
        self._ask(lambda at_s: events.DrainAsked(at_s, name, who))
        return f"{name} leaves as soon as another host can take its place"

    def evict(self, name: str, who: str) -> str:
        """A host leaves at once."""
        host = self._host(name)
        if host.state == "evicted":
            return f"{name} is evicted already"
        self._ask(lambda at_s: events.EvictAsked(at_s, name, who))
        return f"{name} leaves at once and does not come back"

    def give_back(self, name: str, who: str) -> str:
        """A host that was evicted may come back, one that is being drained stays."""
        host = self._host(name)
        recovery = self.state.recovery
        if host.state != "evicted" and recovery is not None and name in recovery.evict:
            cure = "wait until `phalanx run status` shows it as evicted, and return it then"
            raise OrderError(409, f"{name} is being evicted: {recovery.evict[name]}", cure)
        if host.state != "evicted" and not host.leaves:
            raise OrderError(409, f"{name} is {host.state}", "only an evicted or a draining host can return")
        self._ask(lambda at_s: events.ReturnAsked(at_s, name, who))
        return f"{name} may join again" if host.state == "evicted" else f"{name} stays"

    @property
    def _known(self) -> Known:
        return known(self.driver, self.book.addresses)

    def _require_running(self) -> None:
        ending = self.state.ending
        if self.driver.finished is not None or self.state.phase == "ended":
            problem = f"the job is over: {ending.reason if ending else 'it has ended'}"
            raise OrderError(409, problem, "start the job again with `phalanx run`")
        if self.driver.problem is not None:
            raise OrderError(503, f"the driver has to end: {self.driver.problem}", "try again in a moment")

    def _host(self, name: str) -> Host:
        self._require_running()
        if name not in self.state.hosts:
            raise unknown_host(name)
        return self.state.hosts[name]

    def _ask(self, make: Callable[[float], events.Event]) -> None:
        try:
            self.driver.ask(make)
        except Exception as error:  # the journal; the driver ends because of it, and the next one goes on
            raise OrderError(503, f"the order could not be written down: {error}", "try again in a moment") from error


def unknown_host(name: str) -> OrderError:
    """For a name that no host of the job has."""
    return OrderError(404, f"the job has no host {name[:64]!r}", "see `phalanx run status` for their names")


def this_person() -> str:
    """Who gives orders from here, for journals and reports."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no user of this number is known here
        name = "somebody"
    return f"{name}@{socket.gethostname()}"


MOST_RANKS = 64  # logs of so many ranks together are read from files; of more, what executors reported is shown
QUIET_S = 10.0
_AT_ONCE = 1000  # lines that are handed over together: what a slow client does not take must not pile up
_POLL_S = 0.25


async def follow_items(hub: Hub, number: int, seconds: float) -> AsyncIterator[bytes]:
    """Items after this number."""
    until_s = time.monotonic() + seconds
    while True:
        if new := hub.since(number)[:_AT_ONCE]:
            number = new[-1].number
            yield _ndjson(new)
            continue
        left_s = until_s - time.monotonic()
        if left_s <= 0 or (hub.is_over and hub.last <= number):
            return
        if not await hub.changed(number, min(QUIET_S, left_s)):
            yield b"\n"


async def newest_lines(job: JobControl, rank: int | None, last: int) -> list[LogLine]:
    """The newest lines of a rank, or of all together."""
    if await asyncio.to_thread(_is_in_files, job, rank):
        return [line_body(line) for line in await asyncio.to_thread(last_lines, job.logs, rank, last)]
    return _reported(job.hub.since(0), rank, 0)[-last:] if last else []


async def follow_lines(job: JobControl, rank: int | None, last: int, seconds: float) -> AsyncIterator[bytes]:
    """Lines of a rank, or of all together, as they are written, after the `last` that are there."""
    until_s = time.monotonic() + seconds
    is_over: Callable[[], bool] = lambda: job.hub.is_over or time.monotonic() >= until_s  # noqa: E731
    if not await asyncio.to_thread(_is_in_files, job, rank):
        async for block in _follow_reported(job, rank, last, is_over):
            yield block
        return
    follower = await asyncio.to_thread(lambda: Follower(job.logs, rank, last=last))
    quiet_s = time.monotonic()
    try:
        while True:
            was_over = is_over()
            if lines := await asyncio.to_thread(follower.poll):
                for start in range(0, len(lines), _AT_ONCE):
                    yield _ndjson(map(line_body, lines[start : start + _AT_ONCE]))
                quiet_s = time.monotonic()
            elif was_over:
                return
            else:
                await asyncio.sleep(_POLL_S)
            if time.monotonic() - quiet_s > QUIET_S:
                quiet_s = time.monotonic()
                yield b"\n"
    finally:
        follower.close()


async def _follow_reported(
    job: JobControl, rank: int | None, last: int, is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    number = job.hub.last
    if last and (lines := _reported(job.hub.since(0), rank, 0)[-last:]):
        yield _ndjson(lines)
    while not is_over():
        new = job.hub.since(number)
        if lines := _reported(new, rank, job.state.attempt):
            yield _ndjson(lines)
        number = new[-1].number if new else number
        if not await job.hub.changed(number, QUIET_S if not new else _POLL_S) and not new:
            yield b"\n"


def _reported(items: Iterable[object], rank: int | None, attempt: int) -> list[LogLine]:
    """Lines of a rank that executors have reported."""
    wrote = (item for item in items if isinstance(item, Wrote) and rank in (None, item.rank))
    return [LogLine(item.rank, attempt, item.unix_s, item.text) for item in wrote]


def _is_in_files(job: JobControl, rank: int | None) -> bool:
    """Whether the driver can read what is asked for, in a time that does not grow with the job."""
    if rank is not None:
        return bool(rank_folders(job.logs, rank))
    return 0 < len(rank_folders(job.logs)) <= MOST_RANKS


def _ndjson(values: Iterable[object]) -> bytes:
    return msgspec.json.Encoder().encode_lines(list(values))


def check_rank(job: JobControl, rank: int | None) -> None:
    """Raise UserError where the job neither has nor had this rank."""
    size = job.state.world_size
    if rank is not None and size and rank >= size and not rank_folders(job.logs, rank):
        raise UserError(f"there is no rank {rank}", cure=f"give 0 to {size - 1}")
