"""The greeting and the sealing, held against another implementation of the Noise Protocol Framework."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from phalanx.ipc.handshake import MESSAGE_BYTES, Cipher, Handshake, NotAuthenticError

SECRET = bytes(range(32))
HELLO = b"prologue"


def pair(caller: bytes = SECRET, listener: bytes = SECRET, hello: bytes = HELLO) -> tuple[Handshake, Handshake]:
    return Handshake(caller, HELLO, calls=True), Handshake(listener, hello, calls=False)


def ciphers() -> tuple[tuple[Cipher, Cipher], tuple[Cipher, Cipher]]:
    caller, listener = pair()
    listener.read(caller.write())
    caller.read(listener.write())
    return caller.ciphers(), listener.ciphers()


def test_it_says_what_another_implementation_says() -> None:
    """Both sides' messages as noiseprotocol 0.3.1 (PyPI) computes them for these keys, the listener's by it."""
    one, two = (X25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
    caller = Handshake(SECRET, HELLO, calls=True, ephemeral=one)
    listener = Handshake(SECRET, HELLO, calls=False, ephemeral=two)
    first = caller.write(b"hello")
    assert first.hex() == (
        "a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a20919750e70e782df431844b03f9bfa8c6a07a8a36cbb"
    )
    assert listener.read(first) == b"hello"
    second = listener.write(b"answer")
    assert second.hex() == (
        "ce8d3ad1ccb633ec7b70c17814a5c76ecd029685050d344745ba05870e587d59b13b2d595af1706aa9e9f78dab2769a0be0402e51e1e"
    )
    assert caller.read(second) == b"answer"
    sends, hears = caller.ciphers()
    assert sends.seal(b"one").hex() == "97d084d7a6173040406d95079bac55dfa6f890"
    assert hears.open(bytes.fromhex("5fe1fd8d1e0ca5084cebeaa90e7da2a7912bb5")) == b"two"
    assert sends.seal(b"three").hex() == "d5c18ab369fefae3ed5fa7577379836119805d1b18"


def test_either_side_is_known_by_the_secret_alone() -> None:
    for caller, listener in (pair(caller=bytes(32)), pair(listener=bytes(32)), pair(hello=b"another time")):
        with pytest.raises(NotAuthenticError):
            listener.read(caller.write())
    caller, _ = pair()
    caller.write()
    with pytest.raises(NotAuthenticError):  # said back
        caller.read(pair()[0].write())


@pytest.mark.parametrize("place", range(MESSAGE_BYTES))
def test_no_byte_of_a_greeting_can_be_changed(place: int) -> None:
    caller, listener = pair()
    message = bytearray(caller.write())
    message[place] ^= 0x40
    with pytest.raises(NotAuthenticError):
        listener.read(bytes(message))


@pytest.mark.parametrize("message", [b"", bytes(MESSAGE_BYTES), bytes(MESSAGE_BYTES - 1), b"\xff" * 100])
def test_what_is_no_greeting_is_refused(message: bytes) -> None:
    caller, listener = pair()
    caller.write()
    for side in (caller, listener):
        with pytest.raises(NotAuthenticError):
            side.read(message)


def test_pieces_open_once_in_their_order_and_their_direction() -> None:
    (says, hears), (answers, listens) = ciphers()
    first, second = says.seal(b"first"), says.seal(b"second")
    with pytest.raises(NotAuthenticError):
        ciphers()[1][1].open(first)  # of another conversation
    assert listens.open(first) == b"first"
    with pytest.raises(NotAuthenticError):
        listens.open(first)
    with pytest.raises(NotAuthenticError):
        hears.open(second)  # sent back
    with pytest.raises(NotAuthenticError):
        listens.open(answers.seal(b"answer"))


def test_a_piece_that_is_left_out_is_noticed() -> None:
    (says, _), (_, listens) = ciphers()
    says.seal(b"first")
    with pytest.raises(NotAuthenticError):
        listens.open(says.seal(b"second"))


def test_sealing_into_memory_is_the_same() -> None:
    (says, _), (_, listens) = ciphers()
    content, sealed, opened = bytes(range(256)) * 9, bytearray(256 * 9 + 16), bytearray(256 * 9)
    says.seal_into(memoryview(content), memoryview(sealed))
    assert content[:32] not in sealed
    listens.open_into(memoryview(sealed), memoryview(opened))
    assert opened == content
    sealed[7] ^= 1
    with pytest.raises(NotAuthenticError):
        listens.open_into(memoryview(sealed), memoryview(opened))


def test_a_secret_has_its_length() -> None:
    with pytest.raises(ValueError, match="a secret of 5 bytes"):
        Handshake(b"short", HELLO, calls=True)
