"""What strangers and broken peers do to the driver's connection: it costs them theirs, and nobody else anything."""

import asyncio
import logging
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_helpers import (
    TOKEN,
    Clock,
    Heard,
    answering,
    calling,
    driving,
    ended,
    executing,
    heartbeat,
    hello,
    proved,
    runs,
)

from phalanx.ipc.codec import MessageDecoder
from phalanx.run import messages as m
from phalanx.run.wire import arrivals, driver_address, executor_server, message_frames, proof

UPGRADE = (
    b"GET /executors HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


async def tcp(address, sent=b"", source="127.0.0.1"):
    """A stranger's bytes, and all that comes back until the driver hangs up."""
    reader, writer = await asyncio.open_connection(*driver_address.parse(address), local_addr=(source, 0))
    try:
        writer.write(sent)
        return await reader.read()
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()


async def challenged(raw):
    return MessageDecoder(message_frames.Challenge).decode(await raw.frame())


def answer(challenge, **changed):
    settings = {"token": TOKEN, "job": "job-a", "host": "node-1", "instance": b"i" * 16, **changed}
    return proof.answer(proof.key_of(settings.pop("token")), challenge, **settings)[0]


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"token": b"x" * 32}, "does not prove that it knows this job's token"), ({"job": "job-b"}, "of another job")],
)
def test_a_wrong_token_or_job_is_refused_and_both_sides_know_why(changed, says, caplog):
    @runs
    async def play():
        async with driving() as driver, calling(driver.address) as raw:
            raw.channel.send(message_frames.encode(answer(await challenged(raw), **changed)))
            ending = await raw.ended()
            assert ending.code == message_frames.REFUSED and says in ending.reason and ending.by_peer
            assert not driver.heard.all

    with caplog.at_level(logging.WARNING, "phalanx.run.wire"):
        play()
    assert "refused a connection from 127.0.0.1" in caplog.text and says in caplog.text


@runs
async def test_an_executor_with_a_wrong_token_learns_why_and_goes_on_trying():
    async with driving() as driver, executing(driver.address, token=b"x" * 32) as executor:
        while "knows this job's token; check its token file" not in executor.link.problem:
            await asyncio.sleep(0.01)
        assert not executor.task.done() and not driver.heard.all


@runs
async def test_an_older_executor_is_told_the_versions():
    async with driving() as driver, calling(driver.address) as raw:
        challenge = await challenged(raw)
        given_ = message_frames.HandshakeAnswer(m.VERSION - 1, "job-a", "node-1", b"i" * 16, b"p" * 48)
        raw.channel.send(message_frames.encode(given_))
        assert f"the driver speaks version {m.VERSION}, the executor {m.VERSION - 1}" in (await raw.ended()).reason
        assert challenge.version == m.VERSION
        assert driver.server.other_versions() == {"127.0.0.1": m.VERSION - 1}


@runs
async def test_of_what_an_older_executor_says_when_it_ends_only_its_version_is_kept():
    async with driving() as driver, calling(driver.address) as raw:
        await challenged(raw)
        reason = f"the driver speaks version {m.VERSION}, the executor 3; \x1b[31mlook here"
        raw.channel.end(message_frames.REFUSED, reason)
        while not driver.server.other_versions():
            await asyncio.sleep(0.01)
        assert driver.server.other_versions() == {"127.0.0.1": 3}
        driver.server.clock = lambda: time.monotonic() + 61
        assert driver.server.other_versions() == {}


@runs
async def test_a_recorded_handshake_is_of_no_use():
    async with driving() as driver:
        async with calling(driver.address) as raw:
            given_ = await proved(raw)
            await driver.heard.kind("hello")
        async with calling(driver.address) as replay:
            await challenged(replay)
            replay.channel.send(message_frames.encode(given_))
            assert (await replay.ended()).code == message_frames.REFUSED
        assert driver.hellos() == 1


