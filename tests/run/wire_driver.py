"""A driver that is a process of its own and begins from its journal: `python wire_driver.py JOURNAL ADDRESS_FILE`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from wire_helpers import JOB, TOKEN

from phalanx.run import messages as m
from phalanx.run.wire import driver_address
from phalanx.run.wire.executor_server import ExecutorServer
from phalanx.run.wire.message_frames import ReceivedMark


async def main(journal: Path, where: Path) -> None:
    marks = {}
    for line in journal.read_text().splitlines():
        host, instance, sequence, _ = json.loads(line)
        marks[host] = ReceivedMark(bytes.fromhex(instance), sequence)
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND)

    def hello(host: str, said: m.Hello) -> None:
        server.send(host, m.Welcome(m.VERSION, JOB, 0, 1.0))

    def message(host: str, said: object) -> None:
        if isinstance(said, m.WorkerEnded):
            mark = server.mark(host)
            assert mark is not None
            line = json.dumps([host, mark.instance.hex(), mark.sequence, said.rank])
            os.write(descriptor, line.encode() + b"\n")

    def gone(host: str, why: str) -> None:
        pass

    server = ExecutorServer(
        TOKEN,
        JOB,
        "127.0.0.1",
        0,
        on_hello=hello,
        on_heartbeats=lambda beats: {},
        on_message=message,
        on_gone=gone,
        marks=marks,
    )
    async with server:
        driver_address.publish(where, server.address)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
