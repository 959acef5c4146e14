"""Which machines of a job are faulty, by their monitoring metrics: `phalanx detect machines`.

    verdict = judge_machines(table, MinderPolicy())

Minder (arXiv 2411.01791) with what `online_minder.py` and `machine_history.py` say is added. Unsupervised: nothing is
known of the job; a machine is faulty where it differs from its peers, and from what it was, for minutes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from phalanx.core.errors import UserError
from phalanx.detect.detection import LACKING_METRICS, OF_A_FAULT, Advice, Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.minder.fault_guess import (
    MetricChange,
    changes_of,
    class_features,
    confidence_features,
    confidence_of,
    guess_class,
)
from phalanx.detect.minder.impossible_values import long_words, short_words, without_impossible
from phalanx.detect.minder.incident_weight import exporter_state, light_reason
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.minder_weights import MinderNumbers, shipped_numbers
from phalanx.detect.minder.online_minder import FaultyMachines, OnlineMinder
from phalanx.detect.minder.repeated_values import Repeat, detection_of, find_repeats, is_of
from phalanx.detect.minder.sample_coverage import (
    collector_gaps,
    coverage_text,
    ended_words,
    gap_words,
    outside_limits,
    replacements,
    what_samples_lack,
)
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, normalise
from phalanx.detect.monitoring.metric_table import MetricTable

JUDGE = "machines"

_TOLD = 3
"""Metrics that a reason names."""

_NOT_CALIBRATED = "confidence is not calibrated: it is the same for all incidents, so check before a host is taken out"

_LIGHT_CONFIDENCE = 0.5
"""Most that is said of what blames no machine."""

_UNSURE_CONFIDENCE = 0.6
"""Most that is said of what may be the machine or only its exporter."""

_OF_EXPORTERS = {
    "up": "its exporters answer (up = 1): what they no longer have is gone on the machine, such as a card",
    "all are down": "all of its exporters fail (up = 0): the machine is away, or they are",
}

_EXCUSED = "excused_until_unix_s"
"""Figure of what blames nobody for a time: when that is over."""

_SHOWN = 8
"""Machines that a sentence names."""


def judge_machines(
    table: MetricTable, policy: MinderPolicy | None = None, numbers: MinderNumbers | None = None
) -> JudgeVerdict:
    """The verdict on stored data, as if they had come in one by one.

    Args:
        table: in the units of the catalogue.
        policy: None: the defaults.
        numbers: other ones than the package's.
    """
    policy, numbers = policy or MinderPolicy(), numbers or shipped_numbers()
    table, odd = without_impossible(table)
    abstains = outside_limits(table, _compared(table, policy, numbers))
    looked = looked_at(table) + short_words(odd, table, policy.vanished_s)
    table = table.only([one for one in table.metrics if one not in abstains])
    # Where all that is compared has odd values, that says why nothing is left.
    lacking = None if abstains and not _compared(table, policy, numbers) else what_lacks(table, policy, numbers)
    if lacking is not None or not _compared(table, policy, numbers):
        return JudgeVerdict(JUDGE, abstains=(*abstains.values(), *([lacking] if lacking else ())), looked_at=looked)
    minder = OnlineMinder(len(table.machines), table.metrics, policy, numbers, table.period_s)
    replaced = replacements(table)
    found = [
        one
        for one in minder.add(normalise(table).values)
        if one.metric or not all(who in replaced for who in one.machines)
    ]
    teller = IncidentTeller(policy, numbers)
    repeated = teller.repeated(table)
    told = [(one, described) for one in found if (described := teller.tell(one, table)) is not None]
    swaps = "".join(f"; {table.machines[new]} came in place of {table.machines[old]}" for old, new in replaced.items())
    # Faults first: what only is worth a look comes after them.
    detections = tuple(sorted((*(one for _, one in told), *repeated), key=lambda one: one.advice == "watch"))
    gaps = [
        *gap_words(table, collector_gaps(table, policy.vanished_s)),
        *ended_words(table.only(_compared(table, policy, numbers)), policy.vanished_s),
        *long_words(odd, table, policy.vanished_s),
    ]
    tables = {"incidents": [_row(one, table) for one, _ in told]}
    return JudgeVerdict(JUDGE, detections, (*abstains.values(), *gaps), f"{looked}{swaps}", tables)


def judge_run(run: Path, policy: MinderPolicy | None = None, last_s: float = 900.0) -> JudgeVerdict:
    """The same of a run's own counters (`phalanx.telemetry.counters`), of its last quarter of an hour."""
    from phalanx.detect.monitoring.metric_sources import read_run_counters  # opens a database: only where it is used

    try:
        table = read_run_counters(run, minutes=last_s / 60)
    except UserError as error:
        return JudgeVerdict(JUDGE, abstains=(f"{run.name} {error.problem}; {error.cure}",))
    return judge_machines(table, policy)


