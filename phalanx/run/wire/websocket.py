"""A WebSocket over one connection of asyncio: whole binary frames in and out, nothing else.

The protocol is websockets' own without its input and output; this file moves the bytes. Compared with websockets'
asyncio connections there is no task and no queue per connection, which is most of what a server with 12,500 of them
does (docs/benchmarks/run.md). The frames that come a million times, whole masked ones in and small ones out, go without
websockets' parser too, in a tenth of its time; a test holds the two readings against each other.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import NamedTuple, cast

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import WebSocketURI

from phalanx.run.wire.message_frames import BAD_FRAME, MAX_HANDSHAKE_FRAME_BYTES, NO_CLOSE_FRAME

try:
    from websockets.speedups import apply_mask
except ImportError:  # no compiled part for this machine
    from websockets.utils import apply_mask

_WHOLE_BINARY = 0x82
_MASKED = 0x80
_LENGTH_16 = 126
_LENGTH_64 = 127
_SMALL = [bytes((_WHOLE_BINARY, length)) for length in range(_LENGTH_16)]


def size_of(data: bytes) -> int | None:
    """How long the frame is that these data begin with, head and all; None: not known yet."""
    if len(data) < 2:
        return None
    length, head = data[1] & ~_MASKED, 2
    if length == _LENGTH_16:
        length, head = int.from_bytes(data[2:4], "big"), 4
    elif length == _LENGTH_64:
        length, head = int.from_bytes(data[2:10], "big"), 10
    if len(data) < head:
        return None
    return head + (4 if data[1] & _MASKED else 0) + length


def content_of(data: bytes) -> bytes | None:
    """The content, when the data are one whole, masked, binary frame of less than 64 KiB; None: something else."""
    if len(data) < 6 or data[0] != _WHOLE_BINARY or not data[1] & _MASKED:
        return None
    length, head = data[1] ^ _MASKED, 2
    if length == _LENGTH_16:
        length, head = int.from_bytes(data[2:4], "big"), 4
    elif length == _LENGTH_64:
        return None
    if len(data) != head + 4 + length:
        return None
    return bytes(apply_mask(data[head + 4 :], data[head : head + 4]))


def small(content: bytes) -> bytes:
    """As `framed`, for a content of less than 126 bytes."""
    return _SMALL[len(content)] + content


def framed(content: bytes) -> bytes:
    """A server's binary frame with this content; the same bytes do for every connection."""
    length = len(content)
    if length < _LENGTH_16:
        return bytes((_WHOLE_BINARY, length)) + content
    if length < 1 << 16:
        return struct.pack(">BBH", _WHOLE_BINARY, _LENGTH_16, length) + content
    return struct.pack(">BBQ", _WHOLE_BINARY, _LENGTH_64, length) + content


PATH = "/executors"
_MAX_UNPROVEN_BYTES = 16 << 10
_LINGER_S = 2.0
_MAX_REASON_BYTES = 123
_MAX_HEAD_BYTES = 14
_END_OF_REQUEST = b"\r\n\r\n"
MAX_UNSENT_BYTES = 8 << 20  # a peer that lets so much wait is dropped


class ConnectionEnd(NamedTuple):
    """How a connection ended. `code`: of the close frame; 1006 where there was none."""

    code: int
    reason: str
    by_peer: bool


def server_protocol(logger: logging.Logger) -> ServerProtocol:
    """The driver's side: no page of a browser (an Origin), no compression, small frames until the peer is trusted."""
    return ServerProtocol(origins=[None], max_size=MAX_HANDSHAKE_FRAME_BYTES, logger=logger)


def client_protocol(host: str, port: int, secure: bool, logger: logging.Logger) -> ClientProtocol:
    """The executor's side."""
    uri = WebSocketURI(secure, host, port, PATH, "", None, None)
    return ClientProtocol(uri, max_size=MAX_HANDSHAKE_FRAME_BYTES, logger=logger)


def quiet_logger() -> logging.Logger:
    """For websockets, which otherwise writes a line for every connection that anybody makes."""
    logger = logging.getLogger("phalanx.run.wire.websocket")
    logger.setLevel(logging.WARNING)
    return logger


