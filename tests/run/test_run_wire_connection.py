"""Executors and driver over real sockets: what is said arrives, once and in order, whatever becomes of connections."""

import asyncio
import os
import socket

import pytest
from wire_helpers import (
    JOB,
    TOKEN,
    Clock,
    Driver,
    Heard,
    answering,
    calling,
    client_frame,
    driving,
    ended,
    executing,
    heartbeat,
    hello,
    proved,
    runs,
)

from phalanx.core.errors import UserError
from phalanx.ipc.codec import MessageDecoder
from phalanx.run import messages as m
from phalanx.run.wire import driver_address, driver_link, message_frames, proof
from phalanx.run.wire.driver_link import DriverLink, ReplacedError
from phalanx.run.wire.executor_server import ExecutorServer
from phalanx.run.wire.message_frames import ReceivedMark
from phalanx.run.wire.websocket import MAX_UNSENT_BYTES


@runs
async def test_what_each_says_the_other_hears():
    async with driving() as driver:
        async with executing(driver.address) as executor:
            await executor.welcomed()
            assert driver.server.hosts() == ["node-1"] and executor.link.connected
            assert executor.link.send(heartbeat(1)) and executor.link.send(ended(3))
            await executor.link.drained()
            assert driver.messages() == [heartbeat(1), ended(3)]
            assert driver.server.send("node-1", m.Stop(4)) and not driver.server.send("node-2", m.Stop(4))
            await executor.heard.until(lambda: m.Stop(4) in executor.heard.all)
        assert (await driver.heard.kind("gone"))[1] == "node-1"
        assert driver.server.hosts() == []


@runs
async def test_what_is_said_before_there_is_a_driver_is_kept_but_for_heartbeats():
    async with driving() as driver:
        address = driver.address
    async with executing(address) as executor:
        assert not executor.link.send(heartbeat(1)) and not executor.link.send(ended(0))
        executor.link.send(ended(1))
        assert len(executor.link.outbox) == 2
        async with driving(driver_address.parse(address).port) as driver:
            await executor.link.drained()
            assert driver.messages() == [ended(0), ended(1)] and len(executor.link.outbox) == 0


@runs
async def test_an_executor_keeps_what_it_has_said_until_the_driver_has_it_for_good():
    async with driving() as driver, executing(driver.address) as executor:
        driver.is_later = True
        await executor.welcomed()
        assert executor.link.send(ended(0)) and executor.link.send(ended(1)) and executor.link.send(heartbeat(1))
        await driver.heard.until(lambda: heartbeat(1) in driver.messages())
        assert driver.messages() == [ended(0), ended(1), heartbeat(1)] and len(executor.link.outbox) == 2
        driver.server.acknowledge("node-1")
        driver.server.acknowledge("node-2")  # which is not there
        await executor.link.drained()
        assert executor.link.send(ended(2))
        await driver.heard.until(lambda: ended(2) in driver.messages())
        driver.server.drop("node-1", "to see what comes again")
        await driver.heard.until(lambda: driver.hellos() == 2)
        driver.is_later = False
        assert executor.link.send(ended(3))
        await executor.link.drained()
        assert len(executor.link.outbox) == 0
        assert driver.messages()[3:] == [ended(2), ended(3)], "this driver has heard it, though it was not yet for good"


@runs
async def test_one_message_to_all():
    async with driving() as driver, executing(driver.address, "a") as first, executing(driver.address, "b") as second:
        await first.welcomed()
        await second.welcomed()
        assert driver.server.send_all(m.Stop(2)) == 2
        for executor in (first, second):
            await executor.heard.until(lambda heard=executor.heard: m.Stop(2) in heard.all)


@runs
async def test_a_driver_that_comes_back_elsewhere_is_found_by_its_file(tmp_path):
    path = tmp_path / "driver"
    async with executing(driver_address.published(path)) as executor:
        for number in range(3):
            async with driving() as driver:
                driver_address.publish(path, driver.server.address)
                await executor.welcomed(number + 1)
                executor.link.send(ended(number))
                await executor.link.drained()
                assert driver.messages() == [ended(number)] and driver.hellos() == 1
        await executor.heard.until(lambda: not executor.link.connected)


