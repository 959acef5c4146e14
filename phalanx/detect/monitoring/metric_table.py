"""Monitoring data of the machines of one job: one value of each metric, machine and moment, or none.

Sources (Prometheus, Parquet, CSV, a run's own counters) give such a table, the generator makes one, judges take one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class MetricTable:
    """Samples on one grid of time.

    Attributes:
        values: of shape [metrics, machines, samples], float32; NaN where nothing was measured. In the units of
            `phalanx.detect.monitoring.metric_catalogue`.
        metrics: names of the catalogue, such as ``gpu_duty_cycle``.
        machines: hosts, as the job names them.
        start_s: of the first sample, in seconds since 1970.
        period_s: between samples.
        scraped: [machines, samples], share of a machine's exporters that a server could scrape (Prometheus' ``up``);
            NaN where it is not known. None: the source does not know of exporters.
    """

    values: NDArray[np.float32]
    metrics: tuple[str, ...]
    machines: tuple[str, ...]
    start_s: float
    period_s: float = 1.0
    scraped: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        expected = (len(self.metrics), len(self.machines), self.values.shape[-1])
        assert self.values.shape == expected, f"values have the shape {self.values.shape}, not {expected}"
        assert self.scraped is None or self.scraped.shape == expected[1:], f"scraped is {self.scraped.shape}"

    @property
    def samples(self) -> int:
        """How many moments there are."""
        return int(self.values.shape[-1])

    @property
    def is_there(self) -> NDArray[np.bool_]:
        """[machines]: whether there is any sample of it."""
        found: NDArray[np.bool_] = np.asarray((~np.isnan(self.values)).any(axis=(0, 2)))
        return found

    def of(self, metric: str) -> NDArray[np.float32]:
        """One metric: [machines, samples].

        Raises:
            KeyError: the table lacks it.
        """
        if metric not in self.metrics:
            raise KeyError(metric)
        found: NDArray[np.float32] = self.values[self.metrics.index(metric)]
        return found

    def only(self, metrics: Sequence[str]) -> MetricTable:
        """Without all other metrics; those that are lacking are left out."""
        kept = tuple(one for one in metrics if one in self.metrics)
        rows = [self.metrics.index(one) for one in kept]
        return replace(self, values=self.values[rows], metrics=kept)

    def between(self, first: int, end: int) -> MetricTable:
        """Samples ``first`` to ``end`` (left out), as a view."""
        start_s = self.start_s + first * self.period_s
        scraped = None if self.scraped is None else self.scraped[:, first:end]
        return replace(self, values=self.values[..., first:end], start_s=start_s, scraped=scraped)

    def of_machines(self, rows: Sequence[int], names: Sequence[str]) -> MetricTable:
        """Some machines, in this order, and what they are called."""
        scraped = None if self.scraped is None else self.scraped[list(rows)]
        return replace(self, values=self.values[:, list(rows)], machines=tuple(names), scraped=scraped)
