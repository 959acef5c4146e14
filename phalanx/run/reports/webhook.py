"""What hears of a driver's decisions: views, reports of incidents, and a webhook that posts incidents to a URL as JSON.

The webhook posts in a thread, with a bounded queue: a receiver that is slow, broken or gone holds nothing up. The URL
may hold a token, so no message shows more of it than its host.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from phalanx.core.errors import UserError
from phalanx.run.clock import Now
from phalanx.run.decide.actions import Action, Finish
from phalanx.run.incidents.evidence_files import ReportKeeper, earlier_decisions
from phalanx.run.incidents.report import Incident
from phalanx.run.messages import Evidence, LogLine, WorkerEnded
from phalanx.run.reports.recent_events import Hub
from phalanx.run.secrets import Token, is_secret_name
from phalanx.telemetry.alerts.alert_receivers import PAUSES_S, TIMEOUT_S, Outbox, PostedTo

if TYPE_CHECKING:  # SQLAlchemy, which who only refuses or supervises a job does without
    from phalanx.run.journal import Entry

_log = logging.getLogger(__name__)

VERSION = 1


@dataclass(frozen=True)
class IncidentMessage:
    """An incident as it is posted; docs/run_incidents.md describes the fields."""

    incident: Incident
    page: Path

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        outcome = self.incident.outcome
        return {
            "version": VERSION,
            "event": "incident-opened" if outcome is None else "incident-closed",
            "job": self.incident.job,
            "number": self.incident.number,
            "attempt": self.incident.attempt,
            "title": self.incident.title,
            "began_unix_s": self.incident.began_unix_s,
            "result": None if outcome is None else outcome.result,
            "seconds": self.incident.seconds,
            "lost_steps": self.incident.lost_steps,
            "to_do": [] if outcome is None else outcome.to_do,
            "page": str(self.page),
            "incident": msgspec.to_builtins(self.incident),
        }


class Webhook:
    """Posts incidents, in order, to an http or https URL, with pauses between tries, as alerts are sent.

    Attributes:
        delivered: messages that were answered with a status of 200 to 299.
        given_up: those that never were, or for which there was no room.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, pauses_s: tuple[float, ...] = PAUSES_S) -> None:
        self.host = check_url(url)
        self.delivered = self.given_up = 0
        self._counting = threading.Lock()
        self._outbox = Outbox[IncidentMessage]([PostedTo(url, timeout_s)], self._done, pauses_s)

    def post(self, incident: Incident, page: Path) -> None:
        """Have it posted; returns at once."""
        self._outbox.send(IncidentMessage(incident, page))

    def close(self, within_s: float = 5.0) -> None:
        """Post what waits, without long pauses, and end; blocks for so long at most."""
        self._outbox.close(within_s, hurries=True)

    def _done(self, message: Mapping[str, Any], name: str, problem: str) -> None:
        with self._counting:
            if not problem:
                self.delivered += 1
                return
            self.given_up += 1
        _log.warning("incident %d is not posted to the webhook at %s: %s", message["number"], self.host, problem)


def check_url(url: str) -> str:
    """The host of the URL; raises UserError where it is not one that can be posted to."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:
        host = None
    if not host:
        cure = "write https://HOST/PATH"
        raise UserError("is no URL that incidents can be posted to", cure=cure, field="run.webhook")
    return host


_LAST_WORD_S = 5.0
_SHORTEST_SECRET = 6


class Audience:
    """Implements `phalanx.run.driver.driver.People`: views, reports and the webhook of a job.

    No report holds what is `known` to be secret.

    Attributes:
        listeners: who else hears of every action, on the driver's loop.
    """

    def __init__(
        self, hub: Hub, run_folder: Path, job: str, known: Sequence[Token | str] = (), webhook: str = ""
    ) -> None:
        self._hub = hub
        self.listeners: list[Callable[[Action], None]] = []
        self._webhook = Webhook(webhook) if webhook else None
        secrets = [*known, *([webhook] if webhook else [])]
        post = [] if self._webhook is None else [self._webhook.post]
        self._keeper = ReportKeeper(run_folder, job, secrets, *post)

    def recall(self, entries: Iterable[Entry], before_epoch: int) -> None:
        """Complete reports by what drivers before this epoch wrote down; before anything else is reported."""
        self._keeper.recall(list(earlier_decisions(entries, before_epoch)))

    def tell(self, action: Action, at: Now) -> None:
        """Whoever it is for."""
        self._hub.tell(action, at)
        for listen in self.listeners:
            listen(action)
        self._keeper.tell(action, at)
        if isinstance(action, Finish) and (last := self._keeper.last_lines(action)) is not None:
            self._hub.say("error", last.text, at.unix_s, quotes=last.rank)

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