@runs
async def test_the_second_of_two_addresses_is_tried_when_the_first_is_dead():
    async with driving() as gone:
        dead = gone.address
    async with driving() as driver, executing([dead, driver.address]) as executor:
        await executor.welcomed()


@runs
async def test_a_message_that_the_driver_could_not_handle_comes_again():
    fails = [True, True]
    heard = []

    def stumble(host, message):
        if fails:
            fails.pop()
            raise OSError("the journal's disk is full")
        heard.append(message)

    async with driving() as driver, executing(driver.address) as executor:
        driver.server._on_message = stumble
        executor.link.send(ended(0))
        executor.link.send(ended(1))
        await executor.link.drained()
        assert heard == [ended(0), ended(1)] and driver.hellos() == 3


@runs
async def test_what_was_handled_before_the_acknowledgement_was_lost_is_not_handed_on_again():
    """The driver dies between both: the mark in its journal tells the next one."""
    async with driving() as first, executing(first.address) as executor:
        await executor.welcomed()
        put = first.server.take
        first.server.take = lambda *given: put(*given) and False  # handled, and no acknowledgement
        executor.link.send(ended(0))
        await first.heard.kind("message")
        mark = first.server.mark("node-1")
        port = first.server.address.port
        await first.server.close()
        async with driving(port, marks={"node-1": mark}) as second:
            executor.link.send(ended(1))
            await executor.link.drained()
            assert mark.sequence == 1 and second.messages() == [ended(1)]
            assert second.server.mark("node-1") == ReceivedMark(mark.instance, 2)


@runs
async def test_a_mark_of_another_link_does_not_hide_messages():
    async with (
        driving(marks={"node-1": ReceivedMark(b"another instance", 99)}) as driver,
        executing(driver.address) as executor,
    ):
        executor.link.send(ended(0))
        await executor.link.drained()
        assert driver.messages() == [ended(0)]


@runs
async def test_a_number_that_comes_twice_is_acknowledged_and_not_handed_on():
    async with driving() as driver, calling(driver.address) as raw:
        await proved(raw)
        await raw.frame()  # the welcome
        decoder = MessageDecoder(message_frames.FromDriverFrame)
        for sequence, received in [(1, 1), (1, 1), (3, 3), (2, 2), (4, 4)]:
            raw.channel.send(message_frames.encode(message_frames.Kept(sequence, ended(sequence))))
            assert decoder.decode(await raw.frame()) == message_frames.Received(received)
        assert driver.messages() == [ended(1), ended(3), ended(4)]


@runs
async def test_a_newer_connection_of_a_host_takes_the_place_of_the_older():
    async with driving() as driver, executing(driver.address) as old:
        await old.welcomed()
        async with executing(driver.address) as new:
            await new.welcomed()
            with pytest.raises(ReplacedError, match="another executor of node-1 has connected"):
                await old.task
            new.link.send(ended(0))
            await new.link.drained()
            assert driver.server.hosts() == ["node-1"]
            assert not any(what[0] == "gone" for what in driver.heard.all)


@runs
async def test_no_proof_no_replacement():
    async with driving() as driver, executing(driver.address) as good, calling(driver.address) as bad:
        await good.welcomed()
        await proved(bad, token=b"x" * 32, greet=False)
        assert (await bad.ended()).code == message_frames.REFUSED
        assert good.link.send(heartbeat(1)) and driver.server.hosts() == ["node-1"]


@runs
async def test_a_driver_that_does_not_answer_is_given_up_and_called_again():
    clock = Clock()
    async with driving() as driver, executing(driver.address, clock=clock, silence_s=10.0) as executor:
        await executor.welcomed()
        put = driver.server.take
        driver.server.take = lambda *given: False  # hears, and does not answer
        assert executor.link.send(heartbeat(1))
        clock.now_s += 10.0
        assert executor.link.send(heartbeat(2))
        clock.now_s += 0.1
        assert not executor.link.send(heartbeat(3))
        driver.server.take = put
        await executor.welcomed(2)
        assert "has not answered for 10 s" in executor.link.problem and executor.link.send(heartbeat(4))


