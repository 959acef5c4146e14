"""What blames no machine: gaps of the collector, small, harmless and past differences; what nobody can judge."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import numpy as np
import pytest

from phalanx.detect.detection import Detection, JudgeVerdict
from phalanx.detect.minder.following import FollowedJob
from phalanx.detect.minder.incident_weight import _silence
from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.vanished_metrics import VanishedMetrics
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_table import MetricTable

START_S = 1_700_000_000.0
LEVELS = (100.0, 0.2, 0.96, 380.0, 0.95, 0.4, 9e10)


def job(machines: int = 8, samples: int = 700, load: float = 1.0) -> MetricTable:
    random = np.random.default_rng(1)
    steps = 1 - 0.2 * (np.arange(samples) % 5 == 4)
    values = np.stack(
        [one * load * steps * (1 + 0.03 * random.standard_normal((machines, samples))) for one in LEVELS]
    ).astype(np.float32)
    return MetricTable(values, DETECTED, tuple(f"h{number}" for number in range(machines)), START_S)


def judged(table: MetricTable) -> JudgeVerdict:
    return judge_machines(table, MinderPolicy())


@pytest.mark.campaign(but=("260-0", "300-3"))
@pytest.mark.parametrize("later_s", [0, 3, 20])
@pytest.mark.parametrize("gap_s", [260, 300])
def test_a_gap_of_the_collector_blames_nobody_and_is_said(gap_s: int, later_s: int) -> None:
    table = job(8, 800)
    table.values[:, :, 200 : 200 + gap_s] = np.nan
    for machine in range(8):  # they come back one after the other
        table.values[:, machine, 200 + gap_s : 200 + gap_s + machine * later_s] = np.nan
    verdict = judged(table)
    assert not verdict.detections and verdict.exit_status == 3, verdict
    assert "the collector did not work" in verdict.abstains[0]


def test_a_machine_that_does_not_come_back_after_the_gap_is_named() -> None:
    table = job(8, 900)
    table.values[:, :, 200:400] = np.nan
    table.values[:, 5, 400:] = np.nan
    assert judged(table).blamed_hosts == ("h5",)


def test_only_samples_that_most_machines_delivered_count_as_lacking() -> None:
    def told(values: np.ndarray, piece: int) -> list[int]:
        vanished = VanishedMetrics(1, values.shape[1], 240)
        return [
            int(one)
            for at in range(0, values.shape[2], piece)
            for one in vanished.add(values[:, :, at : at + piece].astype(np.float32))
        ]

    values = np.zeros((1, 8, 700))
    values[:, :, 100:400] = np.nan
    assert told(values, 1) == told(values, 64) == []
    values[:, 6, 400:640] = np.nan
    assert told(values, 1) == told(values, 64) == [6]


def test_a_machine_that_is_back_has_a_gap_and_no_fault() -> None:
    table = job()
    table.values[:, 2, 200:500] = np.nan
    (found,) = judged(table).detections
    assert found.advice == "watch" and not found.blamed_hosts
    assert "h2 delivered nothing of 7 metrics from" in found.sentence


def test_the_gap_is_where_nothing_is_delivered_whose_metrics_end_and_begin_one_after_the_other() -> None:
    table = job()
    for place in range(len(DETECTED)):  # rates end a scrape before gauges, and begin a scrape later
        table.values[place, 2, 200 + 3 * place : 500 - place] = np.nan
    (found,) = judged(table).detections
    begin, end = 200 + 3 * (len(DETECTED) - 1), 500 - (len(DETECTED) - 1)
    times = [datetime.fromtimestamp(START_S + one, UTC).strftime("%H:%M:%S UTC") for one in (begin, end)]
    assert found.sentence == f"h2 delivered nothing of 7 metrics from {times[0]} to {times[1]}"
    assert found.since.unix_s == START_S + begin


def test_a_gap_that_ends_just_after_it_counted_blames_nobody() -> None:
    for end in (445, 449):  # samples are judged in pieces: it is over by the end of its piece
        table = job()
        table.values[:, 2, 200:end] = np.nan
        (found,) = judged(table).detections
        assert found.what == "gap in the samples" and "nothing of 7 metrics" in found.sentence
        assert found.since.unix_s == START_S + 200


def test_metrics_of_which_one_is_back_before_another_is_gone_have_a_gap_from_the_first_to_the_last() -> None:
    table = job()
    table.values[0, 2, 200:446] = np.nan
    table.values[1, 2, 441:650] = np.nan
    known = ~np.isnan(table.values[:2, 2:3])
    assert _silence(known, 200, 439) == (441, 446)
    table.values[1, 2, 441:446] = 1.0
    assert _silence(~np.isnan(table.values[:2, 2:3]), 200, 439) == (200, 446)


def test_a_spare_that_takes_over_is_a_replacement() -> None:
    table = job()
    table.values[:, 3, 300:] = np.nan
    table.values[:, 7, :305] = np.nan
    verdict = judged(table)
    assert not verdict.detections and "h7 came in place of h3" in verdict.sentence


def test_cpu_usage_alone_blames_nobody() -> None:
    table = job()
    table.of("cpu_usage")[4, 200:] += 0.3
    (found,) = judged(table).detections
    assert found.advice == "watch" and "CPU usage alone" in found.sentence and "replace" not in " ".join(found.then)


def test_cpu_usage_alone_is_to_blame_where_all_others_have_slowed_down_since() -> None:
    table = job()
    table.of("cpu_usage")[4, 250:] += 0.3
    for name in ("gpu_power_draw", "gpu_tensor_core_activity", "gpu_nvlink_bandwidth"):
        table.of(name)[:, 250:] *= 0.85
    assert judged(table).blamed_hosts == ("h4",)


def test_a_difference_that_is_hardly_seen_blames_nobody() -> None:
    table = job()
    table = dataclasses.replace(table, values=np.full_like(table.values, 0.5))
    table.of("gpu_duty_cycle")[4, 200:] = 0.49
    detections = judged(table).detections
    assert all(one.advice == "watch" and "small" in one.what for one in detections)


def test_who_alone_works_while_the_others_are_idle_is_not_blamed() -> None:
    table = job()
    for name in ("gpu_tensor_core_activity", "gpu_power_draw", "gpu_graphics_engine_activity", "gpu_nvlink_bandwidth"):
        table.of(name)[1:, 300:] *= 0.1
    verdict = judged(table)
    assert verdict.detections and not verdict.blamed_hosts, verdict
    # The other way round it is.
    table = job()
    table.of("gpu_power_draw")[0, 300:] *= 0.3
    assert judged(table).blamed_hosts == ("h0",)


def test_a_difference_that_is_over_blames_nobody_unless_the_job_ended() -> None:
    table = job(8, 800)
    table.of("gpu_power_draw")[2, 200:500] *= 0.4
    (found,) = judged(table).detections
    assert found.advice == "watch" and "is over" in found.what
    table.values[2:5, :, 500:] *= 0.02  # all come down to it
    assert judged(table).blamed_hosts == ("h2",)


@pytest.mark.parametrize(("seconds", "every"), [(8, 1), (900, 15), (700, 100)])
def test_too_few_samples_are_no_all_clear(seconds: int, every: int) -> None:
    table = job(8, 900)
    kept = np.arange(900) % every == 0
    kept[: 900 - seconds] = False
    table.values[..., ~kept] = np.nan
    verdict = judged(table)
    assert verdict.exit_status == 3 and "too few" in verdict.sentence


def test_a_sample_every_five_minutes_is_too_seldom() -> None:
    table = dataclasses.replace(job(8, 60), period_s=300.0)
    verdict = judged(table)
    assert verdict.exit_status == 3 and "too seldom" in verdict.sentence


def test_values_in_per_cent_are_said_and_the_others_judged() -> None:
    table = job()
    table.of("gpu_duty_cycle")[:] *= 100
    verdict = judged(table)
    assert verdict.exit_status == 3 and "gpu_duty_cycle lie outside 0..1" in verdict.abstains[0]
    assert "percent" in verdict.abstains[0]
    table.of("gpu_power_draw")[3, 200:] *= 0.4
    assert judged(table).blamed_hosts == ("h3",) and judged(table).abstains
    table.of("cpu_usage")[:] *= -1
    assert any("cpu_usage" in one for one in judged(table).abstains)


def test_infinite_values_are_no_measurements() -> None:
    table = job()
    table.of("gpu_power_draw")[3, 200:] = np.inf
    assert "no longer delivers gpu_power_draw" in judged(table).sentence


def test_a_followed_job_says_the_same() -> None:
    table = job()
    table.of("cpu_usage")[4, 200:] += 0.3
    (verdict,) = FollowedJob(table, MinderPolicy()).begin()
    assert not verdict.blamed_hosts and "raised_unix_s" in verdict.detections[0].figures


def test_metrics_are_set_without_brackets() -> None:
    assert MinderPolicy(metrics="gpu_power_draw, cpu_usage").metrics == ("gpu_power_draw", "cpu_usage")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no metric of the catalogue"):
        MinderPolicy(metrics=("power",))


def test_who_was_busy_while_habits_were_learnt_is_not_blamed_for_being_as_the_others_are() -> None:
    table = job()
    table.of("pfc_tx_packet_rate")[3, :75] *= 8
    table.of("gpu_power_draw")[5, :70] *= 0.8
    verdict = judged(table)
    assert not verdict.blamed_hosts, verdict.sentence


GPUS = ("gpu_duty_cycle", "gpu_power_draw", "gpu_tensor_core_activity", "gpu_nvlink_bandwidth")


def lacking(metrics: tuple[str, ...], before: float, since: float) -> MetricTable:
    """h2 lacks metrics from 300 s on; the share of its exporters that are scraped before and since."""
    table = job()
    for name in metrics:
        table.of(name)[2, 300:] = np.nan
    scraped = np.ones((8, table.samples), np.float32)
    scraped[2] = np.where(np.arange(table.samples) < 302, before, since)
    return dataclasses.replace(table, scraped=scraped)


def test_an_exporter_that_is_down_beside_others_of_its_machine_blames_nobody() -> None:
    (found,) = judged(lacking(GPUS, 1.0, 0.5)).detections
    assert found.what == "exporter that is down" and found.advice == "watch" and found.confidence <= 0.5
    assert "other exporters of the same machine deliver" in found.why[0] and "exporters of h2" in found.then[0]
    (found,) = judged(lacking(GPUS, 2 / 3, 1 / 3)).detections  # a third has always been down
    assert found.advice == "watch"


@pytest.mark.parametrize(
    ("metrics", "before", "since", "words"),
    [
        (GPUS, 1.0, 1.0, "its exporters answer (up = 1)"),
        (GPUS, 0.5, 0.5, "its exporters answer (up = 1)"),  # another exporter has always been down
        (DETECTED, 1.0, 0.0, "all of its exporters fail (up = 0)"),
        (DETECTED, np.nan, np.nan, ""),
    ],
)
def test_a_card_that_vanished_and_a_machine_that_is_away_are_named(
    metrics: tuple[str, ...], before: float, since: float, words: str
) -> None:
    verdict = judged(lacking(metrics, before, since))
    assert verdict.blamed_hosts == ("h2",)
    assert any(words in one for one in verdict.detections[0].why)


def test_a_gap_that_is_over_says_nothing_of_a_card_that_is_gone() -> None:
    table = lacking((), 1.0, 1.0)
    table.values[:, 2, 200:500] = np.nan
    (found,) = judged(table).detections
    assert found.what == "gap in the samples" and "gone on the machine" not in " ".join(found.why)


def test_what_is_known_of_exporters_goes_along_where_a_job_is_followed() -> None:
    table = lacking(GPUS, 1.0, 0.5)
    assert [one.advice for one in followed(table)] == ["watch"]
    assert [one.blamed_hosts for one in followed(dataclasses.replace(table, scraped=None))] == [("h2",)]


def followed(table: MetricTable) -> list[Detection]:
    """By looks that overlap, at the first of which the server did not answer about exporters."""
    follow = FollowedJob(dataclasses.replace(table.between(0, 100), scraped=None), MinderPolicy())
    told = follow.begin()
    for end in range(110, table.samples, 37):
        told += follow.add(table.between(end - 50, end))
    return [one for verdict in told for one in verdict.detections]
