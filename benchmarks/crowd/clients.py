"""Emulated executors for any server: a heartbeat a second each, and whatever comes back is its acknowledgement.

Run as `python -m crowd.clients PORT COUNT FIRST MODE [CERTIFICATE]`, with MODE `proof` (our handshake), `bare` (none)
or `json`. Prints how long connecting took, then, for each line
with a number of seconds, beats for so long and prints what it has seen as JSON. Frames are
made beforehand and only their number changes, so that the crowd costs little beside the server that is measured.
"""

from __future__ import annotations

import ssl
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from crowd import members
from crowd.beats import SEQUENCE, masked_frame, payload
from phalanx.run import messages as m


class Executor(members.Member):
    """One connection; it does not look at what it hears."""

    def hello(self) -> m.Hello:
        return m.Hello(m.VERSION, self.name, "10.0.0.1", 96, 1 << 40, [], "rack-1", "boot", 4242, 1, list(range(8)))

    def heard(self, data: bytes) -> None:
        self.answered()


class Crowd(members.Crowd[Executor]):
    def __init__(self, port: int, count: int, first: int, mode: str, context: ssl.SSLContext | None) -> None:
        super().__init__(port, count, first, context)
        self.mode = mode
        content, place, self.how = payload(mode == "json")
        self.frame = masked_frame(content)
        self.place = len(self.frame) - len(content) + place

    def member(self, index: int) -> Executor:
        return Executor(self, index, proves=self.mode == "proof")

    def send(self, due: Sequence[Executor], tick: int) -> None:
        self._number(SEQUENCE + tick)
        for executor in due:
            if executor.sent_s:
                self.unanswered += 1
                continue
            executor.sent_s = time.perf_counter()
            executor.transport.write(bytes(self.frame))

    def seen(self) -> dict[str, Any]:
        return {**super().seen(), "cpu_s": time.process_time()}

    def _number(self, sequence: int) -> None:
        digits = struct.pack(">BI", 0xCE, sequence) if self.how == "uint32" else str(sequence).encode()
        self.frame[self.place : self.place + len(digits)] = digits


async def run(arguments: list[str]) -> None:
    port, count, first = (int(text) for text in arguments[:3])
    context = None
    if len(arguments) > 4:
        context = ssl.create_default_context(cafile=arguments[4])
    await members.attend(Crowd(port, count, first, arguments[3], context))


if __name__ == "__main__":
    members.run(run(sys.argv[1:]))
