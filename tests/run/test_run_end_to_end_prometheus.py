"""The driver asks a real Prometheus about the hosts of its job, and tells which one lost its GPU, or its exporter."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prometheus_server import NEEDS, has_prometheus, prometheus
from support.recovery.job import Job

from phalanx.detect.incident_history import read_histories
from phalanx.detect.monitoring.job_scenarios import draw_scenario
from phalanx.detect.monitoring.metric_generator import generate
from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.simulated_exporters import SimulatedExporters, write_scrape_config
from phalanx.run.incidents.detections_file import read_detections

pytestmark = pytest.mark.skipif(not has_prometheus(), reason=NEEDS)

SCRIPT = """
import os, pathlib, time
from phalanx.core.progress import own_progress

page = own_progress(os.environ, int(os.environ["PHALANX_RUN_ATTEMPT"]))
for step in range(1, 100_000):
    time.sleep(0.6 if pathlib.Path("slower").exists() else 0.2)
    page.step(step)
    if step == 2:
        open("begun-" + os.environ["RANK"], "w").close()
"""
SECRET = "a-bearer-token-that-nobody-sees"
METRICS = ("cpu_usage", "gpu_duty_cycle", "gpu_power_draw", "gpu_temperature", "gpu_tensor_core_activity")
POLICY = {"settle_s": 16, "vanished_s": 31}
GUARD_S = 280.0


def card_drop() -> tuple[MetricTable, str, float]:
    """Four machines; the metrics of a GPU vanish half a minute after the beginning; whose, and when."""
    for number in range(1000):
        scenario = draw_scenario("develop", number, fault="GPU card drop", machines=4, duration_s=180)
        fault = scenario.fault
        vanishes = fault is not None and fault.signature.effects[0].how == "vanish"
        if fault is not None and vanishes and 30 < fault.start_s < 40 and fault.end_s > 170:
            case = generate(scenario, METRICS)
            # Its last minute again and again: who starves for a while must not find that all have ended.
            minutes = np.concatenate([case.table.values, *[case.table.values[..., -60:]] * 8], axis=-1)
            return replace(case.table, values=minutes), case.labels.faults[0].machines[0], fault.start_s
    raise AssertionError


def job(folder: Path, url: str, machines: tuple[str, ...], *more: str) -> Job:
    """Four hosts, which the server calls by other names."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "token").write_text(SECRET)
    server: dict[str, Any] = {"url": url, "token_file": str(folder / "token"), "every_s": 1.0, "policy": POLICY}
    server["hosts"] = {f"host-{place}": machine for place, machine in enumerate(machines, 1)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in server.items() if not isinstance(value, dict)]
    for name in ("hosts", "policy"):
        lines += [
            f"[run.judges.prometheus.{name}]",
            *(f"{key} = {json.dumps(one)}" for key, one in server[name].items()),
        ]
    (folder / "job.toml").write_text("\n".join(["[run.judges.prometheus]", *lines]) + "\n")
    settings = ["--set", "run.heartbeat_s=0.2", "--set", "run.policy.joining_check=passive"]
    return Job(folder, ["--job", "job.toml", "--hosts", "4", *settings, *more, "--", "train.py"])


def said(ran: Job, *words: str) -> str:
    """What a command about the job says."""
    command = [sys.executable, "-m", "phalanx.cli.main", "run", *words, "--folder", str(ran.run_folder)]
    return subprocess.run(command, capture_output=True, text=True, env=ran.environment(), timeout=GUARD_S).stdout


@pytest.fixture(name="told", scope="module")
def told_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Future[None]]]:
    """Two jobs side by side, as each is watched for more than a minute: one that becomes slower, and one that not."""
    with ThreadPoolExecutor(2) as both:
        yield {slows: both.submit(watch, tmp_path_factory.mktemp("job"), slows) for slows in (True, False)}


def ranks_of(ran: Job) -> dict[str, list[int]]:
    """Of each host that takes part: of those that come, some are spares."""
    return {one["name"]: one["ranks"] for one in json.loads(said(ran, "status", "--json"))["hosts"] if one["ranks"]}


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("slows", [True, False])
def test_a_host_whose_metrics_vanish_is_told_by_the_driver(told: dict[bool, Future[None]], slows: bool) -> None:
    """Where the job goes on as fast as before, the GPU cannot be gone."""
    told[slows].result()


