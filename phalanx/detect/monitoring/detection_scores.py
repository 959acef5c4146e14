"""How well a judge of monitoring data names faulty machines: its verdicts against labels.

    score([(verdict, case.labels), …]).as_json()

Counted as Minder's paper does: a fault is found when its machine is named; an alarm that names no faulty machine is a
false one. A detection counts as an alarm where its advice blames machines, so a judge that only says "watch" alarms
nobody. What a detection's `figures` may say besides: ``raised_unix_s`` (the sample with which the judge was sure) and
``fault`` (its guess at the class).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.detect.detection import Detection, JudgeVerdict
from phalanx.detect.monitoring.metric_generator import CaseLabels, FaultLabel

CONTINUITY_S = 240.0
"""An oddity that lasts shorter is no fault, to the paper."""

_EARLY_S = 60.0


@dataclass(frozen=True)
class FaultOutcome:
    """One fault, and what the judge said of it.

    Attributes:
        case: name of the table.
        fault: its class.
        machines: of the job.
        severity: of the fault.
        is_found: one of its machines was named, not before the onset.
        share: of its machines that were named.
        false_alarms: detections in this table that name none of them.
        guess: at the class; empty: none.
        since_error_s: the onset that the judge says, less the true one; None: it says none.
        reaction_s: between the earliest moment by continuity and the alarm; None: the judge does not say.
        late_s: the same, with continuity counted from the true onset.
        late_shown_s: the same, with continuity counted from the first sample that shows the fault; None: none does.
    """

    case: str
    fault: str
    machines: int
    severity: float
    is_found: bool
    share: float
    false_alarms: int
    guess: str = ""
    since_error_s: float | None = None
    reaction_s: float | None = None
    late_s: float | None = None
    late_shown_s: float | None = None


@dataclass(frozen=True)
class DetectionScore:
    """Over many tables.

    Attributes:
        outcomes: of each fault.
        healthy_hours: of tables without faults.
        healthy_alarms: in those.
        abstained: tables about which the judge said nothing.
    """

    outcomes: tuple[FaultOutcome, ...]
    healthy_hours: float
    healthy_alarms: int
    abstained: int

    @classmethod
    def joined(cls, parts: Iterable[DetectionScore]) -> DetectionScore:
        """Scores of several sets of tables as one."""
        given = list(parts)
        return cls(
            tuple(outcome for one in given for outcome in one.outcomes),
            sum(one.healthy_hours for one in given),
            sum(one.healthy_alarms for one in given),
            sum(one.abstained for one in given),
        )

    @property
    def found(self) -> int:
        """Faults whose machine was named."""
        return sum(one.is_found for one in self.outcomes)

    @property
    def false_alarms(self) -> int:
        """In tables with a fault."""
        return sum(one.false_alarms for one in self.outcomes)

    @property
    def precision(self) -> float:
        """Of alarms in tables with a fault, the share that is right; 1 where there is none."""
        alarms = self.found + self.false_alarms
        return self.found / alarms if alarms else 1.0

    @property
    def recall(self) -> float:
        """Share of faults that were found; 1 where there is none."""
        return self.found / len(self.outcomes) if self.outcomes else 1.0

    @property
    def f1(self) -> float:
        """Harmonic mean of the two."""
        return f1_of(self.precision, self.recall)

    @property
    def alarms_per_healthy_hour(self) -> float | None:
        """None: no healthy hour was judged."""
        return self.healthy_alarms / self.healthy_hours if self.healthy_hours else None

    @property
    def guessed(self) -> float | None:
        """Share of the faults that were found, of which the right class was guessed; None: none was found."""
        of_found = [one.guess == one.fault for one in self.outcomes if one.is_found]
        return sum(of_found) / len(of_found) if of_found else None

    def late_s(self) -> tuple[float, float, float] | None:
        """Median, nine of ten and the largest, of alarms after the true onset and the time of continuity."""
        return _spread_of(one.late_s for one in self.outcomes)

    def late_shown_s(self) -> tuple[float, float, float] | None:
        """The same after the first sample that shows the fault and the time of continuity."""
        return _spread_of(one.late_shown_s for one in self.outcomes)

    def by_class(self) -> list[dict[str, Any]]:
        """A row for each class, the most frequent first, then one for all."""
        counts = Counter(one.fault for one in self.outcomes)
        groups = [(name, [one for one in self.outcomes if one.fault == name]) for name, _ in counts.most_common()]
        return [_row(name, group) for name, group in [*groups, ("all", list(self.outcomes))] if group]

    def confusion(self) -> list[dict[str, Any]]:
        """A row for each class: how often which class was guessed; ``missed`` where the machine was not named."""
        rows = []
        for name in dict.fromkeys(row["fault"] for row in self.by_class() if row["fault"] != "all"):
            ours = [one for one in self.outcomes if one.fault == name]
            guesses = Counter((one.guess or "no guess") if one.is_found else "missed" for one in ours)
            rows.append({"fault": name, **guesses})
        return rows

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        reactions = [one.reaction_s for one in self.outcomes if one.reaction_s is not None]
        return {
            "faults": len(self.outcomes),
            "found": self.found,
            "false_alarms": self.false_alarms,
            "precision": round(self.precision, 4),
            "recall": round(self.recall, 4),
            "f1": round(self.f1, 4),
            "healthy_hours": round(self.healthy_hours, 2),
            "healthy_alarms": self.healthy_alarms,
            "abstained": self.abstained,
            "median_reaction_s": round(statistics.median(reactions), 2) if reactions else None,
            "longest_reaction_s": round(max(reactions), 2) if reactions else None,
            "late_s": [round(one, 2) for one in self.late_s() or ()],
            "late_shown_s": [round(one, 2) for one in self.late_shown_s() or ()],
            "class_guessed": None if self.guessed is None else round(self.guessed, 3),
            "classes": self.by_class(),
            "confusion": self.confusion(),
        }


def score(
    judged: Iterable[tuple[JudgeVerdict, CaseLabels]], *, period_s: float = 1.0, continuity_s: float = CONTINUITY_S
) -> DetectionScore:
    """Compare verdicts to labels.

    Args:
        period_s: between samples of the tables.
        continuity_s: that the judge waits; reactions are counted from then.
    """
    outcomes: list[FaultOutcome] = []
    hours, healthy_alarms, abstained = 0.0, 0, 0
    for verdict, labels in judged:
        alarms = [one for one in verdict.detections if one.blamed_hosts]
        abstained += not verdict.detections and bool(verdict.abstains)
        if not labels.faults:
            hours += labels.samples * period_s / 3600
            healthy_alarms += len(alarms)
            continue
        wrong = sum(not any(_is_right(alarm, fault) for fault in labels.faults) for alarm in alarms)
        for number, fault in enumerate(labels.faults):
            outcomes.append(_outcome(labels, fault, alarms, wrong if number == 0 else 0, continuity_s))
    return DetectionScore(tuple(outcomes), hours, healthy_alarms, abstained)


def f1_of(precision: float, recall: float) -> float:
    """0 where both are."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _is_right(alarm: Detection, fault: FaultLabel) -> bool:
    is_early = alarm.since.unix_s is not None and alarm.since.unix_s < fault.start_unix_s - _EARLY_S
    return not is_early and bool(set(alarm.blamed_hosts) & set(fault.machines))


