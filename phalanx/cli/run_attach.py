"""`phalanx run attach`. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import click
from rich.console import Console

from phalanx.cli.run_find import Found, find_job, folder_option
from phalanx.cli.run_status import DEAD
from phalanx.run.api.client import Client
from phalanx.run.card import read_card
from phalanx.run.people.hub import Item, Overview
from phalanx.run.people.view import show
from phalanx.run.people.words import Ranks

_AGAIN_S = 0.5
_GIVES_UP_S = 90.0


@click.command()
@folder_option
@click.option("--show", "ranks", type=click.Choice(get_args(Ranks)), default="0", help="Whose lines are shown.")
def attach(folder: Path | None, ranks: Ranks) -> None:
    """Watch a job as where it was started; Ctrl-C leaves it alone. Ends with the job's exit status."""
    found = find_job(folder)
    console = Console(stderr=True)
    if found.life == "lives" and not found.is_over:
        console.print(f"job {found.card.job} in {found.shown}; Ctrl-C leaves it alone", highlight=False)
        try:
            asyncio.run(show(Attached(found.folder), console, ranks=ranks, folder=found.shown))
        except KeyboardInterrupt:
            console.print("it goes on without you", highlight=False)
            return
    _leave(find_job(found.shown))


def _leave(found: Found) -> None:
    if found.card.status is not None:
        click.echo(f"the job has ended with status {found.card.status}: {found.card.ended}", err=True)
        sys.exit(found.card.status)
    click.echo(found.say_dead(), err=True)
    sys.exit(DEAD)


@dataclass
class Attached:
    """A job whose driver may be started again meanwhile; implements `phalanx.run.people.hub.Source`.

    Args:
        folder: of the run.
        gives_up_s: so long another driver is waited for.
    """

    folder: Path
    gives_up_s: float = _GIVES_UP_S
    _client: Client | None = field(default=None, init=False)

    async def overview(self) -> Overview:
        """See `Source`."""
        if self._client is None:
            self._client = Client(self.folder)
        try:
            return await self._client.overview()
        except ConnectionError:
            await self._client.close()  # the next one may listen elsewhere
            raise

    async def follow(self, number: int) -> AsyncIterator[Item]:
        """What is said, by one driver after another, until the job has ended or no driver comes any more."""
        silent_since_s = time.monotonic()
        driver = self._driver()
        while True:
            with contextlib.suppress(ConnectionError):
                async with Client(self.folder) as client:
                    async for item in client.follow(number):
                        number, silent_since_s = item.number, time.monotonic()
                        yield item
            card = read_card(self.folder)
            if card is None or card.status is not None or time.monotonic() - silent_since_s > self.gives_up_s:
                return
            await asyncio.sleep(_AGAIN_S)
            if self._driver() != driver:  # another one counts anew
                driver, number, silent_since_s = self._driver(), 0, time.monotonic()

    def _driver(self) -> tuple[int, int]:
        card = read_card(self.folder)
        return (card.pid, card.started_ticks) if card is not None else (0, 0)
