"""Who may see the dashboard, before any page is looked at.

The token comes in the URL that the command prints; the first use turns it into a cookie (HttpOnly, SameSite=Strict)
that does not hold it, and sends the browser on to the same page without it. What changes something is taken only from
pages of the dashboard itself, by what browsers say of where a request comes from. The name of the host in a request has
to be one of ours, so that no other site can have its own name lead here (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from phalanx.run.api.guard import Sessions
from phalanx.run.secrets import Token

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES = 64 << 10
TOKEN = "token"
_STATIC = "/static/"
_READING = ("GET", "HEAD")

_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        # Plotly sets styles on what it draws, and makes pictures of figures as data and blobs.
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        b"connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
]
_NO_STORE = (b"cache-control", b"no-store")


class AccessGuard:
    """An ASGI application in front of another.

    Args:
        token: None: everybody who reaches the address may come in.
        hosts: names, besides addresses and those of this machine, under which it may be reached.
    """

    def __init__(
        self, app: App, token: Token | None, hosts: Collection[str] = (), unix_s: Callable[[], float] = time.time
    ) -> None:
        self._app, self._token = app, token
        self._hosts = {host.lower() for host in ("localhost", socket.gethostname(), socket.getfqdn(), *hosts)}
        self._sessions = None
        if token is not None:
            # Cookies do not tell the ports of a host apart: two dashboards have one each.
            name = f"dashboard-{hashlib.sha256(token.reveal().encode()).hexdigest()[:8]}"
            self._sessions = Sessions(token, name, unix_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer 401, 403, 413 or 421."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_our_name(headers.get("host", "")):
            words = "The dashboard is not reached under this name. Name it with --allow-host when you start it."
            await _refuse(send, 421, words)
        elif (given := _token_in(scope)) is not None and scope["method"] in _READING:
            await self._enter(scope, send, given)
        elif not self._admits(headers):
            await _refuse(send, 401, "Open the address that phalanx dashboard has printed: it holds the token.")
        elif scope["method"] not in _READING and not _is_same_origin(headers):
            await _refuse(send, 403, "Only pages of the dashboard itself may change something.")
        elif scope["method"] not in _READING and not _is_small(headers.get("content-length", "")):
            await _refuse(send, 413, f"A request brings {BODY_BYTES} bytes at most, and says how many.")
        else:
            await self._app(scope, receive, _with_headers(send, scope["path"].startswith(_STATIC)))

    def _is_our_name(self, host: str) -> bool:
        """An address leads nowhere else, and names of this machine are known."""
        name = urlsplit(f"//{host}").hostname or ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self._hosts
        return True

    def _admits(self, headers: dict[str, str]) -> bool:
        if self._token is None or self._sessions is None:
            return True
        if "authorization" in headers:
            return self._token.admits(headers["authorization"])
        return self._sessions.admits(headers.get("cookie", ""))

    async def _enter(self, scope: Scope, send: Send, given: str) -> None:
        """Turn the token of a URL into a cookie, and the URL into one without it."""
        location = _without_token(scope)
        headers = [(b"location", location.encode()), _NO_STORE, *_HEADERS]
        if self._token is not None and self._sessions is not None:
            if not hmac.compare_digest(given.encode(errors="replace"), self._token.reveal().encode()):
                await _refuse(send, 401, "That is not the token of this dashboard; each start has a new one.")
                return
            secure = "; Secure" if scope.get("scheme") == "https" else ""
            cookie = f"{self._sessions.cookie}={self._sessions.issue()}; Path=/; HttpOnly; SameSite=Strict{secure}"
            headers.append((b"set-cookie", cookie.encode()))
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _token_in(scope: Scope) -> str | None:
    query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    return next((value for name, value in query if name == TOKEN), None)


def _without_token(scope: Scope) -> str:
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    kept = urlencode([(name, value) for name, value in query if name != TOKEN])
    # never "//host/…", which a browser takes for another host
    path: str = "/" + (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").lstrip("/\\")
    return path + (f"?{kept}" if kept else "")


def _is_same_origin(headers: dict[str, str]) -> bool:
    """Whether a page of ours, or no browser at all, sent it."""
    if "authorization" in headers:
        return True
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == headers.get("host")


def _is_small(length: str) -> bool:
    return length.isdecimal() and len(length) < 10 and int(length) <= BODY_BYTES


def _with_headers(send: Send, is_static: bool) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [*_HEADERS] if is_static else [_NO_STORE, *_HEADERS]
            known = {name for name, _ in message.get("headers", [])}
            message["headers"] = [*message.get("headers", []), *(pair for pair in own if pair[0] not in known)]
        await send(message)

    return sent


async def _refuse(send: Send, status: int, words: str) -> None:
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>phalanx dashboard</title>'
        "<style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui;margin:4em auto;max-width:36em}</style>"
        f"<h1>phalanx dashboard</h1><p>{escape(words)}</p>"
        "<p><a href='/'>Try again</a> if you came from a link and have been here before.</p></html>"
    )
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"connection", b"close"), _NO_STORE, *_HEADERS]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="phalanx dashboard"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": page.encode()})
