"""The HTTP server in the driver's event loop, bounded against clients that are slow or many.

A connection is a stranger's until its headers have shown the token, or a session. Strangers have places of their own,
few and the oldest goes first, and are heard in turn, a bounded number of them a second (`run.wire.arrivals`): so they
take neither the places nor the time of those who show the token in their first bytes.

The interface beside a driver: opened when the driver begins, and told in the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.core.addresses import is_loopback
from phalanx.core.asyncio_tasks import told
from phalanx.core.errors import UserError
from phalanx.run.api.app import make_app
from phalanx.run.api.guard import Guard, Scope
from phalanx.run.api.job import Job
from phalanx.run.clock import read_clocks
from phalanx.run.config import RunConfig
from phalanx.run.driver.driver import Driver
from phalanx.run.driver.write_ahead import Book
from phalanx.run.job_folder import Card, card_of_this_process, write_card
from phalanx.run.reports.recent_events import Hub
from phalanx.run.secrets import TlsFiles, read_token, server_context
from phalanx.run.wire.connection import Arrivals, Turns
from phalanx.run.wire.driver_address import Address, bound, parse, publish, published

MOST_STRANGERS = 256
"""Connections that were heard and have not shown the token: the oldest goes when there is another."""

HEADERS_S = 5.0
WRITE_S = 30.0
_HEADER_BYTES = 16 << 10
_LEAVE_S = 2
_BACKLOG = 4096


_SHOWN = re.compile(rb"\r\n(authorization|cookie):[ \t]*([^\r\n]*)", re.IGNORECASE)


@dataclass(frozen=True)
class _Hall:
    """What the connections of a server share.

    Attributes:
        strangers: the oldest first.
    """

    admits: Callable[[Scope], bool]
    turns: Turns
    strangers: dict[BoundedProtocol, None] = field(default_factory=dict)

    def add(self, stranger: BoundedProtocol) -> None:
        self.strangers[stranger] = None
        if len(self.strangers) > MOST_STRANGERS:
            oldest = next(iter(self.strangers))
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, stranger: BoundedProtocol) -> None:
        self.strangers.pop(stranger, None)
        self.turns.leave(stranger)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 for a client that has to send its headers, and to take what it asked for, within some seconds.

    uvicorn itself would wait for both for ever. A stranger has these seconds for all that it wants.
    """

    hall: ClassVar[_Hall]
    _is_known = False
    _has_begun = False
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._wait_for_headers()
        self.hall.add(self)

    def data_received(self, data: bytes) -> None:
        """Hear it now, or when it is its turn; first words had theirs."""
        if self._is_known or not self._has_begun:
            self.hear(data)
        else:
            self.hall.turns.hear(self, data)

    def hear(self, data: bytes) -> None:
        """Go on waiting for headers of those who are known only between two requests."""
        self._has_begun = True
        if not self.flow.read_paused:
            self.transport.resume_reading()
        super().data_received(data)
        if not self._is_known and self.cycle is not None and self.hall.admits(cast(Scope, self.scope)):
            self._is_known = True
            self.hall.remove(self)
        if not self._is_known:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_late()
        elif self.timeout_keep_alive_task is None:
            self._wait_for_headers()

    def pause_writing(self) -> None:
        """The client does not take what it gets."""
        super().pause_writing()
        self._stuck = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._cancel_stuck()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self.hall.remove(self)
        self._cancel_late()
        self._cancel_stuck()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _cancel_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


