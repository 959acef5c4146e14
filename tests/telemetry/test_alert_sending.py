"""From a verdict to those who hear of it: once each, with its evidence, whatever the receiver does, and no secrets."""

from __future__ import annotations

import json
import os
import queue
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.config import load, validate
from phalanx.core.errors import UserError
from phalanx.telemetry.alerts.alert_config import AlertsConfig, Kind, shown_address, without_addresses
from phalanx.telemetry.alerts.alert_episodes import Alert, AlertLog, Episodes, Subject
from phalanx.telemetry.alerts.alert_receivers import Command, Outbox, PostedTo, receivers_of
from phalanx.telemetry.alerts.alert_rules import CLEAR, UNKNOWN, Verdict
from phalanx.train.config import RunConfig

SECRET = "T0K3N-of-the-hook"
FIRING = Verdict("firing", "the loss is 9 at step 7", {"step": 7, "loss": 9.0, "median": 3.0, "who": ["rank 1"]})


def alert(kind: Kind = "loss_spike", link: str = "") -> Alert:
    return Subject("night", Path("/runs/night"), "host7", link).alert(1, kind, FIRING, 1.8e9)


class Hook(BaseHTTPRequestHandler):
    """Answers with the next of the given statuses, 200 when they are used up."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        statuses, got = self.server.statuses, self.server.got  # type: ignore[attr-defined]
        status = statuses.pop(0) if statuses else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        got.put((status, self.path, json.loads(body)))

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def hook(*statuses: int) -> Iterator[tuple[str, queue.Queue[tuple[int, str, Any]]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.statuses, server.got = list(statuses), queue.Queue()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{SECRET}", server.got  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


class Mailbox(socketserver.StreamRequestHandler):
    """As much of SMTP as a client needs to leave a message."""

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline():
            word = line.strip().upper()[:4]
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                text = b""
                while (part := self.rfile.readline()) not in (b".\r\n", b""):
                    text += part
                self.server.got.put(text.decode())  # type: ignore[attr-defined]
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 well\r\n")
            if word == b"QUIT":
                return


# Episodes


def test_an_episode_is_reported_once_whatever_starts_anew(tmp_path: Path) -> None:
    episodes = Episodes(tmp_path)
    assert [kind for _, kind, _ in episodes.begun({"stall": FIRING, "disk": CLEAR}, 1000.0)] == ["stall"]
    assert episodes.begun({"stall": FIRING}, 1001.0) == []
    assert episodes.begun({"stall": UNKNOWN}, 1002.0) == []
    again = Episodes(tmp_path)  # another watcher, of the resumed run
    assert again.begun({"stall": FIRING}, 1003.0) == []
    assert dict(again.active) == {"stall": 1000.0}
    again.begun({"stall": CLEAR}, 1100.0)
    assert Episodes(tmp_path).active == {}
    assert again.begun({"stall": FIRING}, 1200.0) == []  # so soon it is the same trouble
    again.begun({"stall": CLEAR}, 1300.0)
    assert [number for number, *_ in again.begun({"stall": FIRING}, 2000.0)] == [2]
    assert again.counts == {"stall": 2}


def test_each_failure_with_progress_before_it_is_one(tmp_path: Path) -> None:
    episodes = Episodes(tmp_path)
    assert len(episodes.begun({"failed": FIRING}, 1000.0)) == 1
    assert Episodes(tmp_path).begun({"failed": FIRING}, 1001.0) == []  # it failed again, without a step
    later = Episodes(tmp_path)
    later.begun({"failed": CLEAR}, 1002.0)
    assert len(later.begun({"failed": FIRING}, 1003.0)) == 1


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"active": 3}', '{"active": {"stall": "x"}, "ended": {}}'])
def test_a_damaged_state_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "alerts").mkdir()
    (tmp_path / "alerts" / "episodes.json").write_text(text)
    episodes = Episodes(tmp_path)
    assert episodes.active == {}
    assert len(episodes.begun({"stall": FIRING}, 1.0)) == 1


# Messages


def test_a_message_says_what_when_who_and_where(tmp_path: Path) -> None:
    found = alert(link="https://board.example")
    assert found.link == "https://board.example/run?run=%2Fruns%2Fnight&step=7"
    assert alert().link == "/runs/night"
    assert found.to_json()["evidence"]["median"] == 3.0
    text = found.text()
    for part in (FIRING.title, "2027-01-15 08:00:00 UTC", "night", "host7", "who: rank 1", found.link):
        assert part in text
    log = AlertLog(tmp_path)
    log.raised(found)
    log.delivered(found.to_json(), "there", "")
    log.delivered(found.to_json(), "elsewhere", "status 500")
    lines = [json.loads(line) for line in (tmp_path / "alerts" / "alerts.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["alert", "delivered", "given up"]
    assert lines[0]["kind"] == "loss_spike"


def test_a_hook_gets_json_and_a_second_try(tmp_path: Path) -> None:
    done: queue.Queue[tuple[Any, str, str]] = queue.Queue()
    with hook(500) as (url, got):
        outbox = Outbox([PostedTo(url)], lambda *what: done.put(what), pauses_s=(0.01, 0.01))
        outbox.send(alert())
        assert got.get(timeout=30)[0] == 500
        status, path, body = got.get(timeout=30)
        assert (status, path) == (200, f"/{SECRET}")
        assert body == json.loads(json.dumps(alert().to_json()))
        _, name, problem = done.get(timeout=30)
        assert problem == ""
        assert SECRET not in name
        outbox.close(30)


def test_redirects_are_not_followed_and_errors_hold_no_secret() -> None:
    with hook(302) as (url, got):
        assert PostedTo(url).send(alert()) == "status 302"
        assert got.get(timeout=30)[1] == f"/{SECRET}"
        assert got.empty()
    assert SECRET not in PostedTo(url).send(alert())  # nobody listens there any more


def test_one_receiver_that_hangs_holds_up_no_other() -> None:
    class Hangs:
        name = "hangs"

        def __init__(self) -> None:
            self.goes_on = threading.Event()

        def send(self, alert: Alert) -> str:
            self.goes_on.wait()
            raise RuntimeError(SECRET)

    hangs, done = Hangs(), queue.Queue[tuple[Any, str, str]]()
    with hook() as (url, got):
        outbox = Outbox([hangs, PostedTo(url)], lambda *what: done.put(what), pauses_s=())
        for _ in range(150):  # more than wait for one that is behind
            outbox.send(alert())
        assert [got.get(timeout=30)[0] for _ in range(100)] == [200] * 100
        hangs.goes_on.set()
        outbox.close(30, hurries=True)
    results = [done.get_nowait() for _ in range(done.qsize())]
    problems = [problem for _, name, problem in results if name == "hangs"]
    assert problems.count("too many messages wait for it") >= 49
    assert set(problems) == {"too many messages wait for it", "RuntimeError"}


def test_a_command_gets_the_alert_on_stdin(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert Command(["tee", str(kept)]).send(alert()) == ""
    assert json.loads(kept.read_text())["title"] == FIRING.title
    marker = tmp_path / "made by a shell"
    assert Command(["true", f"; touch {marker}", f"$(touch '{marker}')"]).send(alert()) == ""
    assert not marker.exists()
    fails = [sys.executable, "-c", "import sys; sys.exit('it is broken')"]
    assert Command(fails).send(alert()) == "exit status 1: it is broken"
    assert Command([str(tmp_path / "none")]).send(alert()) == "No such file or directory"
    assert "more than" in Command(["sleep", "60"], timeout_s=0.05).send(alert())


def test_services_of_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise")
    with hook() as (url, got):
        there = url.replace("http://", "json://")
        monkeypatch.setenv("CHAT", there)
        config = AlertsConfig(urls=("env:CHAT",), webhook="env:CHAT_HOOK")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="CHAT_HOOK is not set"):
            receivers_of(config, os.environ)
        (service,) = receivers_of(AlertsConfig(urls=(there,)), {})  # type: ignore[arg-type]
        assert service.name == "json://*****"
        assert service.send(alert("failed")) == ""
        body = got.get(timeout=30)[2]
        assert body["title"] == "phalanx night: the loss is 9 at step 7"
        assert body["type"] == "failure"
        assert "median: 3.0" in body["message"]
    with pytest.raises(UserError, match="no address that apprise knows") as refused:
        receivers_of(AlertsConfig(urls=(f"nonsense://{SECRET}",)), {})  # type: ignore[arg-type]
    assert SECRET not in str(refused.value)


def test_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise")
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mailbox)
    server.daemon_threads, server.got = True, queue.Queue()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        url = f"mailto://127.0.0.1:{port}/?from=phalanx@example.org&to=me@example.org&mode=insecure"
        (service,) = receivers_of(AlertsConfig(urls=(url,)), {})  # type: ignore[arg-type]
        assert service.send(alert()) == ""
        text = server.got.get(timeout=30)  # type: ignore[attr-defined]
        assert "me@example.org" in text
        assert "loss is 9 at step 7" in text
    finally:
        server.shutdown()
        server.server_close()


# Settings


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("", ""),
        ("env:HOOK", "env:HOOK"),
        (f"https://user:{SECRET}@hooks.example:8443/{SECRET}?key={SECRET}", "https://hooks.example/*****"),
        (f"slack://{SECRET}/B/C", "slack://*****"),
        (f"mailto://me:{SECRET}@example.org", "mailto://*****"),
        (SECRET, "*****"),
        (f"http://[{SECRET}", "*****"),
    ],
)
def test_addresses_are_hidden_wherever_they_are_written(address: str, shown: str) -> None:
    assert shown_address(address) == shown


def test_a_config_holds_no_address_when_it_is_written_down() -> None:
    given = [f"alerts.webhook=https://hooks.example/{SECRET}", f'alerts.urls=["slack://{SECRET}"]', "train.steps=1"]
    config = load(RunConfig, None, [*given, 'data.sources=[{kind="text", path="x"}]']).value
    tree = config.model_dump(mode="json")
    assert SECRET not in json.dumps(tree) + repr(config) + str(config.model_dump())
    assert tree["alerts"]["webhook"] == "https://hooks.example/*****"
    kept = validate(RunConfig, tree)  # a config.json can be read again
    with pytest.raises(UserError, match="was hidden"):
        receivers_of(kept.alerts, {})
    assert [without_addresses(word) for word in given] == ["alerts.webhook=*****", "alerts.urls=*****", "train.steps=1"]
    assert without_addresses("alerts.webhook=env:HOOK") == "alerts.webhook=env:HOOK"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("alerts.link=board", "alerts.link"),
        ('alerts.on=["stal"]', "alerts.on"),
        ("alerts.throughput_drop=1.5", "throughput_drop"),
        ("alerts.disk_free_bytes=much", "disk_free_bytes"),
    ],
)
def test_settings_that_are_refused(setting: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(RunConfig, None, [setting, "train.steps=1", 'data.sources=[{kind="text", path="x"}]'])


@pytest.mark.parametrize("address", ["hooks.example/x", "https://", "ftp://host/x", "http://host:0/", "https://["])
def test_a_webhook_that_is_no_web_address(address: str) -> None:
    for given, environ in ((address, {}), ("env:HOOK", {"HOOK": address})):
        with pytest.raises(UserError, match="https://HOST/PATH"):
            receivers_of(AlertsConfig(webhook=given), environ)  # type: ignore[arg-type]


def test_sizes_are_read() -> None:
    assert AlertsConfig(disk_free_bytes="1 GiB").disk_free_bytes == 1 << 30  # type: ignore[arg-type]
    assert not AlertsConfig().is_on
    assert AlertsConfig(watch=True).is_on
    assert AlertsConfig(command=("true",)).has_receiver
