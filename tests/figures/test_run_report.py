"""The report of a run: one file with the verdict first, that needs nothing else, whatever the run has and lacks."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.traced_runs import add_reports

from phalanx.cli.trace_command import command
from phalanx.figures.pages.run_report import write_report
from phalanx.telemetry.layer_norms import append_norms
from phalanx.telemetry.span_writer import note_incident
from tests.telemetry.test_verdict import GROUPS, job
from tests.telemetry.trace_runs import MS, write_run

METRICS = [{"kind": "step", "step": step, "loss": 4 - step / 20, "step_s": 0.1, "mfu": 0.4} for step in range(1, 25)]


def texts_of(page: str) -> str:
    """What a person reads, without tags, styles and scripts."""
    body = page[page.index("<main>") : page.index("</main>")]
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def figures_of(page: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(re.findall(r"^const figures = (.*);$", page, flags=re.MULTILINE)[0])
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = tmp_path_factory.mktemp("runs") / "starved <b>"
    write_run(run, job(data_ms=dict.fromkeys(range(8), 40.0)), GROUPS, metrics=METRICS)
    note_incident(run / "telemetry", "hang", 1000 * 10**9 + 500 * MS)
    for step in (1, 10):
        append_norms(run, step, {"gradient": {"blocks.0": 1.0, "blocks.1": float("nan")}})
    write_report(run, run / "page.html")
    return (run / "page.html").read_text()


def test_the_verdict_comes_first_then_evidence_then_what_to_do(page: str) -> None:
    text = texts_of(page)
    places = [
        text.index(part)
        for part in ("All ranks wait for data", "What it rests on", "What to do next", "What is not known")
    ]
    assert places == sorted(places)
    assert "phalanx check --only disk" in text[places[2] :]


def test_it_needs_nothing_else(page: str) -> None:
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page)
    packed = re.findall(r'<script type="text/plain" id="plotly">([^<]*)</script>', page)[0]
    assert b"Plotly" in gzip.decompress(base64.b64decode(packed))
    assert len(page) < 3_000_000


def test_figures_say_in_words_what_they_show(page: str) -> None:
    figures = figures_of(page)
    assert set(figures) == {"parts", "ranks", "timeline", "loss", "step_s", "norms_gradient"}
    for name in figures:
        assert re.search(rf'<div class="figure" id="{name}"></div><details class="words">', page)
    assert "not finite first in layer blocks.1" in texts_of(page)


def test_names_cannot_break_the_page(page: str) -> None:
    assert "<h1>starved &lt;b&gt;</h1>" in page


def test_incidents_are_told_with_their_step(page: str) -> None:
    assert re.search(r"1970-01-01 00:16:40 \d+ hang", texts_of(page))


@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_all_figures_and_fetches_nothing(tmp_path: Path, page: str, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    (tmp_path / "page.html").write_text(page)
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(color_scheme=scheme)
        said: list[str] = []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(f"file://{tmp_path}/page.html")
        tab.wait_for_function("document.querySelectorAll('.figure .main-svg').length > 0", timeout=60_000)
        drawn = "[...document.querySelectorAll('.figure')].every((place) => place.querySelector('.main-svg'))"
        tab.wait_for_function(drawn, timeout=60_000)
        tab.emulate_media(media="print")
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert tab.evaluate("[...document.querySelectorAll('details')].every((one) => one.open)")
        browser.close()
    assert said == [] and [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_headings_are_in_order(page: str) -> None:
    levels = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_without_spans_it_abstains_and_draws_what_there_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    verdict = write_report(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    text = texts_of(page)
    assert verdict.abstains and "It abstains" in text and "record_spans" in text
    assert set(figures_of(page)) == {"loss", "step_s"}
    assert "Not drawn: no spans of ranks." in text


def test_two_attempts_have_a_recovery_history(tmp_path: Path) -> None:
    rows = job(12)
    again = [{**row, "attempt": 1, "start_ns": row["start_ns"] + 60 * 10**9, "end_ns": row["end_ns"] + 60 * 10**9}
             for row in rows if row["step"] >= 8]  # fmt: skip
    run = tmp_path / "run"
    write_run(run, [*rows, *again], GROUPS)
    write_report(run, tmp_path / "page.html")
    figures = figures_of((tmp_path / "page.html").read_text())
    assert "2 attempts, 1 incident" in str(figures["recovery"]) and "5 steps lost" in str(figures["recovery"])


def test_reports_of_the_jobs_driver_tell_its_recoveries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "job", job(12), GROUPS)
    add_reports(tmp_path / "job", began_ns=1000 * 10**9)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["report", "job"], catch_exceptions=False)
    page = (tmp_path / "job-report.html").read_text()
    text, figures = texts_of(page), figures_of(page)
    assert done.exit_code == 0
    assert "UTC incident of the job result until noticed s until training s made again s lost steps" in text
    # Reported by the driver: 0.8 s to detect; 1.1 and 6.5 s to stop and start; from step 5 back to 4.
    assert re.search(r"1\. .{5,80} recovered 0\.8 7\.6 0\.1 1 ", text), text
    assert re.search(r"2\. .{5,80} open – ", text), text
    assert "2 incidents" in str(figures["recovery"]) and {"restart", "detection"} <= set(
        re.findall(r"detection|restart", str(figures["effective"]))
    )


def test_reports_without_spans_are_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "job"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    add_reports(run, began_ns=1000 * 10**9)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(command, ["report", "job"], catch_exceptions=False).exit_code == 0
    text = texts_of((tmp_path / "job-report.html").read_text())
    assert "recovered 0.8 7.6" in text and "attempts are known from the spans of their steps" in text


def test_a_prediction_of_the_run_stands_beside_what_was_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, job(), GROUPS)
    parts = {"passes_s": 0.08, "waiting_s": 0.01, "optimizer_s": 0.004, "loader_s": 0.0, "between_steps_s": 0.001}
    (run / "prediction.json").write_text(json.dumps({"expected": {"step_s": 0.095, "parts": parts}}))
    write_report(run, tmp_path / "page.html")
    figure = str(figures_of((tmp_path / "page.html").read_text())["parts"])
    assert "0.095 s expected" in figure and "passes" in figure


def test_the_command_says_the_verdict_and_where_the_page_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "big", job(slow={3: 1.5}), GROUPS)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["report", "big"], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.startswith("Rank 3 (host host1) computes 50% longer")
    assert (tmp_path / "big-report.html").is_file() and "big-report.html: 2." in done.output


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["report", str(tmp_path), "--out", str(tmp_path / "no/page.html")])
    assert done.exit_code == 2 and "cannot be written" in done.output