@runs
async def test_a_driver_that_answers_is_never_given_up():
    clock = Clock()
    async with driving() as driver, executing(driver.address, clock=clock, silence_s=10.0) as executor:
        await executor.welcomed()
        for number in range(5):
            assert executor.link.send(heartbeat(number))
            await driver.heard.until(lambda number=number: heartbeat(number) in driver.messages())
            executor.link.send(ended(number))
            await executor.link.drained()
            clock.now_s += 100.0
        assert driver.hellos() == 1


@runs
async def test_a_silent_host_loses_its_connection_and_its_strangers_theirs():
    clock = Clock()
    async with driving(clock=clock) as driver, calling(driver.address) as raw, calling(driver.address) as mute:
        await proved(raw)
        await driver.heard.kind("hello")
        await mute.frame()
        clock.now_s += 25.0
        driver.server.sweep()
        assert (await mute.ended()) == (message_frames.TOO_SLOW, "no proof within 10 s", True)
        assert driver.server.hosts() == ["node-1"]
        clock.now_s += 10.0
        driver.server.sweep()
        assert (await raw.ended()).code == message_frames.TOO_SLOW
        assert "nothing was heard for 30 s" in (await driver.heard.kind("gone"))[2]


@runs
async def test_who_does_not_read_is_dropped_and_others_are_served():
    async with driving() as driver, calling(driver.address) as raw, executing(driver.address, "node-2") as good:
        await proved(raw)
        await good.welcomed()
        raw.channel._transport.pause_reading()
        large = m.Prepare(["x" * 900_000], False, "/", {})
        while driver.server.send("node-1", large):
            peer = driver.server._peers["node-1"].channel
            assert peer.unsent_bytes <= MAX_UNSENT_BYTES + m.MAX_FRAME_BYTES
            await asyncio.sleep(0)
        assert "does not read" in (await driver.heard.kind("gone"))[2]
        assert driver.server.hosts() == ["node-2"]
        assert driver.server.send("node-2", m.Stop(1))


@runs
async def test_a_long_absence_is_made_up_in_pieces():
    """More is kept than may wait in a connection at once."""
    count = 3 * driver_link.MAX_WAITING_BYTES // 100_000
    evidence = [m.Evidence(1, [m.RankEvidence(rank, "x" * 100_000)]) for rank in range(count)]
    async with driving() as driver, executing(lambda: driver.address) as executor:
        for one in evidence:
            executor.link.send(one)
        await executor.link.drained()
        assert driver.messages() == evidence


@runs
async def test_what_the_executor_cannot_do_ends_its_link_with_the_error():
    def refuse(message):
        raise RuntimeError("no such script")

    async with driving() as driver, executing(driver.address, on_message=refuse) as executor:
        with pytest.raises(RuntimeError, match="no such script"):
            await executor.task


@runs
async def test_close_ends_a_link_at_every_stage():
    async def mute(raw):
        await asyncio.Event().wait()

    async with answering(mute) as silent, driving() as driver:
        for where in (silent, driver.address, list, "127.0.0.1:1"):
            async with executing(where) as executor:
                if where == driver.address:
                    await executor.welcomed()
                else:
                    await asyncio.sleep(0)
                executor.link.close()
                await executor.task


@runs
async def test_the_server_closes_with_connections_of_every_kind():
    driver = Driver()
    await driver.server.start()
    address = driver.address
    async with calling(address) as mute, calling(address) as raw, executing(address, "node-2") as executor:
        await mute.frame()
        await proved(raw)
        await executor.welcomed()
        await driver.server.close()
        assert (await raw.ended()).reason == "the driver stops"
        assert not any(what[0] == "gone" for what in driver.heard.all)


def test_an_open_address_without_tls_is_not_listened_on_nor_called():
    with pytest.raises(UserError, match=r"run.listen = '0.0.0.0': .* needs TLS; give a certificate"):
        Driver(host="0.0.0.0", field="run.listen")
    with pytest.raises(UserError, match=r"driver address = '10.0.0.1': .* needs TLS"):
        DriverLink("10.0.0.1:7000", TOKEN, JOB, hello, print)
    with pytest.raises(UserError, match="token"):
        DriverLink("127.0.0.1:7000", b"short", JOB, hello, print)
    with pytest.raises(UserError, match="token"):
        Driver(token=b"")


@runs
async def test_an_open_address_that_a_file_names_is_not_called_without_tls(tmp_path):
    (tmp_path / "driver").write_text("192.0.2.1:7000\n")
    async with executing(driver_address.published(tmp_path / "driver")) as executor:
        while "needs TLS" not in executor.link.problem:
            await asyncio.sleep(0.01)


