"""A table from wherever monitoring data are: a Prometheus server, a file, the telemetry of a run.

table = read_metrics("http://prometheus:9090", minutes=15)
table = read_metrics("metrics.parquet")
table = read_metrics("runs/night")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.metric_alignment import Grid
from phalanx.detect.monitoring.metric_names import Names, RawSeries, load_names, table_by_names
from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.prometheus_source import PrometheusServer, read_prometheus
from phalanx.detect.monitoring.table_files import read_table
from phalanx.telemetry.queries import Trace

_COUNTERS = """
select host, gpu, name, list(end_ns order by end_ns) as at_ns, list(value order by end_ns) as samples from counters
where end_ns >= $first_ns group by host, gpu, name order by all
"""


def read_metrics(
    source: str,
    *,
    minutes: float | None = None,
    metrics: Sequence[str] | None = None,
    machines: Sequence[str] | None = None,
    period_s: float | None = None,
    names: Names | None = None,
    server: PrometheusServer | None = None,
) -> MetricTable:
    """The newest samples of a source.

    Args:
        source: address of a Prometheus server, a Parquet or CSV file, or the folder of a run.
        minutes: how far back from the newest sample; None: 15 of a server, else all that there is.
        metrics: of the catalogue; None: all that there are.
        machines: hosts, as the source names them; None: all.
        period_s: between samples; None: 1 s of a server, else what the samples have.
        names: rules for names of series; None: those of the package.
        server: how a server is asked, its address left out of account; None: without secrets.

    Raises:
        UserError: there is no such source, or it has nothing of all that.
    """
    if source.startswith(("http://", "https://")):
        asked = dataclasses.replace(server, url=source) if server else PrometheusServer(source)
        return read_prometheus(
            asked, minutes=minutes or 15, period_s=period_s or 1.0, metrics=metrics, machines=machines, names=names
        )
    path = Path(source)
    if path.is_dir():
        return read_run_counters(
            path, minutes=minutes, metrics=metrics, machines=machines, period_s=period_s, names=names
        )
    if not path.exists():
        cure = "give the address of a Prometheus server, a Parquet or CSV file, or the folder of a run"
        raise UserError("is no source of monitoring data", cure=cure, value=source)
    table = read_table(path, names=names, period_s=period_s, machines=machines, metrics=metrics)
    if minutes is None:
        return table
    return table.between(max(0, table.samples - max(1, round(minutes * 60 / table.period_s))), table.samples)


def read_run_counters(
    run: Path,
    *,
    minutes: float | None = None,
    metrics: Sequence[str] | None = None,
    machines: Sequence[str] | None = None,
    period_s: float | None = None,
    names: Names | None = None,
) -> MetricTable:
    """What Phalanx recorded of the hosts of a run (`RUN/telemetry/counters`), by one clock.

    Raises:
        UserError: the run has no telemetry, or no counters.
    """
    trace = Trace.open(run)
    newest = trace.ask("select max(end_ns) as newest from counters")["newest"].to_pylist()[0]
    if newest is None:
        cure = "let it run some seconds longer, or give another run"
        raise UserError("has no counters of hosts", cure=cure, value=str(run))
    first_ns = 0 if minutes is None else int(newest - minutes * 60e9)
    offsets_s = {
        row["host"]: row["offset_s"]
        for row in trace.ask("select host, median(offset_ns) / 1e9 as offset_s from clocks group by host").to_pylist()
    }
    raw = [
        RawSeries(
            row["name"],
            row["host"],
            np.array(row["at_ns"], np.float64) / 1e9 - (offsets_s.get(row["host"]) or 0.0),
            np.array(row["samples"], np.float64),
            "" if row["gpu"] < 0 else str(row["gpu"]),
        )
        for row in trace.ask(_COUNTERS, parameters={"first_ns": first_ns}).to_pylist()
    ]
    start_s, end_s = min(one.times_s[0] for one in raw), max(one.times_s[-1] for one in raw)
    grid = Grid.between(start_s, end_s, period_s or 1.0)
    return table_by_names(raw, names or load_names(), grid, machines=machines, metrics=metrics)
