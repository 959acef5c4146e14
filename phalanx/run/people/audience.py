"""Everybody who is told what a driver decides: people who watch, the reports of incidents, a webhook. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from phalanx.run.decide.actions import Action, Finish
from phalanx.run.incidents.keeper import Keeper
from phalanx.run.incidents.recall import told
from phalanx.run.journal import Entry
from phalanx.run.messages import Evidence, LogLine, WorkerEnded
from phalanx.run.now import Now
from phalanx.run.people.hub import Hub
from phalanx.run.people.webhook import Webhook
from phalanx.run.secrets import Token, is_secret_name

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
