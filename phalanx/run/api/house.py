"""The interface beside a driver: opened when the driver begins, and told in the run folder. Torch-free."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from phalanx.core.errors import UserError
from phalanx.run.api.app import make_app
from phalanx.run.api.job import Job
from phalanx.run.api.serving import HttpServer
from phalanx.run.card import Card, card_of_this_process, write_card
from phalanx.run.config import RunConfig
from phalanx.run.driver.book import Book
from phalanx.run.driver.driver import Driver
from phalanx.run.now import read_clocks
from phalanx.run.people.hub import Hub
from phalanx.run.secrets import TlsFiles, is_loopback, read_token, server_context
from phalanx.run.wire.addresses import Address, parse, publish, published

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
