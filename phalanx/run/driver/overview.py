"""The job at this moment, out of all that the driver knows. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.run.decide.actions import ranks_of
from phalanx.run.decide.state import Host, State
from phalanx.run.driver.driver import Driver
from phalanx.run.driver.hosts import Heard
from phalanx.run.messages import WorkerState
from phalanx.run.now import Now
from phalanx.run.people.overview import HostView, IncidentView, Overview


def overview(driver: Driver, addresses: dict[str, str], now: Now) -> Overview:
    """What people see.

    Args:
        addresses: of hosts, as `phalanx.run.driver.book.Book` has them.
    """
    state, attempt = driver.state, driver.attempt
    is_watched = attempt is not None and state.phase == "running"
    standing = attempt.standing(now) if attempt is not None and is_watched else None
    rate = attempt.steps_per_s(now) if attempt is not None and is_watched else None
    by_rank = {worker.rank: worker for worker in (attempt.workers if attempt is not None else ())}
    return Overview(
        job=state.job.name,
        unix_s=now.unix_s,
        phase=state.phase,
        phase_s=max(now.unix_s - state.phase_since_s, 0.0) if state.phase_since_s else 0.0,
        attempt=state.attempt,
        world_size=state.world_size,
        hosts_wanted=state.job.hosts,
        workers_per_host=state.job.workers_per_host,
        hosts=tuple(
            _host(state, name, host, driver.hosts.hosts.get(name), addresses.get(name, ""), by_rank, now)
            for name, host in state.hosts.items()
        ),
        step=attempt.step if attempt is not None else -1,
        steps_per_s=-1.0 if rate is None else rate,
        quiet_s=-1.0 if standing is None else standing.quiet_s,
        limit_s=-1.0 if standing is None else standing.limit_s,
        recoveries=state.brakes.recoveries,
        incidents=state.incident_count,
        incident=_incident(state, now),
        version=state.version,
        advise_only=state.policy.advise_only,
        status=None if driver.finished is None else driver.finished.status,
        ended="" if driver.finished is None else driver.finished.reason,
    )


def _host(
    state: State, name: str, host: Host, heard: Heard | None, address: str, by_rank: dict[int, WorkerState], now: Now
) -> HostView:
    place = state.place_of(name) if state.has_workers else -1
    ranks = tuple(ranks_of(place, state.job.workers_per_host)) if place >= 0 else ()
    return HostView(
        name=name,
        state=host.state,
        why=host.why,
        leaves=host.leaves,
        rack=host.rack,
        address=address,
        place=place,
        ranks=ranks,
        silent_s=-1.0 if heard is None else max(now.monotonic_s - heard.last_s, 0.0),
        is_checking=name in state.checks,
        seen=None if heard is None else heard.state,
        workers=tuple(_workers(ranks, by_rank)),
    )


def _workers(ranks: Iterable[int], by_rank: dict[int, WorkerState]) -> Iterable[WorkerState]:
    return (by_rank[rank] for rank in ranks if rank in by_rank)


def _incident(state: State, now: Now) -> IncidentView | None:
    if state.incident is None:
        return None
    why = state.recovery.why if state.recovery is not None else ""
    return IncidentView(number=state.incident.number, age_s=max(now.unix_s - state.incident.began_s, 0.0), why=why)
