"""What another host holds, read into memory here: right, or refused."""

from __future__ import annotations

import mmap
import random
import socket
import threading
from collections.abc import Iterator

import pytest
from replica_helpers import GUARD_S, SECRET, SET_ID, SIZE_BYTES, Host, cut_at, flip_bit_at, hosts, make_plan, proxy, put
from support.chunk_sums import chunk_sums

from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.checkpoint.replicas.fetch import (
    DamagedError,
    PeerCopies,
    fetch,
    list_held,
)
from phalanx.checkpoint.replicas.replica_link import Given, LinkError, Want, call

SNAPSHOT = SnapshotId(1, 1, SET_ID)
GONE = SnapshotId(7, 1, SET_ID)
BIG_BYTES = (40 << 20) + 77


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosts(Host("b")) as (host,):
        yield host


@pytest.fixture(scope="module")
def content(host: Host) -> bytes:
    return put(host.vault, make_plan(0))


@pytest.fixture(scope="module")
def peer(host: Host, content: bytes) -> Endpoint:
    return host.service.start_listening()


def test_what_is_held_can_be_listed(peer: Endpoint) -> None:
    (held,) = list_held(peer, SECRET)
    assert (held.record.snapshot, held.record.rank, held.is_replica) == (SNAPSHOT, 0, False)
    with PeerCopies(SECRET).open(peer, SNAPSHOT, 0) as copy:
        assert (copy.record, copy.plan) == (held.record, make_plan(0))


def test_a_shard_comes_straight_into_memory_given_or_made(peer: Endpoint, content: bytes) -> None:
    memory = bytearray(SIZE_BYTES + 5)
    fetched = fetch(peer, SECRET, SNAPSHOT, 0, memory)
    assert memory == content + bytes(5)
    assert (fetched.plan, fetched.bytes, fetched.interface, fetched.share) == (make_plan(0), SIZE_BYTES, "lo", None)
    made: list[mmap.mmap] = []

    def make(record: object, plan: object) -> mmap.mmap:
        made.append(mmap.mmap(-1, SIZE_BYTES))
        return made[0]

    fetch(peer, SECRET, SNAPSHOT, 0, make)
    assert made[0][:] == content


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_large_shard_comes_over_several_connections(streams: int) -> None:
    with hosts(Host("b")) as (host,):
        content = put(host.vault, make_plan(3, BIG_BYTES))
        memory = bytearray(BIG_BYTES)
        known = host.service.start_listening()
        fast = Endpoint(known.host, known.addresses, known.port, "eth0", 10**9)
        fetched = fetch(fast, SECRET, SNAPSHOT, 3, memory, streams=streams)
        assert memory == content
        assert fetched.share == pytest.approx(8 * BIG_BYTES / fetched.seconds / 10**9)


def test_an_empty_shard_comes() -> None:
    with hosts(Host("b")) as (host,):
        put(host.vault, make_plan(0, 0))
        assert fetch(host.service.start_listening(), SECRET, SNAPSHOT, 0, bytearray()).bytes == 0


@pytest.mark.parametrize("numbers", [[], [0], [2], [0, 1, 2], [2, 0, 1], [1, 1], [0, 2]])
def test_chunks_come_in_the_order_asked_for(peer: Endpoint, content: bytes, numbers: list[int]) -> None:
    with PeerCopies(SECRET).open(peer, SNAPSHOT, 0) as copy:
        assert copy.plan == make_plan(0)
        for _ in range(2):
            chunks = [bytes(chunk) for chunk in copy.chunks(numbers)]
            assert chunks == [content[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES] for n in numbers]
            assert [chunk_sums(chunk, len(chunk))[0] for chunk in chunks] == [copy.record.sums[n] for n in numbers]


def test_what_is_not_there_is_a_lookup_error(peer: Endpoint) -> None:
    with pytest.raises(LookupError, match="b: step 7 of rank 0 is not there any more"):
        fetch(peer, SECRET, GONE, 0, bytearray(SIZE_BYTES))
    with pytest.raises(LookupError), PeerCopies(SECRET).open(peer, SNAPSHOT, 5):
        pass