@runs
async def test_a_false_driver_is_not_believed():
    """It knows no token: it sends back what it was sent, or a proof of its own."""
    for forge in (lambda given: given.proof, lambda given: b"p" * 48):
        stories = asyncio.Queue()

        async def play(raw, forge=forge, stories=stories):
            await raw.opened.wait()
            raw.channel.send(message_frames.encode(proof.new_challenge()))
            given = MessageDecoder(message_frames.HandshakeAnswer).decode(await raw.frame())
            raw.channel.send(message_frames.encode(message_frames.Accepted(forge(given), 0)))
            stories.put_nowait(await raw.ended())

        async with answering(play) as address, executing(address) as executor:
            executor.link.send(ended(0))
            ending = await stories.get()
            assert ending.code == message_frames.REFUSED and "driver does not prove" in ending.reason
            assert len(executor.link.outbox) == 1 and not executor.heard.all


@runs
async def test_a_false_driver_cannot_send_an_executor_away():
    async def play(raw):
        await raw.opened.wait()
        raw.channel.end(message_frames.REPLACED, "go away")

    async with answering(play) as address, driving() as driver, executing([address, driver.address]) as executor:
        await executor.welcomed()
        assert executor.link.connected


@runs
async def test_a_driver_of_another_version_is_told_so():
    stories = asyncio.Queue()

    async def play(raw):
        await raw.opened.wait()
        raw.channel.send(message_frames.encode(message_frames.Challenge(m.VERSION + 1, bytes(32))))
        stories.put_nowait(await raw.ended())

    async with answering(play) as address, executing(address):
        reason = (await stories.get()).reason
        assert f"driver speaks version {m.VERSION + 1}, the executor {m.VERSION}" in reason


def test_the_server_can_be_made_outside_a_loop():
    server = ExecutorServer(
        TOKEN, JOB, "localhost", 0, on_hello=print, on_heartbeats=dict, on_message=print, on_gone=print
    )
    assert server.hosts() == []


@runs
async def test_heartbeats_that_come_together_are_heard_together_and_before_what_was_said_after_them():
    async with driving() as driver, calling(driver.address) as raw:
        calls = driver.heard

        def hear(beats):
            calls.add("beats", [beat.sequence for _, beat in beats])
            return {}

        driver.server._on_heartbeats = hear
        await proved(raw)
        await calls.kind("hello")
        said = [heartbeat(1), heartbeat(2), message_frames.Kept(1, ended(0)), heartbeat(3)]
        raw.channel._transport.writelines([bytes(frame) for frame in map(client_frame, said)])
        await calls.until(lambda: sum(len(what[1]) for what in calls.all if what[0] == "beats") == 3)
        heard = [what for what in calls.all if what[0] != "hello"]
        assert [what[1] if what[0] == "beats" else "ended" for what in heard] == [[1, 2], "ended", [3]]
        told = [MessageDecoder(message_frames.FromDriverFrame).decode(await raw.frame()) for _ in range(5)]
        answers = [m.Acknowledged(1), m.Acknowledged(2), message_frames.Received(1), m.Acknowledged(3)]
        assert told == [m.Welcome(m.VERSION, JOB, 0, 1.0), *answers]


@runs
async def test_heartbeats_that_the_driver_could_not_handle_cost_the_connection_and_the_next_one_is_heard():
    fails, heard = [True], Heard()

    def stumble(beats):
        if fails:
            fails.pop()
            raise OSError("the journal's disk is full")
        heard.add([beat.sequence for _, beat in beats])
        return {}

    async with driving() as driver, executing(driver.address) as executor:
        driver.server._on_heartbeats = stumble
        await executor.welcomed()
        assert executor.link.send(heartbeat(1))
        await executor.welcomed(2)
        assert executor.link.send(heartbeat(2))
        assert await heard.until(lambda: heard.all) == [[2]] and driver.hellos() == 2


@runs
async def test_an_address_that_is_taken_is_an_error_for_people_that_names_who_has_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"run.listen = '127.0.0.1:{port}': .*process {os.getpid()} has it: "):
            async with driving(port, field="run.listen"):
                pass
