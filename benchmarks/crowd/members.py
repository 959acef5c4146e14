"""What all emulated executors have in common: sockets, the real handshake, a beat a second each, spread over it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import resource
import socket
import ssl
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

import uvloop

from crowd.beats import masked_frame
from crowd.servers import JOB, TOKEN
from phalanx.ipc.codec import MessageDecoder
from phalanx.run import messages as m
from phalanx.run.wire import message_frames, proof, websocket

TICKS_PER_S = 100
AT_ONCE = 100
PER_ADDRESS = 5000
REQUEST = (
    b"GET /executors HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
CHALLENGE = MessageDecoder(message_frames.Challenge)
KEY = proof.key_of(TOKEN)
REQUESTED, UPGRADED, ANSWERED, JOINED = range(4)


class Member(asyncio.Protocol, ABC):
    """One connection; it knows just enough of WebSocket for this.

    Args:
        proves: by our handshake who it is; else it has joined once the connection is one of WebSocket.
    """

    def __init__(self, crowd: Crowd[Any], index: int, *, proves: bool = True) -> None:
        self.crowd = crowd
        self.name = f"node-{index}"
        self.proves = proves
        self.ready = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.stage = REQUESTED
        self.sent_s = 0.0
        self.transport: asyncio.Transport

    @abstractmethod
    def hello(self) -> m.Hello:
        """What it says of itself."""

    @abstractmethod
    def heard(self, data: bytes) -> None:
        """What comes once it has joined."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(REQUEST)

    def connection_lost(self, error: Exception | None) -> None:
        self.crowd.lost += 1
        if not self.ready.done():
            self.ready.set_exception(error or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        if self.stage == JOINED:
            self.heard(data)
            return
        self.buffer += data
        if self.stage == REQUESTED and b"\r\n\r\n" in self.buffer:
            self.buffer = self.buffer[self.buffer.index(b"\r\n\r\n") + 4 :]
            self.stage = UPGRADED
            if not self.proves:
                self._join()
        while self.stage in (UPGRADED, ANSWERED) and (content := self.frame()) is not None:
            self._shake_hands(content)

    def frame(self) -> bytes | None:
        """What the next frame holds, which is taken from the buffer; None: it is not whole yet."""
        size = websocket.size_of(self.buffer)
        if size is None or len(self.buffer) < size:
            return None
        head = 2 if self.buffer[1] < 126 else 4
        content, self.buffer = self.buffer[head:size], self.buffer[size:]
        return content

    def answered(self) -> None:
        """What was sent last has been acknowledged."""
        if self.sent_s:
            self.crowd.latencies_s.append(time.perf_counter() - self.sent_s)
            self.sent_s = 0.0

    def _shake_hands(self, content: bytes) -> None:
        if self.stage == UPGRADED:
            challenge = CHALLENGE.decode(content)
            given, _ = proof.answer(KEY, challenge, JOB, self.name, os.urandom(16))  # type: ignore[arg-type, misc]
            self.transport.write(masked_frame(message_frames.encode(given)))
            self.stage = ANSWERED
        else:
            self.transport.write(masked_frame(message_frames.encode(self.hello())))
            self._join()

    def _join(self) -> None:
        self.stage = JOINED
        rest, self.buffer = self.buffer, b""
        self.ready.set_result(None)
        if rest:
            self.heard(rest)


M = TypeVar("M", bound=Member)


class Crowd(ABC, Generic[M]):
    """Members that beat, and what they have seen.

    Args:
        first: number of the first of `count` members.
        context: of TLS; None: without.
    """

    def __init__(self, port: int, count: int, first: int = 0, context: ssl.SSLContext | None = None) -> None:
        self.port, self.count, self.first, self.context = port, count, first, context
        self.members: list[M] = []
        self.latencies_s: list[float] = []
        self.lost = self.unanswered = self.late = 0

    @abstractmethod
    def member(self, index: int) -> M:
        """One of them, before it is connected."""

    @abstractmethod
    def send(self, due: Sequence[M], tick: int) -> None:
        """Have these beat."""

    def seen(self) -> dict[str, Any]:
        """What is printed, since `forget`."""
        counts = {"lost": self.lost, "late": self.late, "unanswered": self.unanswered}
        return {"latencies_s": self.latencies_s, **counts}

    def forget(self) -> None:
        self.latencies_s.clear()
        self.late = self.unanswered = 0

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> None:
            async with turns:
                mine = socket.socket()
                mine.setblocking(False)
                mine.bind((f"127.0.0.{2 + index // PER_ADDRESS}", 0))
                await loop.sock_connect(mine, ("127.0.0.1", self.port))
                name = "localhost" if self.context else None
                _, member = await loop.create_connection(
                    lambda: self.member(index), sock=mine, ssl=self.context, server_hostname=name
                )
                await member.ready
                self.members.append(member)

        async with asyncio.TaskGroup() as group:
            for index in range(self.first, self.first + self.count):
                group.create_task(one(index))

    async def beat(self) -> None:
        """Each member that is connected, once a second, a hundredth of them at a time."""
        begin_s = time.perf_counter()
        for tick in itertools.count():
            wait_s = begin_s + tick / TICKS_PER_S - time.perf_counter()
            self.late += wait_s < 0
            await asyncio.sleep(max(0.0, wait_s))
            self.send(self.members[tick % TICKS_PER_S :: TICKS_PER_S], tick)

    async def obey(self, line: str, beating: asyncio.Task[None]) -> None:
        """Beat for so many seconds."""
        self.forget()
        await asyncio.wait([beating], timeout=float(line))
        if beating.done():
            beating.result()


async def attend(crowd: Crowd[Any]) -> None:
    """Connect, say how long that took, and answer each line on stdin with what has been seen."""
    began_s = time.monotonic()
    await crowd.connect()
    gc.freeze()
    beating = asyncio.create_task(crowd.beat())
    print(json.dumps({"connect_s": time.monotonic() - began_s}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        await crowd.obey(line, beating)
        print(json.dumps(crowd.seen()), flush=True)


def run(attending: Coroutine[Any, Any, None]) -> None:
    """With as many open sockets as may be."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    uvloop.run(attending)