def watch(tmp_path: Path, slows: bool) -> None:
    """A job from its start until its driver has told of the host, and what it says and writes then."""
    table, faulty, since_s = card_drop()
    (tmp_path / "server").mkdir()
    with SimulatedExporters(table) as exporters:
        write_scrape_config(exporters.targets, tmp_path / "server.json")
        with (
            prometheus(tmp_path / "server", tmp_path / "server.json") as url,
            job(tmp_path, url, table.machines) as ran,
        ):
            ran.wait_for(lambda: len(list(tmp_path.glob("begun-*"))) == 4, GUARD_S)
            host = f"host-{table.machines.index(faulty) + 1}"
            if host not in ranks_of(ran):
                pytest.skip(f"{host} came last and is a spare, which no judge looks at")
            exporters.restart()
            begun_s = time.monotonic()
            ran.wait_for(lambda: time.monotonic() >= begun_s + since_s, GUARD_S)
            if slows:
                (tmp_path / "slower").touch()
            (event,) = ran.wait_for(lambda: ran.events("detected"), GUARD_S)
            found = event.fields["found"]
            what = "faulty machine" if slows else "exporter that is down"
            assert event.fields["judge"] == "machines" and found["what"] == what
            assert [one["hosts"] for one in found["who"]] == [[host]]
            assert found["sentence"].startswith(f"{host} no longer delivers")
            (kept,) = ran.wait_for(lambda: read_detections(ran.run_folder), GUARD_S)
            assert kept.found.blamed_hosts == ((host,) if slows else ())
            assert [one.host for one in read_histories([ran.run_folder])] == ([host] if slows else [])
            if not slows:
                assert found["sentence"].endswith(f"{host} is heard and makes steps: look at its exporter")
                assert found["advice"] == "watch" and found["confidence"] <= 0.5
            for command in ("status", "incidents"):
                shown = said(ran, command)
                assert f"judge of machines: {host} no longer delivers" in shown
                print(f"$ phalanx run {command}\n{shown}")  # docs/run_detection.md shows it
            # What the server knows of the exporters is said where it counts: the GPU is gone, not they.
            assert ("its exporters answer (up = 1)" in shown) is slows
            assert len(ran.events("detected")) == 1 and not ran.events("host-gone", "evict-asked")
            written = [path for path in ran.run_folder.rglob("*") if path.is_file() and not path.is_symlink()]
            assert not [path for path in written if SECRET.encode() in path.read_bytes()]


@pytest.mark.campaign
@pytest.mark.slow
def test_a_policy_that_replaces_faulty_hosts_has_a_spare_take_the_place_of_one_that_lost_its_gpu(
    tmp_path: Path,
) -> None:
    """A spare is there without being asked for; it is no host that the server knows, and the others are followed."""
    table, faulty, since_s = card_drop()
    (tmp_path / "server").mkdir()
    more = ("--set", "run.policy.replace_faulty=true")
    with SimulatedExporters(table) as exporters:
        write_scrape_config(exporters.targets, tmp_path / "server.json")
        with (
            prometheus(tmp_path / "server", tmp_path / "server.json") as url,
            job(tmp_path, url, table.machines, *more) as ran,
        ):
            ran.wait_for(lambda: len(list(tmp_path.glob("begun-*"))) == 4, GUARD_S)
            host, before = f"host-{table.machines.index(faulty) + 1}", ranks_of(ran)
            if host not in before:
                pytest.skip(f"{host} came last and is a spare, which no judge looks at")
            exporters.restart()
            begun_s = time.monotonic()
            ran.wait_for(lambda: time.monotonic() >= begun_s + since_s, GUARD_S)
            (tmp_path / "slower").touch()
            (event,) = ran.wait_for(lambda: ran.events("detected"), GUARD_S)
            assert event.fields["found"]["advice"] == "evict"
            ran.wait_for(lambda: [one.attempt for one in ran.events("running")] == [1, 2], GUARD_S)
            after = ranks_of(ran)
            (new,) = after.keys() - before.keys()
            assert host not in after and after[new] == before[host]
            assert "takes the ranks of" in ran.output and host in ran.output
