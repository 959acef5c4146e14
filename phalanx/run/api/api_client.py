"""A job from elsewhere: over the interface of its driver.

The address and the token are read from the run folder each time that a connection is made anew, so that a driver which
was started again is found; or they are given, where its run folder cannot be seen.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from phalanx.core.addresses import is_loopback
from phalanx.core.errors import UserError
from phalanx.run.api import bodies
from phalanx.run.incidents.report import Incident
from phalanx.run.job_folder import read_card
from phalanx.run.reports.recent_events import SHOWN_HOSTS, Item, Overview
from phalanx.run.secrets import TlsFiles, Token, client_context, read_token

_ANSWER_S = 10.0
_QUIET_S = 35.0  # a stream sends something at least every ten seconds

Body = TypeVar("Body")


@dataclass(frozen=True)
class _Reach:
    """Where a driver is, its token, and how its certificate is checked (False: it is on loopback, without one).

    `local`: the Unix socket that leads there instead; empty: none does.
    """

    url: str
    token: Token
    verify: ssl.SSLContext | bool
    local: str = ""


class Client:
    """One job, by its run folder; implements `phalanx.run.reports.recent_events.Source`.

    Every method raises UserError where what was asked for is not there or cannot be done, or the token is not ours; and
    ConnectionError where the driver does not answer; it may again.
    """

    def __init__(self, folder: Path, reach: Callable[[], _Reach] | None = None) -> None:
        self._reach = reach or (lambda: _reach_of_folder(folder))
        self._http: httpx.AsyncClient | None = None

    @classmethod
    def at(cls, url: str, token: Token, authority: Path | None = None) -> Client:
        """A job by the URL of its driver.

        Args:
            authority: PEM file that the driver's certificate is checked by; None: the system's.

        Raises:
            UserError: the token would cross a network without TLS, or a file cannot be read.
        """
        secure = url.startswith("https://")
        if not secure and not is_loopback(url.removeprefix("http://").partition("/")[0]):
            cure = "use https, or ssh -L and the address on loopback"
            raise UserError("the token would cross the network in clear", cure=cure, value=url)
        reach = _Reach(url, token, client_context(TlsFiles(authority=authority)) if secure else False)
        return cls(Path(), lambda: reach)

    async def overview(self) -> Overview:
        """The job now."""
        return await self.status(SHOWN_HOSTS)

    async def status(self, most: int) -> bodies.Status:
        """The job now, with so many of its hosts."""
        return await self._get("/api/status", bodies.Status, most=most)

    async def hosts(self) -> list[bodies.HostBody]:
        """All hosts."""
        found: list[bodies.HostBody] = []
        after = ""
        while True:
            page = await self._get("/api/hosts", bodies.Hosts, after=after, most=500)
            found += page.hosts
            if not (after := page.next):
                return found

    async def follow(self, number: int) -> AsyncIterator[Item]:
        """What is reported after this number; ends with the job."""
        async for line in self._stream("/api/items/follow", since=number, seconds=86_400):
            yield msgspec.json.decode(line, type=Item)

    async def incidents(self) -> list[bodies.IncidentLine]:
        """All of them, the oldest first."""
        return (await self._get("/api/incidents", bodies.Incidents, last=1000)).incidents

    async def incident(self, number: int) -> Incident:
        """One of them."""
        return await self._get(f"/api/incidents/{number}", Incident)

    async def logs(self, rank: int | None, last: int) -> list[bodies.LogLine]:
        """The newest lines of a rank, or of all together."""
        return (await self._get("/api/logs", bodies.LogLines, **_rank(rank), last=last)).lines

    async def follow_logs(self, rank: int | None, last: int) -> AsyncIterator[bodies.LogLine]:
        """The newest lines and those that come; ends with the job."""
        async for line in self._stream("/api/logs/follow", **_rank(rank), last=last, seconds=86_400):
            yield msgspec.json.decode(line, type=bodies.LogLine)

    async def stop(self, who: str, grace_s: float | None = None) -> str:
        """Stop the job, with `grace_s` between SIGTERM and SIGKILL, None: as the policy has it; what was done."""
        given = {} if grace_s is None else {"grace_s": grace_s}  # a driver that runs may be older than this client
        return await self._post("/api/stop", {"who": who, **given})

    async def order(self, what: str, host: str, who: str) -> str:
        """``drain``, ``evict`` or ``return`` a host; what was done."""
        if not host or "/" in host or host in (".", ".."):
            raise UserError("is no name of a host", cure="see `phalanx run status` for their names", value=host)
        return await self._post(f"/api/hosts/{host}/{what}", {"who": who})

    async def close(self) -> None:
        """End the connection; the next call makes a new one."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def __aenter__(self) -> Client:
        """Nothing yet: connections are made when they are needed."""
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Close."""
        await self.close()

    async def _get(self, path: str, body: type[Body], **query: Any) -> Body:
        with _as_connection_errors():
            answer = await self._connection().get(path, params=query)
            _check(answer)
            return msgspec.json.decode(answer.content, type=body)

    async def _post(self, path: str, content: dict[str, Any]) -> str:
        with _as_connection_errors():
            answer = await self._connection().post(path, json=content)
            _check(answer)
            return msgspec.json.decode(answer.content, type=bodies.Done).done

    async def _stream(self, path: str, **query: Any) -> AsyncIterator[str]:
        with _as_connection_errors():
            async with self._connection().stream("GET", path, params=query, timeout=_QUIET_S) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    _check(answer)
                async for line in answer.aiter_lines():
                    if line:
                        yield line

    def _connection(self) -> httpx.AsyncClient:
        if self._http is not None:
            return self._http
        reach = self._reach()
        self._http = httpx.AsyncClient(
            base_url=reach.url,
            headers={"Authorization": reach.token.header()},
            verify=reach.verify,
            transport=httpx.AsyncHTTPTransport(uds=reach.local, verify=False) if reach.local else None,
            trust_env=False,
            timeout=_ANSWER_S,
        )
        return self._http


def _reach_of_folder(folder: Path) -> _Reach:
    card = read_card(folder)
    if card is None or not card.http:
        raise ConnectionError("the driver has not said yet where it can be reached")
    # On its host nobody else can listen to what passes through this.
    if card.local and card.driver_host == socket.gethostname() and Path(card.local).is_socket():
        return _Reach("http://localhost", read_token(card.token_path(folder)), False, card.local)
    # The driver's certificate is checked by the authority of the job, or by the certificate itself. Without one it
    # is on loopback, without TLS: see run.http.
    verify: ssl.SSLContext | bool = False
    if card.certificate:
        verify = client_context(TlsFiles(authority=Path(card.authority) if card.authority else None))
        with contextlib.suppress(OSError):  # another host does not have the file
            verify.load_verify_locations(cafile=card.certificate)
            verify.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return _Reach(card.http, read_token(card.token_path(folder)), verify)


@contextlib.contextmanager
def _as_connection_errors() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise ConnectionError(f"the driver does not answer ({error or type(error).__name__})") from error
    except msgspec.DecodeError as error:
        raise ConnectionError(f"what answers is not a driver of this version ({error})") from error


def _check(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        wrong = msgspec.json.decode(answer.content, type=bodies.Wrong)
    except msgspec.DecodeError:
        wrong = bodies.Wrong(f"the driver answers {answer.status_code}", "look into driver.log in the run folder")
    if answer.status_code >= 500:
        raise ConnectionError(f"{wrong.problem}; {wrong.cure}")
    raise UserError(wrong.problem, cure=wrong.cure)


def _rank(rank: int | None) -> dict[str, int]:
    return {} if rank is None else {"rank": rank}
