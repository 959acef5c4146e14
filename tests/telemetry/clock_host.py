"""A host of a job, as a process whose monotonic clock is shifted and runs faster: one rank, its ring and its writer.

    python clock_host.py FOLDER RANK SHIFT_NS RATE SOCKET

Rank 0 and rank 1 send each other messages over SOCKET and note them as spans; rank 0 ends when its peer hangs up, rank
1 when its clock was compared twice.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from phalanx.telemetry.span_writer import HostWriter
from phalanx.telemetry.spans import Recorder


def main(folder: Path, rank: int, shift_ns: int, rate: float, descriptor: int) -> None:
    def clock_ns() -> int:
        now_ns = time.monotonic_ns()
        return now_ns + shift_ns + int((now_ns - began_ns) * rate)

    began_ns, host, peer = int((folder / "began").read_text()), f"host{rank}", 1 - rank
    recorder = Recorder.open(folder / host / f"{rank}.ring", rank=rank)
    ring = folder / host / f"{rank}.ring"
    telemetry = folder / "run" / "telemetry"
    writer = HostWriter(ring.parent, telemetry, host, store_host="127.0.0.1", clock_ns=clock_ns)
    step, sends, receives = (
        recorder.type(kind, name, group=group, ranks=ranks)  # type: ignore[arg-type]
        for kind, name, group, ranks in (
            ("step", "", "", ()),
            ("collective", "send", "pipeline", (0, 1)),
            ("collective", "recv", "pipeline", (0, 1)),
        )
    )
    connection = socket.socket(fileno=descriptor)
    estimates = telemetry / "clocks" / "host1.jsonl"
    is_enough = False
    while not is_enough:
        writer.tick()
        recorder.step += 1
        start_ns = clock_ns()
        for what in (sends, receives) if rank == 0 else (receives, sends):
            begin_ns = clock_ns()
            if what is sends:
                connection.sendall(b".")
            elif not connection.recv(1):  # the other one has enough
                is_enough = True
            recorder.record(what, begin_ns, clock_ns(), peer=peer, num_bytes=1)
        recorder.record(step, start_ns, clock_ns())
        time.sleep(0.02)
        if rank == 1 and estimates.exists() and estimates.read_text().count("\n") >= 2:
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # what is under way has somewhere to arrive
            is_enough = True
    recorder.close()
    writer.tick()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
