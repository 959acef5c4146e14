"""Dumps of NCCL's flight recorder: real ones are read; what is no data is refused, and bombs do not go off."""

from __future__ import annotations

import json
import os
import pickle
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.run.executor.flight_recorder import FlightSource, as_json, collect
from phalanx.telemetry.flight_dump import FlightRecordError, parse_dump, read_dump

DUMPS = Path(__file__).parents[3] / "shared/data/traces/flight-recorder"
real_dumps = pytest.mark.skipif(not DUMPS.exists(), reason="real dumps are not at hand")

LIMIT_S = 60.0


def entry(number: int) -> dict[str, Any]:
    return {"record_id": number, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce"}


def dump(count: int = 1) -> bytes:
    return pickle.dumps({"version": "2.9", "entries": [entry(number) for number in range(count)]}, protocol=2)


@real_dumps
def test_every_real_dump_is_read() -> None:
    paths = sorted(DUMPS.glob("*/_dump_*"))
    assert len(paths) >= 32
    for path in paths:
        record = read_dump(path)
        assert {"version", "pg_config", "pg_status"} <= record.keys()
        text = as_json(record)
        assert json.loads(text)["left_out"] == 0 and len(text) <= 64 << 10
        assert {one["state"] for one in record["entries"]} <= {"scheduled", "started", "completed"}


class _Hostile:
    """What it is made into is a call."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self._made = (target, arguments)

    def __reduce__(self) -> Any:
        return self._made


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_calls_something_is_refused(protocol: int, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    content = pickle.dumps({"entries": [_Hostile(os.mkdir, str(trap))]}, protocol)
    with pytest.raises(FlightRecordError):
        parse_dump(content)
    assert not trap.exists()


def test_text_pickles_and_extensions_are_refused() -> None:
    for content in (
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL, REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"Pid\n.",  # PERSID
        b"\x82\x01.",  # EXT1
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",  # BYTEARRAY8: memory before there is content
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"I1" + b"0" * 100_000 + b"\n.",  # INT, in decimal
    ):
        with pytest.raises(FlightRecordError):
            parse_dump(content)


def test_a_memo_far_away_takes_no_memory() -> None:
    content = b"\x80\x02}r\xff\xff\xff\xff" + pickle.dumps({"entries": []}, 2)[3:]
    with pytest.raises(FlightRecordError):
        parse_dump(content[:-30])
    parse_dump(b"\x80\x02}r\xff\xff\xff\xff0" + pickle.dumps({"entries": []}, 2)[2:])


def test_a_short_pickle_that_stands_for_billions_of_values_is_refused() -> None:
    bomb: list = ["x"]
    for _ in range(12):
        bomb = [bomb] * 100
    content = pickle.dumps({"entries": bomb}, 2)
    assert len(content) < 10_000
    with pytest.raises(FlightRecordError, match="more than a flight recorder writes"):
        parse_dump(content)


def test_a_value_that_holds_itself_is_refused() -> None:
    ring: list = []
    ring.append(ring)
    with pytest.raises(FlightRecordError, match="more than a flight recorder writes"):
        parse_dump(pickle.dumps({"entries": ring}, 2))


def test_what_is_no_record_is_refused() -> None:
    for value in ([], {"entries": 5}, {"entries": [b"bytes"]}, {"entries": [{1.5: 2}]}, {"entries": [1 << 70]}):
        with pytest.raises(FlightRecordError):
            parse_dump(pickle.dumps(value, 2))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    with pytest.raises(FlightRecordError):
        parse_dump(b"\x80\x02" + content)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
@settings(deadline=None)
def test_a_damaged_dump_is_refused_or_read(at: int, damage: bytes) -> None:
    content = dump(3)
    at %= len(content)
    damaged = content[:at] + damage + content[at + len(damage) :]
    with suppress(FlightRecordError):
        assert isinstance(parse_dump(damaged)["entries"], list)


def test_json_dumps_are_read_too() -> None:
    assert parse_dump(b'{"entries": [{"record_id": 1}]}')["entries"] == [{"record_id": 1}]


def test_the_newest_entries_are_kept_when_there_is_no_room_for_all() -> None:
    record = parse_dump(dump(1000))
    text = as_json(record, 5000)
    kept = json.loads(text)
    assert len(text) <= 5000 and kept["entries"][-1]["record_id"] == 999
    assert len(kept["entries"]) + kept["left_out"] == 1000
    assert json.loads(as_json(record, 10))["left_out"] == 1000


def test_a_rank_is_asked_for_a_dump_through_its_pipe(tmp_path: Path) -> None:
    pipe, file = tmp_path / "0.pipe", tmp_path / "trace_0"
    os.mkfifo(pipe)
    file.write_bytes(dump(1))
    os.utime(file, (1, 1))  # of an earlier time
    asked = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def rank() -> None:
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            try:
                if os.read(asked, 10):
                    break
            except BlockingIOError:
                pass
            time.sleep(0.01)
        whole = dump(5)
        file.write_bytes(whole[:20])  # a dump takes a while
        time.sleep(0.1)
        file.write_bytes(whole)

    thread = threading.Thread(target=rank)
    thread.start()
    text, problem = collect(FlightSource(file, pipe), time.monotonic() + LIMIT_S)
    thread.join()
    os.close(asked)
    assert problem == "" and len(json.loads(text)["entries"]) == 5


def test_a_rank_that_nobody_can_ask_may_have_left_a_dump(tmp_path: Path) -> None:
    file = tmp_path / "trace_0"
    assert collect(FlightSource(file, tmp_path / "no.pipe"), time.monotonic() + 1) == ("", "the rank wrote none")
    file.write_bytes(dump(2))
    text, problem = collect(FlightSource(file), time.monotonic() + 1)
    assert problem == "" and len(json.loads(text)["entries"]) == 2
    text, problem = collect(FlightSource(file, since_unix_s=time.time() + 100), time.monotonic() + 1)
    assert (text, problem) == ("", "the rank wrote none")  # of an earlier attempt
    file.write_bytes(b"nonsense")
    text, problem = collect(FlightSource(file), time.monotonic() + 1)
    assert text == "" and "not for data" in problem
