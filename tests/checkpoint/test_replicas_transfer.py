"""Snapshots sent from host to host: what arrives is what was sent, or is not there."""

from __future__ import annotations

import secrets
import threading
from unittest.mock import patch

import pytest
from replica_helpers import (
    GUARD_S,
    SECRET,
    SET_ID,
    Host,
    cut_at,
    flip_bit_at,
    hosts,
    make_plan,
    make_record,
    proxy,
    put,
    read,
    steps,
)

from phalanx.checkpoint.format.shard_plan import SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.checkpoint.replicas.replica_link import Go, Offer, PlanNeeded, call
from phalanx.checkpoint.replicas.replica_service import listen
from phalanx.core.fault_points import Points

NOBODY = Endpoint("gone", ("127.0.0.1",), 1)


def test_a_snapshot_arrives_and_so_do_later_ones_over_the_same_connection() -> None:
    reached: list[str] = []
    names = ("begin", "half", "sent", "received", "committed")
    points = Points({f"replica.{name}": lambda name=name, **_: reached.append(name) for name in names})
    with hosts(Host("a", points=points), Host("b", points=points)) as (a, b):
        peer, plan = b.service.start_listening(), make_plan()
        assert peer.addresses == ("127.0.0.1",)
        for step in (1, 2, 3):
            content = put(a.vault, plan, step)
            told = a.send(plan, peer, step)
            assert (told.problem, told.step, told.rank, told.to, told.bytes) == ("", step, 0, "b", plan.data_bytes)
            assert told.seconds > 0
            assert read(b.vault, 0, step) == content
        assert steps(b.vault) == [2, 3]
        (newest,) = [held for held in b.vault.held() if held.record.step == 3]
        assert newest.is_replica
        assert newest.record.state == '{"seed": 1}'
    assert [name for name in reached if name in names[:3]] == [*names[:3]] * 3
    assert [name for name in reached if name in names[3:]] == [*names[3:]] * 3


def test_shards_of_several_ranks_and_of_no_bytes_arrive() -> None:
    with hosts(Host("a"), Host("b")) as (a, b):
        peer = b.service.start_listening()
        plans = [make_plan(rank, size) for rank, size in enumerate((0, 1, 4 << 20, 5_000_000))]
        contents = [put(a.vault, plan) for plan in plans]
        for plan in plans:
            a.service.send(plan, SnapshotId(1, 1, SET_ID), peer)
        assert sorted(a.told.get(timeout=GUARD_S).rank for _ in plans) == [0, 1, 2, 3]
        assert [read(b.vault, plan.rank, 1) for plan in plans] == contents


def test_both_send_to_each_other() -> None:
    with hosts(Host("a"), Host("b")) as (a, b):
        plans = (make_plan(0), make_plan(1))
        contents = put(a.vault, plans[0]), put(b.vault, plans[1])
        peers = b.service.start_listening(), a.service.start_listening()
        a.service.send(plans[0], SnapshotId(1, 1, SET_ID), peers[0])
        b.service.send(plans[1], SnapshotId(1, 1, SET_ID), peers[1])
        assert not a.told.get(timeout=GUARD_S).problem
        assert not b.told.get(timeout=GUARD_S).problem
        assert (read(b.vault, 0, 1), read(a.vault, 1, 1)) == contents


