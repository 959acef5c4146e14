"""One call of `decide` on its way: the state as it becomes, and the actions so far.

How a job ends: by itself, by a person, by time, or because it cannot go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec.structs import replace

from phalanx.run.decide.actions import (
    Action,
    AddToIncident,
    Alert,
    AskForHosts,
    CloseIncident,
    Evict,
    Finish,
    IncidentResult,
    OpenIncident,
    Release,
    Where,
)
from phalanx.run.decide.state import Ending, Host, HostState, Incident, PendingCheck, Phase, State, Ways

_NOWHERE = Where()


Own = dict[str, dict[str, Any]]
"""Dictionaries of a state, by their fields, that only whoever decides holds: these are changed in place."""


class Turn:
    """Begin with a state; what is set here becomes the next one."""

    def __init__(self, state: State, at_s: float, own: Own) -> None:
        # A clock that goes back, or is no number, stands still.
        now_s = at_s if at_s > state.now_s else state.now_s
        self.state = replace(state, now_s=now_s) if now_s != state.now_s else state
        self.actions: list[Action] = []
        self.hosts_changed = False
        self._own = own

    @property
    def now_s(self) -> float:
        """Time of the event."""
        return self.state.now_s

    @property
    def limit_has_passed(self) -> bool:
        """Whether the phase is over, which is acted upon after the event."""
        return self.state.deadline_s is not None and self.now_s >= self.state.deadline_s

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **changes)

    def learn(self, **changes: Any) -> None:
        """Change fields of the recovery, if one goes on."""
        if self.state.recovery is not None:
            self.set(recovery=replace(self.state.recovery, **changes))

    def act(self, *actions: Action) -> None:
        """Have these performed."""
        self.actions.extend(actions)

    # Hosts

    def set_host(self, name: str, **changes: Any) -> None:
        """Change fields of a host; a host that is not known needs all."""
        hosts = self._owned("hosts")
        before = hosts.get(name)
        after = hosts[name] = replace(before, **changes) if before else Host(**changes)
        self.hosts_changed = True
        self._count(before, after)
        if after.leaves != (before.leaves if before else ""):
            others = tuple(other for other in self.state.leaving if other != name)
            self.set(leaving=(*others, name) if after.leaves else others)

    def _count(self, before: Host | None, after: Host) -> None:
        """Keep `State.staying` right."""
        was = before.state if before is not None and not before.leaves else None
        now = after.state if not after.leaves else None
        if was == now:
            return
        staying = dict(self.state.staying)
        if was is not None:
            staying[was] -= 1
        if now is not None:
            staying[now] = staying.get(now, 0) + 1
        self.set(staying=staying)

    def await_check(self, name: str, check: PendingCheck) -> None:
        """Wait for the answer of a check."""
        due_s = self.state.checks_due_s
        self._owned("checks")[name] = check
        self.set(checks_due_s=check.deadline_s if due_s is None else min(due_s, check.deadline_s))

    def drop_check(self, name: str) -> None:
        """Wait for no answer of a check of this host any more."""
        if name in self.state.checks:
            checks = self._owned("checks")
            del checks[name]
            if not checks:
                self.set(checks_due_s=None)

    def add_ways(self, name: str, ways: Ways) -> None:
        """A host has tested the network to its peers."""
        self._owned("ways")[name] = ways

    def late_checks(self) -> list[str]:
        """Hosts whose checks should have been answered by now."""
        due_s, checks = self.state.checks_due_s, self.state.checks
        if due_s is None or self.now_s < due_s:
            return []
        late = [name for name, check in checks.items() if self.now_s >= check.deadline_s]
        if not late:
            self.set(checks_due_s=min((check.deadline_s for check in checks.values()), default=None))
        return late

    def remove_host(self, name: str, state: HostState, why: str) -> None:
        """Let it be ``gone`` or ``evicted``; nothing is awaited from it any more."""
        incident = self.state.incident
        if incident is not None:
            self.set(incident=replace(incident, hosts={**incident.hosts, name: why}))
        self.set_host(name, state=state, why=why, leaves="")
        self.drop_check(name)
        self.no_longer_awaited(name)

    def evict(self, name: str, why: str) -> None:
        """Take it out for good."""
        self.remove_host(name, "evicted", why)
        self.act(Evict(name, why))

    def release(self, name: str, why: str) -> None:
        """Take it out; it may join again."""
        self.remove_host(name, "gone", why)
        self.act(Release(name, why))

    def no_longer_awaited(self, name: str) -> None:
        """The phase has its answer."""
        if name in self.state.awaited:
            del self._owned("awaited")[name]

    def _owned(self, field: str) -> dict[str, Any]:
        """A dictionary of the state, copied unless nobody else holds it."""
        present: dict[str, Any] = getattr(self.state, field)
        if self._own.get(field) is not present:
            present = self._own[field] = dict(present)
            self.set(**{field: present})
        return present

    # Phases

    def enter(self, phase: Phase, within_s: float | None = None, awaited: Iterable[str] = ()) -> None:
        """Begin a phase, which is waited for so long, or until these hosts have answered."""
        state = self.state
        deadline_s = None if within_s is None else state.now_s + within_s
        if state.incident is not None:
            self.set(incident=_with_phase(state.incident, state))
        if state.phase == "running":
            self.set(training_s=state.training_s + max(state.now_s - state.phase_since_s, 0.0))
        self.set(phase=phase, phase_since_s=state.now_s, deadline_s=deadline_s)
        self.set(awaited=dict.fromkeys(awaited))

    # What people read

    def alert(self, level: Literal["info", "warning", "error"], text: str, host: str = "") -> None:
        """Tell people."""
        self.act(Alert(level, text, host))

    def open_incident(
        self, seen_by: str, text: str, where: Where = _NOWHERE, late_s: float = 0.0, *, is_own: bool = True
    ) -> None:
        """Begin a report, or add to the one that is open.

        Args:
            late_s: how long it was so before it was noticed.
            is_own: it does not only follow from something else.
        """
        state = self.state
        if state.incident is not None:
            self.note(seen_by, text, where, is_own=is_own)
            return
        number = state.incident_count + 1
        step = state.progress.done if state.progress.is_absolute else -1
        spent = {"detecting": round(late_s, 6)} if late_s > 0 else {}
        incident = Incident(number, state.now_s, spent, step, ranks=state.world_size)
        self.set(incident=incident, incident_count=number)
        self.act(OpenIncident(number, state.attempt, seen_by, text, where, is_own))

    def note(self, by: str, text: str, where: Where = _NOWHERE, *, is_own: bool = False) -> None:
        """Add to the report what was seen, if one is open; `is_own`: it is what is wrong with the attempt."""
        if self.state.incident is not None:
            self.act(AddToIncident(self.state.incident.number, by, text, where, is_own=is_own))

    def advise(self, text: str) -> None:
        """Add to the report what people should do, if one is open."""
        incident = self.state.incident
        if incident is not None and text not in incident.to_do:
            self.set(incident=replace(incident, to_do=(*incident.to_do, text)))

    def decided(self, what: str, why: str) -> None:
        """Add to the report what was decided, if one is open."""
        if self.state.incident is not None:
            self.act(AddToIncident(self.state.incident.number, "driver", what, is_decision=True, why=why))

    def close_incident(
        self, text: str, first_step: int = -1, result: IncidentResult = "recovered", status: int = -1
    ) -> None:
        """End the report, if one is open; `first_step`: absolute, that was done first after it."""
        if self.state.incident is None:
            return
        incident = _with_phase(self.state.incident, self.state)
        is_known = incident.step >= 0 and first_step >= 0
        close = CloseIncident(
            incident.number,
            text,
            incident.phase_s,
            max(0, incident.step - first_step + 1) if is_known else -1,
            result,
            incident.step,
            first_step - 1 if is_known else -1,
            status,
            incident.ranks,
            incident.hosts,
            incident.to_do,
        )
        self.set(incident=None)
        self.act(close)

    def all_started(self) -> None:
        """What is left of the phase is the time to the first step."""
        incident = self.state.incident
        if incident is not None:
            self.set(incident=replace(_with_phase(incident, self.state, "starting"), counted_s=self.now_s))


def _with_phase(incident: Incident, state: State, name: str = "") -> Incident:
    """The report with the time of the phase that ends now."""
    seconds = state.now_s - max(state.phase_since_s, incident.began_s, incident.counted_s)
    if seconds <= 0:
        return incident
    has_started = state.phase == "starting" and not state.awaited
    key = name or ("first step" if has_started else state.phase)
    spent = {**incident.phase_s, key: round(incident.phase_s.get(key, 0.0) + seconds, 6)}
    return replace(incident, phase_s=spent)


DONE = 0
USER_CODE = 1
BAD_INPUT = 2
NO_HOSTS = 3
NO_PROGRESS = 4
STOPPED = 5
TIME_SHORT = 6


def finish(turn: Turn, ending: Ending) -> None:
    """The job is over; no process of it needs to be ended by hand any more."""
    turn.close_incident(
        f"the job has ended with status {ending.status}: {ending.reason}",
        result=_result(ending),
        status=ending.status,
    )
    if turn.state.asked:
        turn.act(AskForHosts(0))
    turn.enter("ended")
    turn.set(ending=ending, recovery=None, ways={}, checks={}, checks_due_s=None, asked=0, lacking_since_s=None)
    turn.act(Finish(ending.status, ending.reason, ending.requeue))


def _result(ending: Ending) -> IncidentResult:
    if ending.status == DONE:
        return "recovered"
    return "stopped" if ending.status in (STOPPED, TIME_SHORT) else "gave up"
