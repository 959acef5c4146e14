"""Orders through a real driver's interface: only with its URL and token, and only after a confirmation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_house import House, open_house
from dashboard_helpers import BASE, TOKEN, client_of
from fastapi.testclient import TestClient
from support.traced_runs import traced_run

from phalanx.dashboard.dashboard_app import create_app
from phalanx.dashboard.data_source import DataSource
from phalanx.run.api.api_client import Client
from phalanx.run.secrets import Token

ORIGIN = {"origin": BASE}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with open_house(tmp_path / "job") as opened:
        yield opened


def _client(house: House, token: Token | None = None) -> TestClient:
    source = DataSource.of_driver(house.url, lambda: Client.at(house.url, token or house.token, None))
    client = TestClient(create_app(source, TOKEN), base_url=BASE, follow_redirects=False)  # type: ignore[arg-type]
    assert client.get(f"/?token={TOKEN.reveal()}").status_code == 303
    return client


def test_hosts_of_a_driver_are_seen_without_any_files(house: House) -> None:
    client = _client(house)
    page = client.get("/machines").text
    assert 'host=node-1"' in page and "spare" in page and "running" in page and "Stop the job" in page
    host = client.get("/machines/host?host=node-1").text
    assert "/orders/confirm?run=.&amp;order=evict&amp;host=node-1" in host and "No spans of this host" in host
    for path in ("/timeline", "/parallelism", "/incidents", "/plan"):
        assert client.get(path).status_code == 200


def test_an_order_is_confirmed_and_carried_out(house: House) -> None:
    client = _client(house)
    page = client.get("/orders/confirm?order=drain&host=node-3").text
    assert "write “node-3” to confirm" in page and "as soon as another host can take its place" in page
    form = {"run": ".", "order": "drain", "host": "node-3", "confirmed": "node-3", "who": "Ada"}
    answer = client.post("/orders", data=form, headers=ORIGIN)
    assert answer.status_code == 200 and "The driver has taken the order" in answer.text
    host = next(one for one in house.do(lambda: house.job.hosts(["node-3"])))
    assert host.leaves or host.state in ("draining", "evicted", "gone")
    assert "Ada by the dashboard" in f"{host.leaves} {host.why}"


def test_the_job_is_stopped_by_its_name(house: House) -> None:
    client = _client(house)
    form = {"run": ".", "order": "stop", "confirmed": "demo", "who": ""}
    assert "The driver has taken the order" in client.post("/orders", data=form, headers=ORIGIN).text
    assert house.do(lambda: house.job.state.phase) in ("stopping", "ended")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"order": "evict", "host": "node-1", "confirmed": ""}, "was not confirmed"),
        ({"order": "evict", "host": "node-1", "confirmed": "node-2"}, "was not confirmed"),
        ({"order": "stop", "confirmed": "another"}, "was not confirmed"),
        ({"order": "explode", "host": "node-1", "confirmed": "node-1"}, "is no order"),
        ({"order": "evict", "host": "nobody", "confirmed": "nobody"}, "The driver refuses"),
        ({"order": "evict", "host": "../stop", "confirmed": "../stop"}, "The driver refuses"),
    ],
)
def test_what_is_not_confirmed_is_not_done(house: House, form: dict[str, str], words: str) -> None:
    before = house.do(house.written)
    answer = _client(house).post("/orders", data={"run": ".", **form}, headers=ORIGIN)
    assert answer.status_code in (404, 409) and words in answer.text
    assert house.do(house.written) == before


@pytest.mark.parametrize(
    "headers", [{}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site", "origin": BASE}]
)
def test_other_sites_give_no_orders(house: House, headers: dict[str, str]) -> None:
    before = house.do(house.written)
    form = {"run": ".", "order": "evict", "host": "node-1", "confirmed": "node-1"}
    assert _client(house).post("/orders", data=form, headers=headers).status_code == 403
    stranger = TestClient(_client(house).app, base_url=BASE)
    assert stranger.post("/orders", data=form, headers=ORIGIN).status_code == 401
    assert house.do(house.written) == before


def test_without_the_drivers_own_token_nothing_is_done(house: House) -> None:
    before = house.do(house.written)
    client = _client(house, Token("cd" * 32))
    form = {"run": ".", "order": "stop", "confirmed": house.url, "who": ""}
    answer = client.post("/orders", data=form, headers=ORIGIN)
    assert answer.status_code == 409 and "The driver refuses" in answer.text
    assert house.do(house.written) == before


def test_a_folder_gives_no_orders_even_with_a_driver(tmp_path: Path, house: House) -> None:
    traced_run(tmp_path / "runs" / "small")
    client = client_of(tmp_path / "runs")
    assert "/orders/confirm" not in client.get("/machines/host?run=small&host=node-2").text
    assert client.get("/orders/confirm?run=small&order=stop").status_code == 404
    form = {"run": "small", "order": "stop", "confirmed": "small"}
    answer = client.post("/orders", data=form, headers=ORIGIN)
    assert answer.status_code == 404 and "orders need the URL and the token" in answer.text