def test_a_bit_that_turns_over_on_the_way_is_seen_and_the_snapshot_sent_again() -> None:
    with hosts(Host("a", persist_s=GUARD_S), Host("b")) as (a, b):
        plan = make_plan()
        content = put(a.vault, plan)
        with proxy(b.service.start_listening(), flip_bit_at(plan.data_bytes // 2)) as peer:
            assert a.send(plan, peer).problem == ""
        assert read(b.vault, 0, 1) == content


@pytest.mark.parametrize("part", [0.1, 0.5, 0.999])
def test_a_way_that_always_damages_leaves_the_older_replica_whole_and_names_the_host(part: float) -> None:
    with hosts(Host("a", persist_s=0.5), Host("b")) as (a, b):
        plan, peer = make_plan(), b.service.start_listening()
        older = put(a.vault, plan, 1)
        assert not a.send(plan, peer, 1).problem
        put(a.vault, plan, 2)
        with proxy(peer, flip_bit_at(1000 + int(part * plan.data_bytes), times=1000)) as damaging:
            problem = a.send(plan, damaging, 2).problem
        assert "step 2 of rank 0 was not replicated to b" in problem
        assert "from 127.0.0.1 were changed on their way" in b.reports.get(timeout=GUARD_S)
        assert steps(b.vault) == [1]
        assert read(b.vault, 0, 1) == older
        assert not a.send(plan, peer, 2).problem
        assert steps(b.vault) == [1, 2]


@pytest.mark.parametrize("place", [10, 150, 400, 700, 1_000_000, 8_000_000])
def test_a_connection_that_is_cut_anywhere_leaves_the_older_replica_whole(place: int) -> None:
    with hosts(Host("a"), Host("b")) as (a, b):
        plan, peer = make_plan(), b.service.start_listening()
        older = put(a.vault, plan, 1)
        assert not a.send(plan, peer, 1).problem
        put(a.vault, plan, 2)
        with proxy(peer, cut_at(place)) as cutting:
            assert "not replicated to b" in a.send(plan, cutting, 2).problem
        assert steps(b.vault) == [1]
        assert read(b.vault, 0, 1) == older
        assert not a.send(plan, peer, 2).problem


@pytest.mark.parametrize("place", [5, 90, 240, 300])
def test_a_changed_message_is_not_taken(place: int) -> None:
    """Whatever byte of greeting or offer is changed: no copy is there that was not sent."""
    with hosts(Host("a"), Host("b", idle_s=1.0)) as (a, b):
        plan = make_plan()
        put(a.vault, plan)
        with proxy(b.service.start_listening(), flip_bit_at(place, times=1000)) as peer:
            assert a.send(plan, peer).problem
        assert steps(b.vault) == []


def test_an_answer_that_is_lost_makes_the_snapshot_come_twice_and_harms_nothing() -> None:
    committed = threading.Event()
    points = Points({"replica.committed": lambda **_: committed.set()})
    with hosts(Host("a", persist_s=GUARD_S), Host("b", points=points)) as (a, b):
        plan, peer = make_plan(), b.service.start_listening()
        content = put(a.vault, plan)
        cuts = [True]

        def lose_stored(piece: bytes, offset: int) -> bytes | None:
            return None if committed.is_set() and cuts and cuts.pop() else piece

        with proxy(peer, backward=lose_stored) as between:
            assert not a.send(plan, between).problem
        assert not cuts
        assert read(b.vault, 0, 1) == content


def test_a_host_that_is_gone_is_named_and_the_next_snapshot_tries_again() -> None:
    with hosts(Host("a"), Host("b")) as (a, b):
        plan = make_plan()
        put(a.vault, plan, 1)
        problem = a.send(plan, NOBODY, 1).problem
        assert "step 1 of rank 0 was not replicated to gone" in problem
        assert "127.0.0.1 port 1" in problem and "refused" in problem.lower()
        put(a.vault, plan, 2)
        assert not a.send(plan, b.service.start_listening(), 2).problem


def test_a_keeper_that_was_started_again_is_found_on_its_old_connection() -> None:
    with hosts(Host("a", persist_s=GUARD_S), Host("b"), Host("b")) as (a, before, after):
        plan = make_plan()
        put(a.vault, plan, 1)
        peer = before.service.start_listening()
        assert not a.send(plan, peer, 1).problem
        before.service.close()
        put(a.vault, plan, 2)
        with patch("phalanx.checkpoint.replicas.replica_service.listen", lambda address: listen(address, peer.port)):
            assert after.service.start_listening() == peer
        assert not a.send(plan, peer, 2).problem
        assert steps(after.vault) == [2]


def test_another_secret_is_refused_on_both_sides_and_said() -> None:
    with hosts(Host("a"), Host("b", secret=secrets.token_bytes(32))) as (a, b):
        plan = make_plan()
        put(a.vault, plan)
        assert "b does not take the secret of this job" in a.send(plan, b.service.start_listening()).problem
        assert steps(b.vault) == []
        assert "127.0.0.1" in b.reports.get(timeout=GUARD_S)


def test_before_there_is_a_secret_nobody_is_talked_to_and_then_the_sender_comes_through() -> None:
    with hosts(Host("a", persist_s=GUARD_S), Host("b", secret=None)) as (a, b):
        plan, peer = make_plan(), b.service.start_listening()
        content = put(a.vault, plan)
        a.service.send(plan, SnapshotId(1, 1, SET_ID), peer)
        assert "before there was a secret" in b.reports.get(timeout=GUARD_S)
        b.service.use_secret(SECRET)
        assert not a.told.get(timeout=GUARD_S).problem
        assert read(b.vault, 0, 1) == content


def test_without_a_secret_nothing_is_sent() -> None:
    with hosts(Host("a", secret=None)) as (a,):
        plan = make_plan()
        put(a.vault, plan)
        assert "no secret yet" in a.send(plan, NOBODY).problem


def test_a_lower_attempt_is_refused_for_good() -> None:
    with hosts(Host("a", persist_s=GUARD_S), Host("b")) as (a, b):
        plan, peer = make_plan(), b.service.start_listening()
        put(a.vault, plan, attempt=3)
        b.vault.begin(4)
        told = a.send(plan, peer, attempt=3)
        assert told.refused
        assert "b refused step 1 of rank 0" in told.problem and "attempt 3 is over" in told.problem
        assert steps(b.vault) == []


def test_an_attempt_that_ends_while_its_replica_comes_is_refused_too() -> None:
    a, b = Host("a", persist_s=GUARD_S), Host("b")
    b.service.close()
    points = Points({"replica.received": lambda **_: b.vault.begin(9)})
    b = Host("b", points=points)
    with hosts(a, b):
        plan = make_plan()
        put(a.vault, plan)
        assert a.send(plan, b.service.start_listening()).refused
        assert steps(b.vault) == []


def test_what_is_not_there_any_more_is_said() -> None:
    with hosts(Host("a")) as (a,):
        assert "not there to be replicated" in a.send(make_plan(), NOBODY).problem


def test_the_slot_that_is_sent_is_not_overwritten_before_the_answer() -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold(**_: object) -> None:
        held.set()
        assert go_on.wait(GUARD_S)

    with hosts(Host("a", points=Points({"replica.half": hold})), Host("b")) as (a, b):
        plan = make_plan()
        content = put(a.vault, plan, 1)
        a.service.send(plan, SnapshotId(1, 1, SET_ID), b.service.start_listening())
        assert held.wait(GUARD_S)
        put(a.vault, plan, 2)
        assert a.vault.free(0) is None
        go_on.set()
        assert not a.told.get(timeout=GUARD_S).problem
        assert a.vault.free(0) is not None
        assert read(b.vault, 0, 1) == content


def test_closing_breaks_off_what_stands_still_and_tells_it() -> None:
    held = threading.Event()
    stop = threading.Event()

    def hold(**_: object) -> None:
        held.set()
        stop.wait(GUARD_S)

    with hosts(Host("a", persist_s=GUARD_S), Host("b", points=Points({"replica.received": hold}))) as (a, b):
        plan = make_plan()
        put(a.vault, plan)
        a.service.send(plan, SnapshotId(1, 1, SET_ID), b.service.start_listening())
        assert held.wait(GUARD_S)
        a.service.close()
        assert "not replicated to b" in a.told.get(timeout=GUARD_S).problem
        assert a.vault.free(0) is not None
        stop.set()


def test_a_sender_that_begins_again_takes_the_place_of_its_connection_that_hangs() -> None:
    """A network that was away: the listener does not know that the first connection is dead, and its slot is in use."""
    with hosts(Host("a", idle_s=GUARD_S), Host("b", idle_s=GUARD_S)) as (a, b):
        plan, peer = make_plan(), b.service.start_listening()
        put(a.vault, plan, 1)
        assert not a.send(plan, peer, 1).problem
        content = put(a.vault, plan, 2)
        hanging = call(peer, SECRET, GUARD_S)
        hanging.send(Offer(make_record(plan, content, 2).to_text()))
        assert isinstance(hanging.receive(Go, PlanNeeded), Go)
        assert not a.send(plan, peer, 2).problem
        assert steps(b.vault) == [1, 2]
        assert read(b.vault, 0, 2) == content
        hanging.close()


def test_who_stands_still_is_given_up() -> None:
    with hosts(Host("a"), Host("b", idle_s=0.2)) as (a, b):
        plan, peer = make_plan(), b.service.start_listening()
        content = put(a.vault, plan)
        assert not a.send(plan, peer).problem
        hanging = call(peer, SECRET, GUARD_S)
        hanging.send(Offer(make_record(plan, content, 2).to_text()))
        hanging.receive(Go)
        assert "nothing moved" in b.reports.get(timeout=GUARD_S)
        hanging.close()
        assert steps(b.vault) == [1]
