"""From exporters that are made up, through a real Prometheus, to the same table again."""

from __future__ import annotations

import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.prometheus_server import NEEDS, WAIT_S, backfill, has_prometheus, prometheus

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.job_scenarios import draw_scenario
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, normalise
from phalanx.detect.monitoring.metric_generator import generate
from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.prometheus_source import PrometheusServer, read_prometheus
from phalanx.detect.monitoring.simulated_exporters import SimulatedExporters, write_scrape_config

needs_prometheus = pytest.mark.skipif(not has_prometheus(), reason=NEEDS)


def table_of(machines: int = 5, metrics: tuple[str, ...] = tuple(CATALOGUE)) -> MetricTable:
    """Of a job in which a GPU falls off the bus and takes its metrics along."""
    for number in range(100):
        scenario = draw_scenario("develop", number, fault="GPU card drop", machines=machines, duration_s=120)
        fault = scenario.fault
        if fault and fault.signature.effects[0].how == "vanish" and fault.end_s > 120 and fault.start_s < 50:
            return generate(scenario, metrics).table
    raise AssertionError


@needs_prometheus
def test_what_was_backfilled_is_read_again(tmp_path: Path) -> None:
    table, config = table_of(), tmp_path / "prometheus.json"
    backfill(table, tmp_path)
    write_scrape_config({}, config)
    end_s = table.start_s + table.samples - 1
    with prometheus(tmp_path, config) as url:
        read = read_prometheus(PrometheusServer(url), minutes=2, end_s=end_s)
        assert read.metrics == table.metrics and read.machines == table.machines
        assert read.start_s == pytest.approx(table.start_s)
        expected, found = normalise(table), normalise(read)
        for name in set(table.metrics) - {"pcie_usage"}:  # of the same series as pcie_bandwidth
            known = ~np.isnan(expected.of(name)) & ~np.isnan(found.of(name))
            apart = np.abs(expected.of(name) - found.of(name))[known]
            assert known.mean() > 0.6 and np.quantile(apart, 0.9) < 1e-3, name
        # What vanished is missing within seconds, not after the server's look-back of five minutes.
        vanished = np.isnan(table.of("gpu_power_draw")).sum(axis=1)
        assert vanished.max() > 60
        culprit = int(vanished.argmax())
        assert np.isnan(read.of("gpu_power_draw")[culprit]).sum() > vanished[culprit] - 10
        assert not np.isnan(read.of("gpu_power_draw")[(culprit + 1) % 5]).all()
        with pytest.raises(UserError, match=r"parse error|unexpected"):
            read_prometheus(PrometheusServer(url, selector='job=="x"'), minutes=1, end_s=end_s)


@needs_prometheus
def test_exporters_are_scraped_each_by_itself(tmp_path: Path) -> None:
    table, config = table_of(metrics=("cpu_usage", "gpu_power_draw")), tmp_path / "prometheus.json"
    with SimulatedExporters(table) as exporters:
        write_scrape_config(exporters.targets, config)
        with prometheus(tmp_path, config) as url:
            give_up_s = time.monotonic() + WAIT_S
            while True:
                with suppress(UserError):
                    read = read_prometheus(PrometheusServer(url), minutes=1)
                    if read.machines == table.machines and len(read.metrics) == 2:
                        known = ~np.isnan(read.values)
                        if known[1].any(axis=1).all() and known[0].any():
                            break
                assert time.monotonic() < give_up_s, (tmp_path / "log").read_text()
                time.sleep(0.2)
    power = read.of("gpu_power_draw")
    assert set(np.round(power[0][~np.isnan(power[0])], 2)) <= set(np.round(table.of("gpu_power_draw")[0], 2))


def test_exporters_show_one_sample_after_the_other_and_then_nothing() -> None:
    now = [0.0]
    table = table_of(3, ("gpu_duty_cycle", "cpu_usage", "memory_usage"))
    with SimulatedExporters(table, speed=2.0, clock=lambda: now[0]) as exporters:
        assert len(set(exporters.targets.values())) == 3
        now[0] = 10.0
        with urllib.request.urlopen(f"http://{exporters.targets['host-0001']}/metrics", timeout=30) as got:
            shown = dict(line.rsplit(" ", 1) for line in got.read().decode().splitlines())
        assert float(shown["DCGM_FI_DEV_GPU_UTIL"]) == pytest.approx(100 * table.of("gpu_duty_cycle")[1, 20])
        assert 0 < float(shown['node_cpu_seconds_total{mode="idle"}']) < 20
        assert exporters.page(0) != exporters.page(1)
        idle = 'node_cpu_seconds_total{mode="idle"}'
        told = []
        for now[0] in (10.0, 10.25, 10.5):  # samples 20, 20.5, 21
            told.append(float(dict(line.rsplit(" ", 1) for line in exporters.page(1).decode().splitlines())[idle]))
        assert told[1] == pytest.approx((told[0] + told[2]) / 2) and told[0] < told[1] < told[2]
        now[0] = 60.0
        assert exporters.page(0) == b""
