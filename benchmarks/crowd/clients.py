"""Emulated executors: real sockets, the real handshake, a heartbeat a second each, spread over the second.

Run as `python -m crowd.clients PORT COUNT FIRST MODE [CERTIFICATE]`, with MODE `proof` (our handshake), `bare` (none)
or `json`. Prints how long connecting took, then, for each line
with a number of seconds, beats for so long and prints what it has seen as JSON. Frames are
made beforehand and only their number changes, so that the crowd costs little beside the server that is measured.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import resource
import socket
import ssl
import struct
import sys
import time

import uvloop

from crowd.beats import SEQUENCE, masked_frame, payload
from crowd.servers import JOB, TOKEN
from phalanx.run import messages as m
from phalanx.run.wire import codec, proof

TICKS_PER_S = 100
AT_ONCE = 100
PER_ADDRESS = 5000
REQUEST = (
    b"GET /executors HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Executor(asyncio.Protocol):
    """One connection; it knows just enough of WebSocket for this."""

    def __init__(self, crowd: Crowd, index: int) -> None:
        self.crowd = crowd
        self.index = index
        self.ready = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.stage = 0
        self.sent_s = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        if self.stage == 3:
            if self.sent_s:
                self.crowd.latencies_s.append(time.perf_counter() - self.sent_s)
                self.sent_s = 0.0
            return
        self.buffer += data
        if self.stage == 0 and b"\r\n\r\n" in self.buffer:
            self.buffer = self.buffer[self.buffer.index(b"\r\n\r\n") + 4 :]
            self.stage = 1
            if self.crowd.mode != "proof":
                self._begin()
        if self.stage in (1, 2) and len(self.buffer) >= 2:
            self._handshake()

    def connection_lost(self, error: Exception | None) -> None:
        self.crowd.lost += 1
        if not self.ready.done():
            self.ready.set_exception(error or ConnectionError("closed"))

    def _handshake(self) -> None:
        length = self.buffer[1]
        assert length < 126
        if len(self.buffer) < 2 + length:
            return
        content, self.buffer = self.buffer[2 : 2 + length], self.buffer[2 + length :]
        host = f"node-{self.index}"
        if self.stage == 1:
            challenge = self.crowd.challenges.decode(content)
            given = proof.answer(TOKEN, challenge, JOB, host, proof.new_instance(), proof.new_nonce())
            self.transport.write(masked_frame(codec.encode(given)))
            self.stage = 2
        else:
            hello = m.Hello(m.VERSION, host, "10.0.0.1", 96, 1 << 40, [], "rack-1", "boot", 4242, 1, list(range(8)))
            self.transport.write(masked_frame(codec.encode(hello)))
            self._begin()

    def _begin(self) -> None:
        self.stage = 3
        self.buffer = b""
        self.ready.set_result(None)


class Crowd:
    def __init__(self, port: int, count: int, first: int, mode: str, context: ssl.SSLContext | None) -> None:
        self.port, self.count, self.first, self.mode, self.context = port, count, first, mode, context
        self.challenges = codec.Decoder(codec.Challenge)
        self.executors: list[Executor] = []
        self.latencies_s: list[float] = []
        self.lost = self.unanswered = self.late = 0
        content, place, self.how = payload(mode == "json")
        self.frame = masked_frame(content)
        self.place = len(self.frame) - len(content) + place

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
                _, executor = await loop.create_connection(
                    lambda: Executor(self, index), sock=mine, ssl=self.context, server_hostname=name
                )
                await executor.ready
                self.executors.append(executor)

        async with asyncio.TaskGroup() as group:
            for index in range(self.first, self.first + self.count):
                group.create_task(one(index))

    async def beat(self) -> None:
        """Each executor that is connected, once a second, a hundredth of them at a time."""
        begin_s = time.perf_counter()
        for tick in itertools.count():
            wait_s = begin_s + tick / TICKS_PER_S - time.perf_counter()
            self.late += wait_s < 0
            await asyncio.sleep(max(0.0, wait_s))
            self._number(SEQUENCE + tick)
            for executor in self.executors[tick % TICKS_PER_S :: TICKS_PER_S]:
                if executor.sent_s:
                    self.unanswered += 1
                    continue
                executor.sent_s = time.perf_counter()
                executor.transport.write(bytes(self.frame))

    def _number(self, sequence: int) -> None:
        digits = struct.pack(">BI", 0xCE, sequence) if self.how == "uint32" else str(sequence).encode()
        self.frame[self.place : self.place + len(digits)] = digits

    def forget(self) -> None:
        self.latencies_s.clear()
        self.late = self.unanswered = 0


async def run(arguments: list[str]) -> None:
    port, count, first = (int(text) for text in arguments[:3])
    context = None
    if len(arguments) > 4:
        context = ssl.create_default_context(cafile=arguments[4])
    crowd = Crowd(port, count, first, arguments[3], context)
    began_s = time.monotonic()
    await crowd.connect()
    gc.freeze()
    beating = asyncio.create_task(crowd.beat())
    print(json.dumps({"connect_s": time.monotonic() - began_s}), flush=True)
    loop = asyncio.get_running_loop()
    while seconds := await loop.run_in_executor(None, sys.stdin.readline):
        crowd.forget()
        await asyncio.wait([beating], timeout=float(seconds))
        if beating.done():
            beating.result()
        seen = {"latencies_s": crowd.latencies_s, "lost": crowd.lost, "late": crowd.late}
        print(json.dumps({**seen, "unanswered": crowd.unanswered, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    uvloop.run(run(sys.argv[1:]))
