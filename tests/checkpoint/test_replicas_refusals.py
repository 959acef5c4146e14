"""What a listener is told that is not true, or not fitting: it takes no memory, commits nothing, and goes on."""

from __future__ import annotations

import errno
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
from replica_helpers import GUARD_S, SECRET, SET_ID, Host, flip_bit_at, hosts, make_plan, make_record, proxy, put, read

from phalanx.checkpoint.format.shard_plan import ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.checkpoint.replicas.fetch import fetch
from phalanx.checkpoint.replicas.replica_link import (
    Go,
    LinkError,
    List,
    Offer,
    Plan,
    PlanNeeded,
    Refused,
    ReplicaLink,
    Want,
    call,
)
from phalanx.ipc.handshake import HELLO_BYTES


@pytest.fixture
def host() -> Iterator[Host]:
    with hosts(Host("b", idle_s=GUARD_S)) as (host,):
        yield host


@pytest.fixture
def peer(host: Host) -> Endpoint:
    return host.service.start_listening()


@pytest.fixture
def link(peer: Endpoint) -> Iterator[ReplicaLink]:
    link = call(peer, SECRET, GUARD_S)
    yield link
    link.close()


def offer(link: ReplicaLink, plan: ShardPlan, **changes: object) -> str:
    """Offer a replica of a plan with a record that has been changed; why it was refused."""
    small = make_plan(plan.rank, 100)
    record = replace(make_record(small, bytes(100)), plan_sha256=plan.sha256, data_bytes=plan.data_bytes, **changes)
    link.send(Offer(record.to_text()))
    link.receive(PlanNeeded)
    link.send(Plan(plan.to_bytes().decode()))
    return link.receive(Refused).why


