"""A driver with hosts of simulated time, whose interface really listens, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from driver_helpers import Town, running

from phalanx.run.api.app import make_app
from phalanx.run.api.http_server import HttpServer
from phalanx.run.api.job import JobControl
from phalanx.run.decide import policy
from phalanx.run.reports.recent_events import Hub
from phalanx.run.secrets import Token, ensure_token
from phalanx.run.wire.driver_address import Address

GUARD_S = 60.0


class HubTown(Town):
    """One whose people are a hub."""

    hub: Hub

    def tell(self, action: Any, at: Any) -> None:
        super().tell(action, at)
        self.hub.tell(action, at)

    def wrote(self, lines: Any, at: Any) -> None:
        self.hub.wrote(lines, at)


@dataclass
class House:
    """What listens.

    Attributes:
        folder: of the run.
    """

    town: HubTown
    job: JobControl
    token: Token
    folder: Path
    url: str
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def do(self, work: Callable[[], Any]) -> Any:
        """Call it where the driver lives."""

        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(GUARD_S)

    def written(self) -> int:
        """How much is in the journal."""
        return self.town.journal.last_sequence

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=GUARD_S, trust_env=False)

    def friend(self) -> httpx.Client:
        return self.client(authorization=self.token.header())


def make_town(folder: Path, hosts: int = 3) -> HubTown:
    names = [f"node-{number}" for number in range(1, hosts + 1)]
    town = HubTown(folder, names, policy.Job("demo", hosts - 1, 2, 1), policy.Policy(joining_check="passive"))
    town.hub = Hub()
    town.begin()
    town.until(running(1))
    return town


@contextmanager
def open_house(
    folder: Path, hosts: int = 3, tls: ssl.SSLContext | None = None, local: Path | None = None, **guard: float
) -> Iterator[House]:
    """A job that runs, and its interface."""
    folder.mkdir(parents=True, exist_ok=True)
    token = ensure_token(folder / "secret" / "token")
    town = make_town(folder, hosts)
    job = JobControl(town.driver, town.driver._book, town.hub, folder, folder / "logs", town._clocks)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    app = make_app(job, token)
    for name, value in guard.items():
        setattr(app, f"_{name}", value)

    async def enter() -> HttpServer:
        return await HttpServer(app, Address("127.0.0.1", 0), None, tls, local).__aenter__()

    server = asyncio.run_coroutine_threadsafe(enter(), loop).result(GUARD_S)
    try:
        yield House(town, job, token, folder, f"{'https' if tls else 'http'}://{server.address}", loop)
    finally:
        loop.call_soon_threadsafe(town.hub.close)
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(GUARD_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(GUARD_S)
        loop.close()
        town.journal.close()
