"""Exporters that are made up: a table shown as dcgm-exporter and node_exporter would, to a real Prometheus.

    with SimulatedExporters(table) as exporters:      # one listening socket per machine, on loopback
        write_scrape_config(exporters.targets, Path("prometheus.yml"))

or without waiting, as a file that `promtool tsdb create-blocks-from openmetrics` turns into Prometheus's own blocks:

    write_openmetrics(table, Path("metrics.om"), start_s=time.time() - 900)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.files import atomic_writer, write_json
from phalanx.detect.monitoring.metric_names import NameRule, load_names
from phalanx.detect.monitoring.metric_table import MetricTable

_TOTAL = 1e12
"""What shares are of, such as bytes of memory."""
_REQUEST_BYTES = 65_536


@dataclass(frozen=True)
class _Shown:
    """A series that exporters show: [machines, samples], NaN where it is not there."""

    name: str
    kind: str
    values: NDArray[np.float64]


def shown_series(table: MetricTable) -> list[_Shown]:
    """What exporters would have to show for the rules of `metric_names.toml` to give this table again.

    Counters begin at 0 and go on while a machine is silent, as those of a kernel do. Where two metrics come of
    one series (``pcie_usage`` of that of ``pcie_bandwidth``), it is as the first says.
    """
    found: dict[str, _Shown] = {}
    names = load_names()
    for metric in table.metrics:
        rule = names[metric][0]
        values = table.of(metric).astype(np.float64)
        values = (1 - values if rule.complement else values) / rule.scale
        if rule.over:
            values *= _TOTAL
        for name in rule.series:
            part = values / len(rule.series)
            found.setdefault(name, _Shown(name, rule.kind, _counted(part, table.period_s, rule)))
        for name in rule.over:
            total = np.where(np.isnan(values), np.nan, _TOTAL / len(rule.over))
            found.setdefault(name, _Shown(name, "gauge", total))
    return list(found.values())


def _counted(values: NDArray[np.float64], period_s: float, rule: NameRule) -> NDArray[np.float64]:
    if rule.kind == "gauge":
        return values
    total: NDArray[np.float64] = np.cumsum(np.nan_to_num(values) * period_s, axis=1)
    return np.where(np.isnan(values), np.nan, total)


def _labelled(name: str, **labels: str) -> str:
    bare, _, rest = name.partition("{")
    own = [one for one in rest.rstrip("}").split(",") if one and "!~" not in one and "=~" not in one]
    own += [f'{key}="{value}"' for key, value in labels.items()]
    return f"{bare}{{{','.join(own)}}}" if own else bare


def write_openmetrics(table: MetricTable, path: Path, *, start_s: float | None = None) -> None:
    """All samples with their times, for `promtool tsdb create-blocks-from openmetrics FILE DATA`.

    Args:
        start_s: of the first sample; None: the table's own.
    """
    first_s = table.start_s if start_s is None else start_s
    times = [f"{first_s + table.period_s * at:.3f}" for at in range(table.samples)]
    by_name: dict[str, list[_Shown]] = {}
    for one in shown_series(table):
        by_name.setdefault(one.name.partition("{")[0], []).append(one)
    with atomic_writer(path) as file:
        for bare, of_name in by_name.items():
            is_counter = of_name[0].kind == "counter" and bare.endswith("_total")
            file.write(f"# TYPE {bare.removesuffix('_total')} counter\n".encode() if is_counter else b"")
            for shown in of_name:
                for row, machine in enumerate(table.machines):
                    head = _labelled(shown.name, instance=f"{machine}:9100", job="simulated")
                    values = shown.values[row]
                    lines = [f"{head} {values[at]:.12g} {times[at]}\n" for at in np.flatnonzero(~np.isnan(values))]
                    file.write("".join(lines).encode())
        file.write(b"# EOF\n")


def write_scrape_config(targets: Mapping[str, str], path: Path, *, period_s: float = 1.0) -> None:
    """A configuration of Prometheus (YAML, of which JSON is a part) that scrapes the exporters.

    Args:
        targets: address by machine.
    """
    of_machines = [{"targets": [at], "labels": {"instance": f"{machine}:9100"}} for machine, at in targets.items()]
    period = f"{round(period_s * 1000)}ms"
    write_json(
        path,
        {
            "global": {"scrape_interval": period, "scrape_timeout": period},
            "scrape_configs": [{"job_name": "simulated", "static_configs": of_machines}],
        },
    )


class SimulatedExporters:
    """A thread that serves ``/metrics`` of every machine at an address of its own.

    Args:
        table: what is shown, from its first sample on, as time goes by; after the last one machines are silent.
        speed: seconds of the table in one of the clock.
        clock: seconds; for tests.

    Attributes:
        targets: ``127.0.0.1:PORT`` by machine.
    """

    def __init__(self, table: MetricTable, *, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._table, self._speed, self._clock = table, speed, clock
        self._shown = [(_labelled(one.name), one) for one in shown_series(table)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="exporters")
        self._began_s = 0.0
        self.targets: dict[str, str] = {}

    def __enter__(self) -> SimulatedExporters:
        self._thread.start()
        self.restart()
        self.targets = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def restart(self) -> None:
        """Begin with the first sample again."""
        self._began_s = self._clock()

    def page(self, row: int) -> bytes:
        """What the exporter of a machine says now: counters go on between samples, or scrapes would see them stand."""
        place = (self._clock() - self._began_s) * self._speed / self._table.period_s
        at, share = int(place), place % 1
        if at >= self._table.samples:
            return b""
        lines = []
        for name, shown in self._shown:
            value = shown.values[row, at]
            if shown.kind == "counter" and at + 1 < self._table.samples:
                value += share * (np.nan_to_num(shown.values[row, at + 1], nan=value) - value)
            if not np.isnan(value):
                lines.append(f"{name} {value:.12g}\n")
        return "".join(lines).encode()

    async def _listen(self) -> dict[str, str]:
        self._servers = [
            await asyncio.start_server(self._serving(row), "127.0.0.1", 0, limit=_REQUEST_BYTES)
            for row in range(len(self._table.machines))
        ]
        ports = (one.sockets[0].getsockname()[1] for one in self._servers)
        return {name: f"127.0.0.1:{port}" for name, port in zip(self._table.machines, ports, strict=True)}

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        own = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not own:
                task.cancel()

    def _serving(self, row: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    body = self.page(row)
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}"
                    writer.write(head.encode() + b"\r\n\r\n" + body)
                    await writer.drain()
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                pass
            finally:
                writer.close()

        return serve
