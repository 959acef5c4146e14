"""The executor's side: one connection to the driver, made again for ever, and nothing lost over it.

From below: backoff between tries, the outbox of what the driver may not have yet, a `Call` (one connection from the
challenge to its end), and the `Link` that makes calls for ever.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

from phalanx.core.errors import UserError
from phalanx.core.rate_limit import LogThrottle
from phalanx.ipc.codec import BadMessageError, Decoder
from phalanx.run import messages
from phalanx.run.secrets import require_tls_unless_loopback
from phalanx.run.wire import codec, driver_address, proof
from phalanx.run.wire.codec import Accepted, Answer, Challenge, Kept, KeptMessage, Received, encode
from phalanx.run.wire.driver_address import Address
from phalanx.run.wire.server import Clock
from phalanx.run.wire.websocket import Channel, Ending, client_protocol, quiet_logger


class Backoff(NamedTuple):
    """Doubling waits with full jitter, so that thousands of executors do not come back at one moment.

    Attributes:
        first_s: the longest wait before the first new try.
        longest_s: the longest wait of all.
    """

    first_s: float = 0.2
    longest_s: float = 10.0

    def delay_s(self, tries: int, fraction: float) -> float:
        """The wait after so many tries in vain (from 0), with a random `fraction` from 0 to 1 of the longest."""
        return fraction * min(self.longest_s, self.first_s * 2.0 ** min(tries, 60))


LIMIT_BYTES = 64 << 20


class Outbox:
    """Messages with their numbers, from the first that was not confirmed.

    All are kept but `Found`, of which there may be many while the driver is away: beyond `limit_bytes` the oldest of
    these are left out.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: deque[tuple[int, bool, bytes]] = deque()
        self._last = 0
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, message: KeptMessage) -> None:
        """Keep it.

        Raises:
            TooLargeError: it does not fit into a frame.
        """
        content = encode(Kept(self._last + 1, message))
        self._last += 1
        self._kept.append((self._last, isinstance(message, messages.Found), content))
        self._bytes += len(content)
        if self._bytes > self._limit_bytes:
            self._leave_out()

    def confirm(self, sequence: int) -> None:
        """The driver has all up to this number."""
        while self._kept and self._kept[0][0] <= sequence:
            self._bytes -= len(self._kept.popleft()[2])

    def after(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """Those that come after this number, as frames, with their own numbers; nothing may be put meanwhile."""
        if self._last > sequence:
            yield from ((number, content) for number, _, content in self._kept if number > sequence)

    def _leave_out(self) -> None:
        left: deque[tuple[int, bool, bytes]] = deque()
        for number, may_go, content in self._kept:
            if may_go and self._bytes > self._limit_bytes // 2:  # by half, so that this is seldom done
                self._bytes -= len(content)
                self.dropped += 1
            else:
                left.append((number, may_go, content))
        self._kept = left


MAX_WAITING_BYTES = 1 << 20
"""So much is handed to the connection before the driver has confirmed something."""
_GOING_AWAY = 1001


class Owner(Protocol):
    """What a connection needs of the link."""

    token: bytes
    job: str
    instance: bytes
    outbox: Outbox
    challenges: Decoder
    replies: Decoder
    frames: Decoder
    clock: Callable[[], float]
    silence_s: float
    logger: logging.Logger
    hello: Callable[[], messages.Hello]

    def hear(self, message: messages.FromDriver) -> None:
        """The driver has said something."""

    def failed(self, error: Exception) -> None:
        """What `hear` or `hello` raised."""

    def confirm(self, sequence: int) -> None:
        """The driver has all up to this number."""


class Call:
    """A connection to the driver at `target`."""

    def __init__(self, owner: Owner, target: Address, *, secure: bool) -> None:
        self._owner = owner
        self._target = target
        self._hear: Callable[[bytes], None] = self._answer
        self._said: tuple[Challenge, Answer] | None = None
        self._live = asyncio.Event()
        self._asked_s: float | None = None
        self._sent = 0
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        protocol = client_protocol(target.host, target.port, secure, owner.logger)
        self._channel = Channel(protocol, lambda channel: None, self._heard, self._ended)
        self._channel.headers[proof.PASS] = proof.make_pass(owner.token, time.time())

    @property
    def is_live(self) -> bool:
        """Whether the driver has proved itself and hears."""
        return self._live.is_set() and self._channel.is_open

    @property
    def was_live(self) -> bool:
        """Whether the driver has proved itself on this connection."""
        return self._live.is_set()

    async def made(self, context: ssl.SSLContext | None, server_name: str | None, within_s: float) -> Ending:
        """Connect, and return when it has ended.

        Raises:
            OSError: there is no connection, also (TimeoutError) when the handshake is not done within `within_s`.
        """
        name = (server_name or self._target.host) if context is not None else None
        opening = asyncio.ensure_future(self._open(context, name))
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

    async def _open(self, context: ssl.SSLContext | None, name: str | None) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._channel, *self._target, ssl=context, server_hostname=name)
        await self._live.wait()

    def hang_up(self, reason: str) -> None:
        """End it, saying why."""
        self._channel.end(_GOING_AWAY, reason)
        if not self._channel.is_connected:
            self._ended(Ending(_GOING_AWAY, reason, by_peer=False))

    def abandon(self) -> None:
        """Let nothing of it be left."""
        self._channel.abort("abandoned")
        self._ending.cancel()

    def beat(self, heartbeat: messages.Heartbeat) -> bool:
        """Send a heartbeat; False: it was not sent, since there is no connection or it is full."""
        if not self._is_answered() or self._channel.unsent_bytes > MAX_WAITING_BYTES:
            return False
        self._channel.send(codec.encode(heartbeat))
        return True

    def pump(self) -> bool:
        """Send what is kept, as far as there is room; False: there is no connection."""
        for number, content in self._owner.outbox.after(self._sent):
            if not self._is_answered() or self._channel.unsent_bytes > MAX_WAITING_BYTES:
                break
            self._sent = number
            self._channel.send(content)
        return self.is_live

    def _is_answered(self) -> bool:
        """Whether there is a connection on which the driver answers; one on which it does not is dropped."""
        if not self.is_live:
            return False
        now_s = self._owner.clock()
        if self._asked_s is None:
            self._asked_s = now_s
        elif now_s - self._asked_s > self._owner.silence_s:
            self._channel.abort(f"the driver has not answered for {now_s - self._asked_s:.0f} s")
            return False
        return True

    def _heard(self, content: bytes) -> None:
        self._asked_s = None
        try:
            self._hear(content)
        except BadMessageError as error:
            self._channel.end(codec.BAD_FRAME, f"not a message that may come here: {error}")
        except Exception as error:
            self._owner.failed(error)

    def _ended(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    def _answer(self, content: bytes) -> None:
        challenge = cast(Challenge, self._owner.challenges.decode(content))
        refusal = proof.refuse_challenge(challenge)
        if refusal is not None:
            self._channel.end(codec.REFUSED, refusal.reason)
            return
        owner = self._owner
        host = owner.hello().host
        given = proof.answer(owner.token, challenge, owner.job, host, owner.instance, proof.new_nonce())
        self._said = challenge, given
        self._channel.send(codec.encode(given))
        self._hear = self._greet

    def _greet(self, content: bytes) -> None:
        assert self._said is not None
        reply = cast(Accepted, self._owner.replies.decode(content))
        refusal = proof.refuse_driver(self._owner.token, *self._said, reply)
        if refusal is not None:
            self._channel.end(codec.REFUSED, refusal.reason)
            return
        self._channel.trust(messages.MAX_FRAME_BYTES)
        self._owner.confirm(reply.received)
        self._sent = reply.received
        self._hear = self._work
        self._channel.send(codec.encode(self._owner.hello()))
        self._live.set()
        self.pump()

    def _work(self, content: bytes) -> None:
        frame = self._owner.frames.decode(content)
        if isinstance(frame, Received):
            self._owner.confirm(frame.sequence)
            self.pump()
        elif not isinstance(frame, messages.Acknowledged):
            self._owner.hear(cast(messages.FromDriver, frame))


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
        self.challenges, self.replies = Decoder(codec.Challenge), Decoder(codec.Accepted)
        self.frames = Decoder(codec.FromDriverFrame)
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
            targets = [driver_address.parse(text) for text in ([found] if isinstance(found, str) else found)]
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
        require_tls_unless_loopback(driver_address.parse(text).host, context, "driver address")
    return lambda: texts
