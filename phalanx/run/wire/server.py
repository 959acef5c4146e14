"""The driver's side: one persistent connection of every host. Runs on asyncio's loop and, faster, on uvloop's.

Every connection that says something and fails to prove itself takes one from the budget of its address, which fills
again with time. While it is empty, only those from there are heard whose first words show that they know the token
(`proof.make_pass`). So one machine that tries again and again costs little, and executors come in as ever, those of the
same machine too.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from phalanx.core.rate_limit import LogThrottle, and_others
from phalanx.ipc.codec import Decoder
from phalanx.run import messages
from phalanx.run.secrets import require_tls_unless_loopback
from phalanx.run.wire import codec, driver_address, proof, websocket
from phalanx.run.wire.codec import Answer, KeptMessage
from phalanx.run.wire.connection import Arrivals, Mark, Peer
from phalanx.run.wire.driver_address import Address
from phalanx.run.wire.websocket import Ending, quiet_logger

FAILURES = 100
FAILURES_PER_S = 10.0
_MAX_ADDRESSES = 4096

Clock = Callable[[], float]


class Door:
    """The budgets of all addresses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}

    def admits(self, address: str) -> bool:
        """Whether anybody from there may try."""
        return address not in self._spent or self._left(address) >= 1.0

    def failed(self, address: str) -> None:
        """A connection from there has not proved itself."""
        left = self._left(address)
        self._spent.pop(address, None)  # the latest to fail are last, the first are forgotten first
        self._spent[address] = max(0.0, left - 1.0), self._clock()
        if len(self._spent) > _MAX_ADDRESSES:
            self._spent.pop(next(iter(self._spent)))

    def _left(self, address: str) -> float:
        left, at_s = self._spent.get(address, (float(FAILURES), self._clock()))
        return min(float(FAILURES), left + (self._clock() - at_s) * FAILURES_PER_S)


HANDSHAKE_S = 10.0
SILENCE_S = 30.0
MAX_UNPROVEN = 16_384
_SWEEP_S = 1.0
_BACKLOG = 4096
_GOING_AWAY = 1001

_log = logging.getLogger(__name__)


