"""The executor's side: one connection to the driver, made again for ever, and nothing lost over it."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx.core.errors import UserError
from phalanx.core.throttle import LogThrottle
from phalanx.run import messages
from phalanx.run.secrets import require_tls_unless_loopback
from phalanx.run.wire import addresses, codec, proof
from phalanx.run.wire.addresses import Address
from phalanx.run.wire.backoff import Backoff
from phalanx.run.wire.call import Call
from phalanx.run.wire.channel import quiet_logger
from phalanx.run.wire.codec import KeptMessage
from phalanx.run.wire.door import Clock
from phalanx.run.wire.outbox import Outbox

CONNECT_S = 30.0
SILENCE_S = 10.0

Where = Callable[[], str | Sequence[str]]

_log = logging.getLogger(__name__)


class ReplacedError(Exception):
    """Another executor of this host has taken this one's place at the driver: this one should end."""


class DriverLink:
    """Keeps a connection to the driver, whatever becomes of the driver.

    All methods and callbacks belong to the loop of `run`. When the driver is killed, cut off or moved, the link tries
    again for ever, with growing and random waits, and asks each time where the driver is; the executor goes on
    meanwhile. After each handshake it sends a new `Hello`, then in order what the driver has not confirmed.

    Args:
        where: the driver's ``host:port``, or several to try in turn; or what gives them, called in a thread before each
            try (`addresses.published` reads a file). It may raise OSError or ValueError: then there is none now.
        hello: says who and how this executor is now; its `host` names it to the driver.
        on_message: called with what the driver says, acknowledgements apart. What it raises ends `run`.
        ssl: with which the driver's certificate is checked. An address that is not loopback is not used without.
        server_name: in that certificate, where it is not the host of the address.
        clock: seconds, monotonic.
        fraction: random numbers from 0 to 1, for the waits.
        silence_s: a driver that has not answered for so long is taken to be gone, when something is sent to it.

    Raises:
        UserError: the token is too short; or the address, where it is given as such, is none, or needs TLS.
    """

    def __init__(
        self,
        where: str | Sequence[str] | Where,
        token: bytes,
        job: str,
        hello: Callable[[], messages.Hello],
        on_message: Callable[[messages.FromDriver], None],
        *,
        ssl: ssl.SSLContext | None = None,
        server_name: str | None = None,
        clock: Clock = time.monotonic,
        backoff: Backoff | None = None,
        fraction: Callable[[], float] = random.random,
        silence_s: float = SILENCE_S,
    ) -> None:
        proof.check_token(token)
        self.token, self.job, self.clock, self.hello = token, job, clock, hello
        self.silence_s = silence_s
        self.instance = proof.new_instance()
        self.outbox = Outbox()
        self.logger = quiet_logger()
        self.challenges, self.replies = codec.Decoder(codec.Challenge), codec.Decoder(codec.Accepted)
        self.frames = codec.Decoder(codec.FromDriverFrame)
        self._ssl, self._server_name = ssl, server_name
        self._on_message = on_message
        self._backoff, self._fraction = backoff or Backoff(), fraction
        self._throttle = LogThrottle(clock)
        self._call: Call | None = None
        self._closing = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._error: Exception | None = None
        self._problem = "not tried yet"
        self._where = where if callable(where) else _checked(where, ssl)

    # What the executor calls

    @property
    def connected(self) -> bool:
        """Whether the driver has proved itself and hears."""
        return self._call is not None and self._call.is_live

    @property
    def pending(self) -> int:
        """How many messages the driver has not confirmed."""
        return len(self.outbox)

    @property
    def problem(self) -> str:
        """Why the last connection ended or was not made."""
        return self._problem

    def send(self, message: messages.Heartbeat | KeptMessage) -> bool:
        """Send now, if there is a connection (False: there is none). All but heartbeats are kept until confirmed.

        Raises:
            TooLargeError: the message does not fit into a frame.
        """
        if isinstance(message, messages.Heartbeat):
            return self._call is not None and self._call.beat(message)
        self.outbox.put(message)
        self._empty.clear()
        return self._call is not None and self._call.pump()

    async def drained(self) -> None:
        """Wait until the driver has confirmed everything; give it a limit with ``asyncio.timeout``."""
        await self._empty.wait()

    def close(self) -> None:
        """Let `run` return."""
        self._closing.set()
        if self._call is not None:
            self._call.hang_up("the executor leaves")

    async def run(self) -> None:
        """Keep the connection until `close` is called.

        Raises:
            ReplacedError: another executor with the name of this host has connected.
            Exception: what `on_message` raised.
        """
        tries = 0
        while not self._closing.is_set():
            began_s = self.clock()
            await self._try_all()
            if self._error is not None:
                raise self._error
            tries = 0 if self.clock() - began_s > self._backoff.longest_s else tries + 1
            await self._rest(self._backoff.delay_s(max(0, tries - 1), self._fraction()))

    # What a call calls

    def hear(self, message: messages.FromDriver) -> None:
        """The driver has said something."""
        self._on_message(message)

    def failed(self, error: Exception) -> None:
        """What one of the executor's functions raised."""
        self._error = error
        assert self._call is not None
        self._call.hang_up("the executor could not do what the driver said")

    def confirm(self, sequence: int) -> None:
        """The driver has all up to this number."""
        self.outbox.confirm(sequence)
        if not self.outbox:
            self._empty.set()

    # The rest

    async def _try_all(self) -> None:
        try:
            found = await asyncio.to_thread(self._where)
            targets = [addresses.parse(text) for text in ([found] if isinstance(found, str) else found)]
        except (OSError, ValueError) as error:
            self._note(f"where the driver is cannot be told: {error}")
            return
        if not targets:
            self._note("nobody says where the driver is")
        for target in targets:
            if self._closing.is_set() or self._error is not None:
                return
            await self._try(target)

    async def _try(self, target: Address) -> None:
        call = Call(self, target, secure=self._ssl is not None)
        try:
            require_tls_unless_loopback(target.host, self._ssl, "driver address")
            self._call = call
            ending = await call.made(self._ssl, self._server_name, CONNECT_S)
            if ending.code == codec.REPLACED and ending.by_peer and call.was_live:
                self._error = self._error or ReplacedError(ending.reason)
            self._note(f"the connection to the driver at {target} has ended: {ending.reason}")
        except (OSError, UserError) as error:
            self._note(f"no connection to the driver at {target}: {error or type(error).__name__}")
        finally:
            self._call = None
            call.abandon()

    def _note(self, problem: str) -> None:
        self._problem = problem
        if self._closing.is_set() or self._error is not None:
            return
        others = self._throttle.due(problem)
        if others is not None:
            _log.warning("%s; trying again%s", problem, f" (and {others} times before)" if others else "")

    async def _rest(self, delay_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._closing.wait()


def _checked(where: str | Sequence[str], context: ssl.SSLContext | None) -> Where:
    texts = [where] if isinstance(where, str) else list(where)
    for text in texts:
        require_tls_unless_loopback(addresses.parse(text).host, context, "driver address")
    return lambda: texts