def what_lacks(table: MetricTable, policy: MinderPolicy, numbers: MinderNumbers) -> str | None:
    """Why nothing can be said, with the cure; None: something can."""
    count = int((~np.isnan(table.values)).any(axis=(0, 2)).sum()) if table.metrics else len(table.machines)
    if count < policy.machines:
        hosts = "host" if count == 1 else "hosts"
        return (
            f"{count} {hosts} cannot be compared with each other; machines are judged from {policy.machines} on, "
            "fewer by `phalanx check`"
        )
    known = _compared(table, policy, numbers)
    if not known:
        return f"none of the metrics that machines are compared by is there; collect {', '.join(numbers.order)}"
    return what_samples_lack(table, known, policy)


def _compared(table: MetricTable, policy: MinderPolicy, numbers: MinderNumbers) -> list[str]:
    return [one for one in policy.metrics or numbers.order if one in table.metrics and one in numbers.metrics]


def looked_at(table: MetricTable) -> str:
    """For the line of a healthy job."""
    counts = ((len(table.machines), "machine"), (len(table.metrics), "metric"))
    words = ", ".join(f"{count:,} {name}{'' if count == 1 else 's'}" for count, name in counts)
    return f"{words}, {coverage_text(table)}"


class IncidentTeller:
    """Describes incidents in the order they were found; of those that follow from another, what was not told by it.

    An incident that blames nobody hides no fault: what follows from it is told once it blames a machine.
    """

    def __init__(self, policy: MinderPolicy, numbers: MinderNumbers) -> None:
        self._policy, self._numbers = policy, numbers
        self._blames: dict[int, bool] = {}
        self._excused: list[tuple[float, FaultyMachines]] = []
        self._repeats: dict[int, Repeat] = {}

    def repeated(self, table: MetricTable) -> list[Detection]:
        """Machines whose collector has come to repeat its values; what they show is not told as an incident."""
        before, self._repeats = self._repeats, {one.machine: one for one in find_repeats(table)}
        return [detection_of(one, table) for one in self._repeats.values() if one.machine not in before]

    def tell(self, found: FaultyMachines, table: MetricTable, first: int = 0) -> Detection | None:
        """The incident as `describe` gives it; None: it was told before, or is no news."""
        if found.follows and self._blames.get(found.number, True):
            return None
        if all(one in self._repeats and is_of(self._repeats[one], found, table, first) for one in found.machines):
            self._blames[found.number] = False
            return None
        described = self._describe(found, table, first)
        if _EXCUSED in described.figures:
            self._excused.append((float(described.figures[_EXCUSED]), found))
        blames = described.advice != "watch"
        if found.follows and not blames:
            return None
        self._blames[found.number] = blames
        return described

    def again(self, table: MetricTable, first: int = 0) -> list[Detection]:
        """Incidents that were excused for a time that is over now, and blame a machine after all."""
        end_s = table.start_s + table.samples * table.period_s
        over = [one for one in self._excused if one[0] <= end_s]
        self._excused = [one for one in self._excused if one[0] > end_s]
        told = []
        for until_unix_s, found in over:
            described = self._describe(found, table, first)
            if described.advice != "watch" and not self._blames.get(found.number):
                self._blames[found.number] = True
                figures = {**described.figures, "raised_unix_s": until_unix_s}
                told.append(dataclasses.replace(described, figures=figures))
        return told

    def _describe(self, found: FaultyMachines, table: MetricTable, first: int) -> Detection:
        policy = self._policy
        return describe(found, table, self._numbers, first, evict_from=policy.evict_from, pause_s=policy.pause_s)


