"""The executor's side: one connection to the driver, made again for ever, and nothing lost over it.

From below: backoff between tries, the outbox of what the driver may not have yet, a `Connection` (from the challenge to
its end), and the `DriverLink` that makes connections for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from phalanx.core.errors import UserError
from phalanx.core.rate_limit import LogThrottle
from phalanx.ipc.codec import BadMessageError, MessageDecoder
from phalanx.ipc.handshake import Handshake
from phalanx.run import messages
from phalanx.run.secrets import require_tls_unless_loopback
from phalanx.run.wire import driver_address, message_frames, proof
from phalanx.run.wire.driver_address import Address
from phalanx.run.wire.message_frames import Accepted, Challenge, Kept, KeptMessage, Received, encode
from phalanx.run.wire.proof import Refusal
from phalanx.run.wire.websocket import ConnectionEnd, WebSocketChannel, client_protocol, quiet_logger

OUTBOX_BYTES = 64 << 20
MAX_WAITING_BYTES = 1 << 20  # so much is handed to the connection before the driver has confirmed something
CONNECT_S = 30.0
SILENCE_S = 10.0

Where = Callable[[], str | Sequence[str]]

_log = logging.getLogger(__name__)


class Backoff(NamedTuple):
    """Doubling waits with full jitter, so that thousands of executors do not come back at one moment."""

    first_s: float = 0.2  # the longest wait before the first new try
    longest_s: float = 10.0

    def delay_s(self, tries: int, fraction: float) -> float:
        """The wait after so many tries in vain (from 0), with a random `fraction` from 0 to 1 of the longest."""
        return fraction * min(self.longest_s, self.first_s * 2.0 ** min(tries, 60))


class Outbox:
    """Messages with their numbers, from the first that was not confirmed.

    All are kept but `Found`, of which there may be many while the driver is away: beyond `limit_bytes` the oldest of
    these are left out.
    """

    def __init__(self, limit_bytes: int = OUTBOX_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: deque[tuple[int, bool, bytes]] = deque()  # number, may be left out, frame
        self._last = 0
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, message: KeptMessage) -> None:
        """Keep it. Raises TooLargeError: it does not fit into a frame."""
        content = encode(Kept(self._last + 1, message))
        self._last += 1
        self._kept.append((self._last, isinstance(message, messages.Found), content))
        self._bytes += len(content)
        if self._bytes <= self._limit_bytes:
            return
        left: deque[tuple[int, bool, bytes]] = deque()
        for number, may_go, content in self._kept:
            if may_go and self._bytes > self._limit_bytes // 2:  # by half, so that this is seldom done
                self._bytes -= len(content)
                self.dropped += 1
            else:
                left.append((number, may_go, content))
        self._kept = left

    def confirm(self, sequence: int) -> None:
        """The driver has all up to this number."""
        while self._kept and self._kept[0][0] <= sequence:
            self._bytes -= len(self._kept.popleft()[2])

    def after(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """Those that come after this number, as frames, with their own numbers; nothing may be put meanwhile."""
        if self._last > sequence:
            yield from ((number, content) for number, _, content in self._kept if number > sequence)


class Connection:
    """One connection to the driver at `target`."""

    def __init__(self, link: DriverLink, target: Address, *, secure: bool) -> None:
        self._link = link
        self._target = target
        self._hear: Callable[[bytes], None] = self._answer  # the challenge; then the reply, then what the driver sends
        self.live = asyncio.Event()  # the driver has proved itself on this connection
        self._unanswered_s: float | None = None  # since when something was sent and nothing has come
        self._sent = 0
        self._ending: asyncio.Future[ConnectionEnd] = asyncio.get_running_loop().create_future()
        protocol = client_protocol(target.host, target.port, secure, link.logger)
        self._channel = WebSocketChannel(protocol, lambda channel: None, self._heard, self._ended)
        self._channel.headers[proof.PASS] = proof.make_pass(link.token, time.time())

    @property
    def is_live(self) -> bool:
        """Whether the driver has proved itself and hears."""
        return self.live.is_set() and self._channel.is_open

    async def made(self, context: ssl.SSLContext | None, server_name: str | None, within_s: float) -> ConnectionEnd:
        """Connect, and return when it has ended.

        Raises:
            OSError: there is no connection, also (TimeoutError) when the handshake is not done within `within_s`.
        """

        async def opened() -> None:
            name = (server_name or self._target.host) if context is not None else None
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self._channel, *self._target, ssl=context, server_hostname=name)
            await self.live.wait()

        opening = asyncio.ensure_future(opened())
        try:
            both: list[asyncio.Future] = [opening, self._ending]
            done, _ = await asyncio.wait(both, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError(f"no handshake within {within_s:.0f} s")
            if opening.done():
                opening.result()
        finally:
            opening.cancel()
        return await self._ending

    def hang_up(self, reason: str) -> None:
        """End it, saying why."""
        self._channel.end(message_frames.GOING_AWAY, reason)
        if not self._channel.is_connected:
            self._ended(ConnectionEnd(message_frames.GOING_AWAY, reason, by_peer=False))

    def abandon(self) -> None:
        """Let nothing of it be left."""
        self._channel.abort("abandoned")
        self._ending.cancel()

    def beat(self, heartbeat: messages.Heartbeat) -> bool:
        """Send a heartbeat; False: it was not sent, since there is no connection or it is full."""
        if not self._is_answered() or self._channel.unsent_bytes > MAX_WAITING_BYTES:
            return False
        self._channel.send(encode(heartbeat))
        return True

    def pump(self) -> bool:
        """Send what is kept, as far as there is room; False: there is no connection."""
        for number, content in self._link.outbox.after(self._sent):
            if not self._is_answered() or self._channel.unsent_bytes > MAX_WAITING_BYTES:
                break
            self._sent = number
            self._channel.send(content)
        return self.is_live

    def _is_answered(self) -> bool:
        """Whether there is a connection on which the driver answers; one on which it does not is dropped."""
        if not self.is_live:
            return False
        now_s = self._link.clock()
        if self._unanswered_s is None:
            self._unanswered_s = now_s
        elif now_s - self._unanswered_s > self._link.silence_s:
            # TCP would try for a quarter of an hour to reach a machine that is gone without a word.
            self._channel.abort(f"the driver has not answered for {now_s - self._unanswered_s:.0f} s")
            return False
        return True

    def _heard(self, content: bytes) -> None:
        self._unanswered_s = None
        try:
            self._hear(content)
        except BadMessageError as error:
            self._channel.end(message_frames.BAD_FRAME, f"not a message that may come here: {error}")
        except Exception as error:
            self._link.failed(error)

    def _ended(self, ending: ConnectionEnd) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    def _answer(self, content: bytes) -> None:
        link = self._link
        challenge = cast(Challenge, link.challenges.decode(content))
        found = proof.answer(link.key, challenge, link.job, link.hello().host, link.instance)
        if isinstance(found, Refusal):
            self._channel.end(message_frames.REFUSED, found.reason)
            return
        answer, handshake = found
        self._channel.send(encode(answer))
        self._hear = lambda reply: self._greet(handshake, reply)

    def _greet(self, handshake: Handshake, content: bytes) -> None:
        reply = cast(Accepted, self._link.replies.decode(content))
        refusal = proof.refuse_driver(handshake, reply)
        if refusal is not None:
            self._channel.end(message_frames.REFUSED, refusal.reason)
            return
        self._channel.trust(messages.MAX_FRAME_BYTES)
        # What the driver has already does not go again; a driver that was started again may have less than before.
        self._link.confirm(reply.received)
        self._sent = reply.received
        self._hear = self._work
        self._channel.send(encode(self._link.hello()))
        self.live.set()
        self.pump()

    def _work(self, content: bytes) -> None:
        frame = self._link.frames.decode(content)
        if isinstance(frame, Received):
            self._link.confirm(frame.sequence)
            self.pump()
        elif not isinstance(frame, messages.Acknowledged):
            self._link.on_message(cast(messages.FromDriver, frame))


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
        hello: describes this executor as it is now; its `host` names it to the driver.
        on_message: called with what the driver says, acknowledgements apart. What it raises ends `run`.
        ssl: with which the driver's certificate is checked. An address that is not loopback is not used without.
        server_name: in that certificate, where it is not the host of the address.
        silence_s: a driver that has not answered for so long is taken to be gone, when something is sent to it.

    Attributes:
        outbox: messages that the driver has not confirmed.
        problem: why the last connection ended or was not made.

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
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
        fraction: Callable[[], float] = random.random,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.key, self.token = proof.key_of(token), token
        self.job, self.clock, self.hello, self.on_message = job, clock, hello, on_message
        self.silence_s = silence_s
        self.instance = os.urandom(message_frames.INSTANCE_BYTES)
        self.outbox = Outbox()
        self.logger = quiet_logger()
        self.challenges, self.replies = MessageDecoder(Challenge), MessageDecoder(Accepted)
        self.frames = MessageDecoder(message_frames.FromDriverFrame)
        self._ssl, self._server_name = ssl, server_name
        self._backoff, self._fraction = backoff or Backoff(), fraction
        self._throttle = LogThrottle(clock)
        self._connection: Connection | None = None
        self._closing = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._error: Exception | None = None
        self.problem = "not tried yet"
        if callable(where):
            self._where: Where = where
        else:
            texts = [where] if isinstance(where, str) else list(where)
            for text in texts:  # at once, rather than in a warning at every try
                require_tls_unless_loopback(driver_address.parse(text).host, ssl, "driver address")
            self._where = lambda: texts

    # What the executor calls

    @property
    def connected(self) -> bool:
        """Whether the driver has proved itself and hears."""
        return self._connection is not None and self._connection.is_live

    def send(self, message: messages.Heartbeat | KeptMessage) -> bool:
        """Send now, if there is a connection (False: there is none). All but heartbeats are kept until confirmed.

        Raises:
            TooLargeError: the message does not fit into a frame.
        """
        if isinstance(message, messages.Heartbeat):
            return self._connection is not None and self._connection.beat(message)
        self.outbox.put(message)
        self._empty.clear()
        return self._connection is not None and self._connection.pump()

    async def drained(self) -> None:
        """Wait until the driver has confirmed everything; give it a limit with ``asyncio.timeout``."""
        await self._empty.wait()

    def close(self) -> None:
        """Let `run` return."""
        self._closing.set()
        if self._connection is not None:
            self._connection.hang_up("the executor leaves")

    async def run(self) -> None:
        """Keep the connection until `close` is called.

        Raises:
            ReplacedError: another executor with the name of this host has connected.
            Exception: what `on_message` raised.
        """
        tries = 0
        while not self._closing.is_set():
            began_s = self.clock()
            try:
                found = await asyncio.to_thread(self._where)
                targets = [driver_address.parse(text) for text in ([found] if isinstance(found, str) else found)]
                if not targets:
                    self._note("nobody says where the driver is")
            except (OSError, ValueError) as error:
                targets = []
                self._note(f"where the driver is cannot be told: {error}")
            for target in targets:
                if not self._closing.is_set() and self._error is None:
                    await self._try(target)
            if self._error is not None:
                raise self._error
            # A connection that lasted was good: its executor comes back at once.
            tries = 0 if self.clock() - began_s > self._backoff.longest_s else tries + 1
            with suppress(TimeoutError):
                async with asyncio.timeout(self._backoff.delay_s(max(0, tries - 1), self._fraction())):
                    await self._closing.wait()

    # What the connection calls

    def failed(self, error: Exception) -> None:
        """`on_message` or `hello` has raised this: `run` ends with it."""
        self._error = error
        assert self._connection is not None
        self._connection.hang_up("the executor could not do what the driver said")

    def confirm(self, sequence: int) -> None:
        """The driver has all up to this number."""
        self.outbox.confirm(sequence)
        if not self.outbox:
            self._empty.set()

    # The rest

    async def _try(self, target: Address) -> None:
        connection = Connection(self, target, secure=self._ssl is not None)
        try:
            require_tls_unless_loopback(target.host, self._ssl, "driver address")
            self._connection = connection
            ending = await connection.made(self._ssl, self._server_name, CONNECT_S)
            if ending.code == message_frames.REPLACED and ending.by_peer and connection.live.is_set():
                self._error = self._error or ReplacedError(ending.reason)
            self._note(f"the connection to the driver at {target} has ended: {ending.reason}")
        except (OSError, UserError) as error:
            self._note(f"no connection to the driver at {target}: {error or type(error).__name__}")
        finally:
            self._connection = None
            connection.abandon()

    def _note(self, problem: str) -> None:
        self.problem = problem
        if self._closing.is_set() or self._error is not None:
            return
        others = self._throttle.due(problem)
        if others is not None:
            _log.warning("%s; trying again%s", problem, f" (and {others} times before)" if others else "")
