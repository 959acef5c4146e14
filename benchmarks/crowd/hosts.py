"""Emulated hosts that do what a driver commands: a socket each, 8 ranks that make a step every half second.

Run as `python -m crowd.hosts PORT COUNT WORKERS`. Prints how long connecting took, then answers each line on stdin with
JSON: `beat SECONDS` goes on for so long, `die COUNT` ends the first rank of so many hosts at once.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from crowd import members
from crowd.beats import LINES, STATE, UNIX_S, masked_frame, worker
from phalanx.ipc.codec import MessageDecoder
from phalanx.run import messages as m
from phalanx.run.messages import heartbeat
from phalanx.run.wire import message_frames

STEP_S = 0.5
FROM_DRIVER = MessageDecoder(message_frames.FromDriverFrame)
ENCODER = msgspec.msgpack.Encoder()


class Host(members.Member):
    """One executor."""

    crowd: Crowd

    def __init__(self, crowd: Crowd, index: int) -> None:
        super().__init__(crowd, index)
        self.boot = f"boot-{index}"
        self.sequence = self.kept = self.attempt = 0
        self.ranks: list[int] = []
        self.began_s = 0.0

    def hello(self) -> m.Hello:
        return m.Hello(m.VERSION, self.name, "10.0.0.1", 96, 1 << 40, [], "rack-1", self.boot, 4242, 0, [])

    def heard(self, data: bytes) -> None:
        self.buffer += data
        while (content := self.frame()) is not None:
            self._hear(FROM_DRIVER.decode(content))

    def _hear(self, message: object) -> None:
        match message:
            case m.Acknowledged():
                if message.sequence == self.sequence:
                    self.answered()
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

    def say(self, message: message_frames.KeptMessage) -> None:
        self.kept += 1
        self.transport.write(masked_frame(message_frames.encode(message_frames.Kept(self.kept, message))))

    def die(self) -> None:
        """The first rank is killed."""
        rank = self.ranks.pop(0)
        self.say(m.WorkerEnded(self.attempt, rank, -9, "signal", "killed by SIGKILL"))

    def beat(self, now_s: float) -> None:
        if self.sent_s:
            self.crowd.unanswered += 1
            return
        self.sequence += 1
        steps = int((now_s - self.began_s) / STEP_S) if self.ranks else 0
        workers = [worker(rank, steps, STEP_S, steps) for rank in self.ranks]
        carried_bytes = int(now_s * 1e9)
        beat = heartbeat(self.sequence, UNIX_S, self.attempt, workers, STATE, LINES, carried_bytes=carried_bytes)
        content = ENCODER.encode(beat)
        self.crowd.shortest = min(self.crowd.shortest, len(content)) if self.ranks else self.crowd.shortest
        self.sent_s = time.perf_counter()
        self.transport.write(masked_frame(content))


class Crowd(members.Crowd[Host]):
    def __init__(self, port: int, count: int) -> None:
        super().__init__(port, count)
        self.shortest = 1 << 20

    def member(self, index: int) -> Host:
        return Host(self, index)

    def send(self, due: Sequence[Host], tick: int) -> None:
        now_s = time.monotonic()
        for host in due:
            host.beat(now_s)

    def seen(self) -> dict[str, Any]:
        return {**super().seen(), "bytes": self.shortest}

    async def obey(self, line: str, beating: asyncio.Task[None]) -> None:
        what, number = line.split()
        if what == "die":
            for host in self.members[: int(number)]:
                host.die()
        else:
            await super().obey(number, beating)


if __name__ == "__main__":
    members.run(members.attend(Crowd(int(sys.argv[1]), int(sys.argv[2]))))
