"""The contenders, each one process: they decode every heartbeat, keep the latest of each host, and acknowledge it.

Run as `python -m crowd.servers NAME [CERTIFICATE]`; the first line on stdout is the port, and each line on stdin is
answered with one line of what this process has used so far.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import json
import resource
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from phalanx.run import messages as m
from phalanx.run.wire.executor_server import ExecutorServer

TOKEN = bytes(range(32))
JOB = "benchmark"
NEEDS = {"fastapi": ["fastapi", "uvicorn"], "picows": ["picows"]}
"""What is not among the project's dependencies."""

Latest = dict[object, Any]


class Ready:
    """Says where the server listens, and answers questions on stdin."""

    def __init__(self) -> None:
        self.beats = 0
        self.latest: Latest = {}

    def listen(self, port: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._answer)
        print(port, flush=True)

    def _answer(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit
        print(
            json.dumps({"cpu_s": time.process_time(), "at_s": time.monotonic(), **memory(), **self._counts()}),
            flush=True,
        )

    def _counts(self) -> dict[str, int]:
        return {"beats": self.beats, "hosts": len(self.latest), "collections": gc.get_stats()[2]["collections"]}


def memory() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"rss_bytes": pages * resource.getpagesize()}


async def ours(ready: Ready, context: ssl.SSLContext | None) -> None:
    def heard(beats: Sequence[tuple[str, m.Heartbeat]]) -> dict[str, str]:
        ready.beats += len(beats)
        ready.latest.update(beats)
        return {}

    server = ExecutorServer(
        TOKEN, JOB, "127.0.0.1", 0, ssl=context,
        silence_s=600.0, on_hello=lambda host, hello: None, on_heartbeats=heard, on_message=lambda host, message: None,
        on_gone=lambda host, why: None,
    )  # fmt: skip
    address = await server.start()
    ready.listen(address.port)
    await asyncio.Event().wait()


def plain_decoder() -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(m.FromExecutor).decode


async def websockets(ready: Ready, context: ssl.SSLContext | None) -> None:
    from websockets.asyncio.server import serve

    decode, encode = plain_decoder(), msgspec.msgpack.encode

    async def handle(connection: Any) -> None:
        async for content in connection:
            message = decode(content)
            ready.beats += 1
            ready.latest[connection] = message
            await connection.send(encode(m.Acknowledged(message.sequence)))

    server = await serve(handle, "127.0.0.1", 0, compression=None, ping_interval=None, ssl=context, backlog=4096)
    ready.listen(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def picows(ready: Ready, context: ssl.SSLContext | None) -> None:
    from picows import WSListener, WSMsgType, ws_create_server

    decode, encode = plain_decoder(), msgspec.msgpack.encode

    class Listener(WSListener):
        def on_ws_frame(self, transport: Any, frame: Any) -> None:
            message = decode(frame.get_payload_as_memoryview())
            ready.beats += 1
            ready.latest[self] = message
            transport.send(WSMsgType.BINARY, encode(m.Acknowledged(message.sequence)))

    server = await ws_create_server(lambda request: Listener(), "127.0.0.1", 0, ssl=context, backlog=4096)
    ready.listen(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def fastapi(ready: Ready, context: ssl.SSLContext | None) -> None:
    import uvicorn
    from fastapi import FastAPI, WebSocket
    from starlette.websockets import WebSocketDisconnect

    model = pydantic_model(m.Heartbeat)
    app = FastAPI()

    async def beat(connection: WebSocket) -> None:
        await connection.accept()
        try:
            while True:
                message = model.model_validate_json(await connection.receive_bytes())
                ready.beats += 1
                ready.latest[connection] = message
                await connection.send_text(json.dumps({"sequence": message.sequence}))
        except WebSocketDisconnect:
            return

    beat.__annotations__["connection"] = WebSocket  # a name that FastAPI could not find from here
    app.add_api_websocket_route("/executors", beat)
    config = uvicorn.Config(app, port=0, log_level="error", ws_ping_interval=None, ws_per_message_deflate=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    ready.listen(server.servers[0].sockets[0].getsockname()[1])
    await serving


def pydantic_model(struct: type) -> Any:
    """The pydantic model with the fields of a message."""
    import typing

    import pydantic

    def kind(hint: Any) -> Any:
        if hint is msgspec.Raw:
            return pydantic_model(m.Report)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return pydantic_model(hint)
        if typing.get_origin(hint) is list:
            return list[kind(typing.get_args(hint)[0])]  # type: ignore[misc]
        return hint

    return pydantic.create_model(
        struct.__name__, **{name: (kind(hint), ...) for name, hint in typing.get_type_hints(struct).items()}
    )


CONTENDERS = {
    "ours": (ours, uvloop.run),
    "ours-asyncio": (ours, asyncio.run),
    "ours-tls": (ours, uvloop.run),
    "websockets": (websockets, uvloop.run),
    "websockets-asyncio": (websockets, asyncio.run),
    "picows": (picows, uvloop.run),
    "fastapi": (fastapi, uvloop.run),
}


def lacks(name: str) -> list[str]:
    """What this contender needs and is not installed."""
    wanted = NEEDS.get(name, [])
    return [package for package in wanted if not list(importlib.metadata.distributions(name=package))]


def main() -> None:
    name, certificate = sys.argv[1], (sys.argv[2:] or [None])[0]
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    serve, run = CONTENDERS[name]
    run(serve(Ready(), context))


if __name__ == "__main__":
    main()
