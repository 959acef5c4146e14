"""What pages show of the planner's outputs is what its commands print."""

from __future__ import annotations

from pathlib import Path

import detect_drift_page
import doc_outputs
import pytest
import trace_page


@pytest.mark.slow
@pytest.mark.parametrize("page", doc_outputs.PAGES)
def test_a_page_shows_what_its_commands_print(page: str) -> None:
    text = (doc_outputs.ROOT / page).read_text()
    assert text.count("<!-- output:") > 0
    assert doc_outputs.written(text) == text, "write it again: python benchmarks/doc_outputs.py"


@pytest.mark.slow
@pytest.mark.skipif(not trace_page.TRACES.exists(), reason="the published job trace is not at hand")
@pytest.mark.parametrize("page", trace_page.PAGES, ids=lambda page: page.name)
def test_a_page_on_the_published_trace_shows_what_its_commands_print(page: Path) -> None:
    assert trace_page.page_now(page) == page.read_text(), "write it again: python benchmarks/trace_page.py"


def test_the_page_of_drift_shows_what_its_commands_print() -> None:
    now = detect_drift_page.page_now()
    assert now == detect_drift_page.PAGE.read_text(), "write it again: python benchmarks/detect_drift_page.py"


def test_what_is_left_out_is_marked() -> None:
    text = "a\nb\nc\n\nd\n\ne\nf\n"
    kept = doc_outputs.Kept.of("paragraphs=1,3 rows=2")
    assert list(doc_outputs._excerpt(text, kept)) == ["a", "b", "…", "e", "f"]
    assert list(doc_outputs._excerpt(text, doc_outputs.Kept.of("paragraphs=2"))) == ["…", "d", "…"]
    assert list(doc_outputs._excerpt(text, doc_outputs.Kept())) == text.splitlines()