@runs
async def test_the_drivers_own_proof_sent_back_is_of_no_use():
    """Two connections: the driver is given on one what it said on the other."""
    async with driving() as driver, calling(driver.address) as honest, calling(driver.address) as mirror:
        first = await challenged(honest)
        await challenged(mirror)
        honest.channel.send(message_frames.encode(answer(first)))
        accepted = MessageDecoder(message_frames.Accepted).decode(await honest.frame())
        forged = message_frames.HandshakeAnswer(m.VERSION, "job-a", "node-1", b"i" * 16, accepted.proof)
        mirror.channel.send(message_frames.encode(forged))
        assert (await mirror.ended()).code == message_frames.REFUSED


@runs
async def test_an_executor_used_as_an_oracle_proves_nothing_to_the_true_driver_later():
    """A false driver passes the true one's challenge on and keeps the answer: it is good for one connection."""
    async with driving() as driver:
        async with calling(driver.address) as first:
            challenge = await challenged(first)
        answers = Heard()

        async def play(raw):
            await raw.opened.wait()
            raw.channel.send(message_frames.encode(challenge))
            answers.add(await raw.frame())

        async with answering(play) as false, executing(false):
            stolen = await answers.until(lambda: answers.all and answers.all[0])
        async with calling(driver.address) as second:
            await challenged(second)
            second.channel.send(stolen)
            assert (await second.ended()).code == message_frames.REFUSED
        assert not driver.heard.all


@pytest.mark.parametrize(
    "content",
    [
        message_frames.encode(hello()),
        message_frames.encode(heartbeat(1)),
        message_frames.encode(message_frames.Kept(1, ended(0))),
        b"",
        b"\xc1",
        b"x" * 900,
    ],
    ids=["hello", "heartbeat", "kept", "nothing", "reserved byte", "noise"],
)
@runs
async def test_before_the_proof_nothing_else_is_accepted(content):
    async with driving() as driver, calling(driver.address) as raw:
        await challenged(raw)
        raw.channel.send(content)
        assert (await raw.ended()).code == message_frames.BAD_FRAME
        assert not driver.heard.all


@runs
async def test_before_the_proof_frames_are_small_and_few():
    async with driving() as driver:
        async with calling(driver.address) as raw:
            await challenged(raw)
            raw.channel.send(b"x" * (message_frames.MAX_HANDSHAKE_FRAME_BYTES + 1))
            assert (await raw.ended()).code == 1009
        async with calling(driver.address) as raw:
            await challenged(raw)
            for _ in range(300):  # pings are answered, but not for ever
                raw.channel._protocol.send_ping(b"x" * 125)
                raw.channel._flush()
            assert (await raw.ended()).code == 1006
        assert not driver.heard.all


@pytest.mark.parametrize(
    ("sent", "comes"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 404"),
        (b"GET /executors HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 426"),
        (b"POST /executors HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b""),
        (UPGRADE + b"Origin: http://evil.example\r\n\r\n", b"HTTP/1.1 403"),
        (UPGRADE + b"\r\n\x82\x80", b""),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100 + b"\r\n", b""),
        (b"A" * 20_000, b""),
        (b"GET /executors HTTP/1.1\r\n" + b"X-A: b\r\n" * 4000, b""),
    ],
    ids=["other path", "no upgrade", "post", "browser", "early frame", "TLS", "long line", "many headers"],
)
@runs
async def test_what_is_no_executor_gets_no_connection(sent, comes):
    async with driving() as driver, executing(driver.address) as good:
        await good.welcomed()
        back = await tcp(driver.address, sent)
        assert back.startswith(comes) or back == b"reset"
        assert b" 101 " not in back
        assert good.link.connected and driver.hellos() == 1


