"""One connection on the executor's side, from the challenge to its end."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast

from phalanx.run import messages
from phalanx.run.wire import codec, proof
from phalanx.run.wire.addresses import Address
from phalanx.run.wire.channel import Channel, Ending, client_protocol
from phalanx.run.wire.codec import Accepted, Answer, BadMessageError, Challenge, Received
from phalanx.run.wire.outbox import Outbox

MAX_WAITING_BYTES = 1 << 20
"""So much is handed to the connection before the driver has confirmed something."""
_GOING_AWAY = 1001


class Owner(Protocol):
    """What a connection needs of the link."""

    token: bytes
    job: str
    instance: bytes
    outbox: Outbox
    challenges: codec.Decoder
    replies: codec.Decoder
    frames: codec.Decoder
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
