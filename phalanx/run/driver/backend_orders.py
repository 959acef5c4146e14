"""What the back end shall do, carried out in order and one at a time, while the driver goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from phalanx.run.backends.backend import Backend
from phalanx.run.decide import actions

_log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """The executor of this host has connected, and all that was ordered before was ordered without it."""

    host: str


BackendOrder = actions.AskForHosts | actions.Evict | actions.Release | Arrived


class BackendOrders:
    """A queue of orders. One that fails is tried again until a later one of its kind takes its place.

    Args:
        failed: called with why an order could not be carried out, once for each reason.
        retry_s: between tries.
    """

    def __init__(self, backend: Backend, failed: Callable[[str], None], retry_s: float = 5.0) -> None:
        self._backend, self._failed, self._retry_s = backend, failed, retry_s
        self._open: dict[tuple[type, str], BackendOrder] = {}
        self._wake = asyncio.Event()
        self._problems: dict[tuple[type, str], str] = {}

    def arrived(self, host: str) -> None:
        """An executor has connected; what is put later is decided with that in mind, what was put before is not."""
        self.put(Arrived(host))

    def put(self, order: BackendOrder) -> None:
        """Order it; an open order of the same kind about the same host is forgotten."""
        key = (type(order), "" if isinstance(order, actions.AskForHosts) else order.host)
        self._open.pop(key, None)
        self._open[key] = order
        self._wake.set()

    async def run(self) -> None:
        """Carry orders out for ever."""
        while True:
            while self._open and await self._try_first():
                pass
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._retry_s if self._open else None)

    async def _try_first(self) -> bool:
        """Carry out the oldest order; False: it failed, and is the last in the queue now."""
        key, order = next(iter(self._open.items()))
        try:
            match order:
                case actions.AskForHosts():
                    await self._backend.ask(order.count)
                case Arrived():
                    self._backend.arrived(order.host)
                case actions.Evict():
                    await self._backend.evict(order.host, order.why)
                case actions.Release():
                    await self._backend.release(order.host, order.why)
        except Exception as error:  # whatever a back end is, its troubles are not the driver's end
            problem = f"{type(error).__name__}: {error}"
            if problem != self._problems.get(key):
                self._problems[key] = problem
                _log.warning("the back end could not be ordered: %s", problem)
                self._failed(problem)
            if self._open.get(key) is order:
                self._open[key] = self._open.pop(key)
            return False
        self._problems.pop(key, None)
        if self._open.get(key) is order:
            del self._open[key]
        return True
