"""Incidents: one page for people, JSON for programs, and where they are kept."""

from __future__ import annotations

import html.parser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.run.incidents.incident_pages import PAGE_LINES, incidents_folder, listed, load, store, to_html, to_markdown
from phalanx.run.incidents.report import Decided, Incident, IncidentOutcome, Lost, Seen, Took, from_json, to_json

T = 1_795_294_398.0

KILLED = Incident(
    number=3,
    job="llama",
    attempt=2,
    facts=[
        Seen(unix_s=T, by="executor", what="killed by SIGKILL", host="node-b", rank=5, step=120),
        Seen(unix_s=T + 0.02, by="log rule peer-gone", what="Connection closed by peer", rank=1),
        Took(unix_s=T, phase="evidence", seconds=0.11),
        Decided(unix_s=T + 0.11, what="restart in place as attempt 3", why="the first clean death on node-b"),
        Took(unix_s=T + 0.2, phase="start", seconds=0.44),
        Lost(unix_s=T + 0.64, from_step=120, to_step=117, seconds=14.2),
        IncidentOutcome(
            unix_s=T + 0.84, result="recovered", summary="rank 5 was killed; restarted", to_do=["look at node-b"]
        ),
    ],
)

PAGE = """\
# Incident 3: rank 5 was killed; restarted

Job llama, attempt 2, 2026-11-21 20:53:18 UTC. Outcome: recovered, after 0.84 s.

## What was seen

| after | by | where | what |
|---:|---|---|---|
| +0.00 s | executor | node-b, rank 5 | killed by SIGKILL (at step 120) |
| +0.02 s | log rule peer-gone | rank 1 | Connection closed by peer |

## What was decided

| after | decision | why |
|---:|---|---|
| +0.11 s | restart in place as attempt 3 | the first clean death on node-b |

## Where the time went

| phase | seconds |  |
|---|---:|---|
| evidence | 0.11 | ██████ |
| start | 0.44 | ████████████████████████ |
| together | 0.55 |  |

## What was lost

3 steps (training was at 120 and goes on from 117); 14.20 s of the ranks' time together

## What you should do

look at node-b
"""


def test_a_page() -> None:
    assert to_markdown(KILLED) == PAGE


def test_what_is_known_of_it() -> None:
    assert (KILLED.title, KILLED.lost_steps, KILLED.began_unix_s) == ("rank 5 was killed; restarted", 3, T)
    assert KILLED.seconds == pytest.approx(0.84)


def test_an_open_incident_and_one_of_nothing() -> None:
    open_one = Incident(number=1, job="j", attempt=1, facts=KILLED.facts[:2])
    page = to_markdown(open_one)
    assert page.startswith("# Incident 1: rank 5 on node-b: killed by SIGKILL\n")
    assert "It is still open." in page
    assert "Wait: it is being dealt with." in page
    assert "something went wrong" in to_markdown(Incident(number=1, job="j", attempt=1, facts=[]))


def test_what_a_person_decided_and_what_was_only_advised_is_said() -> None:
    facts = [
        Decided(unix_s=T, what="evict node-b", why="asked to", by="ann"),
        Decided(unix_s=T, what="restart", why="x", advised=True),
    ]
    page = to_markdown(Incident(number=1, job="j", attempt=1, facts=facts))
    assert "| evict node-b (by ann) | asked to |" in page
    assert "| advised only: restart | x |" in page


def test_of_many_facts_the_first_and_the_last_are_shown() -> None:
    facts = [Seen(unix_s=T + number, by="executor", what=f"death {number}") for number in range(500)]
    page = to_markdown(Incident(number=1, job="j", attempt=1, facts=facts))
    assert "death 4 |" in page
    assert "| … | 493 more |" in page
    assert "death 499" in page
    assert "death 5 |" not in page


WILD = st.text() | st.text(st.sampled_from('|\\`*_[]()<>&#-+1. \n\r\t\x1b\u2028~=!\ud800"'))
TIMES = st.floats(allow_nan=False, allow_infinity=False)
FACTS = st.one_of(
    st.builds(Seen, unix_s=TIMES, by=WILD, what=WILD, host=WILD, rank=st.integers(-1, 9), step=st.integers(-1, 9)),
    st.builds(Decided, unix_s=TIMES, what=WILD, why=WILD, by=WILD, advised=st.booleans()),
    st.builds(Took, unix_s=TIMES, phase=WILD, seconds=TIMES),
    st.builds(Lost, unix_s=TIMES, from_step=st.integers(-1, 9), to_step=st.integers(-1, 9), seconds=TIMES, what=WILD),
    st.builds(
        IncidentOutcome,
        unix_s=TIMES,
        result=st.sampled_from(["recovered", "gave up"]),
        summary=WILD,
        to_do=st.lists(WILD),
    ),
)
INCIDENTS = st.builds(
    Incident, number=st.integers(1, 99), job=WILD, attempt=st.integers(0, 9), facts=st.lists(FACTS, max_size=30)
)


