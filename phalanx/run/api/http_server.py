"""The HTTP server in the driver's event loop, bounded against clients that are slow or many.

A connection is a stranger's until its headers have shown the token, or a session. Strangers have places of their own,
few and the oldest goes first, and are heard in turn, a bounded number of them a second (`run.wire.arrivals`): so they
take neither the places nor the time of those that show the token in their first bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.core.asyncio_tasks import report_failure
from phalanx.core.errors import UserError
from phalanx.run.api.guard import Guard, Scope
from phalanx.run.wire.arrivals import Arrivals, ArrivingConnection, Turns
from phalanx.run.wire.driver_address import Address, bound

_log = logging.getLogger(__name__)

MOST_STRANGERS = 256  # connections that were heard and have not shown the token: the oldest goes for another
HEADERS_S = 5.0
WRITE_S = 30.0
_HEADER_BYTES = 16 << 10
_LEAVE_S = 2
_BACKLOG = 4096
_CREDENTIALS = re.compile(rb"\r\n(authorization|cookie):[ \t]*([^\r\n]*)", re.IGNORECASE)


@dataclass(frozen=True)
class _Connections:
    """What the connections of a server share; strangers, the oldest first."""

    admits: Callable[[Scope], bool]
    turns: Turns
    strangers: dict[_BoundedProtocol, None] = field(default_factory=dict)

    def add(self, stranger: _BoundedProtocol) -> None:
        self.strangers[stranger] = None
        if len(self.strangers) > MOST_STRANGERS:
            oldest = next(iter(self.strangers))
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, stranger: _BoundedProtocol) -> None:
        self.strangers.pop(stranger, None)
        self.turns.leave(stranger)


class _BoundedProtocol(H11Protocol):
    """HTTP/1.1 for a client that has to send its headers, and to take what it asked for, within some seconds.

    uvicorn itself would wait for both for ever. A stranger has these seconds for all that it wants.
    """

    shared: ClassVar[_Connections]
    _is_known = False
    _has_begun = False
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()
        self.shared.add(self)

    def data_received(self, data: bytes) -> None:
        """Hear it now, or when it is its turn; first words had theirs."""
        if self._is_known or not self._has_begun:
            self.hear(data)
        else:
            self.shared.turns.hear(self, data)

    def hear(self, data: bytes) -> None:
        """Go on waiting for headers; with a client that is known, only between two requests."""
        self._has_begun = True
        if not self.flow.read_paused:
            self.transport.resume_reading()
        super().data_received(data)
        if not self._is_known and self.cycle is not None and self.shared.admits(cast(Scope, self.scope)):
            self._is_known = True
            self.shared.remove(self)
        if not self._is_known:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timers(headers_only=True)
        elif self.timeout_keep_alive_task is None:
            self._wait_for_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.remove(self)
        self._cancel_timers()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _cancel_timers(self, *, headers_only: bool = False) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._stuck is not None and not headers_only:
            self._stuck.cancel()
            self._stuck = None


class _Server(uvicorn.Server):
    # Leaves signals to the driver.

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _LocalSocket:
    """Listens at a path; no other user can connect."""

    def __init__(self, path: Path, listening: socket.socket) -> None:
        self.path, self._socket, self._inode = path, listening, path.stat().st_ino
        self._server: asyncio.Server | None = None

    @classmethod
    def bound_to(cls, path: Path) -> _LocalSocket | None:
        """In the place of what a driver that was killed has left; None: it cannot be."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            path.unlink(missing_ok=True)
            os.fchmod(listening.fileno(), 0o600)  # before it has a name
            listening.bind(str(path))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
            return cls(path, listening)
        except OSError as error:
            listening.close()
            _log.warning("commands on this host go over TCP: %s cannot be listened at (%s)", path, error)
            return None

    async def serve(self, server: uvicorn.Server) -> None:
        """Let clients come in here, too."""
        config, loop = server.config, asyncio.get_running_loop()

        def made() -> asyncio.Protocol:
            given: dict[str, Any] = {"config": config, "server_state": server.server_state, "app_state": {}}
            return cast(Callable[..., asyncio.Protocol], config.http_protocol_class)(**given)

        self._server = await loop.create_unix_server(made, sock=self._socket)

    def close(self) -> None:
        """Stop listening."""
        if self._server is None:
            self._socket.close()
        else:
            self._server.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:  # else it is the next driver's
                self.path.unlink()


class HttpServer:
    """An asynchronous context that listens at `wanted`, or raises UserError; port 0: any.

    Where `wanted` names no port, that of `before`, which an earlier driver had, is taken again if it is free. `local`
    is the path of a Unix socket, too, which only this user can reach.

    Attributes:
        local: None: there is none.
    """

    def __init__(
        self,
        guard: Guard,
        wanted: Address,
        before: Address | None,
        tls: ssl.SSLContext | None,
        local: Path | None = None,
    ) -> None:
        self._socket = self._listen(wanted, before)
        self._local = None if local is None else _LocalSocket.bound_to(local)
        self.local = None if self._local is None else self._local.path
        self.address = Address(wanted.host, self._socket.getsockname()[1])
        turns = Turns(lambda data: guard.admits(_credentials(data)))
        self._arrivals = arrivals = Arrivals(within_s=HEADERS_S, turns=turns)
        serves = type("Protocol", (_BoundedProtocol,), {"shared": _Connections(guard.admits, turns)})

        def expect(**given: Any) -> asyncio.Protocol:
            return ArrivingConnection(arrivals, lambda: serves(**given))

        config = uvicorn.Config(
            guard,
            http=cast(type[asyncio.Protocol], expect),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_LEAVE_S,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HttpServer:
        """Listen."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        self._task = report_failure(serving, "the interface for people")
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        if serving.done():
            serving.result()
            raise RuntimeError("the interface for people has ended before it began")
        if self._local is not None:
            await self._local.serve(self._server)
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Stop listening; those that are being answered have some seconds."""
        if self._local is not None:
            self._local.close()
        self._server.should_exit = True
        self._arrivals.close()
        if self._task is not None:
            with contextlib.suppress(Exception):
                await self._task
        self._socket.close()

    @staticmethod
    def _listen(wanted: Address, before: Address | None) -> socket.socket:
        listening = None
        if before is not None and not wanted.port and before.host == wanted.host:
            with contextlib.suppress(UserError):
                listening = bound(before, "run.http")
        listening = listening or bound(wanted, "run.http")
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        return listening


def _credentials(data: bytes) -> Scope:
    """What of the first bytes shows who a client is: not parsed as HTTP, since it gives a turn and no right."""
    head = data[:_HEADER_BYTES].partition(b"\r\n\r\n")[0]
    shown = [(name.lower(), value) for name, value in _CREDENTIALS.findall(head)]
    return {"method": head.partition(b" ")[0].decode("latin-1"), "headers": shown}
