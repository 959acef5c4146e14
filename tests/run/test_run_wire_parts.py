"""The pure parts of the connection: proofs, what is kept, waits, budgets of strangers, addresses, decoding."""

import contextlib
import ssl

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from wire_helpers import JOB, TOKEN, Clock, ended, heartbeat, hello

from phalanx.core.addresses import is_loopback
from phalanx.core.errors import UserError
from phalanx.core.rate_limit import LogThrottle
from phalanx.ipc.codec import BadMessageError, MessageDecoder, TooLargeError
from phalanx.run import messages as m
from phalanx.run.secrets import require_tls_unless_loopback
from phalanx.run.wire import arrivals, driver_address, driver_link, message_frames, proof, websocket
from phalanx.run.wire.driver_address import Address
from phalanx.run.wire.driver_link import Backoff

KEY = proof.key_of(TOKEN)
OTHER_KEY = proof.key_of(b"x" * 32)


def handshake():
    challenge = proof.new_challenge()
    return challenge, *proof.answer(KEY, challenge, JOB, "node-1", b"1" * 16)


def accepted(challenge, given_, key=KEY):
    reply = proof.accept(key, JOB, challenge, given_)
    assert isinstance(reply, bytes)
    return message_frames.Accepted(reply, 3)


def test_both_sides_believe_who_knows_the_token():
    challenge, given_, ours = handshake()
    assert proof.refuse_driver(ours, accepted(challenge, given_)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("host", "node-2"), ("instance", b"i" * 16), ("proof", b"p" * 48)],
)
def test_nothing_of_an_answer_can_be_changed(field, value):
    challenge, given_, _ = handshake()
    changed = msgspec.structs.replace(given_, **{field: value})
    assert proof.accept(KEY, JOB, challenge, changed).kind == "token"


@pytest.mark.parametrize("place", range(48))
def test_no_byte_of_a_proof_can_be_changed(place):
    challenge, given_, ours = handshake()

    def changed(message):
        damaged = bytearray(message.proof)
        damaged[place] ^= 1
        return msgspec.structs.replace(message, proof=bytes(damaged))

    assert proof.accept(KEY, JOB, challenge, changed(given_)).kind == "token"
    assert proof.refuse_driver(ours, changed(accepted(challenge, given_))).kind == "token"


def test_a_point_that_everybody_knows_the_result_of_is_no_proof():
    challenge, given_, ours = handshake()
    assert proof.accept(KEY, JOB, challenge, msgspec.structs.replace(given_, proof=bytes(48))).kind == "token"
    assert proof.refuse_driver(ours, message_frames.Accepted(bytes(48), 0)).kind == "token"


def test_an_answer_fits_one_challenge_one_job_one_version_one_token():
    challenge, given_, _ = handshake()
    assert proof.accept(KEY, JOB, handshake()[0], given_).kind == "token"
    assert proof.accept(KEY, "job-b", challenge, given_).kind == "job"
    assert proof.accept(OTHER_KEY, JOB, challenge, given_).kind == "token"
    older = msgspec.structs.replace(given_, version=m.VERSION - 1)
    refusal = proof.accept(KEY, JOB, challenge, older)
    assert refusal.kind == "version" and f"version {m.VERSION}" in refusal.reason


def test_a_job_that_is_renamed_in_the_answer_does_not_pass_as_another():
    challenge, given_, _ = handshake()
    assert proof.accept(KEY, "job-b", challenge, msgspec.structs.replace(given_, job="job-b")).kind == "token"


def test_a_driver_cannot_prove_itself_with_what_the_executor_said():
    _, given_, ours = handshake()
    assert proof.refuse_driver(ours, message_frames.Accepted(given_.proof, 0)).kind == "token"


def test_a_drivers_proof_fits_one_connection():
    (first, given_, _), (_, _, other) = handshake(), handshake()
    assert proof.refuse_driver(other, accepted(first, given_)).kind == "token"


def test_every_reason_fits_into_a_close_frame():
    challenge, given_, ours = handshake()
    replies = [
        proof.accept(OTHER_KEY, JOB, challenge, given_),
        proof.accept(KEY, "job-b", challenge, given_),
        proof.answer(KEY, message_frames.Challenge(99, challenge.nonce), JOB, "node-1", b"1" * 16),
        proof.refuse_driver(ours, message_frames.Accepted(b"p" * 48, 0)),
    ]
    assert all(len(refusal.reason.encode()) <= 123 for refusal in replies)


