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
    assert len(WORDS) >= 60


@pytest.mark.parametrize(("word", "file"), WORDS, ids=[word for word, _ in WORDS])
def test_grep_finds_a_word_of_the_glossary_where_it_is_done(word: str, file: str) -> None:
    first = re.sub(r" \(.*\)", "", word).split(",")[0]
    pattern = re.escape(first).replace(r"\ ", "[ _-]").replace(r"\-", "[ _-]?")
    assert re.search(pattern, (ROOT / file).read_text(), flags=re.IGNORECASE)


EXAMPLES = re.findall(r"### ([^\n]+)\n.*?```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_a_worked_example_works(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "CONTRIBUTING.md", "exec"), {"__name__": "example"})


def test_there_are_worked_examples() -> None:
    assert len(EXAMPLES) >= 7


QUESTIONS = (
    ("Where are samples shuffled?", "shuffle", "phalanx/data/shuffle.py"),
    ("Where is the throughput computed?", "throughput", "phalanx/train/reports/step_record.py"),
    ("Where is it decided to evict a host?", "evict", "phalanx/run/decide/decide.py"),
    ("Where does a client back off?", "backoff", "phalanx/run/wire/driver_link.py"),
    ("Where does a heartbeat time out?", "heartbeat timeout", "phalanx/run/driver/hosts.py"),
    ("Where is a straggler found?", "straggler", "phalanx/detect/stragglers/straggler_judge.py"),
    ("Where is the quorum of an attempt?", "quorum", "phalanx/run/decide/attempts.py"),
    ("Where is the gradient clipped?", "gradient clipping", "phalanx/optim/build.py"),
    ("Where is AdamW's weight decay?", "weight decay", "phalanx/optim/adamw.py"),
    ("Where does the learning rate warm up?", "warmup", "phalanx/optim/schedule.py"),
    ("Where are gradients accumulated?", "gradient accumulation", "phalanx/train/trainer.py"),
    ("Where are activations recomputed?", "recompute", "phalanx/model/recompute.py"),
    ("Where is the KV cache?", "KV ?cache", "phalanx/model/forward_context.py"),
    ("Where is top-p sampling?", "top.p", "phalanx/model/generate.py"),
    ("Where do ranks rendezvous?", "rendezvous", "phalanx/parallel/rendezvous.py"),
    ("Where is a checkpoint published?", "publish", "phalanx/checkpoint/persist/publication.py"),
    ("Where are old checkpoints pruned?", "retention", "phalanx/checkpoint/storage/retention.py"),
    ("Where is the rate limit?", "rate limit", "phalanx/core/rate_limit.py"),
    ("Where are measured kernels interpolated?", "interpolat", "phalanx/plan/hardware/device_model.py"),
    ("Which layouts are infeasible?", "infeasible", "phalanx/parallel/feasible.py"),
    ("Where is the roofline?", "roofline", "phalanx/plan/hardware/device_model.py"),
    ("Where is the bubble of a pipeline computed?", "bubble", "phalanx/plan/pipeline/step_time.py"),
    ("Where are certificates made?", "certificate", "phalanx/run/secrets.py"),
)


@pytest.mark.parametrize(("question", "word", "file"), QUESTIONS, ids=[word for _, word, _ in QUESTIONS])
def test_the_usual_word_finds_where_a_thing_is_done(question: str, word: str, file: str) -> None:
    """`grep -rliE WORD phalanx`: few files have the word in their name or in what they say first of themselves, or the
    file is among the three that have it most often."""
    pattern = re.compile(word.replace(" ", "[ _-]"), flags=re.IGNORECASE)
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "phalanx").rglob("*.py")}
    named = [name for name, text in texts.items() if pattern.search(name) or pattern.search(text.partition("\n")[0])]
    often = sorted(texts, key=lambda name: -len(pattern.findall(texts[name])))[:3]
    assert (file in named and len(named) <= 6) or file in often, f"{question} {named} {often}"