class ExecutorServer:
    """Listens for executors, and knows the one live connection of each host.

    All methods and callbacks belong to the loop that `start` was awaited on. A connection counts from its `Hello`; one
    that comes later, with a good proof, takes the place of an earlier one of the same host, and only `on_hello` is
    called then.

    What the driver sends is not kept: whoever calls `send` sends again after the next `on_hello` what is still wanted.
    What executors keep (all but heartbeats) is handed to `on_message` once, as long as the driver lives; `marks`,
    restored from a journal, make that hold over its restart.

    Args:
        host, port: where to listen; port 0: any. More than loopback needs `ssl`.
        on_hello: called with the name of a host and what it says of itself. It should `send` a `Welcome`.
        on_heartbeats: called with the names of hosts and their heartbeats, all that came in one round of the loop, in
            order and before anything else that these hosts have said since. They are acknowledged when it returns; it
            says which hosts made no sense and why, and these are turned away.
        on_message: called with the name and any other message. A message is acknowledged when this returns, unless it
            returns True: then `acknowledge` will be called. It comes again, over a new connection, when this raises.
        on_gone: called with the name and why, when a connection has ended and no other has taken its place.
        clock: seconds, monotonic.
        marks: of hosts, from a journal (`mark`).
        field: the setting that `host` comes from, for errors.
        unix_s: by which passes are good or old.
        silence_s: a connection on which nothing was heard for so long is closed. This says nothing about the host.

    Raises:
        UserError: the token is too short, or the address is open to other machines and there is no `ssl`.
    """

    def __init__(
        self,
        token: bytes,
        job: str,
        host: str,
        port: int,
        *,
        on_hello: Callable[[str, messages.Hello], None],
        on_heartbeats: Callable[[Sequence[tuple[str, messages.Heartbeat]]], Mapping[str, str]],
        on_message: Callable[[str, KeptMessage], bool | None],
        on_gone: Callable[[str, str], None],
        ssl: ssl.SSLContext | None = None,
        clock: Clock = time.monotonic,
        marks: Mapping[str, Mark] | None = None,
        field: str = "host",
        silence_s: float = SILENCE_S,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        proof.check_token(token)
        require_tls_unless_loopback(host, ssl, field)
        self.token, self.job, self.clock = token, job, clock
        self.answers, self.frames = Decoder(Answer), Decoder(codec.FromExecutorFrame)
        self.logger = quiet_logger()
        self._listen_at = Address(host, port)
        self._ssl, self._field = ssl, field
        self._on_hello, self._on_heartbeats = on_hello, on_heartbeats
        self._on_message, self._on_gone = on_message, on_gone
        self._silence_s, self._unix_s = silence_s, unix_s
        self._marks = dict(marks or {})
        self._held: dict[str, Mark] = {}  # before the first message of those that are not received for good
        self._peers: dict[str, Peer] = {}
        self._open: set[Peer] = set()
        self._unproven: dict[Peer, None] = {}  # the oldest first
        self._beats: list[tuple[Peer, messages.Heartbeat]] = []  # of this round of the loop
        self._arrivals = Arrivals()
        self._door, self._throttle = Door(clock), LogThrottle(clock)
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._closing: asyncio.Event | None = None

    # Life

    async def start(self) -> Address:
        """Listen; what others connect to is returned.

        Raises:
            UserError: the address cannot be listened at.
        """
        loop = self._loop = asyncio.get_running_loop()
        limit_s = HANDSHAKE_S if self._ssl is not None else None
        self._server = await loop.create_server(
            self._connection,
            sock=driver_address.bound(self._listen_at, self._field),
            ssl=self._ssl,
            backlog=_BACKLOG,
            ssl_handshake_timeout=limit_s,
        )
        self._sweep_again()
        return Address(self._listen_at.host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end all connections; executors will try to come back. No callback is called any more."""
        self._closing = asyncio.Event()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        self._arrivals.close()
        self._peers.clear()
        for peer in list(self._open):
            peer.channel.end(_GOING_AWAY, "the driver stops")
        if self._open:
            await self._closing.wait()

    async def __aenter__(self) -> ExecutorServer:
        """Listen."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    # What the driver calls

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self._server is not None, "not started"
        return Address(self._listen_at.host, self._server.sockets[0].getsockname()[1])

    def hosts(self) -> list[str]:
        """The names of the hosts that are connected."""
        return [host for host, peer in self._peers.items() if peer.channel.is_open]

    def send(self, host: str, message: messages.FromDriver) -> bool:
        """Send to this host; False: it is not connected. True does not say that it will arrive.

        Raises:
            TooLargeError: the message does not fit into a frame.
        """
        frame = websocket.framed(codec.encode(message))
        return self._write(self._peers.get(host), frame)

    def send_all(self, message: messages.FromDriver) -> int:
        """Send to all hosts; to how many it went.

        Raises:
            TooLargeError: the message does not fit into a frame.
        """
        frame = websocket.framed(codec.encode(message))
        return sum(self._write(peer, frame) for peer in list(self._peers.values()))

    def drop(self, host: str, why: str) -> None:
        """End the connection of a host; `on_gone` is called for it later. Its executor may come back."""
        peer = self._peers.get(host)
        if peer is not None:
            peer.channel.end(_GOING_AWAY, why)

    def mark(self, host: str) -> Mark | None:
        """How far the kept messages of this host were received, with the one that `on_message` is called with.

        Journal it with what the message led to, and give it back as `marks` after a restart.
        """
        return self._marks.get(host)

    def acknowledge(self, host: str) -> None:
        """Tell a host that its kept messages are received for good, up to its `mark`."""
        self._held.pop(host, None)
        peer = self._peers.get(host)
        if peer is not None and self._marks[host].instance == peer.instance:
            self._write(peer, websocket.framed(codec.encode(codec.Received(self._marks[host].sequence))))

    def sweep(self) -> None:
        """Close what has taken too long to prove itself, or was silent for too long. Called once a second."""
        now_s = self.clock()
        for peer in [peer for peer in self._unproven if now_s - peer.since_s > HANDSHAKE_S]:
            peer.refuse(codec.TOO_SLOW, proof.Refusal("time", f"no proof within {HANDSHAKE_S:.0f} s"))
        for peer in [peer for peer in self._open if now_s - peer.heard_s > self._silence_s]:
            peer.channel.end(codec.TOO_SLOW, f"nothing was heard for {self._silence_s:.0f} s")

    # What connections call

    def admit(self, peer: Peer) -> bool:
        """See `phalanx.run.wire.connection.House`."""
        if self._closing is not None:
            return False
        if not self._door.admits(peer.address):
            peer.channel.require(lambda request: self._lets_pass(peer, request))
        self._open.add(peer)
        self._unproven[peer] = None
        if len(self._unproven) > MAX_UNPROVEN:
            # The oldest: whoever knows the token needs a moment only.
            oldest = next(iter(self._unproven))
            oldest.refuse(codec.TOO_SLOW, proof.Refusal("many", "too many wait to prove themselves"))
        return True

    def prove(self, peer: Peer) -> None:
        """See `phalanx.run.wire.connection.House`."""
        self._unproven.pop(peer, None)

    def join(self, peer: Peer, hello: messages.Hello) -> None:
        """See `phalanx.run.wire.connection.House`."""
        self._hear()
        before = self._peers.get(peer.host)
        self._peers[peer.host] = peer
        if before is not None:
            before.channel.end(codec.REPLACED, f"another executor of {peer.host} has connected")
        mark = self._marks.get(peer.host)
        if mark is None or mark.instance != peer.instance:
            self._marks[peer.host] = Mark(peer.instance, 0)
            self._held.pop(peer.host, None)
        try:
            self._on_hello(peer.host, hello)
        except Exception:
            self._failed(peer)

    def beat(self, peer: Peer, beat: messages.Heartbeat) -> None:
        """See `phalanx.run.wire.connection.House`."""
        if not self._beats:
            self._loop.call_soon(self._hear)
        self._beats.append((peer, beat))

    def take(self, peer: Peer, message: KeptMessage, sequence: int) -> bool:
        """See `phalanx.run.wire.connection.House`."""
        self._hear()
        before = self._marks[peer.host]
        if self._peers.get(peer.host) is not peer:
            return False
        if sequence <= before.sequence:
            return peer.host not in self._held
        self._marks[peer.host] = Mark(peer.instance, sequence)
        try:
            is_later = self._on_message(peer.host, message)
        except Exception:
            self._marks[peer.host] = before
            self._failed(peer)
            return False
        if not is_later:
            return True
        self._held.setdefault(peer.host, before)
        return False

    def received(self, host: str, instance: bytes) -> int:
        """See `phalanx.run.wire.connection.House`."""
        mark = self._held.get(host) or self._marks.get(host)
        return mark.sequence if mark is not None and mark.instance == instance else 0

    def leave(self, peer: Peer, ending: Ending) -> None:
        """See `phalanx.run.wire.connection.House`."""
        self._hear()
        if peer in self._unproven and self._closing is None:
            reason = f"it ended before it had proved itself: {ending.reason}"
            self.refuse(peer, proof.Refusal("end", reason))
        self._open.discard(peer)
        if self._closing is not None and not self._open:
            self._closing.set()
        if self._peers.get(peer.host) is peer:
            del self._peers[peer.host]
            try:
                self._on_gone(peer.host, ending.reason)
            except Exception:
                _log.exception("the driver could not handle that the connection of %s has ended", peer.host)

    def refuse(self, peer: Peer, refusal: proof.Refusal) -> None:
        """See `phalanx.run.wire.connection.House`."""
        if peer in self._unproven:
            del self._unproven[peer]
            if peer.channel.has_heard:  # else it has cost next to nothing
                self._door.failed(peer.address)
        self._report(peer, refusal)

    # The rest

    def _hear(self) -> None:
        """Hand on the heartbeats that have come in this round of the loop, and answer them."""
        if not self._beats:
            return
        beats, self._beats = self._beats, []
        beats = [(peer, beat) for peer, beat in beats if self._peers.get(peer.host) is peer]
        try:
            bad = self._on_heartbeats([(peer.host, beat) for peer, beat in beats])
        except Exception:
            for peer, _ in beats:
                self._failed(peer)
            return
        for peer, beat in beats:
            if bad and (why := bad.get(peer.host)) is not None:
                peer.refuse(codec.BAD_FRAME, proof.Refusal("frame", f"not a report that may come here: {why}"))
            else:
                peer.channel.write(websocket.small(codec.acknowledged(beat.sequence)))

    def _lets_pass(self, peer: Peer, request: bytes) -> bool:
        """Whether somebody may try although too many from there have failed."""
        if proof.is_pass(self.token, request, self._unix_s()):
            return True
        self._unproven.pop(peer, None)  # it is no failure more: that would keep the door shut for ever
        self._report(peer, proof.Refusal("failures", "too many connections from there have failed"))
        return False

    def _connection(self) -> asyncio.Protocol:
        return self._arrivals.expect(lambda: Peer(self).channel)

    def _write(self, peer: Peer | None, frame: bytes) -> bool:
        if peer is None or not peer.channel.is_open:
            return False
        peer.channel.write(frame)
        return True

    def _failed(self, peer: Peer) -> None:
        _log.exception("the driver could not handle what %s said; it will be sent again", peer.host)
        peer.channel.end(codec.FAILED, "the driver could not handle a message; its log says why")

    def _report(self, peer: Peer, refusal: proof.Refusal) -> None:
        others = self._throttle.due(refusal.kind)
        if others is not None:
            line = "refused a connection from %s%s: %s%s"
            _log.warning(line, peer.address, _named(peer), refusal.reason, and_others(others))

    def _sweep_again(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep_again)
        self.sweep()  # last, so that nothing that it raises is the end of it


def _named(peer: Peer) -> str:
    return f" ({peer.host})" if peer.host else ""
