"""What a listener is told that is not true, or not fitting: it takes no memory, commits nothing, and goes on."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
from replica_helpers import GUARD_S, TOKEN, Host, hosts, make_plan, make_record, proxy, put

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.replicas.contract import Endpoint
from phalanx.checkpoint.replicas.link import Link, LinkError, call
from phalanx.checkpoint.replicas.messages import Go, Hello, List, Offer, Plan, PlanNeeded, Refused, Want


@pytest.fixture
def host() -> Iterator[Host]:
    with hosts(Host("b", idle_s=GUARD_S)) as (host,):
        yield host


@pytest.fixture
def peer(host: Host) -> Endpoint:
    return host.service.start_listening()


@pytest.fixture
def link(peer: Endpoint) -> Iterator[Link]:
    link = call(peer, TOKEN, GUARD_S)
    yield link
    link.close()


def offer(link: Link, plan: ShardPlan, **changes: object) -> str:
    """Offer a replica of a plan with a record that has been changed; why it was refused."""
    small = make_plan(plan.rank, 100)
    record = replace(make_record(small, bytes(100)), plan_sha256=plan.sha256, data_bytes=plan.data_bytes, **changes)
    link.send(Offer(record.to_text()))
    link.receive(PlanNeeded)
    link.send(Plan(plan.to_bytes().decode()))
    return link.receive(Refused).why


def test_more_than_the_host_has_is_refused_before_memory_is_taken(link: Link, host: Host) -> None:
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
def test_a_record_that_does_not_fit_is_refused(link: Link, changes: dict[str, object], why: str) -> None:
    plan = make_plan(0, 100)
    record = replace(make_record(plan, bytes(100)), **changes)
    link.send(Offer(record.to_text()))
    link.receive(PlanNeeded)
    link.send(Plan(plan.to_bytes().decode()))
    assert why in link.receive(Refused).why
    link.send(List())  # the conversation goes on


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"step": 1}', '{"sums": 3, "sick": []}'])
def test_what_is_no_record_is_refused(link: Link, text: str) -> None:
    link.send(Offer(text))
    assert "no replica" in link.receive(Refused).why


def test_what_is_no_plan_is_refused(link: Link) -> None:
    link.send(Offer(make_record(make_plan(0, 100), bytes(100)).to_text()))
    link.receive(PlanNeeded)
    link.send(Plan("[1, 2, 3]"))
    assert "no replica" in link.receive(Refused).why


def test_a_request_outside_of_the_shard_is_refused(link: Link, host: Host) -> None:

    put(host.vault, make_plan(0, 100))
    for runs in ([(0, 2)], [(-1, 1)], [(1, 1)], [(0, -1)], [("x", 1)], [3]):
        link.send(Want(1, 1, "set", 0, runs, False))
        assert "makes no sense" in link.receive(Refused).why, runs


def test_a_huge_announced_message_takes_no_memory(peer: Endpoint, host: Host) -> None:
    with socket.create_connection((peer.addresses[0], peer.port)) as raw:
        raw.sendall(struct.pack("!I", 0xFFFFFFFF))
        assert "4294967295 bytes; the limit is" in host.reports.get(timeout=GUARD_S)
        assert raw.recv(1) == b""


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"{}", b"[]", b'["Offer", "{}"]', b'["Hello"]', b'["Hello", [], 1]']
)
def test_strangers_are_sent_away(peer: Endpoint, host: Host, body: bytes) -> None:
    with socket.create_connection((peer.addresses[0], peer.port)) as raw:
        raw.sendall(struct.pack("!I", len(body)) + body)
        assert host.reports.get(timeout=GUARD_S)
        raw.settimeout(GUARD_S)
        while raw.recv(1000):
            pass


def test_another_version_is_told_so(peer: Endpoint, host: Host) -> None:
    raw = Link(socket.create_connection((peer.addresses[0], peer.port)), "b", GUARD_S)
    raw.send(Hello(99, "0" * 64))
    assert "speaks version 1, not 99" in raw.receive(Refused).why
    assert "speaks version 99" in host.reports.get(timeout=GUARD_S)
    raw.close()


def test_a_proof_cannot_be_said_back(peer: Endpoint, host: Host) -> None:
    """Neither the listener's own proof nor one of an earlier conversation opens it."""
    with socket.create_connection((peer.addresses[0], peer.port)) as raw:
        raw.settimeout(GUARD_S)

        def say(*message: object) -> list[object]:
            body = json.dumps(message).encode()
            raw.sendall(struct.pack("!I", len(body)) + body)
            (length,) = struct.unpack("!I", raw.recv(4, socket.MSG_WAITALL))
            return list(json.loads(raw.recv(length, socket.MSG_WAITALL)))

        _, _, _, proof = say("Hello", 1, "0" * 64)
        assert say("Proof", proof)[0] == "Refused"
    assert "does not have the token" in host.reports.get(timeout=GUARD_S)


def test_the_token_is_never_sent(host: Host, peer: Endpoint) -> None:

    passed = bytearray()

    def keep(content: bytes, offset: int) -> bytes:
        passed.extend(content)
        return content

    with proxy(peer, keep, keep) as between:
        call(between, TOKEN, GUARD_S).close()
    assert len(passed) > 200
    assert TOKEN.encode() not in passed
    assert bytes.fromhex(TOKEN) not in passed


def test_a_listener_without_the_token_cannot_pretend(peer: Endpoint) -> None:
    with pytest.raises(LinkError, match="b does not have the token"):
        call(peer, "0" * 64, GUARD_S)


def test_a_message_in_the_wrong_place_ends_the_conversation(link: Link, host: Host) -> None:
    link.send(Go())
    assert "sent Go where Offer or List or Want was due" in host.reports.get(timeout=GUARD_S)
    with pytest.raises(LinkError):
        link.receive(Refused)
