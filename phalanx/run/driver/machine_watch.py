"""Machines of a job by what a Prometheus server has of them, followed while the job runs: Minder beside it.

    for verdict in watch_machines(source, since_unix_s=...):
        ...

Only what is new since the last look is read and judged, for as long as ranks are where they are. A server that is away
is waited for; what it has of that time is judged when it is back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.core.errors import UserError
from phalanx.detect.detection import JudgeVerdict
from phalanx.run.config import PrometheusConfig

if TYPE_CHECKING:
    from phalanx.detect.minder.minder_policy import MinderPolicy
    from phalanx.detect.monitoring.metric_table import MetricTable
    from phalanx.detect.monitoring.prometheus_source import PrometheusServer

_JUDGE = "machines"
_FIRST_S = 10.0
"""Of the attempt, before it is asked about: what is collected has been scraped by then."""

_MOST_MINUTES = 15.0
_SHOWN = 8


class MachineSource(msgspec.Struct, frozen=True):
    """Where metrics of the job's hosts are.

    Attributes:
        names: what the server may call a host, the likeliest first, by host in the order of the job.
        settings: `phalanx.run.config.PrometheusConfig` as a table.
    """

    names: dict[str, tuple[str, ...]] = {}
    settings: dict[str, Any] = {}


def source_of(config: PrometheusConfig, addresses: Mapping[str, str]) -> MachineSource:
    """What a job's config says of it.

    Args:
        addresses: of the hosts that take part, in order; empty where it is not known.
    """
    given = list(addresses.values())
    names = {
        host: (named,) if (named := config.hosts.get(host)) else (host, *([at] if given.count(at) == 1 and at else ()))
        for host, at in addresses.items()
    }
    return MachineSource(names, config.model_dump())


def check_source(config: PrometheusConfig) -> None:
    """See that the server can be asked as far as this host knows.

    Raises:
        UserError: a number of the judge is refused, a secret stands in the address, or its file cannot be read.
    """
    from phalanx.detect.monitoring.prometheus_source import PrometheusClient

    if "@" in config.url:  # what a config holds is written down in many places; this message does not show it
        cure = "give user and password_file"
        raise UserError("holds a user or a password", cure=cure, field="run.judges.prometheus.url")
    _policy(config)
    with PrometheusClient(_server(config)):
        pass


def watch_machines(
    source: MachineSource,
    since_unix_s: float,
    read: Callable[..., MetricTable] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock_s: Callable[[], float] = time.time,
) -> Iterator[JudgeVerdict]:
    """A verdict for each incident of the job's hosts, and one that abstains where they cannot be judged; without end.

    Args:
        since_unix_s: what was before is not the job's.
        read: as `phalanx.detect.monitoring.prometheus_source.read_prometheus`, which it is.
    """
    from phalanx.detect.minder.following import FollowedJob, follow
    from phalanx.detect.minder.sample_coverage import outside_limits
    from phalanx.detect.monitoring.prometheus_source import read_prometheus

    config = PrometheusConfig.model_validate(source.settings)
    policy, server, read = _policy(config), _server(config), read or read_prometheus
    if len(source.names) < policy.machines:
        reason = f"{len(source.names)} hosts are not compared, {policy.machines} or more are; `phalanx check` tests one"
        yield JudgeVerdict(_JUDGE, abstains=(reason,))
        return
    sleep(max(0.0, since_unix_s + max(_FIRST_S, server.window_s) - clock_s()))
    every = [(host, name) for host, some in source.names.items() for name in some]

    def first() -> MetricTable:
        minutes = min((clock_s() - since_unix_s) / 60, _MOST_MINUTES)
        return read(server, minutes=minutes, machines=[name for _, name in every])

    table = yield from _once_there(first, config.every_s, sleep)
    table, names = yield from _named(table, every)

    def newest(minutes: float, machines: Sequence[str]) -> MetricTable:
        return replace(read(server, minutes=minutes, machines=names), machines=tuple(machines))

    if odd := outside_limits(table, table.metrics):
        yield JudgeVerdict(_JUDGE, abstains=tuple(odd.values()))
    job = FollowedJob(table.only([one for one in table.metrics if one not in odd]), policy, clock_s=clock_s)
    yield from follow(job, newest, config.every_s, sleep)


def _once_there(
    first: Callable[[], MetricTable], every_s: float, sleep: Callable[[float], None]
) -> Generator[JudgeVerdict, None, MetricTable]:
    """The first samples; before, why there are none, each reason once."""
    problem = ""
    while True:
        try:
            return first()
        except UserError as error:
            if str(error) != problem:
                problem = str(error)
                yield JudgeVerdict(_JUDGE, abstains=(problem,))
        sleep(every_s)


def _named(
    table: MetricTable, every: Sequence[tuple[str, str]]
) -> Generator[JudgeVerdict, None, tuple[MetricTable, tuple[str, ...]]]:
    """The table with a row for each host of the job, and what the server calls them: of several names the one that has
    samples; of which hosts there are none is said.

    Args:
        every: host and name of each row that was asked for.
    """
    is_there = table.is_there
    rows: dict[str, int] = {}
    for row, (host, _) in enumerate(every):
        if host not in rows or (is_there[row] and not is_there[rows[host]]):
            rows[host] = row
    if lacking := [host for host, row in rows.items() if not is_there[row]]:
        shown = ", ".join(lacking[:_SHOWN]) + (f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else "")
        reason = f"the server has nothing of {shown}; say in run.judges.prometheus.hosts what it calls them"
        yield JudgeVerdict(_JUDGE, abstains=(reason,))
    chosen = list(rows.values())
    return table.of_machines(chosen, tuple(rows)), tuple(every[row][1] for row in chosen)


def _policy(config: PrometheusConfig) -> MinderPolicy:
    from phalanx.core.config import load
    from phalanx.detect.minder.minder_policy import MinderPolicy

    try:
        return load(MinderPolicy, None, [f"{key}={_word(value)}" for key, value in config.policy.items()]).value
    except UserError as error:
        field = ".".join(filter(None, ("run.judges.prometheus.policy", error.field)))
        raise UserError(error.problem, cure=error.cure, field=field) from None


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _server(config: PrometheusConfig) -> PrometheusServer:
    from phalanx.detect.monitoring.prometheus_source import PrometheusServer

    named = (config.token_file, config.password_file, config.ca_file)
    token, password, authority = (Path(name).absolute() if name else None for name in named)
    return PrometheusServer(
        config.url, config.host_label, config.selector, config.scrape_s, token, config.user, password, authority
    )
