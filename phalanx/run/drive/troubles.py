"""Faults of the driver itself, told to people: the log has the tracebacks, but who reads it before all is wrong?

All that the program, asyncio and the HTTP server write down as errors comes here, in whatever thread. Torch-free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from phalanx.core.throttle import LogThrottle
from phalanx.run.now import unix_s
from phalanx.run.people.hub import Hub

_CHARACTERS = 500


class Troubles(logging.Handler):
    """Says errors that are logged to people, the same not more often than every ten seconds.

    Args:
        hub: of the people, in the event loop that runs now.
    """

    def __init__(self, hub: Hub) -> None:
        super().__init__(logging.ERROR)
        self._hub, self._loop, self._throttle = hub, asyncio.get_running_loop(), LogThrottle()

    def emit(self, record: logging.LogRecord) -> None:
        """Say it; whatever is wrong with that is not worth another error."""
        with suppress(Exception):
            text = _words(record)
            others = self._throttle.due(text)
            if others is not None:
                again = f" ({others} times more before)" if others else ""
                self._loop.call_soon_threadsafe(self._hub.say, "error", f"{text}{again}", unix_s())


@asynccontextmanager
async def told_to(hub: Hub) -> AsyncIterator[None]:
    """Within it, errors that are logged are told to people; they are written to stderr as ever."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    troubles, root = Troubles(hub), logging.getLogger()
    root.addHandler(troubles)
    try:
        yield
    finally:
        root.removeHandler(troubles)


def _words(record: logging.LogRecord) -> str:
    """One line."""
    what = record.getMessage().strip().partition("\n")[0]
    error = record.exc_info[1] if record.exc_info else None
    why = "" if error is None else f": {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"a fault in the driver, whose log says more: {what[:_CHARACTERS]}{why[:_CHARACTERS]}"