@pytest.mark.parametrize(
    ("opcode", "content"),
    [(0x81, b"text"), (0x02, b"a fragment"), (0x80, b"a continuation"), (0x83, b"reserved"), (0xC2, b"compressed")],
)
@runs
async def test_frames_that_are_not_whole_and_binary_end_the_connection(opcode, content):
    async with driving() as driver, calling(driver.address) as raw, executing(driver.address, "node-2") as good:
        await proved(raw)
        await good.welcomed()
        await driver.heard.until(lambda: driver.hellos() == 2)
        raw.channel._transport.write(struct.pack(">BB", opcode, 0x80 | len(content)) + b"\0\0\0\0" + content)
        await driver.heard.kind("gone")
        assert driver.server.hosts() == ["node-2"]


@runs
async def test_a_frame_that_says_it_is_huge_is_refused_at_its_head():
    async with driving() as driver, calling(driver.address) as raw:
        await proved(raw)
        await driver.heard.kind("hello")
        raw.channel._transport.write(struct.pack(">BBQ", 0x82, 0xFF, 1 << 62))
        assert (await raw.ended()).code == 1009


@runs
async def test_hello_comes_once_and_under_the_name_that_was_proved():
    for second in ([hello("node-2")], [hello("node-1"), hello("node-1")], [heartbeat(1)]):
        async with driving() as driver, calling(driver.address) as raw:
            await proved(raw, greet=False)
            for message in second:
                raw.channel.send(message_frames.encode(message))
            assert (await raw.ended()).code == message_frames.BAD_FRAME
            assert driver.hellos() == len(second) - 1


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5), st.booleans(), st.integers(1, 50))
def test_garbage_never_hurts_anybody_but_its_sender(parts, has_proof, step):
    """Before the upgrade or after the proof, whole or in small pieces."""

    @runs
    async def play():
        async with driving() as driver, executing(driver.address, "good") as good:
            await good.welcomed()
            if has_proof:
                async with calling(driver.address) as raw:
                    await proved(raw)
                    await raw.frame()
                    data = b"".join(parts) + struct.pack(">BB", 0x88, 0x80) + b"\0\0\0\0"
                    for begin in range(0, len(data), step):
                        if raw.channel._transport is not None:
                            raw.channel._transport.write(data[begin : begin + step])
                        await asyncio.sleep(0)
                    raw.channel.abort("over")
                    await driver.heard.until(lambda: driver.server.hosts() == ["good"])
            else:
                reader, writer = await asyncio.open_connection(*driver_address.parse(driver.address))
                writer.write(b"".join(parts))
                writer.close()
                await reader.read()
            good.link.send(ended(0))
            await good.link.drained()
            assert driver.messages("good") == [ended(0)]

    play()


@given(st.integers(1, 60), st.integers(0, 3))
@settings(max_examples=20)
def test_frames_may_come_in_any_pieces(step, beats):
    @runs
    async def play():
        async with driving() as driver, calling(driver.address) as raw:
            await proved(raw)
            await driver.heard.kind("hello")
            protocol = raw.channel._protocol
            for number in range(beats):
                protocol.send_binary(message_frames.encode(heartbeat(number)))
                protocol.send_ping(b"between")
            kept = message_frames.Kept(1, m.Evidence(1, [m.RankEvidence(0, "x" * 200)]))
            protocol.send_binary(message_frames.encode(kept))
            data = b"".join(protocol.data_to_send())
            for begin in range(0, len(data), step):
                raw.channel._transport.write(data[begin : begin + step])
                await asyncio.sleep(0)
            await driver.heard.until(lambda: len(driver.messages()) == beats + 1)
            assert driver.messages()[:beats] == [heartbeat(number) for number in range(beats)]

    play()


@runs
async def test_a_flood_from_one_address_is_bounded_and_others_come_in(caplog):
    async with driving(clock=Clock()) as driver, executing(driver.address, "old") as old:
        await old.welcomed()
        refused = Heard()

        async def bad():
            async with calling(driver.address, "127.0.0.2") as raw:
                await proved(raw, token=b"x" * 32, greet=False)
                refused.add(await raw.ended())

        for _ in range(arrivals.FAILURES):
            await bad()
        assert len(refused.all) == arrivals.FAILURES
        backs = [await tcp(driver.address, UPGRADE + b"\r\n", "127.0.0.2") for _ in range(20)]
        assert set(backs) <= {b"", b"reset"}  # not even an answer to the upgrade
        async with executing(driver.address, "new") as new:
            await new.welcomed()
            old.link.send(heartbeat(1))
            await driver.heard.until(lambda: driver.messages("old"))
    lines = [record for record in caplog.records if "refused a connection from 127.0.0.2" in record.message]
    assert len(lines) == 2  # one for each reason