def describe(
    found: FaultyMachines,
    table: MetricTable,
    numbers: MinderNumbers,
    first: int = 0,
    *,
    evict_from: float = 0.95,
    pause_s: float = 600.0,
) -> Detection:
    """An incident in the shape of all judges.

    Args:
        table: of the time before and after it began.
        first: sample of the judge that is the table's first.
        evict_from: confidence from which the advice is to take the machine out.
        pause_s: for how long one machine may save while all others wait.
    """
    since, at = max(0, found.since - first), min(found.at - first, table.samples - 1)
    changes = changes_of(table, found.machines[0], since, at)
    guesses: tuple[tuple[str, float], ...] = ()
    if numbers.classes is not None:
        guesses = guess_class(numbers.classes, class_features(numbers.classes.metrics, changes, found.vanished))
    confidence = confidence_of(numbers.confidence, confidence_features(found, len(table.machines)))
    names = [table.machines[one] for one in found.machines]

    def unix_s(sample: int) -> float:
        return table.start_s + (sample - first) * table.period_s

    figures: dict[str, float | int | str] = {
        "raised_unix_s": unix_s(found.at),
        "metric": found.metric or (found.vanished[0] if found.vanished else ""),
        "score": round(found.score, 3),
        "share_of_samples": round(found.share, 3),
        "machines": len(table.machines),
    }
    if not found.metric:
        figures[LACKING_METRICS] = len(found.vanished)
    if guesses:
        figures |= {"fault": guesses[0][0], "fault_share": round(guesses[0][1], 3)}
    described = Detection(
        what="faulty machine" if len(names) == 1 else "faulty machines",
        sentence=_sentence(found, names, changes, guesses),
        who=tuple(Culprit("host", name, hosts=(name,)) for name in names),
        since=Onset(unix_s(found.since)),
        confidence=round(confidence, 3),
        why=(*_why(found, table, changes, guesses, since, at), *(() if numbers.confidence else (_NOT_CALIBRATED,))),
        then=tuple(_then(names)),
        advice=_advice(confidence, evict_from if numbers.confidence is not None else math.inf),
        figures=figures,
    )
    light = light_reason(found, table, changes, first, pause_s)
    if light is None:
        return described
    if light.advice == "check":
        return dataclasses.replace(
            described,
            what=light.what,
            why=(light.reason, *described.why),
            then=(light.cure, *described.then),
            advice="check",
            confidence=min(described.confidence, _UNSURE_CONFIDENCE),
        )
    return dataclasses.replace(
        described,
        what=light.what,
        sentence=light.sentence or f"{_sentence(found, names, changes, ())}: {light.what}, no machine is blamed",
        why=(light.reason, *(one for one in described.why if not one.startswith(("for ", *OF_A_FAULT)))),
        then=(light.cure,),
        since=described.since if light.since < 0 else Onset(table.start_s + light.since * table.period_s),
        advice="watch",
        confidence=min(described.confidence, _LIGHT_CONFIDENCE),
        figures=figures if light.until < 0 else figures | {_EXCUSED: unix_s(light.until)},
    )


def _sentence(
    found: FaultyMachines,
    names: Sequence[str],
    changes: Sequence[MetricChange],
    guesses: Sequence[tuple[str, float]],
) -> str:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    verb = "differs" if len(names) == 1 else "differ"
    if not found.metric:
        what = f"no longer deliver{'s' if len(names) == 1 else ''} {_metrics_text(found.vanished)}"
    else:
        change = next((one for one in changes if one.metric == found.metric), None)
        what = f"{verb} from the other machines in {found.metric}{f' ({_values(change)})' if change else ''}"
        if found.vanished:
            what += f" and no longer deliver{'s' if len(names) == 1 else ''} {_metrics_text(found.vanished)}"
    guess = f", perhaps {_article(guesses[0][0])} ({guesses[0][1]:.0%})" if guesses and guesses[0][0] != "other" else ""
    return f"{shown} {what}{guess}"


