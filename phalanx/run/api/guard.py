"""Who may come in, and how much they may bring: before any route is looked at.

Every path but ``/health`` and ``/login`` needs the job's token as a bearer token. A browser gets a session for it, in a
cookie that only reads: no request that changes something is taken with a cookie, whichever site it comes from.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from phalanx.run.api.bodies import Wrong
from phalanx.run.secrets import Token

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

BODY_BYTES = 64 << 10
BODY_S = 10.0
MOST_REQUESTS = 1024  # with the token, streams too, answered at one time
LOGIN_BYTES = 4 << 10  # of a request without the token: a login brings nothing else

LOGIN_S = 3.0
SESSION_S = 12 * 3600.0

OPEN_PATHS = frozenset({"/health", "/login"})
_READING = frozenset({"GET", "HEAD"})
_LABEL = "phalanx run: session until "

_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; frame-ancestors 'none'; "
        b"base-uri 'none'",
    ),
]
_LAST_HEADERS = [(b"connection", b"close"), *_HEADERS]


class Sessions:
    """Proofs that somebody has shown the token, without the token in them; they outlive the driver, not the token.

    The name of the job is in the cookie's: cookies do not tell the ports of a host apart.
    """

    def __init__(self, token: Token, job: str, unix_s: Callable[[], float]) -> None:
        self._token, self._unix_s = token, unix_s
        self.cookie = f"phalanx-{job}"

    def issue(self) -> str:
        """A new one."""
        until = str(int(self._unix_s() + SESSION_S))
        return f"{until}.{self._proof(until)}"

    def admits(self, cookies: str) -> bool:
        """Whether a ``Cookie`` header has a session that is still good."""
        found = dict(cookie.strip().partition("=")[::2] for cookie in cookies.split(";"))
        until, _, proof = found.get(self.cookie, "").partition(".")
        is_proven = hmac.compare_digest(proof.encode(errors="replace"), self._proof(until).encode())
        return is_proven and int(until) > self._unix_s()

    def _proof(self, until: str) -> str:
        message = f"{_LABEL}{until}".encode(errors="replace")
        return hmac.digest(self._token.reveal().encode(), message, "sha256").hex()


class Guard:
    """An ASGI application in front of another. Strangers get one answer to a connection.

    Args:
        body_bytes: of a request at most; of one without the token `LOGIN_BYTES`.
        body_s: within which it has to be there; one without the token in `LOGIN_S`.
    """

    def __init__(
        self, app: App, token: Token, sessions: Sessions, *, body_bytes: int = BODY_BYTES, body_s: float = BODY_S
    ) -> None:
        self._app, self._token, self._sessions = app, token, sessions
        self._body_bytes, self._body_s = body_bytes, body_s
        self._answering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it through, or answer 401, 408, 413 or 503."""
        if scope["type"] != "http":
            return
        is_known = self.admits(scope)
        if scope["path"] not in OPEN_PATHS and not is_known:
            await self._refuse_stranger(scope, receive, send)
        elif not is_known:
            await self._answer(scope, receive, send, LOGIN_BYTES, LOGIN_S, _LAST_HEADERS)
        elif self._answering >= MOST_REQUESTS:
            await refuse(send, 503, Wrong(f"{MOST_REQUESTS} requests are being answered already", "ask again later"))
        else:
            self._answering += 1
            try:
                await self._answer(scope, receive, send, self._body_bytes, self._body_s, _HEADERS)
            finally:
                self._answering -= 1

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, most_bytes: int, body_s: float, headers: Headers
    ) -> None:
        try:
            async with asyncio.timeout(body_s):
                body = await _body(scope, receive, most_bytes)
        except TimeoutError:
            await refuse(send, 408, Wrong("the request does not come to its end", "send it faster"))
            return
        if body is None:
            await refuse(send, 413, Wrong("the request is too large", f"send {most_bytes} bytes at most"))
            return
        # What was received already comes again, and then what comes after it.
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return unread.pop() if unread else await receive()

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *headers]
            await send(message)

        await self._app(scope, again, with_headers)

    def admits(self, scope: Scope) -> bool:
        """Whether its headers have the token, or, for what only reads, a session."""
        headers = _headers(scope)
        if "authorization" in headers:
            return self._token.admits(headers["authorization"])
        return scope["method"] in _READING and self._sessions.admits(headers.get("cookie", ""))

    async def _refuse_stranger(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A connection that is closed before all is read is reset, and the answer may be lost with it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOGIN_S):
                await _body(scope, receive, LOGIN_BYTES)
        if scope["method"] == "GET" and scope["path"] == "/" and "text/html" in _headers(scope).get("accept", ""):
            headers = [(b"location", b"/login"), *_LAST_HEADERS]
            await send({"type": "http.response.start", "status": 303, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        cure = "send the header Authorization: Bearer TOKEN, with the token of the job's token file"
        await refuse(send, 401, Wrong("this needs the job's token", cure))


async def _body(scope: Scope, receive: Receive, most_bytes: int) -> bytes | None:
    """All of the request's body; None: it is too large."""
    length = _headers(scope).get("content-length", "0")
    if length.isdecimal() and int(length) > most_bytes:
        return None
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > most_bytes:
            return None
        if not message.get("more_body", False):
            return bytes(body)


async def refuse(send: Send, status: int, wrong: Wrong) -> None:
    """Answer that something is wrong, and end the connection."""
    body = msgspec.json.encode(wrong)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"www-authenticate", b'Bearer realm="phalanx"')] if status == 401 else []),
        *_LAST_HEADERS,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
