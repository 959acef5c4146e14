"""The way in: every page is in the index, every file that a page names is there, and every word leads where it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
WORDS = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$", (DOCS / "glossary.md").read_text(), flags=re.MULTILINE)
DATED = {"LOG.md"}  # it tells of files as they were


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in DATED], ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(
        r"\b((?:phalanx|tests|benchmarks|configs|examples)/[\w/.-]+\.(?:py|toml|html))\b", page.read_text()
    )
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]+)", re.sub(r"`[^`\n]*`", "", page.read_text()))
    assert not [link for link in links if not (page.parent / link).exists()]


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md", "PLAN.md"}
    assert not [page for page in sorted(pages) if f"]({page})" not in index]


def test_the_glossary_has_words() -> None:
    assert len(WORDS) >= 45


@pytest.mark.parametrize(("word", "file"), WORDS, ids=[word for word, _ in WORDS])
def test_grep_finds_a_word_of_the_glossary_where_it_is_done(word: str, file: str) -> None:
    first = re.sub(r" \(.*\)", "", word).split(",")[0]
    pattern = re.escape(first).replace(r"\ ", "[ _-]").replace(r"\-", "[ _-]?")
    assert re.search(pattern, (ROOT / file).read_text(), flags=re.IGNORECASE)


EXAMPLES = re.findall(r"### ([^\n]+)\n.*?```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_a_worked_example_works(code: str) -> None:
    exec(compile(code, "CONTRIBUTING.md", "exec"), {"__name__": "example"})


def test_there_are_worked_examples() -> None:
    assert len(EXAMPLES) >= 3