class WebSocketChannel(asyncio.Protocol):
    """One connection.

    Until `trust` is called, the peer may send little: small frames, and few bytes in all.

    Args:
        opened: called once, when frames may be sent.
        heard: called with the content of every frame.
        ended: called once, at the end, whether or not it had opened.
        connected: called first of all, before anything is read.

    Attributes:
        headers: that a client adds to its request.
        has_heard: whether the peer has sent anything at all.
    """

    def __init__(
        self,
        protocol: ServerProtocol | ClientProtocol,
        opened: Callable[[WebSocketChannel], None],
        heard: Callable[[bytes], None],
        ended: Callable[[ConnectionEnd], None],
        connected: Callable[[WebSocketChannel], None] | None = None,
    ) -> None:
        self._protocol = protocol
        self.headers: dict[str, str] = {}
        self._opened = opened
        self._heard = heard
        self._ended = ended
        self._connected = connected
        self._is_upgraded = False
        self._begun = b""
        self.has_heard = False
        self._required: Callable[[bytes], bool] | None = None
        self._transport: asyncio.Transport | None = None
        self._budget_bytes: int | None = _MAX_UNPROVEN_BYTES
        self._why: ConnectionEnd | None = None
        self._linger: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._why is None and self._transport is not None and self._protocol.state is State.OPEN

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection under it, open for frames or not."""
        return self._transport is not None

    @property
    def peer(self) -> str:
        """The address of the other side, without its port."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if name else ""

    @property
    def unsent_bytes(self) -> int:
        """What waits here because the other side does not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def require(self, good: Callable[[bytes], bool]) -> None:
        """Hang up unless the first bytes that come are `good`: nothing else is done for this peer before."""
        self._required = good

    def trust(self, max_frame_bytes: int) -> None:
        """The peer has proved itself: it may send frames so large, and as many as it likes."""
        self._budget_bytes = None
        self._protocol.max_message_size = max_frame_bytes

    def write(self, frame: bytes) -> None:
        """Send the bytes of a frame as `frames.framed` makes them, unless it is ending; on the driver's side only."""
        if self._why is None and self._transport is not None:
            self._transport.write(frame)
            self._drop_slow()

    def send(self, content: bytes) -> None:
        """Send a frame with this content."""
        self._protocol.send_binary(content)
        self._flush()

    def end(self, code: int, reason: str) -> None:
        """Close, saying why (no more than 123 bytes of it); the peer has a moment to read it."""
        if self._why is not None:
            return
        reason = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
        self._why = ConnectionEnd(code, reason, by_peer=False)
        if self._protocol.state is not State.OPEN:
            self._drop()
            return
        self._protocol.fail(code, reason)
        self._flush()
        self._limit_linger()

    def abort(self, reason: str) -> None:
        """Close at once, without a word and without what was not sent yet."""
        if self._why is None:
            self._why = ConnectionEnd(NO_CLOSE_FRAME, reason, by_peer=False)
        self._drop()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        if self._connected is not None:
            self._connected(self)
        if self._why is not None:
            self._drop()
        elif isinstance(self._protocol, ClientProtocol):
            request = self._protocol.connect()
            request.headers.update(self.headers)
            self._protocol.send_request(request)
            self._flush()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.has_heard = True
        if self._required is not None:
            required, self._required = self._required, None
            if not required(data):
                self.abort("too many connections from there have failed")
                return
        if self._budget_bytes is not None:
            self._budget_bytes -= len(data)
            if self._budget_bytes < 0:
                self.abort("it sent too much before it had proved itself")
                return
        if not self._is_upgraded:
            self._receive(data)
        elif self._why is None:
            self._receive_frames(data)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._linger is not None:
            self._linger.cancel()
        if self._why is None:
            reason = str(error) if error else "the connection was closed"
            self._why = ConnectionEnd(NO_CLOSE_FRAME, reason, by_peer=True)
        self._transport = None
        self._ended(self._why)

    # The rest

    def _receive_frames(self, data: bytes) -> None:
        # The driver's side gives the protocol whole frames only, and those that `content_of` can read not even to it.
        limit_bytes = self._protocol.max_message_size or 0
        if not self._begun:
            content = content_of(data)
            if content is not None and len(content) <= limit_bytes:  # one frame, whole, as nearly always
                self._heard(content)
                return
        data = self._begun + data
        while self._why is None and (size := size_of(data)) is not None:
            if len(data) < size <= limit_bytes + _MAX_HEAD_BYTES:
                break
            frame, data = (data, b"") if len(data) == size else (data[:size], data[size:])
            content = content_of(frame)
            if content is not None and len(content) <= limit_bytes:
                self._heard(content)
            else:
                self._receive(frame)
        self._begun = data

    def _receive(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Request) and not data.endswith(_END_OF_REQUEST):
                self.abort("it sent frames before it was let in")
            if self._why is not None:
                continue
            if isinstance(event, Frame):
                if event.opcode is Opcode.BINARY and event.fin:
                    self._heard(bytes(event.data))
                elif event.opcode not in (Opcode.PING, Opcode.PONG, Opcode.CLOSE):
                    self.end(BAD_FRAME, "a message is one whole binary frame")
            elif isinstance(event, Request):
                assert isinstance(self._protocol, ServerProtocol)
                if event.path == PATH:
                    response = self._protocol.accept(event)
                else:
                    response = self._protocol.reject(404, f"Executors connect to {PATH}.\n")
                self._protocol.send_response(response)
                self._flush()
                if self._protocol.state is State.OPEN:
                    self._is_upgraded = True
                    self._opened(self)
            elif self._protocol.state is State.OPEN:
                self._opened(self)
            else:
                self.abort(f"it answers with HTTP status {event.status_code}: no driver listens there")
        if self._protocol.writes:
            self._flush()
        if self._why is None and self._protocol.close_expected():
            self._close()

    def _close(self) -> None:
        """The protocol is closing: because the peer said so, or because what it sent breaks the rules."""
        rcvd, sent = self._protocol.close_rcvd, self._protocol.close_sent
        if rcvd is not None:
            self._why = ConnectionEnd(rcvd.code, rcvd.reason, by_peer=True)
            if self._transport is not None:
                self._transport.close()
        elif sent is not None:
            self._why = ConnectionEnd(sent.code, sent.reason, by_peer=False)
        else:
            self._why = ConnectionEnd(NO_CLOSE_FRAME, "no WebSocket was opened", by_peer=False)
        self._limit_linger()

    def _flush(self) -> None:
        assert self._transport is not None
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            elif not self._transport.can_write_eof():  # TLS
                self._transport.close()
            else:
                try:
                    self._transport.write_eof()
                except OSError:  # the peer has cut the connection, and asyncio has not noticed yet
                    self._drop()
        self._drop_slow()

    def _drop_slow(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort("it does not read what is sent to it")

    def _limit_linger(self) -> None:
        # A peer that does not close its side, or does not read, must not hold this end.
        if self._transport is not None and self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(_LINGER_S, self._drop)

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()
