from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from dashboard_helpers import client_of, make_run, write_log

from phalanx.run.logs.log_files import RankLog


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "runs" / "base")
    write_log(run, [("INFO", f"step {n}") for n in range(400)])
    last = [("WARNING", "it is slow"), ("ERROR", "ValueError: <b>"), ("INFO", "after")]
    write_log(run, last, begin_unix_s=1.8e9 + 400)
    return run


def texts(page: str) -> list[str]:
    return re.findall(r"<td>(?:<span[^>]*>[^<]*</span>)?([^<]*)(?:<span[^>]*>[^<]*</span>)?</td>\s*</tr>", page)


def test_the_newest_lines_are_shown_and_older_ones_are_a_link_away(run: Path) -> None:
    client = client_of(run.parent)
    page = client.get("/logs?run=base").text
    shown = texts(page)
    assert len(shown) == 300
    assert shown[-1] == "after"
    assert "&lt;b&gt;" in page
    older = re.search(r'href="([^"]*before[^"]*)">Older lines', page)
    assert older is not None
    before = texts(client.get(older[1].replace("&amp;", "&")).text)
    assert len(before) == 103
    assert before[-1] == "step 102"
    assert shown[0] == "step 103"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("q=step+39", [f"step {n}" for n in (39, *range(390, 400))]),
        ("q=STEP+7", [f"step {n}" for n in (7, *range(70, 80))]),
        ("q=^step+.$&pattern=1", [f"step {n}" for n in range(10)]),
        ("q=step+.&pattern=", []),
        ("level=WARNING", ["it is slow", "ValueError: &lt;b&gt;"]),
        ("level=ERROR", ["ValueError: &lt;b&gt;"]),
        ("rank=1", []),
        ("since=2027-01-15+08:06:40", ["it is slow", "ValueError: &lt;b&gt;", "after"]),
        ("since=1800000402", ["after"]),
    ],
)
def test_lines_are_searched(run: Path, query: str, expected: list[str]) -> None:
    client = client_of(run.parent)
    if query == "q=step+.&pattern=":
        assert client.get(f"/logs/lines?run=base&{query}").status_code == 422
        return
    assert texts(client.get(f"/logs/lines?run=base&{query}").text) == expected


@pytest.mark.parametrize(("query", "words"), [("q=(&pattern=1", "is not a pattern"), ("since=soon", "is no time")])
def test_a_wrong_search_says_what_is_wrong(run: Path, query: str, words: str) -> None:
    assert words in client_of(run.parent).get(f"/logs?run=base&{query}").text


def test_a_pattern_that_would_try_for_ever_is_answered(run: Path) -> None:
    write_log(run, [("INFO", "a" * 5000)], begin_unix_s=1.8e9 + 500)
    page = client_of(run.parent).get("/logs/lines", params={"run": "base", "q": "^(a+)+b", "pattern": "1"})
    assert (page.status_code, texts(page.text)) == (200, [])
    page = client_of(run.parent).get("/logs/lines", params={"run": "base", "q": "^(a+)+$", "pattern": "1"})
    assert texts(page.text) == ["a" * 4000]  # cut


def test_the_link_of_a_line_shows_it_among_its_neighbours(run: Path) -> None:
    client = client_of(run.parent)
    page = client.get("/logs?run=base&q=step+200").text
    link, key = re.findall(r'<a href="([^"]*at=[^"#]*)#([^"]*)"', page)[0]
    around = client.get(link.replace("&amp;", "&")).text
    assert f'id="{key}"' in around
    shown = texts(around)
    assert shown.index("step 199") + 2 == shown.index("step 201")


def test_lines_of_several_ranks_come_in_order(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "base")
    for rank in range(3):
        write_log(run, [("INFO", f"rank {rank} line {n}") for n in range(3)], rank=rank, begin_unix_s=1.8e9 + rank / 10)
    client = client_of(run.parent)
    shown = texts(client.get("/logs/lines?run=base").text)
    assert shown == [f"rank {rank} line {n}" for n in range(3) for rank in range(3)]
    assert texts(client.get("/logs/lines?run=base&rank=2").text) == [f"rank 2 line {n}" for n in range(3)]


def test_new_lines_come(run: Path) -> None:
    client = client_of(run.parent)
    first = client.get("/logs/lines?run=base")
    assert client.get("/logs/lines?run=base", headers={"if-none-match": first.headers["etag"]}).status_code == 304
    write_log(run, [("INFO", "just now")], begin_unix_s=time.time())
    assert texts(client.get("/logs/lines?run=base").text)[-1] == "just now"


def test_what_ranks_of_a_job_print_is_shown(tmp_path: Path) -> None:
    job = tmp_path / "runs" / "job"
    job.mkdir(parents=True)
    card = (
        '{"job": "job", "driver_host": "elsewhere", "pid": 1, "started_ticks": 1, "boot_id": "b", "began_unix_s": 1.0,'
        ' "token": "secret/token", "journal": "journal.db", "logs": "logs", "journal_job": "job", "status": 1,'
        ' "ended": "rank 1 failed"}'
    )
    (job / "job.json").write_text(card)
    for rank in (0, 1):
        log = RankLog(job / "logs" / "host-a", rank, 1)
        log.write([f"hello of {rank}", "RuntimeError: it broke"][: rank + 1], 1.8e9 + rank)
        log.close()
    client = client_of(tmp_path / "runs")
    assert "rank 1 failed" in client.get("/").text
    assert texts(client.get("/logs/lines?run=job").text) == ["hello of 0", "hello of 1", "RuntimeError: it broke"]
    assert texts(client.get("/logs/lines?run=job&level=ERROR").text) == ["RuntimeError: it broke"]
    # Training in the same folder keeps a log of its own.
    write_log(job, [("INFO", "said by training")])
    assert texts(client.get("/logs/lines?run=job&source=training").text) == ["said by training"]
    assert "what ranks printed" in client.get("/logs?run=job").text


def test_a_very_long_line_is_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "base")
    write_log(run, [("INFO", "begins " + "x" * 20_000), ("INFO", "after")])
    page = client_of(run.parent).get("/logs?run=base").text
    assert "… 16,007 more characters" in page and "x" * 4000 not in page and "begins xxx" in page
    assert texts(page)[-1] == "after"


def test_a_run_without_a_log_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "base")
    assert "This run has no log" in client_of(run.parent).get("/logs?run=base").text
