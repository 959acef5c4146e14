"""The job as the interface sees it: reading it without holding the driver up, and ordering it. Torch-free."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.run.api.metrics import Reading
from phalanx.run.decide import events
from phalanx.run.decide.state import Host, State
from phalanx.run.driver.book import Book
from phalanx.run.driver.driver import Driver
from phalanx.run.driver.overview import Known, host_views, known, overview
from phalanx.run.now import Now, read_clocks
from phalanx.run.people.hub import Hub
from phalanx.run.people.overview import HostView, Overview


class OrderError(Exception):
    """An order cannot be taken.

    Attributes:
        status: of HTTP, 404, 409 or 503.
    """

    def __init__(self, status: int, problem: str, cure: str) -> None:
        self.status, self.problem, self.cure = status, problem, cure
        super().__init__(f"{problem}; {cure}")


_OVER = "start the job again with `phalanx run`"


@dataclass(frozen=True)
class Job:
    """One job, for the event loop of its driver.

    Attributes:
        folder: of the run.
        logs: where ranks of this host, or of all that share a file system with it, write.
    """

    driver: Driver
    book: Book
    hub: Hub
    folder: Path
    logs: Path
    clocks: Callable[[], Now] = read_clocks

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
        """End the job; what was done, for people. Asked twice it is not done twice, unless with another grace.

        Args:
            grace_s: between SIGTERM and SIGKILL; None: as the policy has it.
        """
        self._alive()
        is_asked = self._is_stopping
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

    # Parts

    @property
    def _known(self) -> Known:
        return known(self.driver, self.book.addresses)

    @property
    def _is_stopping(self) -> bool:
        ending = self.state.ending
        return ending is not None and ending.by_person

    def _alive(self) -> None:
        ending = self.state.ending
        if self.driver.finished is not None or self.state.phase == "ended":
            raise OrderError(409, f"the job is over: {ending.reason if ending else 'it has ended'}", _OVER)
        if self.driver.problem is not None:
            raise OrderError(503, f"the driver has to end: {self.driver.problem}", "try again in a moment")

    def _host(self, name: str) -> Host:
        self._alive()
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
    except (KeyError, OSError):  # nobody of this number is known here
        name = "somebody"
    return f"{name}@{socket.gethostname()}"