def test_more_than_the_host_has_is_refused_before_memory_is_taken(link: ReplicaLink, host: Host) -> None:
    plan = make_plan(0, psutil.virtual_memory().total + 1)
    chunks = -(-plan.data_bytes // (4 << 20))
    assert "more than the memory of this host" in offer(link, plan, sums=(0,) * chunks)
    assert host.vault.held() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sums": ()}, "0 sums for 100 bytes"),
        ({"sums": (1, 2)}, "2 sums for 100 bytes"),
        ({"data_bytes": 99}, "99 bytes, its plan 100"),
        ({"data_bytes": -1}, "sums for -1 bytes"),
        ({"rank": 1}, "not that of the record"),
        ({"plan_sha256": "0" * 64}, "not that of the record"),
        ({"state": "other"}, "state in the record does not match"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(link: ReplicaLink, changes: dict[str, object], why: str) -> None:
    plan = make_plan(0, 100)
    record = replace(make_record(plan, bytes(100)), **changes)
    link.send(Offer(record.to_text()))
    link.receive(PlanNeeded)
    link.send(Plan(plan.to_bytes().decode()))
    assert why in link.receive(Refused).why
    link.send(List())  # the conversation goes on


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"step": 1}', '{"sums": 3, "sick": []}'])
def test_what_is_no_record_is_refused(link: ReplicaLink, text: str) -> None:
    link.send(Offer(text))
    assert "no replica" in link.receive(Refused).why


def test_what_is_no_plan_is_refused(link: ReplicaLink) -> None:
    link.send(Offer(make_record(make_plan(0, 100), bytes(100)).to_text()))
    link.receive(PlanNeeded)
    link.send(Plan("[1, 2, 3]"))
    assert "no replica" in link.receive(Refused).why


def test_a_request_outside_of_the_shard_is_refused(link: ReplicaLink, host: Host) -> None:

    put(host.vault, make_plan(0, 100))
    for runs in ([(0, 2)], [(-1, 1)], [(1, 1)], [(0, -1)], [("x", 1)], [3]):
        link.send(Want(1, 1, "set", 0, runs, False))
        assert "makes no sense" in link.receive(Refused).why, runs


def test_a_huge_announced_message_takes_no_memory(link: ReplicaLink, host: Host) -> None:
    link._socket.sendall(struct.pack("!I", 0xFFFFFFFF))
    assert "4294967295 bytes; the limit is" in host.reports.get(timeout=GUARD_S)


def close_the_sending_half(raw: socket.socket) -> None:
    """As `shutdown`, also when the other side has already cut the connection, which may come before all is said."""
    try:
        raw.shutdown(socket.SHUT_WR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise


@pytest.mark.parametrize("said", [b"", b"nonsense", b'["Offer", "{}"]', bytes(48), b"x" * 10_000])
def test_strangers_are_sent_away_without_a_word(peer: Endpoint, host: Host, said: bytes) -> None:
    with socket.create_connection((peer.addresses[0], peer.port)) as raw:
        raw.settimeout(GUARD_S)
        heard = bytearray()
        with suppress(ConnectionError):
            raw.sendall(said)
            close_the_sending_half(raw)
            while piece := raw.recv(1000):
                heard += piece
        assert len(heard) <= HELLO_BYTES
    assert host.reports.get(timeout=GUARD_S).startswith("127.0.0.1")


def test_what_is_no_keeper_of_this_version_is_told_from_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=lambda: other.accept()[0].sendall(b"phalanx keeper 9" + bytes(16)))
        thread.start()
        endpoint = Endpoint("b", ("127.0.0.1",), other.getsockname()[1])
        with pytest.raises(LinkError, match="what answers for b is no keeper of this version"):
            call(endpoint, SECRET, GUARD_S)
        thread.join()


class Listening:
    """Keeps what passes between a caller and a keeper, either way."""

    def __init__(self) -> None:
        self.forward, self.backward = bytearray(), bytearray()

    def hear(self, content: bytes, offset: int) -> bytes:
        self.forward += content
        return content

    def hear_back(self, content: bytes, offset: int) -> bytes:
        self.backward += content
        return content


def sent_and_heard(host: Host, peer: Endpoint) -> tuple[Listening, bytes]:
    """A replica sent to `host` and fetched again, and what somebody on the wire has of it."""
    listening, plan = Listening(), make_plan()
    with hosts(Host("a")) as (a,), proxy(peer, listening.hear, listening.hear_back) as between:
        content = put(a.vault, plan)
        assert not a.send(plan, between).problem
        memory = bytearray(plan.data_bytes)
        fetch(between, SECRET, SnapshotId(1, 1, SET_ID), 0, memory)
        assert memory == content
    return listening, content


def test_who_listens_learns_nothing(host: Host, peer: Endpoint) -> None:
    listening, content = sent_and_heard(host, peer)
    for heard in (listening.forward, listening.backward):
        assert len(heard) > len(content)
        assert not any(content[start : start + 16] in heard for start in range(0, len(content) - 16, 65_537))
        # Of eight bytes or more: among 16 MB of random ones, four are found by chance in one run of a hundred.
        words = b"PlanNeeded", b"plan_sha256", b"data_bytes", b'"seed": 1', make_plan().sha256.encode()
        for word in (SECRET, SECRET.hex().encode(), *words):
            assert word not in heard


def test_what_was_heard_cannot_be_said_again(host: Host, peer: Endpoint) -> None:
    """Neither the whole of a conversation, nor its parts in another order, opens anything or puts anything anywhere."""
    listening, _ = sent_and_heard(host, peer)
    before = [held.record for held in host.vault.held()]
    for said in (listening.forward, listening.forward[:48], listening.backward):
        with socket.create_connection((peer.addresses[0], peer.port)) as raw, suppress(OSError):
            raw.settimeout(GUARD_S)
            assert len(raw.recv(HELLO_BYTES, socket.MSG_WAITALL)) == HELLO_BYTES  # who speaks first is not even heard
            raw.sendall(said)
            raw.shutdown(socket.SHUT_WR)
            assert raw.recv(1000, socket.MSG_WAITALL) == b""
    assert [held.record for held in host.vault.held()] == before


@pytest.mark.campaign(but=("0", "20", "40", "79", "130", "399", "9000"))
@pytest.mark.parametrize("place", [0, 20, 31, 40, 79, 81, 90, 130, 200, 399, 9000])
def test_any_changed_byte_ends_the_conversation(host: Host, peer: Endpoint, place: int) -> None:
    """Greeting, messages and bytes, either way: nothing is believed that was changed."""
    with hosts(Host("a")) as (a,):
        content = put(a.vault, make_plan())
        for changes in ((flip_bit_at(place, 99), None), (None, flip_bit_at(place % 150, 99))):
            with proxy(peer, *changes) as between:
                assert a.send(make_plan(), between).problem
        held = [record.step for record, is_replica in host.vault.held() if is_replica]
        assert not held or read(host.vault, 0, 1) == content


def test_a_keeper_of_another_host_does_not_pass_for_the_one_that_was_called(peer: Endpoint) -> None:
    """Who can lead packets elsewhere cannot have a snapshot kept where it would be lost with its host."""
    with pytest.raises(LinkError, match="at the address of c there is b"):
        call(replace(peer, host="c"), SECRET, GUARD_S)


def test_no_message_begins_an_attempt(link: ReplicaLink, host: Host) -> None:
    """Not even of who has the secret: the running attempt goes on, nothing of one that nobody claimed is kept."""
    host.vault.begin(3)
    plan = make_plan(0, 100)
    link.send(Offer(make_record(plan, bytes(100), 9, 4).to_text()))
    link.receive(PlanNeeded)
    link.send(Plan(plan.to_bytes().decode()))
    assert "attempt 4 has not begun" in link.receive(Refused).why
    for attempt, why in ((1003, "attempt 1003 has not begun on this host"), (2, "attempt 2 is over")):
        link.send(Offer(make_record(plan, bytes(100), 9, attempt).to_text()))
        refused = link.receive(Refused)
        assert why in refused.why
        assert refused.later_attempt == (attempt < 3)
    assert host.vault.attempt == 3
    assert host.vault.held() == []
    put(host.vault, plan, step=10, attempt=3)


def test_an_attempt_that_begins_a_moment_later_gets_its_replicas() -> None:
    """A host may be the first whose ranks know of it."""
    with hosts(Host("a", persist_s=GUARD_S), Host("b")) as (a, b):
        plan, peer = make_plan(), b.service.start_listening()
        content = put(a.vault, plan, attempt=2)
        a.service.send(plan, SnapshotId(1, 2, SET_ID), peer)
        with pytest.raises(queue.Empty):
            a.told.get(timeout=0.3)
        b.vault.begin(2)
        assert not a.told.get(timeout=GUARD_S).problem
        assert read(b.vault, 0, 1, 2) == content


def test_a_message_in_the_wrong_place_ends_the_conversation(link: ReplicaLink, host: Host) -> None:
    link.send(Go())
    assert "sent Go where Offer or List or Want was due" in host.reports.get(timeout=GUARD_S)
    with pytest.raises(LinkError):
        link.receive(Refused)
