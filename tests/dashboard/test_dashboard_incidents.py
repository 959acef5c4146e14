"""What went wrong and what it cost, with evidence; and predictions beside measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dashboard_helpers import client_of
from fastapi.testclient import TestClient
from support.traced_runs import add_reports, traced_run

from phalanx.dashboard.job_history import history_of
from phalanx.detect.detection import Culprit, Detection
from phalanx.figures.style import described
from phalanx.run.decide.actions import KeepDetection
from phalanx.run.incidents.detections_file import DetectionsFile
from phalanx.run.incidents.incident_pages import load
from phalanx.telemetry.span_writer import note_incident
from tests.telemetry.trace_runs import span, write_run

ATTEMPTS = [
    {"attempt": 0, "start_s": 1000.0, "end_s": 1100.0, "first_step": 1, "last_step": 100},
    {"attempt": 1, "start_s": 1130.0, "end_s": 1230.0, "first_step": 91, "last_step": 190},
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder = tmp_path_factory.mktemp("runs")
    traced_run(folder / "small")
    add_reports(traced_run(folder / "job", ends={6: 9}))
    for name in ("plain", "empty"):
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").write_text("")
    return client_of(folder)


def test_reports_and_notes_stand_in_lists_with_links_to_what_shows_them(client: TestClient) -> None:
    page = client.get("/incidents?run=job").text
    assert "rank 6 was killed; &lt;b&gt;restarted&lt;/b&gt; in place" in page and "recovered" in page
    assert 'href="/timeline?run=job&amp;ranks=6&amp;steps=4%3A5"' in page
    assert 'href="/machines/host?run=job&amp;host=node-3"' in page
    assert "slow rank" in page and 'href="/timeline?run=job&amp;ranks=5&amp;steps=7%3A9"' in page
    assert page.index("node-1: not heard of for 5 s") < page.index("rank 6 was killed")  # the newest first


def test_what_judges_told_the_driver_stands_on_three_pages(tmp_path: Path) -> None:
    job = traced_run(tmp_path / "job", ends={6: 9})
    add_reports(job)
    client, kept = client_of(tmp_path), DetectionsFile(job)
    assert "Found while the job ran" not in client.get("/incidents?run=job").text
    who = (Culprit("host", "node-3", (6,), ("node-3",)),)
    found = Detection("slow host", "rank <b> is slow", who, why=("0.3 s",), then=("check it",), advice="check")
    for number, incident in ((1, 0), (2, 1)):
        kept.add(KeepDetection(number, 1e9 + number, 1, "stragglers", found, incident), lambda text: text)
    for page in ("/incidents?run=job", "/findings?run=job"):
        text = client.get(page).text
        assert text.count("Rank &lt;b&gt; is slow") == 2 and "check the hosts" in text and "→ check it" in text
        assert 'href="/incidents/report?run=job&amp;number=1">incident 1' in text
        assert 'href="/machines/host?run=job&amp;host=node-3"' in text
    assert client.get("/incidents/report?run=job&number=1").text.count("Rank &lt;b&gt; is slow") == 1


def test_a_report_has_its_page_and_its_evidence(client: TestClient) -> None:
    page = client.get("/incidents/report?run=job&number=1").text
    assert "Where the time went" in page and "<b>restarted" not in page
    evidence = client.get("/incidents/evidence?run=job&number=1&name=rank-6.txt")
    assert evidence.text == "the last lines of <rank> 6\n"
    assert evidence.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("name", ["secret.txt", "../0001.json", "../../config.json", "", ".", "/etc/passwd"])
def test_only_evidence_that_the_report_names_is_shown(client: TestClient, name: str) -> None:
    answer = client.get("/incidents/evidence", params={"run": "job", "number": 1, "name": name})
    assert answer.status_code == 404 and "there is no such evidence" in answer.text


def test_costs_come_from_the_phases_of_reports(client: TestClient) -> None:
    said = described(client.get("/incidents/recovery?run=job").json())
    assert (
        said == "1 attempt, 2 incidents, median 0.8 s until it was noticed, median 7.6 s until training went on, "
        "1 step lost, the steps that 1 of them lost are not known"
    )
    parts = {one["name"]: one["x"][0] * 60 for one in client.get("/incidents/time?run=job").json()["data"]}
    assert parts["detection"] == pytest.approx(0.8) and parts["restart"] == pytest.approx(7.6)
    assert parts["made again"] == pytest.approx(0.47) and parts["training"] == pytest.approx(
        8 * 0.48 - 0.01 - 0.47, abs=0.01
    )


def test_without_a_driver_what_spans_tell_is_said_to_be_that(client: TestClient) -> None:
    assert "Worked out from spans" in client.get("/incidents?run=small").text
    assert "Worked out from spans" not in client.get("/incidents?run=job").text
    assert described(client.get("/incidents/time?run=small").json()) == "Effective training time: 100.0 %"
    page = client.get("/incidents?run=plain")
    assert page.status_code == 200 and "No incidents" in page.text and "phalanx run" in page.text


def test_attempts_of_spans_tell_what_was_made_again(tmp_path: Path) -> None:
    told = history_of("a", ATTEMPTS, [], 1.0)
    assert [(row["restart_s"], row["again_s"], row["lost_steps"]) for row in told.incidents] == [(30.0, 10.0, 10)]
    parts = {row["part"]: row["seconds"] for row in told.parts}
    assert parts == {"training": 190.0, "made again": 10.0, "restart": 30.0}
    add_reports(tmp_path)
    by_driver = history_of("a", [], [load(tmp_path, 1)], None, trained_s=50.0, whole_s=80.0)
    parts = {row["part"]: row["seconds"] for row in by_driver.parts}
    assert parts == {"training": 50.0, "detection": 0.8, "restart": pytest.approx(7.6), "queue": pytest.approx(21.6)}


def _steps_with_a_stall(folder: Path, stall_ms: float) -> None:
    """Forty steps of 100 ms; the twentieth takes so much longer."""
    starts = [100.0 * step + (stall_ms if step > 20 else 0) for step in range(1, 42)]
    rows = [span(0, step, "step", starts[step - 1], starts[step] - 1) for step in range(1, 41)]
    write_run(folder, rows)


def test_a_stall_is_no_training_and_counts_with_all_that_was_noted(tmp_path: Path) -> None:
    _steps_with_a_stall(tmp_path / "live", 16_000)
    telemetry = tmp_path / "live" / "telemetry"
    note_incident(telemetry, "stall", 1_004_500_000_000, step=19)
    note_incident(telemetry, "rank died", 1_021_000_000_000, rank=0, host="host0")
    pages = client_of(tmp_path)
    said = described(pages.get("/incidents/recovery?run=live").json())
    assert said.startswith("1 attempt, 2 incidents, median 2.5 s until it was noticed, median 13.5 s until training")
    parts = {one["name"]: one["x"][0] * 60 for one in pages.get("/incidents/time?run=live").json()["data"]}
    assert parts["stalled"] == pytest.approx(16, abs=0.01) and parts["training"] == pytest.approx(4, abs=0.01)
    assert "Effective training time: 20.0 %" in described(pages.get("/incidents/time?run=live").json())


def test_a_short_pause_is_a_stall_only_if_somebody_noted_it(tmp_path: Path) -> None:
    for name in ("quiet", "noted"):
        _steps_with_a_stall(tmp_path / name, 3000)
    note_incident(tmp_path / "noted" / "telemetry", "stall", 1_004_500_000_000, step=19)
    pages = client_of(tmp_path)
    assert described(pages.get("/incidents/time?run=quiet").json()) == "Effective training time: 100.0 %"
    assert "stalled" in [one["name"] for one in pages.get("/incidents/time?run=noted").json()["data"]]


def test_what_was_noted_when_an_attempt_ended_counts_once() -> None:
    noted = [{"at_ns": at * 10**9, "kind": "rank died", "rank": 1, "step": None} for at in (1101, 1229)]
    told = history_of("a", ATTEMPTS, [], 1.0, noted=noted)
    assert [row["what"] for row in told.incidents] == ["attempt 0 ended at step 100", "rank died 1"]


def test_predictions_stand_beside_what_was_measured(client: TestClient) -> None:
    page = " ".join(client.get("/plan?run=small").text.split())
    assert "372.0 ms" in page and "470.0 ms" in page and '<td class="n bad">+26.3 %</td>' in page
    assert "52.0 %" in page and '<td class="n bad">-21.2 %</td>' in page  # MFU: less is worse
    assert "+4.1 %" in page  # memory
    assert page.index("waiting for other ranks</th>") < page.index(
        "forward and backward passes</th>"
    )  # the largest first
    assert "71 %" in page
    said = described(client.get("/plan/step?run=small").json())
    assert "0.47 s measured, 0.372 s expected" in said
    assert client.get("/plan/memory?run=small").json()["layout"]["annotations"][0]["text"] == "device: 75 GiB"
    hidden = [one for one in client.get("/plan/parts?run=small").json()["data"] if "hidden" in one["hovertemplate"]]
    assert [one["name"] for one in hidden] == ["data/overlapped"]


def test_the_verdict_on_the_run_is_asked_for_after_the_page(client: TestClient) -> None:
    assert 'data-fragment="/plan/verdict?run=small" data-now' in client.get("/plan?run=small").text
    text = client.get("/plan/verdict?run=small").text
    assert "What limits this run" in text and "ank 5" in text


def test_without_a_prediction_the_page_says_how_to_get_one(client: TestClient, tmp_path: Path) -> None:
    page = client.get("/plan?run=plain").text
    assert "No prediction" in page and "phalanx plan calibrate" in page
    run = traced_run(tmp_path / "runs" / "torn")
    for text in ("{", "[]", '{"expected": {}}', '{"expected": {"parts": {}, "step_s": "x"}}'):
        (run / "prediction.json").write_text(text)
        assert "No prediction" in client_of(tmp_path / "runs").get("/plan?run=torn").text


def test_a_prediction_that_nothing_was_measured_of_is_shown_too(tmp_path: Path) -> None:
    run = traced_run(tmp_path / "runs" / "new")
    kept = json.loads((run / "prediction.json").read_text())
    (run / "prediction.json").write_text(json.dumps(kept | {"measured": None, "misfit": "layout pp2 instead of 1"}))
    for name in ("steps", "spans", "phases"):
        (run / "telemetry" / name).rename(tmp_path / name)
    page = client_of(tmp_path / "runs").get("/plan?run=new").text
    assert "not measured" in page and "The prediction is for layout pp2 instead of 1" in page
