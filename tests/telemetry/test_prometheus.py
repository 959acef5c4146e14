"""Rules and board against a real Prometheus, from Debian's packages, which scrapes our own endpoints on loopback."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.run.api.job import Metrics, Reading
from phalanx.run.reports.recent_events import Overview
from phalanx.telemetry.alerts.alert_rules import DiskSeen
from phalanx.telemetry.alerts.run_metrics import MetricsServer, TrainingCollector, TrainingFigures, listen

SHIPPED = Path(__file__).parents[2] / "phalanx" / "telemetry" / "alerts" / "prometheus"
RULES, BOARD = SHIPPED / "rules.yml", SHIPPED / "board.json"
UNIT_TESTS = Path(__file__).parent / "prometheus" / "rules_test.yml"
WAIT_S = 120.0
OF_GRAFANA = {
    "$__rate_interval": "10s",
    "$run": ".*",
    "$job": ".*",
}

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Debian's package prometheus (apt-get install --no-install-recommends prometheus)",
)


def training() -> TrainingFigures:
    """All that can be known of a training, which goes on."""
    now_s = time.time()
    steps = int(now_s * 10)
    return TrainingFigures(
        "night",
        newest={"loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1e4, "step_s": 0.1, "mfu": 0.4,
                "memory_bytes": 1 << 30},
        evaluation={"validation_loss": 3.1},
        counts={"steps": steps, "skipped": steps // 100, "tokens": 1000 * steps, "checkpoints": 3, "evaluations": 2},
        step=500,
        total_steps=1000,
        last_step_s=now_s,
        checkpoint_step=400,
        checkpoint_s=now_s - 60,
        restarts=1,
        disks=[DiskSeen("/run", 1 << 40, 1 << 41)],
        alerts={"stall": 1},
        active={"stall": now_s},
    )  # fmt: skip


def job() -> bytes:
    """All that a driver can know of its job."""
    now = Overview(
        job="night", unix_s=time.time(), phase="running", phase_s=60.0, attempt=2, world_size=8, hosts_wanted=4,
        workers_per_host=2, hosts=(), hosts_by_state={"active": 4}, step=500, steps_per_s=10.0, step_age_s=0.1,
        quiet_s=0.1, limit_s=60.0, age_s=100.0, training_s=95.0, recoveries=1, incidents=1, status=0,
    )  # fmt: skip
    return Metrics(lambda: Reading(now, 1000, 0.5, 95.0, 100.0)).text()


def exported(text: str) -> dict[str, str]:
    """Names of samples, by type of their metric."""
    return {sample.name: family.type for family in text_string_to_metric_families(text) for sample in family.samples}


def texts() -> list[str]:
    registry = CollectorRegistry()
    registry.register(TrainingCollector(training))
    return [generate_latest(registry).decode(), job().decode()]


def named(expression: str) -> set[str]:
    return set(re.findall(r"phalanx_[a-z_]+", expression))


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(BOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    found = []
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in OF_GRAFANA.items():
                expression = expression.replace(name, value)
            found.append(expression)
    return found


# What stands in the files


def test_names_and_units_are_those_of_prometheus() -> None:
    for name, kind in {**exported(texts()[0]), **exported(texts()[1])}.items():
        assert re.fullmatch(r"phalanx_(train|run)_[a-z_]+", name), name
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"(_ms|_mb|_gb|_percent|_minutes|_hours)(_|$)", name), name
    for text in texts():
        for family in text_string_to_metric_families(text):
            assert family.documentation, family.name
            labels = {name for sample in family.samples for name in sample.labels}
            assert labels <= {"run", "version", "kind", "result", "state", "phase"}, family.name
            assert len(family.samples) < 20, family.name


def test_every_metric_that_rules_and_board_use_exists() -> None:
    known = exported(texts()[0]).keys() | exported(texts()[1]).keys()
    used = {name for rule in rules() for name in named(rule["expr"])} | set().union(*map(named, queries()))
    assert used
    assert used <= known
    page = (SHIPPED.parents[3] / "docs" / "metrics.md").read_text()
    assert not [name for name in sorted(known) if name not in page]


def test_the_board_is_one_that_people_can_read() -> None:
    board = json.loads(BOARD.read_text())
    assert board["schemaVersion"] >= 36
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = set()
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & places, panel["title"]
        places |= cells
        assert all(target["legendFormat"] for target in panel["targets"])
    assert not re.search(r"\$(?!run\b|job\b|__rate_interval)", " ".join(
        target["expr"] for panel in panels() for target in panel["targets"]))  # fmt: skip


def test_every_rule_says_what_to_do_and_has_a_test_that_fires_and_one_that_does_not() -> None:
    tests = [one for group in yaml.safe_load(UNIT_TESTS.read_text())["tests"] for one in group["alert_rule_test"]]
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 12
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        fires = {bool(one.get("exp_alerts")) for one in tests if one["alertname"] == rule["alert"]}
        assert fires == {True, False}, rule["alert"]


# What Prometheus says


@needs_prometheus
def test_promtool_takes_rules_and_names(tmp_path: Path) -> None:
    for path in (RULES, UNIT_TESTS):
        shutil.copy(path, tmp_path)
    for words in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for text in texts():
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


class _Job(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = job()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(name="prometheus", scope="module")
def prometheus_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that has scraped a training and a job, and evaluated the rules, several times."""
    folder = tmp_path_factory.mktemp("prometheus")
    server = listen("127.0.0.1:0")
    port = server.getsockname()[1]
    of_training = MetricsServer(server, training)
    of_job = ThreadingHTTPServer(("127.0.0.1", 0), _Job)
    threading.Thread(target=of_job.serve_forever, daemon=True).start()
    targets = [f"127.0.0.1:{port}", f"127.0.0.1:{of_job.server_port}"]
    shutil.copy(RULES, folder)
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "phalanx", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address={at}"], stdout=log, stderr=log)
    try:
        give_up_s = time.monotonic() + WAIT_S
        while not _has_looked(f"http://{at}", len(targets)):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < give_up_s, (folder / "log").read_text()
            time.sleep(0.2)
        yield f"http://{at}"
    finally:
        process.terminate()
        process.wait(60)
        of_training.close()
        of_job.shutdown()
        of_job.server_close()


def ask(url: str, query: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=30) as got:
        answer = json.loads(got.read())
    assert answer["status"] == "success"
    return list(answer["data"]["result"])


def _has_looked(url: str, targets: int) -> bool:
    """Whether every target was scraped so often that rates can be had."""
    with suppress(OSError):
        found = ask(url, "count_over_time(up[1m]) >= 4 and up == 1")
        return len(found) == targets and bool(ask(url, "phalanx:effective_training:ratio"))
    return False


@needs_prometheus
def test_every_query_of_the_board_returns_data(prometheus: str) -> None:
    assert len(queries()) >= 20
    empty = [query for query in queries() if not ask(prometheus, query)]
    assert empty == []


@needs_prometheus
def test_every_rule_is_evaluated_and_none_fires(prometheus: str) -> None:
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=30) as got:
        groups = json.loads(got.read())["data"]["groups"]
    found = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert found.keys() == {rule.get("alert") or rule["record"] for rule in rules()}
    for name, rule in found.items():
        assert rule["health"] == "ok", name
        assert rule.get("state", "inactive") == "inactive", name


@needs_prometheus
def test_the_variables_of_the_board_have_values(prometheus: str) -> None:
    assert [one["metric"]["run"] for one in ask(prometheus, "phalanx_train_info")] == ["night"]
    assert ask(prometheus, "phalanx_run_attempt")[0]["metric"]["job"] == "phalanx"
