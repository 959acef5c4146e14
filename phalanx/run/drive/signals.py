"""Signals to a driver. Torch-free."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

from phalanx.core.tasks import told
from phalanx.run.backends.base import Backend, Movable
from phalanx.run.decide.events import StopAsked
from phalanx.run.driver.driver import Driver

_log = logging.getLogger(__name__)


class _MovedError(Exception):
    """This driver is ended, and its job is not."""


def heed_signals(driver: Driver, backend: Backend) -> None:
    """SIGINT and SIGTERM stop the job; but where a SIGTERM may mean this driver alone, the back end is asked first."""
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        driver.ask(lambda at_s: StopAsked(at_s, f"{number.name} at {socket.gethostname()}"))

    async def ask_first(movable: Movable) -> None:
        try:
            goes_on = await movable.goes_on()
        except Exception:  # whoever is to be ended must not live on because of that; a job that is wanted goes on
            _log.exception("the back end does not say whether the job shall go on: it does")
            goes_on = True
        if goes_on:
            driver.step_down(_MovedError("its process is ended, and the next one takes over"))
        else:
            stop(signal.SIGTERM)

    loop.add_signal_handler(signal.SIGINT, stop, signal.SIGINT)
    if isinstance(backend, Movable):
        asked: list[asyncio.Task[None]] = []  # a task that nobody holds may be dropped

        def ask() -> None:
            asked.append(told(loop.create_task(ask_first(backend)), "what follows from SIGTERM"))

        loop.add_signal_handler(signal.SIGTERM, ask)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop, signal.SIGTERM)
