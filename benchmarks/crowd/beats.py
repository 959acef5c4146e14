"""The heartbeat that all contenders hear: 8 workers, at least 1 kB in MessagePack; the same values in JSON."""

from __future__ import annotations

import struct

import msgspec

from phalanx.run import messages as m
from phalanx.run.messages import heartbeat as summed
from phalanx.run.messages import report_of

SEQUENCE = 1 << 24
"""Numbers from here on take the same five bytes in MessagePack."""
PLACE = msgspec.msgpack.encode(SEQUENCE)


UNIX_S = 1_790_000_000.5
LINES = [m.LogLine(rank, "step 123456 loss 2.3456 tokens/s 12345.6 lr 3.0e-04 " + "." * 20) for rank in range(4)]
STATE = m.HostState(
    12.34, 1 << 40, 1 << 39, 1 << 42, [m.Interface(f"ib{index}", 1 << 45, 1 << 45) for index in range(2)]
)


def worker(rank: int, step: int = 123_456, last_step_s: float = 0.3456, steps_here: int = 0) -> m.WorkerState:
    return m.WorkerState(
        rank=rank,
        pid=40_000 + rank,
        state="running",
        step=step,
        step_age_s=0.1234,
        last_step_s=last_step_s,
        phase="step",
        phase_age_s=0.1234,
        busy_s=0.3012,
        cpu_s=12_345.67,
        rss_bytes=3 << 30,
        loss=2.3456,
        steps_here=steps_here,
    )


def heartbeat(sequence: int = SEQUENCE) -> m.Heartbeat:
    return summed(sequence, UNIX_S, 1, [worker(rank) for rank in range(8)], STATE, LINES, carried_bytes=1 << 46)


def named(value: object) -> object:
    """The same with names, as JSON has it; the report is no longer one by itself."""
    if isinstance(value, m.Heartbeat):
        parts = {name: named(getattr(value, name)) for name in value.__struct_fields__ if name != "report"}
        return {**parts, "report": named(report_of(value))}
    if isinstance(value, msgspec.Struct):
        return {name: named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [named(item) for item in value]
    return value


def payload(as_json: bool) -> tuple[bytes, int, str]:
    """The bytes, where in them the number stands, and how it is written (`struct`, or decimal digits)."""
    content = msgspec.json.encode(named(heartbeat())) if as_json else msgspec.msgpack.encode(heartbeat())
    place = str(SEQUENCE).encode() if as_json else PLACE
    assert content.count(place) == 1 and len(content) >= 1000
    return content, content.index(place), "digits" if as_json else "uint32"


def masked_frame(content: bytes) -> bytearray:
    """A client's binary WebSocket frame, masked with zeros: the server unmasks it as any other."""
    length = len(content)
    head = struct.pack(">BB", 0x82, 0x80 | length) if length < 126 else struct.pack(">BBH", 0x82, 0x80 | 126, length)
    return bytearray(head + b"\0\0\0\0" + content)
