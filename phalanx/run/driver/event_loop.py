"""The driver's process: its event loop, on which executors, the back end, people and time meet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from phalanx.run import messages
from phalanx.run.backends.base import Backend
from phalanx.run.decide import actions
from phalanx.run.driver.driver import Driver
from phalanx.run.driver.write_ahead import Aside
from phalanx.run.journal import JournalError, JournalLostError

_log = logging.getLogger(__name__)

TICK_S = 0.1
"""Time is looked at so often, however many hosts report; when something has been decided, at once."""

LEAVE_S = 5.0
"""For executors to end by themselves what they have, before the back end ends them."""


class Arrived(NamedTuple):
    """The executor of this host has connected, and all that was ordered before was ordered without it."""

    host: str


BackendOrder = actions.AskForHosts | actions.Evict | actions.Release | Arrived


class BackendOrders:
    """What the back end shall do, done in order and one at a time by `run`; implements `driver.Orders`.

    An order that fails is tried again until a later one of its kind takes its place: the driver goes on meanwhile.

    Args:
        backend: that is ordered.
        failed: is told why an order could not be carried out, once for each reason.
        retry_s: between tries.
    """

    def __init__(self, backend: Backend, failed: Callable[[str], None], retry_s: float = 5.0) -> None:
        self._backend, self._failed, self._retry_s = backend, failed, retry_s
        self._open: dict[tuple[type, str], BackendOrder] = {}
        self._wake = asyncio.Event()
        self._problems: dict[tuple[type, str], str] = {}

    def arrived(self, host: str) -> None:
        """See `phalanx.run.backends.base.Backend`; told in order with what it is asked for."""
        self.put(Arrived(host))

    def put(self, action: BackendOrder) -> None:
        """Order it; an order of the same kind about the same host that is still open is forgotten."""
        key = (type(action), "" if isinstance(action, actions.AskForHosts) else action.host)
        self._open.pop(key, None)
        self._open[key] = action
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
        """Carry out the oldest order; False: it failed, and is the last in line now."""
        key, action = next(iter(self._open.items()))
        try:
            await self._carry_out(action)
        except Exception as error:  # whatever a back end is, its troubles are not the driver's end
            self._tell(key, f"{type(error).__name__}: {error}")
            if self._open.get(key) is action:
                self._open[key] = self._open.pop(key)
            return False
        self._problems.pop(key, None)
        if self._open.get(key) is action:
            del self._open[key]
        return True

    async def _carry_out(self, action: BackendOrder) -> None:
        match action:
            case actions.AskForHosts():
                await self._backend.ask(action.count)
            case Arrived():
                self._backend.arrived(action.host)
            case actions.Evict():
                await self._backend.evict(action.host, action.why)
            case actions.Release():
                await self._backend.release(action.host, action.why)

    def _tell(self, key: tuple[type, str], problem: str) -> None:
        if problem != self._problems.get(key):
            self._problems[key] = problem
            _log.warning("the back end could not be ordered: %s", problem)
            self._failed(problem)


class Crowd(Protocol):
    """What is needed of `phalanx.run.wire.server.ExecutorServer` to let executors leave."""

    def send_all(self, message: messages.FromDriver) -> int:
        """Send to all hosts."""
        ...

    def hosts(self) -> list[str]:
        """Those that are connected."""
        ...


async def let_leave(server: Crowd, reason: str, within_s: float = LEAVE_S) -> list[str]:
    """Tell all executors that the job is over, and wait until they have gone; those that have not in time."""
    server.send_all(messages.End(reason))
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while server.hosts():
                await asyncio.sleep(0.02)
    return server.hosts()


@contextmanager
def aside_of(loop: asyncio.AbstractEventLoop) -> Iterator[Aside]:
    """A thread that writes the journal, for as long as this context lasts."""
    with ThreadPoolExecutor(1, thread_name_prefix="journal") as pool:
        yield Aside(loop.call_soon, loop.call_soon_threadsafe, pool.submit)


async def keep_going(driver: Driver, changed: asyncio.Event) -> None:
    """Tick until the job has ended, or this driver has to; returns then.

    Args:
        driver: that has begun.
        changed: set by `driver.on_change`, so that a limit that has become nearer is not slept over.
    """
    while driver.finished is None and driver.problem is None:
        changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), min(driver.next_tick_s(), TICK_S))
        if driver.problem is None:
            with suppress(JournalError, JournalLostError):  # then it has a `problem`
                driver.tick()