@runs
async def test_when_too_many_wait_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(executor_server, "MAX_UNPROVEN", 3)
    async with driving() as driver:
        mutes = [calling(driver.address) for _ in range(4)]
        raws = []
        for mute in mutes:
            raws.append(await mute.__aenter__())
            await raws[-1].frame()
        assert (await raws[0].ended()).reason == "too many wait to prove themselves"
        assert not any(raw.endings for raw in raws[1:])
        async with executing(driver.address) as good:
            await good.welcomed()
        for mute in mutes:
            await mute.__aexit__(None, None, None)


@runs
async def test_a_report_that_cannot_be_read_costs_its_sender_the_connection_and_nobody_else_anything():
    def unreadable(beats):
        driver.heard.add("beats", [host for host, _ in beats])
        return {"node-2": "no report"}

    async with (
        driving() as driver,
        executing(driver.address) as good,
        calling(driver.address) as raw,
    ):
        driver.server._on_heartbeats = unreadable
        await good.welcomed()
        await proved(raw, "node-2")
        await driver.heard.until(lambda: driver.hellos() == 2)
        raw.channel.send(message_frames.encode(heartbeat(1)))
        ending = await raw.ended()
        assert ending.code == message_frames.BAD_FRAME and "no report" in ending.reason
        assert good.link.send(heartbeat(1)) and good.link.send(ended(0))
        await good.link.drained()
        assert good.link.connected


@runs
async def test_an_executor_of_a_machine_whose_budget_is_spent_comes_in(caplog):
    """A program of somebody else beside it that fails all the time keeps it out as little as one elsewhere."""
    async with driving(clock=Clock()) as driver:
        for _ in range(arrivals.FAILURES):
            async with calling(driver.address) as raw:
                await proved(raw, token=b"x" * 32, greet=False)
                await raw.ended()
        assert await tcp(driver.address, UPGRADE + b"\r\n") in (b"", b"reset")
        async with executing(driver.address) as here:
            await here.welcomed()


@runs
async def test_those_who_say_nothing_shut_no_door(monkeypatch):
    monkeypatch.setattr(executor_server, "MAX_UNPROVEN", 20)
    async with driving() as driver:
        for _ in range(2 * arrivals.FAILURES):
            (await asyncio.open_connection(*driver_address.parse(driver.address)))[1].close()
        idle = [await asyncio.open_connection(*driver_address.parse(driver.address)) for _ in range(60)]
        async with executing(driver.address) as here:
            await here.welcomed()
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize(
    ("shown", "is_good"),
    [
        (lambda now_s: proof.make_pass(TOKEN, now_s), True),
        (lambda now_s: proof.make_pass(TOKEN, now_s - proof.PASS_S + 2), True),
        (lambda now_s: proof.make_pass(TOKEN, now_s - proof.PASS_S - 2), False),
        (lambda now_s: proof.make_pass(TOKEN, now_s + proof.PASS_S + 2), False),
        (lambda now_s: proof.make_pass(b"x" * 32, now_s), False),
        (lambda now_s: f"{int(now_s)}.{'0' * 64}", False),
        (lambda now_s: "", False),
    ],
)
def test_a_pass_is_of_the_token_and_of_now(shown, is_good):
    now_s = 1_800_000_000.0
    request = f"GET /executors HTTP/1.1\r\nHost: x\r\n{proof.PASS}: {shown(now_s)}\r\nA: b\r\n\r\n"
    assert proof.is_pass(TOKEN, request.encode(), now_s) is is_good
    assert not proof.is_pass(TOKEN, b"", now_s)
