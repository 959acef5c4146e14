"""A driver and executors of the connection's tests: what they heard, and events to wait for."""

from __future__ import annotations

import asyncio
import functools
import os
import struct
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from phalanx.ipc.codec import MessageDecoder
from phalanx.run import messages
from phalanx.run import messages as m
from phalanx.run.wire import message_frames, proof
from phalanx.run.wire.driver_address import parse
from phalanx.run.wire.driver_link import Backoff, DriverLink
from phalanx.run.wire.executor_server import ExecutorServer
from phalanx.run.wire.websocket import ConnectionEnd, WebSocketChannel, client_protocol, quiet_logger, server_protocol

TOKEN = bytes(range(32))
JOB = "job-a"
QUICK = Backoff(first_s=0.01, longest_s=0.05)
GUARD_S = 60.0


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def hello(host: str = "node-1", attempt: int = 0, running: list[int] | None = None) -> m.Hello:
    return m.Hello(m.VERSION, host, "127.0.0.1", 2, 1 << 30, [], "", "boot", 1, attempt, running or [])


def heartbeat(sequence: int) -> m.Heartbeat:
    worker = m.WorkerState(rank=0, pid=10, state="running", step=sequence)
    return messages.heartbeat(sequence, 0.0, 1, [worker], m.HostState(0.5, 1, 1, 1), [])


def ended(rank: int) -> m.WorkerEnded:
    return m.WorkerEnded(attempt=1, rank=rank, code=-9, kind="signal")


class Heard:
    """What a side was told, in order; `until` waits for it."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._news = asyncio.Event()

    def add(self, *what: Any) -> None:
        self.all.append(what if len(what) > 1 else what[0])
        self._news.set()

    async def until(self, enough: Callable[[], Any]) -> Any:
        async with asyncio.timeout(GUARD_S):
            while not (result := enough()):
                self._news.clear()
                await self._news.wait()
        return result

    async def kind(self, kind: str) -> Any:
        return await self.until(lambda: next((what for what in self.all if what[0] == kind), None))


class Driver:
    """A server that welcomes everybody and remembers everything, as ('hello' | 'message' | 'gone', host, what)."""

    def __init__(self, port: int = 0, token: bytes = TOKEN, job: str = JOB, **settings: Any) -> None:
        self.heard = Heard()
        self.is_later = False
        self.server = ExecutorServer(
            token,
            job,
            settings.pop("host", "127.0.0.1"),
            port,
            on_hello=self._hello,
            on_heartbeats=self._beats,
            on_message=self._message,
            on_gone=lambda host, why: self.heard.add("gone", host, why),
            **settings,
        )

    def _beats(self, beats: list[tuple[str, m.Heartbeat]]) -> dict[str, str]:
        for host, beat in beats:
            self.heard.add("message", host, beat)
        return {}

    def _message(self, host: str, message: m.FromExecutor) -> bool:
        self.heard.add("message", host, message)
        return self.is_later

    def _hello(self, host: str, said: m.Hello) -> None:
        self.heard.add("hello", host, said)
        self.server.send(host, m.Welcome(m.VERSION, JOB, 0, 1.0))

    @property
    def address(self) -> str:
        return str(self.server.address)

    def messages(self, host: str = "node-1") -> list[Any]:
        return [what[2] for what in self.heard.all if what[0] == "message" and what[1] == host]

    def hellos(self) -> int:
        return sum(what[0] == "hello" for what in self.heard.all)


@asynccontextmanager
async def driving(port: int = 0, **settings: Any):
    driver = Driver(port, **settings)
    async with driver.server:
        yield driver


class Executor:
    """A link, what it heard, and the task that runs it."""

    def __init__(self, where: Any, host: str = "node-1", token: bytes = TOKEN, job: str = JOB, **settings: Any) -> None:
        self.heard = Heard()
        settings.setdefault("backoff", QUICK)
        on_message = settings.pop("on_message", self.heard.add)
        self.link = DriverLink(where, token, job, lambda: hello(host), on_message, **settings)
        self.task: asyncio.Task[None] | None = None

    async def welcomed(self, times: int = 1) -> None:
        await self.heard.until(lambda: sum(isinstance(what, m.Welcome) for what in self.heard.all) >= times)


@asynccontextmanager
async def executing(where: Any, host: str = "node-1", **settings: Any):
    executor = Executor(where, host, **settings)
    executor.task = asyncio.create_task(executor.link.run())
    try:
        yield executor
    finally:
        executor.link.close()
        executor.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await executor.task


def runs(test: Callable[..., Any]) -> Callable[..., None]:
    """An async test, with a guard."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(guarded(test, *arguments, **named))

    return run


async def guarded(test: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    async with asyncio.timeout(2 * GUARD_S):
        await test(*arguments, **named)


class Raw:
    """One side of a connection with frames and no manners."""

    def __init__(self, protocol: Any) -> None:
        self.heard = Heard()
        self.opened = asyncio.Event()
        self.endings: list[ConnectionEnd] = []
        self.channel = WebSocketChannel(protocol, lambda channel: self.opened.set(), self.heard.add, self._ended)
        self.channel.trust(m.MAX_FRAME_BYTES)
        self._taken = 0

    def _ended(self, ending: ConnectionEnd) -> None:
        self.endings.append(ending)
        self.heard.add(ending)

    async def frame(self) -> bytes:
        """The next one."""
        await self.heard.until(lambda: len(self.heard.all) > self._taken)
        self._taken += 1
        content = self.heard.all[self._taken - 1]
        assert isinstance(content, bytes), content
        return content

    async def ended(self) -> ConnectionEnd:
        return await self.heard.until(lambda: self.endings and self.endings[0])


@asynccontextmanager
async def calling(address: str, source: str = "127.0.0.1"):
    """An executor's side, connected and not yet proved."""
    target = parse(address)
    raw = Raw(client_protocol(target.host, target.port, False, quiet_logger()))
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: raw.channel, *target, local_addr=(source, 0))
    try:
        yield raw
    finally:
        raw.channel.abort("over")


async def proved(
    raw: Raw, host: str = "node-1", token: bytes = TOKEN, greet: bool = True
) -> message_frames.HandshakeAnswer:
    """Go through the handshake by hand."""
    challenge = MessageDecoder(message_frames.Challenge).decode(await raw.frame())
    given, _ = proof.answer(proof.key_of(token), challenge, JOB, host, os.urandom(16))
    raw.channel.send(message_frames.encode(given))
    if greet:
        await raw.frame()
        raw.channel.send(message_frames.encode(hello(host)))
    return given


def client_frame(message: Any) -> bytes:
    """A whole masked frame."""
    content = message_frames.encode(message)
    return struct.pack(">BBH", 0x82, 0x80 | 126, len(content)) + b"\0\0\0\0" + content


@asynccontextmanager
async def answering(play: Callable[[Raw], Any]):
    """A driver's side that does what `play` says with each connection; its address is given."""
    tasks: list[asyncio.Task[Any]] = []

    def connection() -> WebSocketChannel:
        raw = Raw(server_protocol(quiet_logger()))
        tasks.append(asyncio.ensure_future(play(raw)))
        return raw.channel

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