def test_memory_that_does_not_fit_is_refused(peer: Endpoint) -> None:
    with pytest.raises(ValueError, match=f"3 bytes of memory for the {SIZE_BYTES} of rank 0"):
        fetch(peer, SECRET, SNAPSHOT, 0, bytearray(3))
    with pytest.raises(ValueError, match="read-only"):
        fetch(peer, SECRET, SNAPSHOT, 0, bytes(SIZE_BYTES))


def test_another_secret_and_a_host_that_is_gone_are_said(peer: Endpoint) -> None:
    with pytest.raises(LinkError, match="b does not take the secret of this job"):
        list_held(peer, bytes(32))
    with pytest.raises(LinkError, match=r"gone cannot be reached: 127.0.0.1 port 1: .*refused"):
        list_held(Endpoint("gone", ("127.0.0.1",), 1), SECRET)
    with pytest.raises(LinkError, match="it has no address"):
        list_held(Endpoint("gone", (), 0), SECRET)


def test_damage_and_an_end_on_the_way_are_seen(peer: Endpoint) -> None:
    memory = bytearray(SIZE_BYTES)
    with (
        proxy(peer, backward=flip_bit_at(5_000_000, times=9)) as between,
        pytest.raises(LinkError, match="bytes from b were changed on their way"),
    ):
        fetch(between, SECRET, SNAPSHOT, 0, memory)
    for place in (5, 300, 900, 5_000_000):
        with proxy(peer, backward=cut_at(place)) as between, pytest.raises(LinkError):
            fetch(between, SECRET, SNAPSHOT, 0, memory)


def test_each_of_100_bits_that_turn_over_in_a_held_replica_is_found() -> None:
    """At fetch, and only there."""
    size = CHUNK_BYTES + 12345
    with hosts(Host("a"), Host("b")) as (a, b):
        plan, peer = make_plan(0, size), b.service.start_listening()
        content = put(a.vault, plan)
        assert not a.send(plan, peer).problem
        (cell,) = [cell for cell in b.vault._cells.values() if cell.record]
        chosen = random.Random(0)
        memory = bytearray(size)
        for _ in range(100):
            place, bit = chosen.randrange(size), chosen.randrange(8)
            cell.block.memory[place] ^= 1 << bit
            with pytest.raises(DamagedError, match=f"chunk {place // CHUNK_BYTES} of step 1, rank 0 from b"):
                fetch(peer, SECRET, SNAPSHOT, 0, memory)
            cell.block.memory[place] ^= 1 << bit
        fetch(peer, SECRET, SNAPSHOT, 0, memory)
        assert memory == content


def test_who_reads_slowly_keeps_the_slot_and_who_stops_reading_loses_it() -> None:
    with hosts(Host("b", idle_s=2.0)) as (host,):
        plan, peer = make_plan(0, BIG_BYTES), host.service.start_listening()
        content = put(host.vault, plan)
        link = call(peer, SECRET, GUARD_S)
        link.send(Want(*SNAPSHOT, 0, [(0, 11)], False))
        link.receive(Given)
        put(host.vault, plan, 2)
        assert host.vault.free(0) is None
        memory = memoryview(bytearray(BIG_BYTES))
        link.receive_into(memory[:CHUNK_BYTES], float("inf"))
        assert memory[:CHUNK_BYTES] == content[:CHUNK_BYTES]
        assert "nothing moved on the connection" in host.reports.get(timeout=GUARD_S)
        with pytest.raises(LinkError):
            link.receive_into(memory, float("inf"))
        link.close()
        assert host.vault.free(0) is not None


def test_many_read_at_once() -> None:
    with hosts(Host("b")) as (host,):
        content = put(host.vault, make_plan())
        peer = host.service.start_listening()
        memories = [bytearray(SIZE_BYTES) for _ in range(8)]
        threads = [threading.Thread(target=fetch, args=(peer, SECRET, SNAPSHOT, 0, memory)) for memory in memories]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD_S)
        assert all(memory == content for memory in memories)


def test_it_listens_on_loopback_only(peer: Endpoint) -> None:
    assert peer.addresses == ("127.0.0.1",)
    with socket.socket() as other, pytest.raises(OSError):
        other.connect(("127.0.0.2", peer.port))
