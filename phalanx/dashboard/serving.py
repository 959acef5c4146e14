"""Serves the dashboard until it is interrupted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from phalanx.core.errors import UserError
from phalanx.dashboard.access_guard import TOKEN, AccessGuard
from phalanx.run.secrets import Token

_LEAVE_S = 2


@dataclass(frozen=True)
class Listening:
    """Where the dashboard listens; with a certificate, over TLS. Port 0: any that is free."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None


def serve(app: AccessGuard, listening: Listening, token: Token | None, say: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM; says first where.

    Raises:
        UserError: the address cannot be taken, or the certificate cannot be read.
    """
    listener = _listen(listening.host, listening.port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LEAVE_S,
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.key,
    )
    try:
        config.load()
    except OSError as error:
        problem = f"cannot be used ({error})"
        cure = "give PEM files that belong together"
        raise UserError(problem, cure=cure, field="--certificate", value=str(listening.certificate)) from None
    scheme = "https" if listening.certificate else "http"
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    query = f"?{TOKEN}={token.reveal()}" if token is not None else ""
    say(f"{scheme}://{host}:{listener.getsockname()[1]}/{query}")
    with listener:
        uvicorn.Server(config).run([listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        cure = "give another --port, or --port 0 for any that is free"
        raise UserError(f"cannot be listened on ({error.strerror})", cure=cure, value=f"{host}:{port}") from None
    listener.listen(128)
    return listener
