"""The driver's side: one persistent connection of every host. Runs on asyncio's loop and, faster, on uvloop's.

A `Peer` is one executor, from challenge to last message; the `ExecutorServer` knows the one live connection of each
host.

Every connection that sends something and fails to prove itself takes one from the budget of its address, which fills
again with time. While it is empty, only connections from there are heard whose request shows that they know the token
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
from phalanx.ipc.codec import BadMessageError, MessageDecoder
from phalanx.run import messages
from phalanx.run.secrets import require_tls_unless_loopback
from phalanx.run.wire import driver_address, message_frames, proof, websocket
from phalanx.run.wire.arrivals import Arrivals, ArrivingConnection, FailureBudgets
from phalanx.run.wire.driver_address import Address
from phalanx.run.wire.message_frames import Accepted, HandshakeAnswer, Kept, KeptMessage, Received, ReceivedMark, encode
from phalanx.run.wire.proof import Refusal
from phalanx.run.wire.websocket import ConnectionEnd, WebSocketChannel, quiet_logger, server_protocol

# All executors of a job come back at once when its driver is started again: `MAX_UNPROVEN` is more than the 12,500
# hosts that the driver is made for, and the backlog holds those that the loop has not accepted yet.
HANDSHAKE_S = 10.0
SILENCE_S = 30.0
MAX_UNPROVEN = 16_384
_SWEEP_S = 1.0
_VERSION_S, _VERSIONS_KEPT = 60.0, 64
_BACKLOG = 4096

_log = logging.getLogger(__name__)


class Peer:
    """A connection to an executor. `host`: the name that it has proved; empty: none yet."""

    __slots__ = ("_challenge", "_hear", "_server", "address", "channel", "heard_s", "host", "instance", "since_s")

    def __init__(self, server: ExecutorServer) -> None:
        self._server = server
        self._challenge = proof.new_challenge()
        self._hear: Callable[[bytes], None] = self._prove  # then `_greet`, then `_work`
        self.host = ""
        self.instance = b""
        self.address = ""
        self.since_s = self.heard_s = server.clock()
        self.channel = WebSocketChannel(
            server_protocol(server.logger),
            lambda channel: channel.send(encode(self._challenge)),
            self._heard,
            lambda ending: server.leave(self, ending),
            self._connected,
        )

    def refuse(self, code: int, refusal: Refusal) -> None:
        """Turn it away, with the reason on both sides."""
        self.channel.end(code, refusal.reason)
        self._server.refuse(self, refusal)

    def _connected(self, channel: WebSocketChannel) -> None:
        self.address = channel.peer
        if not self._server.admit(self):
            channel.abort("too many connections from this address have failed")

    def _heard(self, content: bytes) -> None:
        self.heard_s = self._server.clock()
        try:
            self._hear(content)
        except BadMessageError as error:
            self.refuse(message_frames.BAD_FRAME, Refusal("frame", f"not a message that may come here: {error}"))

    def _prove(self, content: bytes) -> None:
        given = self._server.answers.decode(content)
        assert isinstance(given, HandshakeAnswer)
        found = proof.accept(self._server.key, self._server.job, self._challenge, given)
        if isinstance(found, Refusal):
            self.refuse(message_frames.REFUSED, found)
            return
        self.host, self.instance = given.host, given.instance
        received = self._server.prove(self)
        # Only now may it send long frames: strangers must not fill memory.
        self.channel.trust(messages.MAX_FRAME_BYTES)
        self.channel.send(encode(Accepted(found, received)))
        self._hear = self._greet

    def _greet(self, content: bytes) -> None:
        hello = self._server.frames.decode(content)
        if not isinstance(hello, messages.Hello):
            raise BadMessageError(f"{type(hello).__name__} before Hello")
        # Another name would take the place of a host that this executor has not proved to be.
        if hello.host != self.host:
            raise BadMessageError(f"Hello of {hello.host!r} from {self.host!r}")
        self._hear = self._work
        self._server.join(self, hello)

    def _work(self, content: bytes) -> None:
        frame = self._server.frames.decode(content)
        if isinstance(frame, messages.Heartbeat):
            self._server.beat(self, frame)
        elif isinstance(frame, Kept):
            if self._server.take(self, frame.message, frame.sequence):
                self.channel.write(websocket.framed(encode(Received(frame.sequence))))
        else:
            raise BadMessageError("a second Hello")


class ExecutorServer:
    """Listens for executors, and knows the one live connection of each host.

    All methods and callbacks belong to the loop that `start` was awaited on. A connection counts from its `Hello`; one
    that comes later, with a good proof, takes the place of an earlier one of the same host, and only `on_hello` is
    called then.

    What the driver sends is not kept: the caller of `send` sends again after the next `on_hello` what is still wanted.
    What executors keep (all but heartbeats) is handed to `on_message` once, as long as the driver lives; `marks`,
    restored from a journal, make that hold over its restart.

    Args:
        host, port: where to listen; port 0: any. More than loopback needs `ssl`.
        on_hello: called with the name of a host and its `Hello`. It should `send` a `Welcome`.
        on_heartbeats: called with the names of hosts and their heartbeats, all that came in one round of the loop, in
            order and before anything else that these hosts have sent since. They are acknowledged when it returns; it
            says which hosts made no sense and why, and these are turned away.
        on_message: called with the name and any other message. A message is acknowledged when this returns, unless it
            returns True: then `acknowledge` will be called. It comes again, over a new connection, when this raises.
        on_gone: called with the name and why, when a connection has ended and no other has taken its place.
        marks: of hosts, from a journal (`mark`).
        field: the setting that `host` comes from, for errors.
        unix_s: by which passes are good or old.
        silence_s: a connection on which nothing was heard for so long is closed. The host itself may be well.

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
        clock: Callable[[], float] = time.monotonic,
        marks: Mapping[str, ReceivedMark] | None = None,
        field: str = "host",
        silence_s: float = SILENCE_S,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        require_tls_unless_loopback(host, ssl, field)
        self.key, self.job, self.clock = proof.key_of(token), job, clock
        self.answers, self.frames = MessageDecoder(HandshakeAnswer), MessageDecoder(message_frames.FromExecutorFrame)
        self.logger = quiet_logger()
        self._token = token
        self._listen_at = Address(host, port)
        self._ssl, self._field = ssl, field
        self._on_hello, self._on_heartbeats = on_hello, on_heartbeats
        self._on_message, self._on_gone = on_message, on_gone
        self._silence_s, self._unix_s = silence_s, unix_s
        self._marks = dict(marks or {})
        self._held: dict[str, ReceivedMark] = {}  # before the first message of those that are not received for good
        self._peers: dict[str, Peer] = {}
        self._open: set[Peer] = set()
        self._unproven: dict[Peer, None] = {}  # the oldest first
        self._beats: list[tuple[Peer, messages.Heartbeat]] = []  # of this round of the loop
        self._arrivals = Arrivals()
        self._versions: dict[str, tuple[float, int]] = {}
        self._budgets, self._throttle = FailureBudgets(clock), LogThrottle(clock)
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._closing: asyncio.Event | None = None

    # Life

    async def start(self) -> Address:
        """Listen; what others connect to is returned. Raises UserError: the address cannot be listened at."""
        loop = self._loop = asyncio.get_running_loop()
        # asyncio refuses a limit for the handshake where there is no TLS.
        limit_s = HANDSHAKE_S if self._ssl is not None else None
        self._server = await loop.create_server(
            lambda: ArrivingConnection(self._arrivals, lambda: Peer(self).channel),
            sock=driver_address.bound(self._listen_at, self._field),
            ssl=self._ssl,
            backlog=_BACKLOG,
            ssl_handshake_timeout=limit_s,
        )
        self._sweep_again()
        return self.address

    async def close(self) -> None:
        """Stop listening and end all connections; executors will try to come back. No callback is called any more."""
        self._closing = asyncio.Event()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        self._arrivals.close()
        # Forgotten first, so that `leave` calls `on_gone` for none of them.
        self._peers.clear()
        for peer in list(self._open):
            peer.channel.end(message_frames.GOING_AWAY, "the driver stops")
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
        return self._write(self._peers.get(host), websocket.framed(encode(message)))

    def send_all(self, message: messages.FromDriver) -> int:
        """Send to all hosts; to how many it went. Raises TooLargeError: the message does not fit into a frame."""
        frame = websocket.framed(encode(message))
        return sum(self._write(peer, frame) for peer in list(self._peers.values()))

    def drop(self, host: str, why: str) -> None:
        """End the connection of a host; `on_gone` is called for it later. Its executor may come back."""
        peer = self._peers.get(host)
        if peer is not None:
            peer.channel.end(message_frames.GOING_AWAY, why)

    def other_versions(self) -> dict[str, int]:
        """Versions of the wire, by address, of executors that could not be met for theirs in the last minute."""
        now_s = self.clock()
        return {address: version for address, (at_s, version) in self._versions.items() if now_s - at_s < _VERSION_S}

    def mark(self, host: str) -> ReceivedMark | None:
        """How far the kept messages of this host were received, with the one that `on_message` is called with.

        Journal it with what the message led to, and give it back as `marks` after a restart.
        """
        return self._marks.get(host)

    def acknowledge(self, host: str) -> None:
        """Acknowledge the kept messages of a host, up to its `mark`: they are received for good."""
        self._held.pop(host, None)
        peer = self._peers.get(host)
        # Another instance counts its messages anew: this number is none of its own.
        if peer is not None and self._marks[host].instance == peer.instance:
            self._write(peer, websocket.framed(encode(Received(self._marks[host].sequence))))

    def sweep(self) -> None:
        """Close what has taken too long to prove itself, or was silent for too long. Called once a second."""
        now_s = self.clock()
        for peer in [peer for peer in self._unproven if now_s - peer.since_s > HANDSHAKE_S]:
            peer.refuse(message_frames.TOO_SLOW, Refusal("time", f"no proof within {HANDSHAKE_S:.0f} s"))
        for peer in [peer for peer in self._open if now_s - peer.heard_s > self._silence_s]:
            peer.channel.end(message_frames.TOO_SLOW, f"nothing was heard for {self._silence_s:.0f} s")

    # What connections call

    def admit(self, peer: Peer) -> bool:
        """A connection was opened; False: it may not stay."""
        if self._closing is not None:
            return False

        def passes(request: bytes) -> bool:
            if proof.is_pass(self._token, request, self._unix_s()):
                return True
            self._unproven.pop(peer, None)  # this is not one more failure: none would ever be admitted again
            self._report(peer, Refusal("failures", "too many connections from there have failed"))
            return False

        if not self._budgets.admits(peer.address):
            peer.channel.require(passes)
        self._open.add(peer)
        self._unproven[peer] = None
        if len(self._unproven) > MAX_UNPROVEN:
            # The oldest: an executor with the token needs a moment only.
            oldest = next(iter(self._unproven))
            oldest.refuse(message_frames.TOO_SLOW, Refusal("many", "too many wait to prove themselves"))
        return True

    def prove(self, peer: Peer) -> int:
        """It has proved that it knows the token; up to which number its kept messages have been received for good."""
        self._unproven.pop(peer, None)
        mark = self._held.get(peer.host) or self._marks.get(peer.host)
        return mark.sequence if mark is not None and mark.instance == peer.instance else 0

    def join(self, peer: Peer, hello: messages.Hello) -> None:
        """Its `Hello` has come: it takes the place of an earlier connection of its host."""
        self._hand_on_beats()  # of the earlier connection, which count for nothing once it is replaced
        before = self._peers.get(peer.host)
        self._peers[peer.host] = peer
        if before is not None:
            before.channel.end(message_frames.REPLACED, f"another executor of {peer.host} has connected")
        # Another instance is another executor: its numbers begin anew, and what the former one kept is lost with it.
        mark = self._marks.get(peer.host)
        if mark is None or mark.instance != peer.instance:
            self._marks[peer.host] = ReceivedMark(peer.instance, 0)
            self._held.pop(peer.host, None)
        try:
            self._on_hello(peer.host, hello)
        except Exception:
            self._failed(peer)

    def beat(self, peer: Peer, beat: messages.Heartbeat) -> None:
        """Its heartbeat has come; all of one round of the loop are handed on together."""
        if not self._beats:
            self._loop.call_soon(self._hand_on_beats)
        self._beats.append((peer, beat))

    def take(self, peer: Peer, message: KeptMessage, sequence: int) -> bool:
        """It has sent a message; False: this could not be handled, or is not received for good yet."""
        self._hand_on_beats()  # what it has sent earlier comes first
        before = self._marks[peer.host]
        if self._peers.get(peer.host) is not peer:
            return False
        if sequence <= before.sequence:  # sent again, because the connection broke before it was acknowledged
            return peer.host not in self._held
        # Before the call: whoever journals the message takes the mark that includes it.
        self._marks[peer.host] = ReceivedMark(peer.instance, sequence)
        try:
            is_later = self._on_message(peer.host, message)
        except Exception:
            self._marks[peer.host] = before
            self._failed(peer)
            return False
        if not is_later:
            return True
        # Until `acknowledge`, a driver that is started again has to be sent it again: `prove` answers with this mark.
        self._held.setdefault(peer.host, before)
        return False

    def leave(self, peer: Peer, ending: ConnectionEnd) -> None:
        """It is gone."""
        self._hand_on_beats()
        if peer in self._unproven and self._closing is None:
            reason = f"it ended before it had proved itself: {ending.reason}"
            self.refuse(peer, Refusal("end", reason))
        self._open.discard(peer)
        if self._closing is not None and not self._open:
            self._closing.set()
        if self._peers.get(peer.host) is peer:
            del self._peers[peer.host]
            try:
                self._on_gone(peer.host, ending.reason)
            except Exception:
                _log.exception("the driver could not handle that the connection of %s has ended", peer.host)

    def refuse(self, peer: Peer, refusal: Refusal) -> None:
        """It was turned away."""
        if peer in self._unproven:
            del self._unproven[peer]
            if peer.channel.has_heard:  # else it has cost next to nothing
                self._budgets.failed(peer.address)
        self._report(peer, refusal)

    # The rest

    def _hand_on_beats(self) -> None:
        """Hand on the heartbeats that have come in this round of the loop, and answer them."""
        if not self._beats:
            return
        # All at once: of 12,500 hosts a call for each, and a decision after each, would be most of the driver's time.
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
                peer.refuse(message_frames.BAD_FRAME, Refusal("frame", f"not a report that may come here: {why}"))
            else:
                peer.channel.write(websocket.small(message_frames.acknowledged(beat.sequence)))

    def _write(self, peer: Peer | None, frame: bytes) -> bool:
        if peer is None or not peer.channel.is_open:
            return False
        peer.channel.write(frame)
        return True

    def _failed(self, peer: Peer) -> None:
        _log.exception("the driver could not handle what %s said; it will be sent again", peer.host)
        peer.channel.end(message_frames.FAILED, "the driver could not handle a message; its log says why")

    def _report(self, peer: Peer, refusal: Refusal) -> None:
        # What the other side says when it ends is anybody's text: of it only a number is kept.
        if (version := proof.other_version(refusal.reason)) is not None:
            if len(self._versions) >= _VERSIONS_KEPT:
                self._versions.pop(next(iter(self._versions)))
            self._versions[peer.address] = self.clock(), version
        others = self._throttle.due(refusal.kind)
        if others is not None:
            named = f" ({peer.host})" if peer.host else ""
            line = "refused a connection from %s%s: %s%s"
            _log.warning(line, peer.address, named, refusal.reason, and_others(others))

    def _sweep_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep_again)
        # A round later: where this process stood still, what has come meanwhile lies in its sockets, and a loop looks
        # at timers before them.
        loop.call_soon(loop.call_soon, self.sweep)
