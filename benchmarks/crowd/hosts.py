"""Emulated hosts that do what a driver commands: a socket each, 8 ranks that make a step every half second.

Run as `python -m crowd.hosts PORT COUNT WORKERS`. Prints how long connecting took, then answers each line on stdin with
JSON: `beat SECONDS` goes on for so long, `die COUNT` ends the first rank of so many hosts at once.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import resource
import socket
import struct
import sys
import time

import msgspec
import uvloop

from crowd.clients import AT_ONCE, PER_ADDRESS, REQUEST, TICKS_PER_S
from crowd.servers import JOB, TOKEN
from phalanx.run import messages as m
from phalanx.run.wire import codec, frames, proof

STEP_S = 0.5
FROM_DRIVER = codec.Decoder(codec.FromDriverFrame)
CHALLENGE = codec.Decoder(codec.Challenge)
INTERFACES = [m.Interface(f"ib{index}", 1 << 45, 1 << 45) for index in range(2)]
STATE = m.HostState(12.34, 1 << 40, 1 << 39, 1 << 42, INTERFACES)
ENCODER = msgspec.msgpack.Encoder()


def masked(content: bytes) -> bytes:
    length = len(content)
    head = struct.pack(">BB", 0x82, 0x80 | length) if length < 126 else struct.pack(">BBH", 0x82, 0x80 | 126, length)
    return head + b"\0\0\0\0" + content


class Host(asyncio.Protocol):
    """One executor."""

    def __init__(self, crowd: Crowd, index: int) -> None:
        self.crowd, self.name, self.boot = crowd, f"node-{index}", f"boot-{index}"
        self.ready = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.stage = self.sequence = self.kept = self.attempt = 0
        self.ranks: list[int] = []
        self.began_s = self.sent_s = 0.0
        self.lines = [
            m.LogLine(rank, "step 123456 loss 2.3456 tokens/s 12345.6 lr 3.0e-04 " + "." * 20) for rank in range(4)
        ]
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(REQUEST)

    def connection_lost(self, error: Exception | None) -> None:
        self.crowd.lost += 1
        if not self.ready.done():
            self.ready.set_exception(error or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.stage == 0:
            if b"\r\n\r\n" not in self.buffer:
                return
            self.buffer = self.buffer[self.buffer.index(b"\r\n\r\n") + 4 :]
            self.stage = 1
        while (size := frames.size_of(self.buffer)) is not None and len(self.buffer) >= size:
            head = 2 if self.buffer[1] < 126 else 4
            content, self.buffer = self.buffer[head:size], self.buffer[size:]
            self._take(content)

    def _take(self, content: bytes) -> None:
        if self.stage == 1:
            challenge = CHALLENGE.decode(content)
            given = proof.answer(TOKEN, challenge, JOB, self.name, proof.new_instance(), proof.new_nonce())  # type: ignore[arg-type]
            self.transport.write(masked(codec.encode(given)))
            self.stage = 2
        elif self.stage == 2:
            hello = m.Hello(m.VERSION, self.name, "10.0.0.1", 96, 1 << 40, [], "rack-1", self.boot, 4242, 0, [])
            self.transport.write(masked(codec.encode(hello)))
            self.stage = 3
            self.ready.set_result(None)
        else:
            self._hear(FROM_DRIVER.decode(content))

    def _hear(self, message: object) -> None:
        match message:
            case m.Acknowledged():
                if self.sent_s and message.sequence == self.sequence:
                    self.crowd.latencies_s.append(time.perf_counter() - self.sent_s)
                    self.sent_s = 0.0
            case m.Check():
                self.say(m.Checked(message.number, [m.CheckOutcome("memory", "pass")]))
            case m.OpenStore():
                self.say(m.StoreOpened(message.attempt, 2950))
            case m.Start():
                self.attempt, self.ranks, self.began_s = message.attempt, message.ranks, time.monotonic()
                self.say(m.Started(message.attempt, {rank: 40_000 + rank for rank in message.ranks}))
            case m.Stop():
                self.ranks = []
                self.say(m.Stopped(message.attempt, 0.1))
            case m.Gather():
                looks = [m.RankEvidence(rank, "wait (train.py)") for rank in self.ranks]
                self.say(m.Evidence(message.attempt, looks))

    def say(self, message: codec.KeptMessage) -> None:
        self.kept += 1
        self.transport.write(masked(codec.encode(codec.Kept(self.kept, message))))

    def die(self) -> None:
        """The first rank is killed."""
        rank = self.ranks.pop(0)
        self.say(m.WorkerEnded(self.attempt, rank, -9, "signal", "killed by SIGKILL"))

    def _worker(self, rank: int, steps: int) -> m.WorkerState:
        return m.WorkerState(
            rank=rank,
            pid=40_000 + rank,
            state="running",
            step=steps,
            step_age_s=0.1234,
            last_step_s=STEP_S,
            phase="step",
            phase_age_s=0.1234,
            busy_s=0.3012,
            cpu_s=12_345.67,
            rss_bytes=3 << 30,
            loss=2.3456,
            steps_here=steps,
        )

    def beat(self, now_s: float) -> None:
        if self.sent_s:
            self.crowd.unanswered += 1
            return
        self.sequence += 1
        steps = int((now_s - self.began_s) / STEP_S) if self.ranks else 0
        workers = [self._worker(rank, steps) for rank in self.ranks]
        beat = m.Heartbeat(self.sequence, 1_790_000_000.5, self.attempt, workers, STATE, self.lines)
        content = ENCODER.encode(beat)
        self.crowd.shortest = min(self.crowd.shortest, len(content)) if self.ranks else self.crowd.shortest
        self.sent_s = time.perf_counter()
        self.transport.write(masked(content))


class Crowd:
    def __init__(self, port: int, count: int) -> None:
        self.port, self.count = port, count
        self.hosts: list[Host] = []
        self.latencies_s: list[float] = []
        self.lost = self.unanswered = self.late = 0
        self.shortest = 1 << 20

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> None:
            async with turns:
                mine = socket.socket()
                mine.setblocking(False)
                mine.bind((f"127.0.0.{2 + index // PER_ADDRESS}", 0))
                await loop.sock_connect(mine, ("127.0.0.1", self.port))
                _, host = await loop.create_connection(lambda: Host(self, index), sock=mine)
                await host.ready
                self.hosts.append(host)

        async with asyncio.TaskGroup() as group:
            for index in range(self.count):
                group.create_task(one(index))

    async def beat(self) -> None:
        """Each host once a second, a hundredth of them at a time."""
        begin_s = time.perf_counter()
        for tick in itertools.count():
            wait_s = begin_s + tick / TICKS_PER_S - time.perf_counter()
            self.late += wait_s < 0
            await asyncio.sleep(max(0.0, wait_s))
            now_s = time.monotonic()
            for host in self.hosts[tick % TICKS_PER_S :: TICKS_PER_S]:
                host.beat(now_s)

    def forget(self) -> None:
        self.latencies_s.clear()
        self.late = self.unanswered = 0


async def run(port: int, count: int) -> None:
    crowd = Crowd(port, count)
    began_s = time.monotonic()
    await crowd.connect()
    gc.freeze()
    beating = asyncio.create_task(crowd.beat())
    print(json.dumps({"connect_s": time.monotonic() - began_s}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        what, number = line.split()
        if what == "die":
            for host in crowd.hosts[: int(number)]:
                host.die()
        else:
            crowd.forget()
            await asyncio.wait([beating], timeout=float(number))
            if beating.done():
                beating.result()
        seen = {"latencies_s": crowd.latencies_s, "lost": crowd.lost, "late": crowd.late, "bytes": crowd.shortest}
        print(json.dumps({**seen, "unanswered": crowd.unanswered}), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    uvloop.run(run(int(sys.argv[1]), int(sys.argv[2])))
