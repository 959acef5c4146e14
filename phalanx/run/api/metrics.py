"""What Prometheus reads: a few dozen numbers of the job, none of them per rank or per host. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from phalanx.run.api.bodies import STATES
from phalanx.run.decide.state import PHASES
from phalanx.run.people.overview import Overview

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Reading(NamedTuple):
    """What is read at once.

    Attributes:
        heartbeats: that this driver has heard.
        oldest_s: age of the oldest newest heartbeat of a host that is expected to report; None: there is none.
        training_s: in which attempts have made steps.
        job_s: since the job began.
    """

    overview: Overview
    heartbeats: int
    oldest_s: float | None
    training_s: float
    job_s: float


class Metrics:
    """The numbers of one job, in a registry of their own.

    Args:
        read: the job now; of its overview no host is needed.
    """

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Job(read))

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self._registry)


class _Job(Collector):
    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not read."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All numbers."""
        reading = self._read()
        yield from _states(reading.overview)
        yield from _progress(reading.overview)
        yield from _counted(reading)


def _states(now: Overview) -> Iterable[Metric]:
    hosts = GaugeMetricFamily("phalanx_run_hosts", "Hosts by state.", labels=["state"])
    for state in STATES:
        hosts.add_metric([state], now.hosts_by_state.get(state, 0))
    yield hosts
    phases = GaugeMetricFamily("phalanx_run_phase", "1 for the phase that the job is in.", labels=["phase"])
    for phase in PHASES:
        phases.add_metric([phase], float(phase == now.phase))
    yield phases
    yield _gauge("phalanx_run_hosts_wanted", "Hosts that take part when all is well.", now.hosts_wanted)
    yield _gauge("phalanx_run_ranks", "Ranks of the present attempt.", now.world_size)
    yield _gauge("phalanx_run_attempt", "Number of the present attempt.", now.attempt)
    yield _gauge("phalanx_run_incident_open", "1 while an incident is being dealt with.", now.incident is not None)


def _progress(now: Overview) -> Iterable[Metric]:
    known = (
        ("phalanx_run_step", "Newest step that any rank has done.", now.step),
        ("phalanx_run_steps_per_second", "Over the last minute, of the present attempt.", now.steps_per_s),
        ("phalanx_run_seconds_since_last_step", "Of the present attempt, while it runs.", now.step_age_s),
        ("phalanx_run_seconds_since_last_movement", "The same of whatever moves, a step or else.", now.quiet_s),
        ("phalanx_run_step_limit_seconds", "Without movement for so long, the job is looked into.", now.limit_s),
        ("phalanx_run_exit_status", "With which the job has ended.", -1 if now.status is None else now.status),
    )
    for name, text, value in known:
        if value >= 0:  # what is not known is absent, as Prometheus wants it
            yield _gauge(name, text, value)


def _counted(reading: Reading) -> Iterable[Metric]:
    now = reading.overview
    yield _counter("phalanx_run_recoveries", "Recoveries of the job.", now.recoveries)
    yield _counter("phalanx_run_incidents", "Incidents of the job.", now.incidents)
    yield _counter("phalanx_run_heartbeats", "Heartbeats that this driver has heard.", reading.heartbeats)
    yield _counter("phalanx_run_job_seconds", "Since the job began.", reading.job_s)
    text = "In which attempts have made steps; divided by job seconds, the share of effective training time."
    yield _counter("phalanx_run_training_seconds", text, reading.training_s)
    if reading.oldest_s is not None:
        text = "Of all hosts that are expected to report, since the one that was silent longest was heard."
        yield _gauge("phalanx_run_heartbeat_age_max_seconds", text, reading.oldest_s)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=float(value))
