"""Incidents posted to a URL, as JSON, when they begin and when they have ended.

In a thread, with a bounded queue: a receiver that is slow, broken or gone holds up nobody. The URL may hold a token, so
no message shows more of it than its host.

Everybody who is told what a driver decides: people who watch, the reports of incidents, a webhook.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from phalanx.core.errors import UserError
from phalanx.run.clock import Now
from phalanx.run.decide.actions import Action, Finish
from phalanx.run.incidents.evidence_files import Keeper, told
from phalanx.run.incidents.report import Incident
from phalanx.run.journal import Entry
from phalanx.run.messages import Evidence, LogLine, WorkerEnded
from phalanx.run.reports.recent_events import Hub
from phalanx.run.secrets import Token, is_secret_name

_log = logging.getLogger(__name__)

VERSION = 1
TIMEOUT_S = 10.0
PAUSES_S = (1.0, 5.0, 30.0, 120.0)
"""Between tries; after the last one a message is given up."""

MOST_WAITING = 100


def body(incident: Incident, page: Path) -> dict[str, Any]:
    """What is posted; see docs/run_incidents.md."""
    outcome = incident.outcome
    return {
        "version": VERSION,
        "event": "incident-opened" if outcome is None else "incident-closed",
        "job": incident.job,
        "number": incident.number,
        "attempt": incident.attempt,
        "title": incident.title,
        "began_unix_s": incident.began_unix_s,
        "result": None if outcome is None else outcome.result,
        "seconds": incident.seconds,
        "lost_steps": incident.lost_steps,
        "to_do": [] if outcome is None else outcome.to_do,
        "page": str(page),
        "incident": msgspec.to_builtins(incident),
    }


class Webhook:
    """Posts what it is given, in order.

    Args:
        url: http or https.
        timeout_s: for an answer.
        pauses_s: between tries.

    Attributes:
        delivered: messages that were answered with a status of 200 to 299.
        given_up: those that never were, or for which there was no room.

    Raises:
        UserError: it is no such URL.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, pauses_s: tuple[float, ...] = PAUSES_S) -> None:
        self._url, self._timeout_s, self._pauses_s = url, timeout_s, pauses_s
        self.host = check_url(url)
        self.delivered = self.given_up = 0
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._hurry = threading.Event()
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def post(self, incident: Incident, page: Path) -> None:
        """Have it posted; returns at once."""
        try:
            self._waiting.put_nowait(encoded(body(incident, page)))
        except queue.Full:
            self.given_up += 1
            _log.warning("the webhook at %s is behind: incident %d is not posted", self.host, incident.number)

    def close(self, within_s: float = 5.0) -> None:
        """Post what waits, without long pauses, and end; blocks for so long at most."""
        end_s = time.monotonic() + within_s
        self._hurry.set()
        try:
            self._waiting.put(None, timeout=within_s)
        except queue.Full:
            return
        self._thread.join(max(end_s - time.monotonic(), 0.0))

    def _work(self) -> None:
        while (message := self._waiting.get()) is not None:
            try:
                is_delivered = self._deliver(message)
            except Exception as error:  # no traceback: the URL may hold a token, and stands in many errors
                _log.error("a message to the webhook at %s has failed: %s", self.host, type(error).__name__)
                is_delivered = False
            if is_delivered:
                self.delivered += 1
            else:
                self.given_up += 1

    def _deliver(self, message: bytes) -> bool:
        problem = ""
        for pause_s in (*self._pauses_s, None):
            problem = self._try(message)
            if not problem:
                return True
            if pause_s is None or (self._hurry.is_set() and pause_s > 1.0):
                break
            self._hurry.wait(pause_s) if not self._hurry.is_set() else time.sleep(min(pause_s, 1.0))
        _log.warning("the webhook at %s was not reached, a message is given up: %s", self.host, problem)
        return False

    def _try(self, message: bytes) -> str:
        """Post it once; why it was not taken, without the URL; empty: it was."""
        headers = {"Content-Type": "application/json", "User-Agent": "phalanx-run"}
        request = urllib.request.Request(self._url, message, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return "" if 200 <= answer.status < 300 else f"status {answer.status}"
        except urllib.error.HTTPError as error:
            error.close()
            return f"status {error.code}"
        except (OSError, http.client.HTTPException) as error:
            return type(getattr(error, "reason", None) or error).__name__


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What was meant for one receiver is not sent to another."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def encoded(value: Mapping[str, Any]) -> bytes:
    """As JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def check_url(url: str) -> str:
    """Whom the URL is of.

    Raises:
        UserError: it is none.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:
        host = None
    if not host:
        raise UserError(
            "is no URL that incidents can be posted to", cure="write https://HOST/PATH", field="run.webhook"
        )
    return host


_LAST_WORD_S = 5.0
_SHORTEST_SECRET = 6


class Audience:
    """Implements `phalanx.run.driver.driver.People`.

    Args:
        hub: of people who watch.
        run_folder: of the job.
        job: its name.
        known: secrets that no report may hold.
        webhook: URL that incidents are posted to; empty: none.

    Raises:
        UserError: the URL is none.
    """

    def __init__(
        self, hub: Hub, run_folder: Path, job: str, known: Sequence[Token | str] = (), webhook: str = ""
    ) -> None:
        self._hub = hub
        self._webhook = Webhook(webhook) if webhook else None
        secrets = [*known, *([webhook] if webhook else [])]
        self._keeper = (
            Keeper(run_folder, job, secrets, self._webhook.post)
            if self._webhook is not None
            else Keeper(run_folder, job, secrets)
        )

    def recall(self, entries: Iterable[Entry], before_epoch: int) -> None:
        """Complete reports by what earlier drivers wrote down; before anything else is told.

        Args:
            entries: of the journal; they are read before this returns.
            before_epoch: the present driver's.
        """
        self._keeper.recall(list(told(entries, before_epoch)))

    def tell(self, action: Action, at: Now) -> None:
        """Whoever it is for."""
        self._hub.tell(action, at)
        self._keeper.tell(action, at)
        if isinstance(action, Finish) and (last_words := self._keeper.last_words(action)) is not None:
            self._hub.say("error", last_words.text, at.unix_s, quotes=last_words.rank)

    def heard(self, host: str, message: Evidence | WorkerEnded, at: Now) -> None:
        """For reports."""
        self._keeper.heard(host, message, at)

    def wrote(self, lines: Sequence[LogLine], at: Now) -> None:
        """For people who watch."""
        self._hub.wrote(lines, at)

    async def close(self) -> None:
        """Let reports be stored and posted, for some seconds at most."""
        await asyncio.to_thread(self._keeper.close, _LAST_WORD_S)
        if self._webhook is not None:
            await asyncio.to_thread(self._webhook.close, _LAST_WORD_S)


def secrets_among(environment: Mapping[str, str]) -> list[str]:
    """Values of variables whose names say that they are secret, as far as they are long enough to be told apart."""
    return [value for name, value in environment.items() if is_secret_name(name) and len(value) >= _SHORTEST_SECRET]