def test_the_token_is_in_nothing_that_is_sent():
    challenge, given_, _ = handshake()
    said = [challenge, given_, accepted(challenge, given_)]
    assert not any(TOKEN[:8] in message_frames.encode(message) for message in said)


def test_a_short_token_is_refused():
    with pytest.raises(UserError, match="token: a token of 7 bytes can be guessed; use at least 16"):
        proof.key_of(b"1234567")


def test_the_outbox_keeps_order_until_confirmed():
    box = driver_link.Outbox()
    for rank in range(5):
        box.put(ended(rank))
    box.confirm(2)
    decoder = MessageDecoder(message_frames.Kept)
    assert [(number, decoder.decode(content).message.rank) for number, content in box.after(3)] == [(4, 3), (5, 4)]
    assert len(box) == 3
    box.confirm(99)
    assert len(box) == 0 and list(box.after(0)) == []


def test_a_full_outbox_leaves_out_findings_only_the_oldest_first():
    box = driver_link.Outbox(limit_bytes=10_000)
    box.put(ended(0))
    for number in range(200):
        box.put(m.Found(1, [m.Finding(0, "rule", "host", f"line {number} " + "x" * 100)]))
    box.put(ended(1))
    decoder = MessageDecoder(message_frames.Kept)
    left = [decoder.decode(content) for _, content in box.after(0)]
    assert isinstance(left[0].message, m.WorkerEnded) and isinstance(left[-1].message, m.WorkerEnded)
    assert left[0].sequence == 1 and left[-1].sequence == 202
    findings = [kept.message.findings[0].line.split()[1] for kept in left[1:-1]]
    assert findings == [str(number) for number in range(200 - len(findings), 200)]
    assert 0 < len(findings) == 200 - box.dropped


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_waits_grow_to_their_limit_and_no_further(tries, fraction):
    backoff = Backoff(first_s=0.2, longest_s=10.0)
    assert 0 <= backoff.delay_s(tries, fraction) <= min(10.0, 0.2 * 2 ** min(tries, 10))
    assert backoff.delay_s(tries, fraction) <= backoff.delay_s(tries + 1, fraction)


def test_an_address_that_fails_too_often_waits_and_others_do_not():
    clock = Clock()
    gate = arrivals.FailureBudgets(clock)
    for _ in range(arrivals.FAILURES):
        assert gate.admits("10.0.0.1")
        gate.failed("10.0.0.1")
    assert not gate.admits("10.0.0.1") and gate.admits("10.0.0.2")
    clock.now_s += 1.0 / arrivals.FAILURES_PER_S
    assert gate.admits("10.0.0.1")
    gate.failed("10.0.0.1")
    assert not gate.admits("10.0.0.1")


def test_strangers_from_everywhere_take_bounded_memory():
    gate = arrivals.FailureBudgets(Clock())
    for number in range(3 * arrivals._MAX_ADDRESSES):
        gate.failed(f"address-{number}")
    assert len(gate._left) <= arrivals._MAX_ADDRESSES


def test_one_line_in_ten_seconds_and_a_count_of_the_others():
    clock = Clock()
    throttle = LogThrottle(clock)
    assert [throttle.due("token") for _ in range(4)] == [0, None, None, None]
    assert throttle.due("version") == 0
    clock.now_s += 10.0
    assert throttle.due("token") == 3


@pytest.mark.parametrize("text", ["127.0.0.1:80", "node-7.cluster:65535", "[::1]:7000"])
def test_addresses_that_are_some(text):
    assert str(driver_address.parse(text)) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "::1:80", "host:8o", "h:²"])
def test_addresses_that_are_none_say_how_to_write_one(text):
    with pytest.raises(UserError, match="write host:port"):
        driver_address.parse(text)


@pytest.mark.parametrize(("host", "is_one"), [("127.8.9.1", True), ("::1", True), ("localhost", True),
                                              ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("", False),
                                              ("localhost.example.com", False)])  # fmt: skip
def test_loopback(host, is_one):
    assert is_loopback(host) is is_one


