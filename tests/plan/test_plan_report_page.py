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
from phalanx.plan.report.page import prediction_figures, prediction_sections, write_page


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
    assert {name for name in page.ids if not name.startswith("source-")} == {"step", "memory", "pipeline"}
    figures = json.loads(re.findall(r"^const figures = (.*);$", page.scripts[-1], flags=re.MULTILINE)[0])
    assert figures == json.loads(json.dumps(prediction_figures(shown)))
    assert any(len(script) > 1_000_000 for script in page.scripts)  # plotly.js


def test_every_source_is_told_once_and_each_part_leads_to_its_own() -> None:
    shown = report()
    page, text = _Page(), "".join(prediction_sections(shown))
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
    assert 'id="pipeline"' not in "".join(prediction_sections(report(1)))


def test_a_long_step_is_drawn_with_fewer_micro_batches() -> None:
    assert "drawn with 24 of 48" in prediction_figures(report(8))["pipeline"]["layout"]["title"]["text"]


def test_without_plotly_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'phalanx-train\[report\]'"):
        write_page(tmp_path / "page.html", "", [], {})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_page(tmp_path / "no" / "page.html", "", [], {})
