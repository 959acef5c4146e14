"""Which hosts the driver itself knows to be at work, held against what their exporters no longer say of them.

A host that is heard and whose ranks make steps as fast as before is neither unreachable nor without its GPUs, whatever
a Prometheus server lacks of it: its exporter is to be looked at. Where the host is silent, its ranks stand still, or
the job has become slower since, the metrics are right to be missed.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from phalanx.detect.detection import LACKING_METRICS, OF_A_FAULT, Detection
from phalanx.run.clock import Now
from phalanx.run.driver.hosts import HostWatch
from phalanx.run.messages import BadReportError, report_of

_KEPT = 1800
"""Times of steps, one a second."""
_BEFORE_S, _NOW_S = 300.0, 60.0
_ENOUGH = 5
_SLOWER = 1.2
"""Times as long as before: then what vanished may be why."""

_FRESH_S, _USUAL_STEPS = 10.0, 3.0
"""Age of a rank's last step, at most: seconds, or usual steps if that is longer."""

_MOST_CONFIDENCE = 0.5
_SHOWN = 8


class HostsAtWork:
    """How long steps took lately, and which hosts are at work; of one job."""

    def __init__(self) -> None:
        self._step_s: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def look(self, hosts: HostWatch, placement: Sequence[str], unix_s: float) -> None:
        """Note how long the last step took, by the first host of the job whose ranks are alike; once a second."""
        for host in placement:
            heard = hosts.hosts.get(host)
            if heard is not None and heard.beat is not None and heard.beat.pace is not None:
                if (took_s := heard.beat.pace.last_step_s) > 0:
                    self._step_s.append((unix_s, took_s))
                return

    def of_hosts(
        self,
        hosts: HostWatch,
        names: Iterable[str],
        now: Now,
        usual_s: float | None,
        since_unix_s: float | None,
        *,
        is_paused: bool,
    ) -> dict[str, str]:
        """Those of them that are at work, and what they do, in words that follow their names.

        Args:
            usual_s: of a step; None: not known.
            since_unix_s: when their metrics began to lack.
            is_paused: a rank evaluates, writes a checkpoint or the like, and steps need not be made.
        """
        if not is_paused and self._has_slowed(since_unix_s, now.unix_s):
            return {}
        limit_s = max(_FRESH_S, _USUAL_STEPS * (usual_s or 0.0))
        found = {}
        for name in names:
            if hosts.is_unknown(name):
                continue
            if is_paused:
                found[name] = "is heard while the job pauses"
            elif _steps(hosts, name, now, limit_s):
                found[name] = "is heard and makes steps"
        return found

    def _has_slowed(self, since_unix_s: float | None, now_unix_s: float) -> bool:
        if since_unix_s is None:
            return False
        before = [took_s for at, took_s in self._step_s if since_unix_s - _BEFORE_S <= at < since_unix_s]
        lately = [took_s for at, took_s in self._step_s if at >= max(now_unix_s - _NOW_S, since_unix_s)]
        if min(len(before), len(lately)) < _ENOUGH:
            return False
        return statistics.median(lately) > _SLOWER * statistics.median(before)


def beside_work(found: Detection, at_work: Mapping[str, str]) -> Detection:
    """What metrics that vanished say of hosts, given what the driver hears of them.

    Hosts that are at work are not blamed. Where no others are named, it is worth a look at their exporters.

    Args:
        at_work: from `HostsAtWork.of_hosts`.
    """
    if LACKING_METRICS not in found.figures or found.advice == "watch" or not at_work:
        return found
    left_out = len(at_work) - _SHOWN
    names = ", ".join(list(at_work)[:_SHOWN]) + (f" and {left_out} more" if left_out > 0 else "")
    said = next(iter(at_work.values()))
    words = f"{names} {said}: look at its exporter"
    if len(at_work) > 1:
        words = f"{names}: each {said}: look at their exporters"
    left = tuple(who for who in found.who if not set(who.hosts) <= at_work.keys())
    if left:
        return replace(found, who=left, why=(words, *found.why))
    figures = {name: value for name, value in found.figures.items() if name not in ("fault", "fault_share")}
    lacks, _, _ = found.sentence.partition(", perhaps ")
    return replace(
        found,
        what="exporter that is down",
        sentence=f"{lacks}; {words}",
        why=(
            "what the driver hears of a host goes before what its exporters no longer say",
            *(one for one in found.why if not one.startswith(OF_A_FAULT)),
        ),
        then=(f"look at the exporters of {names}, and whether the server can reach them",),
        advice="watch",
        confidence=min(found.confidence, _MOST_CONFIDENCE),
        figures=figures,
    )


def _steps(hosts: HostWatch, name: str, now: Now, limit_s: float) -> bool:
    """Whether all ranks of a host have made a step lately."""
    heard = hosts.hosts[name]
    if heard.beat is None:
        return False
    behind_s = now.monotonic_s - heard.last_s
    if (pace := heard.beat.pace) is not None:
        return pace.step_age_s + behind_s <= limit_s
    try:
        workers = report_of(heard.beat).workers
    except BadReportError:
        return False
    return bool(workers) and all(
        one.steps_here > 0 and one.state != "ended" and one.step_age_s + behind_s <= limit_s for one in workers
    )