def test_an_open_address_without_tls_is_refused_and_with_it_is_not():
    with pytest.raises(UserError, match=r"run.listen = '0.0.0.0': .* needs TLS; give a certificate"):
        require_tls_unless_loopback("0.0.0.0", None, "run.listen")
    require_tls_unless_loopback("0.0.0.0", ssl.create_default_context(), "run.listen")


def test_the_address_file_is_read_each_time(tmp_path):
    where = driver_address.published(tmp_path / "driver")
    with pytest.raises(OSError):
        where()
    for port in (7000, 7001):
        driver_address.publish(tmp_path / "driver", Address("::1", port))
        assert where() == [f"[::1]:{port}"]


DECODERS = [MessageDecoder(kind) for kind in (message_frames.Challenge, message_frames.HandshakeAnswer, message_frames.Accepted, message_frames.FromExecutorFrame, message_frames.FromDriverFrame)]  # fmt: skip  # noqa: E501
SAMPLES = [
    message_frames.encode(message)
    for message in (
        hello(),
        heartbeat(3),
        message_frames.Kept(7, m.Evidence(1, [m.RankEvidence(0, "stacks")], ["a line"])),
        m.Start(1, [0, 1], 2, 0, 1, "127.0.0.1", 1),
        message_frames.Received(7),
        message_frames.HandshakeAnswer(1, JOB, "node-1", b"i" * 16, b"p" * 48),
    )
]


def only_its_own_error(content: bytes) -> None:
    for decoder in DECODERS:
        with contextlib.suppress(BadMessageError):
            decoder.decode(content)


@given(st.binary(max_size=4096))
def test_no_bytes_make_a_decoder_raise_anything_else(content):
    only_its_own_error(content)


@given(st.sampled_from(SAMPLES), st.data())
def test_no_damage_to_a_message_makes_a_decoder_raise_anything_else(content, data):
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    only_its_own_error(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    only_its_own_error(bytes(damaged))


@pytest.mark.parametrize(
    "content",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x98\xa9heartbeat\x01\xcb" + b"\0" * 8 + b"\x01\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x9d\xa5hello" + b"\xdb\xff\xff\xff\xff",
        b"\x92\xa8received\xcf" + b"\xff" * 8,
        b"\x92\xa2\xff\xfe\x01",
    ],
    ids=["huge array", "huge inner array", "deep", "huge string", "huge number", "not text"],
)
def test_lengths_that_lie_are_an_error_at_once(content):
    for decoder in DECODERS:
        with pytest.raises(BadMessageError):
            decoder.decode(content)


def test_a_message_too_large_for_a_frame_is_refused_where_it_is_made():
    with pytest.raises(TooLargeError, match=r"Found of \d+ bytes: a frame holds 1048576"):
        message_frames.encode(m.Found(1, [m.Finding(0, "rule", "host", "x" * (1 << 20))]))


def parsed(data: bytes) -> list[bytes]:
    """What websockets makes of a client's bytes."""
    protocol = ServerProtocol(state=OPEN)
    protocol.receive_data(data)
    return [bytes(event.data) for event in protocol.events_received()]


@given(st.binary(max_size=200), st.sampled_from([0, 0, 125, 126, 65_535, 65_536]), st.binary(max_size=8), st.data())
def test_our_reading_of_frames_is_that_of_websockets(content, more, other, data):
    content = content + bytes(more)
    frame = Frame(Opcode.BINARY, content).serialize(mask=True)
    assert websocket.size_of(frame + other) == len(frame) and parsed(frame) == [content]
    assert websocket.content_of(frame) == (content if len(content) < 65_536 else None)
    assert websocket.content_of(frame[:-1]) is None and websocket.content_of(frame + b"\0") is None
    cut = websocket.size_of(frame[: data.draw(st.integers(0, len(frame)))])
    assert cut in (None, len(frame))


@given(st.binary(max_size=70), st.sampled_from([0, 55, 56, 65_535]))
def test_our_frames_are_those_of_websockets(content, more):
    content = content + bytes(more)
    assert websocket.framed(content) == Frame(Opcode.BINARY, content).serialize(mask=False)


@given(st.binary(min_size=2, max_size=40))
def test_what_is_read_past_websockets_is_what_it_would_read(data):
    content = websocket.content_of(data)
    if content is not None:
        assert parsed(data) == [content]
