"""Precision, recall and false alarms, counted on verdicts whose truth is known."""

from __future__ import annotations

import pytest

from phalanx.detect.detection import Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.monitoring.detection_scores import DetectionScore, score
from phalanx.detect.monitoring.job_scenarios import draw_scenario
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_generator import CaseLabels, generate, label


def labels(number: int, fault: str | None = "ECC error") -> CaseLabels:
    return label(draw_scenario("develop", number, fault=fault, machines=16, duration_s=900))


def verdict(*hosts: str, since_s: float | None = None, advice: str = "evict", **figures: float | str) -> JudgeVerdict:
    found = Detection(
        "faulty machine",
        "one differs",
        who=tuple(Culprit("host", host, hosts=(host,)) for host in hosts),
        since=Onset(since_s),
        advice=advice,  # type: ignore[arg-type]
        figures=figures,
    )
    return JudgeVerdict("machines", (found,))


def test_right_wrong_and_missed_are_told_apart() -> None:
    right, wrong, missed, healthy = labels(0), labels(1), labels(2, "HDFS error"), labels(3, None)
    (fault,) = right.faults
    others = [f"host-{number:04d}" for number in range(16) if f"host-{number:04d}" not in wrong.faults[0].machines]
    since_s, raised_s = fault.start_unix_s + 5, fault.start_unix_s + 5 + 240.5
    found = score(
        [
            (verdict(*fault.machines, since_s=since_s, raised_unix_s=raised_s, fault="ECC error"), right),
            (verdict(others[0]), wrong),
            (JudgeVerdict("machines"), missed),
            (verdict("host-0000"), healthy),
            (JudgeVerdict("machines", abstains=("too few machines; give more",)), healthy),
        ]
    )
    assert (found.found, found.false_alarms, len(found.outcomes)) == (1, 1, 3)
    assert found.precision == 1 / 2
    assert found.recall == 1 / 3
    assert found.f1 == pytest.approx(0.4)
    assert found.healthy_alarms == 1 and found.healthy_hours == 0.5 and found.alarms_per_healthy_hour == 2
    assert found.abstained == 1
    assert found.outcomes[0].since_error_s == 5 and found.outcomes[0].reaction_s == pytest.approx(0.5)
    rows = {row["fault"]: row for row in found.by_class()}
    assert rows["ECC error"]["recall"] == 0.5 and rows["HDFS error"]["found"] == 0 and rows["all"]["cases"] == 3
    assert found.confusion() == [
        {"fault": "ECC error", "ECC error": 1, "missed": 1},
        {"fault": "HDFS error", "missed": 1},
    ]
    assert found.as_json()["longest_reaction_s"] == 0.5
    assert found.late_s() == pytest.approx((5.5, 5.5, 5.5)) and found.guessed == 1.0


def test_scores_of_parts_add_up() -> None:
    pairs = [(verdict(*one.faults[0].machines) if at else JudgeVerdict("machines"), one)
             for at, one in enumerate((labels(0), labels(1)))]  # fmt: skip
    pairs.append((verdict("host-0000"), labels(3, None)))
    assert DetectionScore.joined(score([one]) for one in pairs) == score(pairs)


def test_who_only_watches_alarms_nobody_and_who_is_early_is_wrong() -> None:
    case = labels(0)
    (fault,) = case.faults
    watched = score([(verdict(*fault.machines, advice="watch"), case)])
    assert (watched.found, watched.false_alarms, watched.precision) == (0, 0, 1.0)
    early = score([(verdict(*fault.machines, since_s=fault.start_unix_s - 100), case)])
    assert (early.found, early.false_alarms, early.f1) == (0, 1, 0.0)


def test_of_a_group_the_share_that_was_named_is_kept() -> None:
    case = next(
        found for number in range(400) if len((found := label(draw_scenario("develop", number, fault="NIC dropout",
                                                                            machines=256))).faults[0].machines) > 1
    )  # fmt: skip
    machines = case.faults[0].machines
    found = score([(verdict(machines[0]), case)])
    assert found.outcomes[0].is_found and found.outcomes[0].share == 1 / len(machines)


def test_what_shows_late_is_counted_from_when_it_shows_too() -> None:
    """A receiver's buffer fills for seconds before pause frames rise out of the noise."""
    case = generate(draw_scenario("develop", 3, fault="PCIe downgrading", machines=24), DETECTED).labels
    (fault,) = case.faults
    assert fault.shown_unix_s is not None and 2 <= fault.shown_unix_s - fault.start_unix_s < 6
    raised_s = fault.shown_unix_s + 240.5
    found = score([(verdict(*fault.machines, raised_unix_s=raised_s), case)])
    assert found.late_shown_s() == pytest.approx((0.5, 0.5, 0.5))
    late = found.late_s()
    assert late is not None and late[0] > 2
    unseen = labels(3, "PCIe downgrading")
    assert score([(verdict(*unseen.faults[0].machines, raised_unix_s=raised_s), unseen)]).late_shown_s() is None