@given(INCIDENTS)
@example(Incident(number=1, job="", attempt=0, facts=[Took(unix_s=0.0, phase="", seconds=1.7e308)] * 2))
@example(
    Incident(
        number=1,
        job="",
        attempt=0,
        facts=[Seen(unix_s=-1.7e308, by="", what=""), IncidentOutcome(unix_s=1.7e308, result="gave up", summary="")],
    )
)
def test_any_incident_is_one_page_with_its_headings_and_no_other(incident: Incident) -> None:
    page = to_markdown(incident)
    lines = page.split("\n")
    assert len(page.splitlines()) == len(lines) - 1 <= PAGE_LINES
    assert max(map(len, lines)) < 2000
    assert [line for line in lines if line.startswith("#")][1:] == [
        "## What was seen",
        "## What was decided",
        "## Where the time went",
        "## What was lost",
        "## What you should do",
    ]
    for line in lines:
        if line.startswith("| "):
            cells = line.replace("\\\\", "").replace("\\|", "").count("|") - 1
            assert cells in (3, 4)
    assert "<" not in page


def test_a_page_of_as_much_as_can_be_is_still_one() -> None:
    kinds = [
        Seen(unix_s=T, by="x", what="y"),
        Decided(unix_s=T, what="x", why="y"),
        Took(unix_s=T, phase="x", seconds=1),
        Lost(unix_s=T, what="x"),
        IncidentOutcome(unix_s=T, result="gave up", summary="x", to_do=["do"] * 99),
    ]
    page = to_markdown(Incident(number=1, job="j", attempt=1, facts=kinds * 99))
    assert PAGE_LINES - 5 <= len(page.splitlines()) <= PAGE_LINES


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert not attrs
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@given(INCIDENTS)
def test_html_holds_no_tag_but_ours(incident: Incident) -> None:
    tags = Tags()
    tags.feed(to_html(incident))
    tags.close()
    assert tags.tags <= {"article", "h1", "h2", "p", "table", "tr", "th", "td", "ul", "li"}
    assert tags.open == []


def test_html_shows_what_was_said_as_text() -> None:
    facts = [Seen(unix_s=T, by="rank", what="<script>alert('x')</script>\x1b[31m")]
    page = to_html(Incident(number=1, job="j", attempt=1, facts=facts))
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;</td>" in page


@given(INCIDENTS)
def test_json_comes_back(incident: Incident) -> None:
    text = to_json(incident)
    again = from_json(text.encode())
    assert to_json(again) == text
    assert to_markdown(again) == to_markdown(incident)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"number": "x"}', "\ud800", to_json(KILLED).replace('"seen"', '"x"')]
)
def test_other_text_is_no_incident(text: str) -> None:
    with pytest.raises(UserError, match="is no incident"):
        from_json(text)


def test_another_version_is_said() -> None:
    with pytest.raises(UserError, match="form 9, and this version knows 1"):
        from_json(to_json(KILLED).replace('"version": 1', '"version": 9'))


def test_incidents_are_kept_and_listed(tmp_path: Path) -> None:
    assert listed(tmp_path) == []
    page = store(tmp_path, Incident(number=3, job="llama", attempt=2, facts=KILLED.facts[:1]))
    assert [summary.result for summary in listed(tmp_path)] == ["open"]
    assert store(tmp_path, KILLED) == page == tmp_path / "incidents" / "0003.md"
    assert page.read_text() == PAGE
    assert load(tmp_path, 3) == KILLED
    store(tmp_path, Incident(number=10001, job="llama", attempt=9, facts=[]))
    store(tmp_path, Incident(number=4, job="llama", attempt=3, facts=[]))
    (incidents_folder(tmp_path) / "0005.json").write_text("torn")
    (incidents_folder(tmp_path) / "notes.json").write_text("mine")
    summaries = listed(tmp_path)
    assert [summary.number for summary in summaries] == [3, 4, 5, 10001]
    assert [summary.result for summary in summaries] == ["recovered", "open", "unreadable", "open"]
    first = summaries[0]
    assert (first.title, first.attempt, first.lost_steps, first.page) == (KILLED.title, 2, 3, page)
    with pytest.raises(UserError, match="no such incident"):
        load(tmp_path, 7)
    assert not [file for file in incidents_folder(tmp_path).iterdir() if file.name.startswith(".")]
