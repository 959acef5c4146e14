from __future__ import annotations

from pathlib import Path

import pytest
from dashboard_helpers import BASE, client_of, make_run
from support.browser import TOKEN


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "base")
    return tmp_path / "runs"


def test_without_the_token_nothing_is_shown(runs: Path) -> None:
    client = client_of(runs, enters=False)
    for path in ("/", "/static/1/dashboard.css", "/freshness", "/nowhere", f"/?token={'cd' * 32}"):
        answer = client.get(path)
        assert answer.status_code == 401
        assert "base" not in answer.text


def test_the_token_becomes_a_cookie_and_leaves_the_url(runs: Path) -> None:
    client = client_of(runs, enters=False)
    answer = client.get(f"/?tag=a%26b&token={TOKEN.reveal()}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?tag=a%26b")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN.reveal() not in cookie
    assert "base" in client.get("/").text


def test_a_path_of_two_slashes_sends_nobody_to_another_host(runs: Path) -> None:
    answer = client_of(runs, enters=False).get(f"{BASE}//evil.example/?token={TOKEN.reveal()}")
    assert answer.headers["location"] == "/evil.example/"


def test_programs_send_the_token_as_a_header(runs: Path) -> None:
    client = client_of(runs, enters=False)
    assert client.get("/", headers={"authorization": TOKEN.header()}).status_code == 200
    assert client.get("/", headers={"authorization": f"Bearer {'cd' * 32}"}).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200),
        ("localhost", 200),
        ("[::1]:8642", 200),
        ("evil.example", 421),
        ("localhost.evil", 421),
        ("", 421),
    ],
)
def test_names_of_other_hosts_do_not_lead_here(runs: Path, host: str, status: int) -> None:
    client = client_of(runs)
    cookie = "; ".join(f"{one.name}={one.value}" for one in client.cookies.jar)
    assert client.get("/", headers={"host": host, "cookie": cookie}).status_code == status


@pytest.mark.parametrize(
    "headers",
    [{}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "http://evil.example"}],
)
def test_other_sites_cannot_change_anything(runs: Path, headers: dict[str, str]) -> None:
    assert client_of(runs).post("/anything", data={"a": "1"}, headers=headers).status_code == 403


def test_pages_bring_their_rules_with_them(runs: Path) -> None:
    headers = client_of(runs).get("/").headers
    assert "script-src 'self';" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert headers["x-frame-options"] == "DENY"


def test_a_large_body_is_not_taken(runs: Path) -> None:
    answer = client_of(runs).post("/anything", content=b"x" * 70_000, headers={"origin": BASE})
    assert answer.status_code == 413


def test_no_file_outside_is_served(runs: Path) -> None:
    client = client_of(runs)
    assert client.get("/static/1/..%2f..%2fdashboard_app.py").status_code == 404
    assert client.get("/freshness?run=../../etc").status_code == 404
    assert client.get("/freshness?run=%00").status_code == 404
    assert client.get("/static/1/plotly.min.js").headers["content-type"].startswith("text/javascript")