def _outcome(
    labels: CaseLabels, fault: FaultLabel, alarms: Sequence[Detection], wrong: int, continuity_s: float
) -> FaultOutcome:
    right = [alarm for alarm in alarms if _is_right(alarm, fault)]
    named = {host for alarm in right for host in alarm.blamed_hosts}
    first = right[0] if right else None
    since_s = first.since.unix_s if first else None
    raised = first.figures.get("raised_unix_s") if first else None
    reaction_s = late_s = late_shown_s = None
    if isinstance(raised, int | float):
        late_shown_s = None if fault.shown_unix_s is None else float(raised) - fault.shown_unix_s - continuity_s
        late_s = float(raised) - fault.start_unix_s - continuity_s
        reaction_s = float(raised) - (since_s if since_s is not None else fault.start_unix_s) - continuity_s
    return FaultOutcome(
        labels.case,
        fault.fault,
        labels.machines,
        fault.severity,
        bool(right),
        len(named & set(fault.machines)) / len(fault.machines),
        wrong,
        str(first.figures.get("fault", "")) if first else "",
        None if since_s is None else since_s - fault.start_unix_s,
        reaction_s,
        late_s,
        late_shown_s,
    )


def _spread_of(seconds: Iterable[float | None]) -> tuple[float, float, float] | None:
    late = sorted(one for one in seconds if one is not None)
    if not late:
        return None
    return statistics.median(late), late[min(len(late) - 1, int(0.9 * len(late)))], late[-1]


def _row(name: str, group: Sequence[FaultOutcome]) -> dict[str, Any]:
    of_group = DetectionScore(tuple(group), 0.0, 0, 0)
    return {
        "fault": name,
        "cases": len(group),
        "found": of_group.found,
        "false_alarms": of_group.false_alarms,
        "precision": round(of_group.precision, 3),
        "recall": round(of_group.recall, 3),
        "f1": round(of_group.f1, 3),
    }
