"""The codec of processes that talk: what goes in comes out, and whatever else comes is one clear error."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.ipc import local_socket
from phalanx.ipc.codec import PACKET_BYTES, BadMessageError, PacketDecoder, TooLargeError, to_packet


@dataclass(frozen=True)
class Words:
    """All that messages hold."""

    number: int
    text: str
    seconds: float = 0.0
    flag: bool = False
    content: bytes = b""
    numbers: list[int] = field(default_factory=list)
    settings: dict[str, Any] | None = None


@dataclass(frozen=True)
class Nothing:
    """No fields."""


DECODER = PacketDecoder(Words, Nothing)
_INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
# Python's names of files that are not UTF-8 have surrogates
_TEXT = st.text(st.characters(), max_size=60)
_WORDS = st.builds(
    Words,
    _INTEGERS,
    _TEXT,
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.binary(max_size=60),
    st.lists(_INTEGERS, max_size=8),
    st.none() | st.dictionaries(_TEXT, st.booleans() | _INTEGERS | _TEXT | st.lists(_TEXT, max_size=3), max_size=4),
)


@given(_WORDS | st.just(Nothing()))
def test_what_goes_in_comes_out(message):
    assert DECODER.decode(to_packet(message)) == message


@pytest.mark.parametrize("text", ["a name", "folder/\udcff"])
def test_a_packet_that_is_cut_off_at_any_byte_or_goes_on_is_refused(text):
    packet = to_packet(Words(7, text, numbers=[1, 2], settings={"a": "b"}))
    for length in range(len(packet)):
        with pytest.raises(BadMessageError, match="a packet"):
            DECODER.decode(packet[:length])
    with pytest.raises(BadMessageError, match="a packet has"):
        DECODER.decode(packet + b"\0")


@given(st.binary(max_size=200))
def test_garbage_is_refused(content):
    with pytest.raises(BadMessageError):
        DECODER.decode(b"\x93" + content)
    with contextlib.suppress(BadMessageError):  # of what says its length rightly, some is a message
        DECODER.decode(len(content).to_bytes(4, "little") + content)


@settings(max_examples=300)
@given(_WORDS, st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_a_message_or_refused(message, place, change):
    packet = bytearray(to_packet(message))
    packet[place % len(packet)] ^= change
    with contextlib.suppress(BadMessageError):
        assert isinstance(DECODER.decode(bytes(packet)), Words)


def test_of_a_nested_bomb_too():
    for body in (b"\x91" * 60_000, b"\x92\xa5Words" + b"\x91" * 60_000, b"\x92\xa5Words\xc5\xea\x60" + b"[" * 60_000):
        with pytest.raises(BadMessageError):
            DECODER.decode(len(body).to_bytes(4, "little") + body)


@pytest.mark.parametrize("value", [Words("seven", "x"), Words(1, b"\0"), Words(1, "x", numbers=[1, "2"])])
def test_a_field_of_another_type_is_refused_and_named(value):
    with pytest.raises(BadMessageError, match=r"^Words: Expected"):
        DECODER.decode(to_packet(value))


def test_a_message_that_may_not_come_here_is_refused_and_named():
    with pytest.raises(BadMessageError, match="'Words' is none of Nothing"):
        PacketDecoder(Nothing).decode(to_packet(Words(1, "")))


def test_what_is_too_large_is_neither_sent_nor_taken():
    room = PACKET_BYTES - len(to_packet(Words(1, "x" * 60_000))) + 60_000
    assert DECODER.decode(to_packet(Words(1, "x" * room))) == Words(1, "x" * room)
    with pytest.raises(TooLargeError, match=f"Words of {PACKET_BYTES + 1} bytes: a frame holds {PACKET_BYTES}"):
        to_packet(Words(1, "x" * (room + 1)))
    for length in (PACKET_BYTES - 3, (1 << 32) - 1):
        with pytest.raises(BadMessageError, match=f"{length} bytes follow: {PACKET_BYTES} is the most"):
            DECODER.decode(length.to_bytes(4, "little") + b"x" * min(length, PACKET_BYTES))


def test_the_time_grows_with_the_length_and_no_faster():
    def seconds(count: int) -> float:
        message = Words(1, "", numbers=list(range(count)))
        packet = to_packet(message)
        taken = []
        for _ in range(20):
            begin_s = time.perf_counter()
            for _ in range(10):
                DECODER.decode(packet)
                to_packet(message)
            taken.append(time.perf_counter() - begin_s)
        return min(taken)

    assert seconds(16_000) < 8 * 4 * seconds(2_000)  # 8 times as long; were it quadratic, 64 times


def test_a_socket_carries_descriptors_and_closes_those_of_what_it_refuses():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        read, write = os.pipe()
        local_socket.send(ours, Nothing(), [write])
        message, (got,) = local_socket.receive(theirs, DECODER)
        assert message == Nothing()
        os.close(got)
        socket.send_fds(ours, [b"garbage"], [write])
        os.close(write)
        with pytest.raises(BadMessageError):
            local_socket.receive(theirs, DECODER)
        assert os.read(read, 1) == b""  # nobody holds the other end any more
        os.close(read)
        ours.send(b"x" * (PACKET_BYTES + 10))  # cut off by the kernel
        with pytest.raises(BadMessageError, match="follow"):
            local_socket.receive(theirs, DECODER)
        ours.close()
        assert local_socket.receive(theirs, DECODER) == (None, [])
