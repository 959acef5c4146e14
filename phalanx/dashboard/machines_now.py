"""The machines of a run at this moment, from its spans and its driver, for every page that says how the run is."""

from __future__ import annotations

from typing import Any

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.machine_states import HostNow, hosts_now, looks_of
from phalanx.dashboard.page_frame import PageFrame
from phalanx.dashboard.run_telemetry import found_telemetry
from phalanx.run.api.bodies import HostBody, Status

_MOST_NAMED_CELLS = 96
_MOST_TROUBLES = 12
_MOST_HOSTS_BESIDE = 64
_DRIVER_AGE_S = 0.25


def driver_of(frame: PageFrame, run: Run) -> tuple[Status | None, list[HostBody], str]:
    """What its driver says, asked four times a second at most; why nothing, where it does not answer."""

    def ask() -> tuple[Status | None, list[HostBody], str]:
        if frame.source.kind != "driver" and (run.card is None or run.card.status is not None):
            return None, [], ""
        try:
            status = frame.source.ask(run, lambda client: client.status(256))
            whole = sum(status.hosts_by_state.values())
            hosts = list(status.hosts)
            if whole > len(hosts):
                hosts = frame.source.ask(run, lambda client: client.hosts())
            return status, hosts, ""
        except (ConnectionError, UserError) as error:
            return None, [], f"the driver does not answer: {error}"

    return frame.remembered.get(("driver", run.id, int(frame.unix_s() / _DRIVER_AGE_S)), ask)


def now_of(frame: PageFrame, run: Run) -> dict[str, Any]:
    """Every host as it is now, and what is the matter."""
    telemetry, problem = found_telemetry(frame, run)
    status, listed, driver_problem = driver_of(frame, run)
    job = telemetry.state() if telemetry is not None else None
    slow = telemetry.slow_now() if telemetry is not None else None
    excess = {one["rank"]: one["excess"] for one in slow.slow} if slow is not None else {}
    hosts = hosts_now(job, excess, status, listed)
    return {
        "hosts": hosts,
        "looks": looks_of(hosts),
        "job": job,
        "slow": slow,
        "status": status,
        "still": next((one for one in frame.troubles.of(run) if one.kind == "stall"), None),
        "problem": problem,
        "driver_problem": driver_problem,
        "troubles": _troubles(hosts),
        "most_troubles": _MOST_TROUBLES,
        "has_names": len(hosts) <= _MOST_NAMED_CELLS,
    }


def _troubles(hosts: list[HostNow]) -> list[HostNow]:
    order = ("dead", "cut off", "stopped", "slow", "leaves")
    return sorted((host for host in hosts if host.is_wrong), key=lambda host: order.index(host.look))


def troubles_of(frame: PageFrame, run: Run, *, with_spans: bool = True) -> list[HostNow]:
    """Hosts of a run that goes on which a person should look at, the worst first.

    Args:
        with_spans: ask its spans too, which takes longer; of very many hosts they are not asked.
    """
    if not run.is_live:
        return []
    if with_spans:
        telemetry, _ = found_telemetry(frame, run)
        if telemetry is not None and len(telemetry.trace.hosts) <= _MOST_HOSTS_BESIDE:
            found: list[HostNow] = now_of(frame, run)["troubles"]
            return found
    status, listed, _ = driver_of(frame, run)
    return _troubles(hosts_now(None, {}, status, listed))
