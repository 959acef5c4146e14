"""The page of a prediction: one file, nothing in it has to be fetched, and nothing ends a script early."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plan_report_samples import report

from phalanx.core.errors import UserError
from phalanx.figures.pages.page_blocks import html_of, write_page
from phalanx.parallel.config import Schedule
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.report.report_model import PredictionReport
from phalanx.plan.report.report_page import prediction_figures, prediction_sections, step_timeline
from phalanx.plan.software import MEGATRON_2022, PHALANX
from phalanx.plan.types import Job, Model, Software, Strategy


class _Page(HTMLParser):
    """Ids, what is loaded from elsewhere, places in the page that are linked to, and the texts of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        addresses = [value or "" for name, value in attrs if name in ("src", "href")]
        self.loaded += [address for address in addresses if not address.startswith("#")]
        self.links += [address[1:] for address in addresses if address.startswith("#")]
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def test_a_page_holds_all_it_needs(tmp_path: Path) -> None:
    shown = report()
    write_page(tmp_path / "page.html", "a title", prediction_sections(shown), prediction_figures(shown))
    page = _read(tmp_path / "page.html")
    assert page.loaded == []
    assert {name for name in page.ids if not name.startswith("source-")} == {"step", "memory", "pipeline", "plotly"}
    figures = json.loads(re.findall(r"^const figures = (.*);$", page.scripts[-1], flags=re.MULTILINE)[0])
    assert figures == json.loads(json.dumps(prediction_figures(shown)))
    assert any(len(script) > 1_000_000 for script in page.scripts)  # plotly.js


def test_every_source_is_told_once_and_each_part_leads_to_its_own() -> None:
    shown = report()
    page, text = _Page(), html_of(prediction_sections(shown))
    page.feed(text)
    sources = dict(re.findall(r'<li id="source-(\d+)">(.*?)</li>', text))
    assert {f"source-{number}" for number in sources} == set(page.links)
    prediction = shown.prediction
    parts = [*prediction.parts, *prediction.hidden, *prediction.start_up]
    assert sorted(map(unescape, sources.values())) == sorted({part.source for part in parts if part.seconds})
    for mark, number in re.findall(r'<td>(\w+) <sup><a href="#source-\d+">(\d+)</a>', text):
        assert mark in {part.mark for part in parts if part.source == unescape(sources[number])}


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    name = "</script><b>&"
    shown = replace(report(1), name=name)
    figures = prediction_figures(shown)
    figures["step"]["layout"]["title"]["text"] = name
    write_page(tmp_path / "page.html", name, prediction_sections(shown), figures)
    page = _read(tmp_path / "page.html")
    assert json.loads(re.findall(r"const figures = (.*);\n", page.scripts[-1])[0]) == json.loads(json.dumps(figures))
    assert "<h1>&lt;/script&gt;&lt;b&gt;&amp;: " in (tmp_path / "page.html").read_text()


def test_without_a_pipeline_there_is_no_timeline() -> None:
    assert set(prediction_figures(report(1))) == {"step", "memory"}
    assert 'id="pipeline"' not in html_of(prediction_sections(report(1)))


@pytest.mark.parametrize(
    ("schedule", "chunks", "software"),
    [
        ("1f1b", 1, PHALANX),
        ("interleaved_1f1b", 3, PHALANX),
        ("interleaved_zero_bubble", 3, PHALANX),
        ("zbv", 2, PHALANX),
        ("interleaved_1f1b", 3, MEGATRON_2022),  # which waits for what it sends
    ],
)
def test_what_is_drawn_of_a_pipeline_is_what_the_step_was_predicted_of(
    schedule: Schedule, chunks: int, software: Software
) -> None:
    model = Model(layers=26, hidden=2048, heads=16, vocab_rows=51200, max_sequence=2048)
    job = Job(model, sequence=2048, global_batch=24, software=software)
    strategy = Strategy(pipeline=4, tensor=2, chunks=chunks, schedule=schedule)
    prediction = predict(job, strategy, load_cluster("selene", 8))
    waits_s = prediction.seconds("pipeline")
    line = step_timeline(prediction)
    idle_s = [line.length - sum(end - begin for _, begin, end in row) for row in line.ranks]
    assert min(idle_s) == pytest.approx(waits_s, rel=1e-9)
    figure = prediction_figures(PredictionReport(prediction, "x", 1, "a100", 80e9))["pipeline"]
    assert f"({100 * waits_s / prediction.step_s:.1f} %)" in figure["layout"]["title"]["text"]
    drawn, unit_s = figure["data"][0], line.length / figure["layout"]["xaxis"]["range"][1]
    of_ranks = [row.count(0) * drawn["dx"] * unit_s for row in drawn["z"]]
    assert min(of_ranks) == pytest.approx(waits_s, abs=0.01 * line.length)


def test_a_step_of_more_passes_than_can_be_seen_is_not_drawn() -> None:
    shown = report(8)
    many = replace(shown, prediction=replace(shown.prediction, job=replace(shown.prediction.job, global_batch=1 << 20)))
    assert "pipeline" in prediction_figures(shown) and "pipeline" not in prediction_figures(many)
    assert 'id="pipeline"' not in html_of(prediction_sections(many))


def test_without_plotly_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'phalanx-train\[report\]'"):
        write_page(tmp_path / "page.html", "", [], {})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_page(tmp_path / "no" / "page.html", "", [], {})
