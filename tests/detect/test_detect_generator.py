"""Data that are made up: the same on every machine, of the physics that the scenario says, and labelled by it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.fault_signatures import FAULTS, SIGNATURES, fault_shares, faults_in_shares
from phalanx.detect.monitoring.job_scenarios import (
    SPLITS,
    Scenario,
    draw_scenario,
    fault_scenarios,
    healthy_scenarios,
)
from phalanx.detect.monitoring.load_model import ACTIVITIES, MODELS, JobLoad, Phase, activities
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, DETECTED, normalise
from phalanx.detect.monitoring.metric_generator import generate


def drawn(fault: str, signature: str, **arguments: object) -> Scenario:
    """The first scenario of the development split whose fault shows in this way."""
    for number in range(200):
        found = draw_scenario("develop", number, fault=fault, machines=16, **arguments)  # type: ignore[arg-type]
        if found.fault and found.fault.signature.name.startswith(signature) and found.fault.end_s > 900:
            return found
    raise AssertionError(signature)


def test_the_same_scenario_gives_the_same_table_whatever_else_is_made() -> None:
    scenario = draw_scenario("develop", 3, fault="NIC dropout", machines=20, duration_s=120)
    assert scenario == draw_scenario("develop", 3, fault="NIC dropout", machines=20, duration_s=120)
    whole, one = generate(scenario, list(CATALOGUE)), generate(scenario, ["cpu_usage"])
    np.testing.assert_array_equal(whole.table.of("cpu_usage"), one.table.of("cpu_usage"))
    other = generate(draw_scenario("develop", 4, fault="NIC dropout", machines=20, duration_s=120), ["cpu_usage"])
    assert not np.allclose(np.nan_to_num(one.table.values), np.nan_to_num(other.table.values))


def test_every_metric_has_a_model_and_lies_within_its_limits() -> None:
    assert MODELS.keys() == CATALOGUE.keys()
    assert len(CATALOGUE) == 21
    table = generate(draw_scenario("develop", 1, machines=12, duration_s=300), list(CATALOGUE)).table
    assert table.values.dtype == np.float32
    scaled = normalise(table)
    for name in CATALOGUE:
        lower, upper = np.nanmin(table.of(name)), np.nanmax(table.of(name))
        assert CATALOGUE[name].lower <= lower <= upper <= CATALOGUE[name].upper, name
        assert np.nanmax(scaled.of(name)) - np.nanmin(scaled.of(name)) > 0.001, name
        assert np.isnan(table.of(name)).mean() < 0.1
    assert (np.isnan(scaled.values) == np.isnan(table.values)).all()


def test_classes_have_the_shares_of_the_papers_evaluation() -> None:
    assert {one.fault for one in fault_shares()} == set(FAULTS)
    assert sum(one.production_pct for one in fault_shares()) == pytest.approx(100)
    counts = faults_in_shares(150)
    assert sum(counts.values()) == 150
    assert counts["ECC error"] == 39 and counts["CUDA execution error"] in (22, 23)
    scenarios = list(fault_scenarios("develop", 150))
    assert Counter(one.fault.signature.fault for one in scenarios if one.fault) == counts
    assert len({one.seed for one in scenarios}) == 150
    sizes = sorted(one.machines for one in scenarios)
    assert sizes[0] < 30 and sizes[-1] > 500
    assert next(healthy_scenarios("test", 1)).fault is None


def test_splits_share_neither_seeds_nor_ranges() -> None:
    develop, test = SPLITS["develop"], SPLITS["test"]
    assert abs(develop.first_seed - test.first_seed) > 10_000_000
    assert develop.noise != test.noise and develop.excursion_s != test.excursion_s and develop.stages != test.stages
    firsts = sorted(split.first_seed for split in SPLITS.values())
    assert min(np.diff(firsts)) > 10_000_000
    for split in SPLITS.values():
        assert split.excursion_s[1] < 240  # an innocent burst ends before continuity would blame it


def test_peers_of_a_machine_that_died_spin_and_it_is_idle() -> None:
    scenario = drawn("CUDA execution error", "illegal")
    assert scenario.fault
    table = generate(scenario, [*DETECTED, "memory_usage"]).table
    culprit = scenario.fault.machines[0]
    after = slice(int(scenario.fault.job_start_s) + 60, 900)
    of_all = {name: np.nanmean(table.of(name)[:, after], axis=1) for name in table.metrics}
    peers = np.delete(np.arange(16), culprit)
    assert of_all["gpu_duty_cycle"][peers].min() > 0.9
    assert of_all["gpu_duty_cycle"][culprit] < 0.9 * of_all["gpu_duty_cycle"][peers].min()
    assert of_all["gpu_tensor_core_activity"][peers].max() < 0.05
    assert of_all["memory_usage"][culprit] < of_all["memory_usage"][peers].min()


def test_a_slow_link_fills_buffers_and_slows_everyone() -> None:
    scenario = drawn("PCIe downgrading", "PCIe trains at fewer lanes")
    fault = scenario.fault
    assert fault
    table = generate(scenario, ["pfc_tx_packet_rate", "tcp_rdma_throughput", "gpu_tensor_core_activity"]).table
    before, after = slice(0, int(fault.start_s)), slice(int(fault.start_s) + 90, 900)
    pfc, throughput = table.of("pfc_tx_packet_rate"), table.of("tcp_rdma_throughput")
    culprit = fault.machines[0]
    assert np.nanmedian(pfc[culprit, after]) > 2 * np.nanmedian(pfc[culprit, before])
    others = [one for one in range(16) if one not in fault.machines and one not in {peer for peer, *_ in fault.peers}]
    assert np.nanmean(throughput[others, after]) < np.nanmean(throughput[others, before])
    assert np.nanmean(table.of("gpu_tensor_core_activity")[others, after]) < np.nanmean(
        table.of("gpu_tensor_core_activity")[others, before]
    )
    first = fault.peers[0][0]
    assert np.nanmean(pfc[culprit, after]) > np.nanmean(pfc[first, after])


def test_a_detached_gpu_takes_its_metrics_along_and_nothing_else() -> None:
    scenario = drawn("GPU card drop", "fallen off the bus, its exporter")
    fault = scenario.fault
    assert fault
    case = generate(scenario, list(CATALOGUE))
    after = slice(int(fault.start_s) + 5, 900)
    for name, metric in CATALOGUE.items():
        is_missing = bool(np.isnan(case.table.of(name)[fault.machines[0], after]).all())
        assert is_missing == metric.is_of_gpus, name
    assert set(case.labels.faults[0].vanished) == {name for name, one in CATALOGUE.items() if one.is_of_gpus}
    assert case.labels.faults[0].machines == (f"host-{fault.machines[0]:04d}",)
    assert json.loads(json.dumps(case.labels.as_json()))["faults"][0]["fault"] == "GPU card drop"


def test_stages_differ_by_what_they_wait_and_do_the_same_work() -> None:
    load = JobLoad(step_s=4, stages=4, bubble=0.1, gradient_share=0.15, step_jitter=0.0)
    plain, slow = activities(load, [], 400, 8, np.random.default_rng(0))
    compute, wait = ACTIVITIES.index("compute"), ACTIVITIES.index("wait")
    assert plain[0, wait].mean() < plain[3, wait].mean()
    np.testing.assert_array_equal(plain, slow)
    phase = Phase("slow_compute", 0, 400, 2.0)
    waiting, busy = activities(load, [phase], 400, 8, np.random.default_rng(0))
    inner = slice(200, -200)
    assert busy[0, compute, inner].mean() == pytest.approx(waiting[0, compute, inner].mean(), rel=0.1)
    assert waiting[0, compute, inner].mean() == pytest.approx(plain[0, compute, inner].mean() / 2, rel=0.1)


def test_all_signatures_can_be_drawn() -> None:
    wanted = {(one.fault, one.name) for one in SIGNATURES}
    found = {
        (one.fault.signature.fault, one.fault.signature.name)
        for fault in FAULTS
        for one in (draw_scenario("test", number, fault=fault, machines=64) for number in range(60))
        if one.fault
    }
    assert found == wanted


def test_a_group_shares_a_switch() -> None:
    groups = [
        one.fault.machines
        for one in (draw_scenario("develop", each, fault="machine unreachable", machines=512) for each in range(300))
        if one.fault and len(one.fault.machines) > 1
    ]
    assert groups
    for number in range(20):
        forced = draw_scenario("test", number, fault="NIC dropout", machines=32, faulty=8)
        assert forced.fault and len(forced.fault.machines) == 8
    assert all(group == tuple(range(group[0], group[0] + len(group))) for group in groups)


def test_what_makes_no_job_is_refused() -> None:
    many = {"fault": "HDFS error", "machines": 8, "faulty": 5}
    for arguments in ({"fault": "rust"}, {"machines": 1}, {"duration_s": 10}, {"faulty": 2}, many):
        with pytest.raises(UserError):
            draw_scenario("develop", 0, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no split"):
        draw_scenario("train", 0)
    with pytest.raises(UserError, match="no metric"):
        generate(draw_scenario("develop", 0), ["speed"])
    assert math.isfinite(draw_scenario("develop", 0).start_unix_s)


def test_the_first_sample_that_shows_a_fault_is_known() -> None:
    """What the faulty machine measures before it is the same as without the fault."""
    for number, fault in ((0, "ECC error"), (1, "machine unreachable"), (4, "GPU card drop")):
        scenario = draw_scenario("develop", number, fault=fault, machines=16)
        assert scenario.fault is not None
        silent = dataclasses.replace(scenario.fault.signature, state="", effects=(), job="none")
        healthy = dataclasses.replace(scenario, fault=dataclasses.replace(scenario.fault, signature=silent))
        case, other = generate(scenario, DETECTED), generate(healthy, DETECTED)
        (label_of_fault,), (machine,) = case.labels.faults, scenario.fault.machines
        assert label_of_fault.shown_unix_s is not None and other.labels.faults[0].shown_unix_s is None
        shown = round(label_of_fault.shown_unix_s - scenario.start_unix_s)
        ours, theirs = case.table.values[:, machine], other.table.values[:, machine]
        assert 0 <= shown - scenario.fault.start_s + 1 < 6
        np.testing.assert_allclose(ours[:, : shown - 1], theirs[:, : shown - 1], rtol=0.2)
        assert not np.allclose(ours[:, shown], theirs[:, shown], rtol=0.02)
