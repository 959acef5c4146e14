"""A job whose machines are judged as new samples come: tables that overlap go in, new incidents come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.detect.detection import Detection, JudgeVerdict
from phalanx.detect.minder.impossible_values import without_impossible
from phalanx.detect.minder.machine_judge import JUDGE, IncidentTeller, looked_at
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.minder_weights import MinderNumbers, shipped_numbers
from phalanx.detect.minder.online_minder import OnlineMinder
from phalanx.detect.monitoring.metric_catalogue import normalise
from phalanx.detect.monitoring.metric_table import MetricTable

_KEPT_S = 1200.0
"""Of samples, that incidents are described by."""

_OVERLAP_S = 10.0
"""Asked for again, so that nothing is lost between two looks."""


def follow(
    job: FollowedJob,
    read: Callable[[float, tuple[str, ...]], MetricTable],
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[JudgeVerdict]:
    """A verdict for each incident as it becomes clear, without end.

    While the source cannot be asked, one that abstains is given once for each reason; what was missed is asked for
    afterwards, as far as the source has it.

    Args:
        job: that was not begun yet.
        read: the newest samples: of so many minutes, of these machines.
        every_s: seconds between two looks.
    """
    yield from job.begin()
    problem = ""
    while True:
        sleep(every_s)
        try:
            table = read(job.minutes_needed(), job.machines)
        except UserError as error:
            if str(error) != problem:
                problem = str(error)
                yield JudgeVerdict(JUDGE, abstains=(problem,), looked_at=looked_at(job.recent))
            continue
        problem = ""
        yield from job.add(table)


class FollowedJob:
    """Judges what is new in each table.

    Attributes:
        machines: that are judged; later tables are put into this order.
        recent: the newest samples, in the units of the catalogue.
    """

    def __init__(
        self,
        table: MetricTable,
        policy: MinderPolicy,
        numbers: MinderNumbers | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        numbers = numbers or shipped_numbers()
        self._teller = IncidentTeller(policy, numbers)
        self._clock_s = clock_s
        self.machines = table.machines
        self.recent = table.between(0, 0)
        self._first = 0  # sample of the judge that is the first of `recent`
        self._minder = OnlineMinder(len(table.machines), table.metrics, policy, numbers, table.period_s)
        self._waiting: MetricTable | None = table

    def minutes_needed(self) -> float:
        """How far back the next table should go."""
        behind_s = self._clock_s() - (self.recent.start_s + self.recent.samples * self.recent.period_s)
        return (min(max(behind_s, 0.0), 3600.0) + _OVERLAP_S) / 60

    def add(self, table: MetricTable) -> list[JudgeVerdict]:
        """Judge the samples of a table that are newer than all before; what lies between is missing.

        Returns:
            a verdict for each incident that has become clear.
        """
        period_s = self.recent.period_s
        next_s = self.recent.start_s + self.recent.samples * period_s
        end = round((table.start_s + table.samples * table.period_s - next_s) / period_s)
        if end <= 0:
            return []
        values = np.full((len(self.recent.metrics), len(self.machines), end), np.nan, np.float32)
        offset = round((table.start_s - next_s) / period_s)
        rows = [table.metrics.index(one) if one in table.metrics else -1 for one in self.recent.metrics]
        hosts = {name: place for place, name in enumerate(table.machines)}
        places = np.array([hosts.get(name, -1) for name in self.machines])
        for row, source in enumerate(rows):
            if source >= 0:
                taken = table.values[source][places, max(0, -offset) :]
                taken = np.where((places < 0)[:, None], np.nan, taken)
                values[row, :, max(0, offset) : max(0, offset) + taken.shape[1]] = taken
        scraped = None
        if table.scraped is not None:
            scraped = np.full((len(self.machines), end), np.nan, np.float32)
            taken = np.where((places < 0)[:, None], np.nan, table.scraped[places, max(0, -offset) :])
            scraped[:, max(0, offset) : max(0, offset) + taken.shape[1]] = taken
        return self._judge(MetricTable(values, self.recent.metrics, self.machines, next_s, period_s, scraped))

    def begin(self) -> list[JudgeVerdict]:
        """Judge the table that the job was begun with."""
        table, self._waiting = self._waiting, None
        return self._judge(table) if table is not None else []

    def _judge(self, new: MetricTable) -> list[JudgeVerdict]:
        new, _ = without_impossible(new)
        found = self._minder.add(normalise(new).values)
        joined = np.concatenate([self.recent.values, new.values], axis=2)
        dropped = max(0, joined.shape[2] - round(_KEPT_S / new.period_s))
        self._first += dropped
        start_s = self.recent.start_s if self.recent.samples else new.start_s
        self.recent = MetricTable(
            joined[..., dropped:],
            new.metrics,
            new.machines,
            start_s + dropped * new.period_s,
            new.period_s,
            _scraped(self.recent, new, dropped),
        )
        told: list[Detection | None] = [*self._teller.repeated(self.recent)]
        told += [self._teller.tell(one, self.recent, self._first) for one in found]
        told += self._teller.again(self.recent, self._first)
        return [JudgeVerdict(JUDGE, (one,), looked_at=looked_at(self.recent)) for one in told if one is not None]


def _scraped(old: MetricTable, new: MetricTable, dropped: int) -> NDArray[np.float32] | None:
    """Of both; a server that did not say it at one of the looks may say it at another."""
    if old.scraped is None and new.scraped is None:
        return None
    parts = [
        one.scraped if one.scraped is not None else np.full((len(one.machines), one.samples), np.nan, np.float32)
        for one in (old, new)
    ]
    return np.concatenate(parts, axis=1)[:, dropped:]