class _Server(uvicorn.Server):
    """One that leaves signals to the driver."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """For use as an asynchronous context: listens within it.

    Args:
        guard: that answers, and says who is known.
        wanted: address; port 0: any.
        before: an address that an earlier driver had, taken again if the port is free and `wanted` names none.
        tls: None: no TLS.

    Raises:
        UserError: the address cannot be listened at.
    """

    def __init__(self, guard: Guard, wanted: Address, before: Address | None, tls: ssl.SSLContext | None) -> None:
        self._socket = _listen(wanted, before)
        self.address = Address(wanted.host, self._socket.getsockname()[1])
        turns = Turns(lambda data: guard.admits(_shown(data)))
        self._arrivals = arrivals = Arrivals(within_s=HEADERS_S, turns=turns)
        serves = type("Protocol", (BoundedProtocol,), {"hall": _Hall(guard.admits, turns)})

        def expect(**told: Any) -> asyncio.Protocol:
            return arrivals.expect(lambda: serves(**told))

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
        self._task = told(serving, "the interface for people")
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        if serving.done():
            serving.result()
            raise RuntimeError("the interface for people has ended before it began")
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Stop listening; those that are being answered have some seconds."""
        self._server.should_exit = True
        self._arrivals.close()
        if self._task is not None:
            with contextlib.suppress(Exception):
                await self._task
        self._socket.close()


def _shown(data: bytes) -> Scope:
    """What of its first bytes shows who somebody is: not parsed as HTTP, since it gives a turn and no right."""
    head = data[:_HEADER_BYTES].partition(b"\r\n\r\n")[0]
    shown = [(name.lower(), value) for name, value in _SHOWN.findall(head)]
    return {"method": head.partition(b" ")[0].decode("latin-1"), "headers": shown}


def _listen(wanted: Address, before: Address | None) -> socket.socket:
    again = before is not None and not wanted.port and before.host == wanted.host
    if again and before is not None:
        with contextlib.suppress(UserError):
            return _listening(before)
    return _listening(wanted)


def _listening(address: Address) -> socket.socket:
    listening = bound(address, "run.http")
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


_log = logging.getLogger(__name__)

ADDRESS = "http"
"""File of the run folder that says where the interface listens; a driver that is started again takes the same port."""

_EVERYWHERE = ("0.0.0.0", "::", "")


@asynccontextmanager
async def open_house(config: RunConfig, folder: Path, driver: Driver, book: Book, hub: Hub) -> AsyncIterator[None]:
    """Serve people within it; the run folder's card says where, and after the job how it has ended.

    Args:
        folder: of the run, absolute.

    Raises:
        UserError: the address cannot be listened at, or a certificate cannot be read.
    """
    token = read_token(config.token_path.absolute())
    job = Job(driver, book, hub, folder, config.log_folder.absolute())
    files = config.tls.files
    # The token proves who a person is: browsers and Prometheus need no certificate of their own.
    tls = server_context(TlsFiles(files.certificate, files.key)) if files is not None else None
    card = card_of_this_process(config, folder, read_clocks().unix_s)
    host, _, port = config.http.rpartition(":")  # checked by the config; port 0 is any
    wanted = Address(host.strip("[]"), int(port))
    async with HttpServer(make_app(job, token), wanted, _before(folder), tls) as server:
        publish(folder / ADDRESS, server.address)
        card = msgspec.structs.replace(card, http=_url(server.address, tls is not None))
        write_card(folder, card)
        try:
            yield
        finally:
            _write_end(folder, card, driver)


def _before(folder: Path) -> Address | None:
    """Where an earlier driver of this job listened."""
    with suppress(OSError, UserError, IndexError):
        return parse(published(folder / ADDRESS)()[0])
    return None


def _url(address: Address, is_secure: bool) -> str:
    """Where clients find it: whoever listens everywhere is found by the name of this machine."""
    name = socket.gethostname() if address.host in _EVERYWHERE else address.host
    if is_loopback(name) and name != address.host:
        name = "127.0.0.1"
    return f"{'https' if is_secure else 'http'}://{Address(name, address.port)}"


def _write_end(folder: Path, card: Card, driver: Driver) -> None:
    if driver.finished is None:
        return
    try:
        write_card(folder, msgspec.structs.replace(card, status=driver.finished.status, ended=driver.finished.reason))
    except OSError as error:  # the journal says it too
        _log.warning("how the job has ended could not be written to %s: %s", folder, error)
