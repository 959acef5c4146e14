"""The web pages of a job: nothing in them is markup but what the page itself is made of."""

from __future__ import annotations

import html.parser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports_helpers import HOSTILE, T, detection, host, job, open_incident, told, wrote
from test_run_incidents_page import KILLED

from phalanx.run.incidents.incident_pages import Summary
from phalanx.run.incidents.report import Incident, Seen
from phalanx.run.reports.job_page import incident_page, page

KNOWN = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "small", "section", "p", "a", "div", "dl", "dt"),
    *("dd", "table", "tr", "th", "td", "pre", "span", "article", "ul", "li"),
}
ATTRIBUTES = {"lang", "charset", "name", "content", "http-equiv", "class", "href"}


class Markup(html.parser.HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name == "href"]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def parsed(text: str) -> Markup:
    found = Markup(text)
    assert found.open == []
    assert found.tags <= KNOWN and found.attributes <= ATTRIBUTES
    assert all(link.startswith(("incidents/", "/")) for link in found.links)
    return found


def summary(number: int, title: str = "rank 5 was killed", result: str = "recovered") -> Summary:
    return Summary(number, T, 2, title, result, 1.5, 3, Path("page.md"))


def test_what_judges_have_found_stands_there_with_why_and_is_no_markup() -> None:
    found = parsed(page(job([host(0)], detections=(detection(1), detection(2, HOSTILE)), detection_count=2), [], []))
    assert (
        "Found by judges" in found.text
        and "judge of stragglers: host-1 is slow (90% sure; advice: check)" in found.text
    )
    assert found.text.count("<script>") == 3
    assert "Found by judges" not in page(job([host(0)]), [], [])


def test_what_people_want_to_know_is_there() -> None:
    hosts = [host(0), host(1, "unknown", why="nothing has been heard of it"), host(2, "spare")]
    items = [told(1, "said first"), wrote(2, 0, "loss 3.1"), told(3, "said last", level="error")]
    found = parsed(page(job(hosts, incident=open_incident()), items, [summary(1), summary(2, result="open")]))
    for part in ("train", "running, attempt 2", "18.2", "96.7 %", "nothing has been heard of it", "[rank 0] loss 3.1"):
        assert part in found.text
    assert found.text.index("host-1") < found.text.index("host-2") and "said first" in found.text
    assert found.text.index("said last") < found.text.index("said first")
    assert {"incidents/1", "incidents/2"} <= set(found.links)


def test_it_asks_again_until_the_job_has_ended() -> None:
    assert 'http-equiv="refresh"' in page(job([host(0)]), [], [])
    ended = page(job([host(0)], status=1, ended="KeyError at postgres://ann:hunter2@db"), [], [])
    assert 'http-equiv="refresh"' not in ended
    assert "ended with status 1" in ended and "hunter2" not in ended
    assert 'http-equiv="refresh"' not in incident_page(KILLED)
    is_open = Incident(number=1, job="j", attempt=1, facts=KILLED.facts[:1])
    assert 'http-equiv="refresh"' in incident_page(is_open)


def hostile_pages(text: str) -> list[str]:
    hosts = [host(0, name=text, why=text, leaves=text), host(1, text)]
    items = [told(1, text, host=text, by=text), told(2, text, incident=3), wrote(3, 0, text)]
    overview = job(hosts, job=text, ended=text, status=4, incident=open_incident(text), phase=text)
    seen = Seen(unix_s=T, by=text, what=text, host=text, rank=1)
    incident = Incident(number=1, job=text, attempt=1, facts=[seen], evidence=[text])
    return [page(overview, items, [summary(1, text, text)]), incident_page(incident)]


def test_hostile_words_are_shown_as_words() -> None:
    for text in hostile_pages(HOSTILE):
        found = parsed(text)
        assert "[bold]<script>alert(1)</script> & " in found.text
        assert not {"\x1b", "\x9b", "\x07"} & set(text)
    assert "\u202e" not in hostile_pages(HOSTILE)[0]


@given(st.text(max_size=60))
def test_no_word_becomes_markup(text: str) -> None:
    for one in hostile_pages(f"\"'><img src=x onerror=y>{text}"):
        parsed(one)
        one.encode()


@pytest.mark.parametrize("unix_s", [float("nan"), float("inf"), -1e18])
def test_a_clock_that_is_beside_itself_breaks_nothing(unix_s: float) -> None:
    parsed(page(job([host(0)], unix_s=unix_s), [told(1, "x", unix_s=unix_s), wrote(2, 0, "y")], []))


def test_of_very_many_hosts_those_in_trouble_are_listed_and_all_are_counted() -> None:
    hosts = [host(number) for number in range(1200)] + [host(1200, "evicted", why="at fault again")]
    text = page(job(hosts), [], [])
    found = parsed(text)
    assert "at fault again" in found.text and "of 1,201 hosts: 1,200 active, 1 evicted" in found.text
    assert len(text) < 200_000
