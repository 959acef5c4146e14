"""Timelines of chosen ranks, groups and steps, whose state stands in the URL."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from dashboard_helpers import client_of
from fastapi.testclient import TestClient
from support.traced_runs import traced_run

from phalanx.core.errors import UserError
from phalanx.dashboard.run_telemetry import ranks_of, ranks_text
from phalanx.figures.series import unpacked
from phalanx.figures.style import described


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder = tmp_path_factory.mktemp("runs")
    traced_run(folder / "small")
    traced_run(folder / "stuck", ends={6: 9})
    return client_of(folder)


def test_the_newest_step_of_the_slow_rank_and_its_pipeline_comes_first(client: TestClient) -> None:
    page = client.get("/timeline?run=small").text
    assert 'placeholder="1,5"' in page and 'placeholder="12"' in page
    assert "/timeline/figure?run=small&amp;ranks=1%2C5&amp;steps=12" in page
    assert "steps=11%3A11" in page and "later →" not in page


def test_a_stuck_run_shows_the_step_that_nobody_finished(client: TestClient) -> None:
    figure = client.get("/timeline/figure?run=stuck").json()
    assert described(figure).startswith("Timeline of 2 ranks, step 9")
    assert {trace["name"] for trace in figure["data"]} >= {"data", "forward", "collective"}


def test_ranks_steps_and_groups_are_chosen(client: TestClient) -> None:
    figure = client.get("/timeline/figure?run=small&ranks=0-3&steps=4:5&groups=tensor").json()
    assert described(figure).startswith("Timeline of 4 ranks, steps 4 to 5: ")
    names = " ".join(next(one for one in figure["data"] if one["name"] == "collective")["hovertext"])
    assert "of tensor" in names and "of pipeline" not in names


def test_arrows_lead_from_sends_to_receives_unless_they_are_not_wanted(client: TestClient) -> None:
    lines = client.get("/timeline/figure?run=small&ranks=1,5&steps=3").json()["data"]
    message = next(one for one in lines if one["name"].startswith("message"))
    assert len(unpacked(message["x"])) == 3 * 2 * 4  # activations and gradients of four micro-batches
    without = client.get("/timeline/figure?run=small&ranks=1,5&steps=3&messages=false").json()["data"]
    assert not any(one["name"].startswith("message") for one in without)


def test_the_stretch_that_is_looked_at_stands_in_the_url(client: TestClient) -> None:
    page = client.get("/timeline?run=small&from=10&to=90").text
    address = re.search(r'data-figure="([^"]+)"', page)
    assert address and "from=10" in address.group(1)
    figure = client.get(address.group(1).replace("&amp;", "&")).json()
    assert figure["layout"]["xaxis"]["range"] == [10.0, 90.0]


def test_the_table_holds_the_longest_spans(client: TestClient) -> None:
    page = client.get("/timeline?run=small&ranks=1,5&steps=3").text
    assert "As a table: the" in page and page.count("<td>backward</td>") == 8


def test_the_download_is_a_trace_that_perfetto_reads(client: TestClient) -> None:
    answer = client.get("/timeline/perfetto?run=small&ranks=1,5&steps=3")
    assert 'filename="small-steps-3-3.json.gz"' in answer.headers["content-disposition"]
    events = json.loads(gzip.decompress(answer.content))["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "s", "f"}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("ranks=abc", "are no ranks"),
        ("ranks=0-9999", "10,000 ranks cannot be told apart"),
        ("ranks=0-99999999999", "are no ranks"),
        ("steps=9:3", "is no range of steps"),
        ("steps=1:99999", "are too many steps to be drawn"),
        ("steps=900:910", "no spans of these ranks are kept"),
        ("ranks=77", "no spans of these ranks are kept"),
    ],
)
def test_what_cannot_be_drawn_is_said_on_the_page(client: TestClient, query: str, words: str) -> None:
    page = client.get(f"/timeline?run=small&{query}")
    assert page.status_code == 200 and words in page.text and "<h2>No timeline</h2>" in page.text


def test_too_many_steps_are_not_downloaded(client: TestClient) -> None:
    answer = client.get("/timeline/perfetto?run=small&steps=1:100")
    assert answer.status_code == 404 and "phalanx trace export" in answer.text


def test_without_telemetry_the_page_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "runs" / "plain").mkdir(parents=True)
    (tmp_path / "runs" / "plain" / "metrics.jsonl").write_text("")
    page = client_of(tmp_path / "runs").get("/timeline?run=plain")
    assert page.status_code == 200 and "No timeline" in page.text and "no telemetry in" in page.text


def test_ranks_are_written_as_they_are_read() -> None:
    assert ranks_of("0-3, 9,2") == [0, 1, 2, 3, 9] and ranks_text([0, 1, 2, 3, 9]) == "0-3,9"
    with pytest.raises(UserError, match="are no ranks"):
        ranks_of("1;2")
