"""Incidents are posted, whatever the receiver does; and nobody reads the URL, which may hold a token."""

from __future__ import annotations

import http.server
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_run_incidents_page import KILLED

from phalanx.core.errors import UserError
from phalanx.run.incidents.report import Incident, from_json
from phalanx.run.reports.webhook import Webhook
from phalanx.telemetry.alerts.alert_receivers import MOST_WAITING

PAGE = Path("/runs/llama/incidents/0003.md")
QUICK = (0.01, 0.01, 0.01)


class Receiver(http.server.ThreadingHTTPServer):
    """On loopback; answers as it is told, one after the other and the last for ever."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.statuses, self.bodies, self.paths = list(statuses), list[bytes](), list[str]()
        self.headers: dict[str, str] = {}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook/s3cr3t?token=s3cr3t"


class Answering(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        self.server.headers = dict(self.headers)
        status = self.server.statuses[0]
        if len(self.server.statuses) > 1:
            self.server.statuses.pop(0)
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        raise AssertionError("it was sent elsewhere")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    made: list[Receiver] = []
    yield made
    for receiver in made:
        receiver.shutdown()
        receiver.server_close()


def test_an_incident_is_posted_as_json(receivers: list[Receiver]) -> None:
    receivers.append(receiver := Receiver(204))
    hook = Webhook(receiver.url, pauses_s=QUICK)
    hook.post(KILLED, PAGE)
    hook.post(Incident(number=4, job="llama", attempt=2, facts=KILLED.facts[:2]), PAGE)
    hook.close(30)
    closed, opened = map(json.loads, receiver.bodies)
    assert (closed["version"], closed["event"], closed["job"], closed["number"]) == (1, "incident-closed", "llama", 3)
    assert (closed["title"], closed["result"], closed["lost_steps"]) == (KILLED.title, "recovered", 3)
    assert closed["seconds"] == pytest.approx(0.84) and closed["page"] == str(PAGE)
    assert closed["to_do"] == ["look at node-b"]
    assert from_json(json.dumps(closed["incident"])) == KILLED
    assert (opened["event"], opened["result"], opened["seconds"]) == ("incident-opened", None, None)
    assert receiver.headers["Content-Type"] == "application/json"
    assert (hook.delivered, hook.given_up) == (2, 0)


def test_a_receiver_that_fails_is_tried_again_and_given_up_in_the_end(receivers: list[Receiver]) -> None:
    receivers += [comes_back := Receiver(500, 503, 200), fails := Receiver(500)]
    hooks = [Webhook(one.url, pauses_s=QUICK) for one in (comes_back, fails)]
    for hook in hooks:
        hook.post(KILLED, PAGE)
        hook.close(30)
    assert (hooks[0].delivered, hooks[0].given_up) == (1, 0) and len(comes_back.bodies) == 3
    assert (hooks[1].delivered, hooks[1].given_up) == (0, 1) and len(fails.bodies) == len(QUICK) + 1


def test_what_is_meant_for_one_receiver_is_not_sent_to_another(receivers: list[Receiver]) -> None:
    receivers.append(receiver := Receiver(302))
    hook = Webhook(receiver.url, pauses_s=())
    hook.post(KILLED, PAGE)
    hook.close(30)
    assert len(receiver.bodies) == 1 and hook.given_up == 1


def test_a_receiver_that_hangs_holds_up_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections, never answers
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/s3cr3t"
        patient, hasty = Webhook(url, timeout_s=3600), Webhook(url, timeout_s=0.1, pauses_s=())
        for _ in range(MOST_WAITING + 10):
            patient.post(KILLED, PAGE)
        assert patient.given_up >= 9  # for these there was no room
        began_s = time.monotonic()
        patient.close(0.2)
        assert time.monotonic() - began_s < 20
        assert patient.given_up >= MOST_WAITING + 9  # all but the one that is on its way
        hasty.post(KILLED, PAGE)
        hasty.close(60)
        assert hasty.given_up == 1
    for thread in threading.enumerate():
        if thread.name == "alerts":
            thread.join(30)  # nobody listens any more, and no other message waits: it says so, and ends
            assert not thread.is_alive()
    assert patient.given_up == MOST_WAITING + 10


def test_nobody_reads_the_url(receivers: list[Receiver], caplog: pytest.LogCaptureFixture) -> None:
    receivers.append(receiver := Receiver(500))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        nobody_there = f"http://127.0.0.1:{listening.getsockname()[1]}/s3cr3t"
    with caplog.at_level(logging.DEBUG):
        for url in (receiver.url, nobody_there):
            hook = Webhook(url, pauses_s=())
            hook.post(KILLED, PAGE)
            hook.close(30)
            assert "s3cr3t" not in repr(hook)
    assert "127.0.0.1" in caplog.text and "s3cr3t" not in caplog.text


@pytest.mark.parametrize("url", ["", "file:///etc/s3cr3t", "s3cr3t", "http://", "http://h:99999/s3cr3t", "ftp://h/"])
def test_what_is_no_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(UserError) as caught:
        Webhook(url)
    assert "run.webhook" in str(caught.value) and "s3cr3t" not in str(caught.value)
