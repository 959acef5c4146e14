"""A job is watched beside its driver: alerts of what it runs, and the figures of a training for Prometheus."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.detect.detection import Advice, Culprit, Detection
from phalanx.run.api.job import Metrics, Reading
from phalanx.run.backends.kubernetes.manifests import require_no_address
from phalanx.run.config import RunConfig
from phalanx.run.decide.actions import Finish, KeepDetection
from phalanx.run.incidents.incident_pages import store
from phalanx.run.incidents.report import Incident, Seen
from phalanx.run.reports.job_watch import JobWatch
from phalanx.run.reports.recent_events import IncidentView, Overview
from phalanx.run.reports.training_settings import training_alerts, training_folder
from phalanx.telemetry.alerts.alert_rules import DiskSeen


def job(folder: Path, **changes: Any) -> RunConfig:
    (folder / "night.toml").write_text('[alerts]\nwatch = true\n[run]\nfolder = "out"\n')
    settings: dict[str, Any] = {
        "script": "phalanx",
        "module": True,
        "arguments": ("train", "night.toml"),
        "working_folder": str(folder),
        "folder": str(folder / "job"),
        "alerts": {"watch": True, "disk_free_bytes": 1000},
    }
    return RunConfig.model_validate(settings | changes)


def now(**changes: Any) -> Overview:
    values: dict[str, Any] = {
        "job": "night", "unix_s": 5.0, "phase": "running", "phase_s": 4.0, "attempt": 1, "world_size": 2,
        "hosts_wanted": 1, "workers_per_host": 2, "hosts": (), "step": 40, "quiet_s": 0.2, "limit_s": 30.0,
        "step_age_s": 0.2, "recoveries": 3,
    }  # fmt: skip
    return Overview(**(values | changes))


def kinds(folder: Path) -> list[str]:
    path = folder / "job" / "alerts" / "alerts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["kind"] for line in lines if line["event"] == "alert"]


def watch(folder: Path, *looks: tuple[Overview, Finish | None], config: RunConfig | None = None) -> JobWatch:
    (folder / "job").mkdir(exist_ok=True)
    found = JobWatch(config or job(folder), folder / "job", lambda path: DiskSeen(path, 5000, 9000))
    for look in looks:
        asyncio.run(found.look(lambda look=look: look))  # type: ignore[misc]
    return found


def test_a_job_that_is_well_and_ends_well(tmp_path: Path) -> None:
    watch(tmp_path, (now(), None), (now(step=41), None), (now(phase="recovering", quiet_s=-1.0), None))
    assert kinds(tmp_path) == []
    watch(tmp_path, (now(phase="ended"), Finish(0, "all ranks have ended")))
    assert kinds(tmp_path) == ["finished"]


@pytest.mark.parametrize(
    ("status", "kind"), [(1, "failed"), (4, "failed"), (5, "stopped"), (6, "stopped"), (143, "stopped")]
)
def test_other_ends(tmp_path: Path, status: int, kind: str) -> None:
    watch(tmp_path, (now(phase="ended"), Finish(status, "as it was asked to")))
    assert kinds(tmp_path) == [kind]


def test_a_stall_and_each_incident_once_whatever_becomes_of_the_driver(tmp_path: Path) -> None:
    opened = now(incident=IncidentView(7, 0.1, ""))
    stalls, incident = now(quiet_s=61.0, step_age_s=61.0), now(incident=IncidentView(7, 1.0, "rank 1 was killed"))
    watch(tmp_path, (now(), None), (stalls, None), (opened, None), (incident, None))
    watch(tmp_path, (incident, None), (now(step=50), None))  # the next driver
    watch(tmp_path, (now(incident=IncidentView(8, 1.0, "host a is gone")), None))
    assert kinds(tmp_path) == ["stall", "incident", "incident"]


def test_an_incident_that_is_over_before_the_next_look_is_reported_by_its_report(tmp_path: Path) -> None:
    """A killed rank is back within a second."""
    watcher = watch(tmp_path, (now(incidents=2), None))
    asyncio.run(watcher.look(lambda: (now(incidents=4, step=50), None)))  # the reports are not written yet
    assert kinds(tmp_path) == []
    for number in (3, 4):
        seen = Seen(unix_s=5.0, by="executor", what="killed by SIGKILL", rank=number)
        store(tmp_path / "job", Incident(number=number, job="night", attempt=1, facts=[seen]))
    for _ in range(4):
        asyncio.run(watcher.look(lambda: (now(incidents=4, step=51), None)))
    assert kinds(tmp_path) == ["incident", "incident"]
    text = (tmp_path / "job" / "alerts" / "alerts.jsonl").read_text()
    assert "rank 3: killed by SIGKILL" in text and "rank 4: killed by SIGKILL" in text


def test_what_judges_find_is_an_alert_of_its_own_unless_its_incident_is_one(tmp_path: Path) -> None:
    def found(number: int, incident: int = 0, advice: Advice = "check") -> KeepDetection:
        who = (Culprit("host", f"h{number}", (), (f"h{number}",)),)
        words = Detection("x", f"h{number} is slow", who, advice=advice)
        return KeepDetection(number, 9.0, 1, "drift", words, incident)

    before, new = (
        found(1),
        (found(1), found(2), found(3, incident=1), found(4, advice="program"), found(5, advice="watch")),
    )
    watch(tmp_path, (now(detections=(before,)), None), (now(detections=new), None), (now(detections=new), None))
    watch(tmp_path, (now(detections=new), None))  # the next driver
    lines = [json.loads(line) for line in (tmp_path / "job" / "alerts" / "alerts.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["event"] == "alert"]
    assert [line["title"] for line in told] == ["h2 is slow", "h4 is slow"]
    assert told[0]["kind"] == "detection" and told[0]["evidence"]["hosts"] == ["h2"]


def test_each_slow_rank_that_judges_name_is_reported_as_such(tmp_path: Path) -> None:
    def slow(number: int) -> KeepDetection:
        who = (Culprit("rank", str(number), (number,), (f"h{number}",)),)
        words = Detection("slow rank", f"rank {number} computes 60% longer than its peers", who, advice="check")
        return KeepDetection(number, 9.0, 1, "stragglers", words, 0)

    one, two = slow(1), slow(2)
    watch(tmp_path, (now(detections=()), None), (now(detections=(one,)), None), (now(detections=(one, two)), None))
    lines = [json.loads(line) for line in (tmp_path / "job" / "alerts" / "alerts.jsonl").read_text().splitlines()]
    told = [(line["kind"], line["evidence"]["hosts"]) for line in lines if line["event"] == "alert"]
    assert told == [("slow_rank", ["h1"]), ("slow_rank", ["h2"])]


def test_figures_of_a_training_are_exported(tmp_path: Path) -> None:
    config = job(tmp_path)
    found = watch(tmp_path, (now(), None), config=config)
    out = training_folder(config, tmp_path / "job")
    assert out == tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"checkpoint": {"every_steps": 10, "every_s": 0}}))
    (out / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"kind": "step", "step": n, "loss": 3.0, "tokens": 64 * n, "tokens_per_s": 640.0, "mfu": 0.4,
                        "step_s": 0.1}) + "\n"
            for n in (41, 42)
        )
    )  # fmt: skip
    asyncio.run(found.look(lambda: (now(step=42), None)))
    reading = Reading(now(step=42), 1, None, 1.0, 2.0)
    text = Metrics(lambda: reading, lambda: found.figures).text().decode()
    for line in ("phalanx_train_loss 3.0", "phalanx_train_tokens_per_second 640.0", "phalanx_train_mfu_ratio 0.4",
                 "phalanx_train_steps_total 2.0", "phalanx_train_step 42.0", "phalanx_train_restarts_total 3.0",
                 "phalanx_run_step 42.0"):  # fmt: skip
        assert f"\n{line}\n" in text
    assert "phalanx_train" not in Metrics(lambda: reading).text().decode()


def test_alerts_of_a_training_are_those_of_its_job(tmp_path: Path) -> None:
    assert training_alerts(job(tmp_path)) == {"watch": True}
    words = ("train", "config.toml", "alerts.watch=false", "alerts.stall_s=9")
    assert training_alerts(job(tmp_path, arguments=words)) == {"watch": False, "stall_s": 9}
    other = job(tmp_path, script="train.py", module=False, arguments=())
    assert training_alerts(other) == {}
    assert training_folder(other, tmp_path) is None
    assert watch(tmp_path, (now(), None), config=other).figures is None


def test_an_address_goes_into_no_file_of_another_host(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="env:NAME") as refused:
        require_no_address(job(tmp_path, alerts={"webhook": "https://hooks.example/SECRET"}).alerts)
    assert "SECRET" not in str(refused.value)
    require_no_address(job(tmp_path, alerts={"webhook": "env:HOOK"}).alerts)


def test_what_fails_leaves_the_job_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = watch(tmp_path)

    def broken() -> Any:
        raise RuntimeError("no such thing")

    asyncio.run(found.look(broken))
    assert "could not be looked at" in caplog.text