def _why(
    found: FaultyMachines,
    table: MetricTable,
    changes: Sequence[MetricChange],
    guesses: Sequence[tuple[str, float]],
    since: int,
    at: int,
) -> list[str]:
    lasted_s = (found.at - found.since + 1) * table.period_s
    reasons = []
    if found.metric:
        reasons.append(
            f"{found.metric}: {found.score:.1f} times the threshold of healthy machines, "
            f"above it in {found.share:.0%} of {lasted_s:.0f} s"
        )
    if found.vanished:
        reasons.append(f"for {lasted_s:.0f} s it has not delivered {_metrics_text(found.vanished)}, which others do")
        state = exporter_state(found.machines[0], since, at, table)
        reasons += [_OF_EXPORTERS[state]] if state in _OF_EXPORTERS else []
    others = [
        one for one in changes if one.metric != found.metric and math.isfinite(one.change) and abs(one.change) > 0.01
    ]
    if others:
        reasons.append("besides " + "; ".join(f"{one.metric} {_values(one)}" for one in others[:_TOLD]))
    if found.affected:
        hosts = ", ".join(table.machines[one] for one in found.affected[:_SHOWN])
        reasons.append(f"less or later also {hosts}: it may have spread to them")
    if len(found.machines) > 1:
        reasons.append(f"{len(found.machines)} machines began at once: look at what they share, such as a switch")
    if guesses:
        like = ", ".join(f"{name} {share:.0%}" for name, share in guesses[:_TOLD])
        reasons.append(f"faults that look like it: {like}")
    return reasons


def _then(names: Sequence[str]) -> list[str]:
    hosts = ",".join(names[:_SHOWN])
    return [f"run `phalanx check` on {hosts}", "replace what fails there, and go on from the newest checkpoint"]


def _advice(confidence: float, evict_from: float) -> Advice:
    """Take it out where that was measured to be right nearly always; look at it where it is more likely than not."""
    if confidence >= evict_from:
        return "evict"
    return "check" if confidence >= 0.4 else "watch"


def _values(change: MetricChange) -> str:
    """Such as ``120 W, others 310 W``."""
    unit = CATALOGUE[change.metric].unit
    return f"{_value(change.value, unit)}, others {_value(change.of_peers, unit)}"


def _value(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "not measured"
    if unit == "ratio":
        return f"{value:.1%}"
    if unit == "celsius":
        return f"{value:.0f} °C"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor and unit != "W":
            return f"{value / factor:.3g} {prefix}{_UNITS.get(unit, unit)}"
    return f"{value:.3g} {_UNITS.get(unit, unit)}"


_UNITS = {"bytes/s": "B/s", "bytes": "B"}


def _metrics_text(metrics: Sequence[str]) -> str:
    if not metrics:
        return "a metric"
    more = f" and {len(metrics) - 2} more metrics" if len(metrics) > 2 else ""
    return (", " if more else " and ").join(metrics[:2]) + more


def _article(fault: str) -> str:
    return f"{'an' if fault[0] in 'AEIONH' and fault.split()[0].isupper() else 'a'} {fault}"


def _row(found: FaultyMachines, table: MetricTable) -> dict[str, object]:
    return {
        "machines": [table.machines[one] for one in found.machines],
        "metric": found.metric,
        "since_unix_s": table.start_s + found.since * table.period_s,
        "raised_unix_s": table.start_s + found.at * table.period_s,
        "score": found.score,
        "agreeing": list(found.agreeing),
        "vanished": list(found.vanished),
        "affected": [table.machines[one] for one in found.affected],
    }
