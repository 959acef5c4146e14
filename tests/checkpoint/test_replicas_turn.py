"""Where snapshots go changes while one is on its way: to the new keeper of the peer, or, with the attempt, nowhere."""

from __future__ import annotations

import secrets
import socket
import threading

from replica_helpers import GUARD_S, SECRET, SET_ID, Host, hosts, make_plan, put, read, steps

from phalanx.checkpoint.format.shard_plan import SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.core.fault_points import Points

PLAN = make_plan()


def nobody() -> Endpoint:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Endpoint("b", ("127.0.0.1",), server.getsockname()[1])


def test_what_is_tried_again_goes_to_the_new_keeper_of_the_peer() -> None:
    tried = threading.Event()
    points = Points({"replica.begin": lambda **_: tried.set()})
    with hosts(Host("a", persist_s=GUARD_S, points=points), Host("b")) as (a, b):
        content = put(a.vault, PLAN)
        gone = nobody()
        a.service.turn(0, gone, 1)
        a.service.send(PLAN, SnapshotId(1, 1, SET_ID), gone)
        assert tried.wait(GUARD_S)
        a.service.turn(0, b.service.start_listening(), 1)
        assert not a.told.get(timeout=GUARD_S).problem
        assert read(b.vault, 0, 1) == content


def test_a_transfer_that_hangs_is_broken_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, hosts(Host("a"), Host("b")) as (a, b):
        content = put(a.vault, PLAN)
        hangs = Endpoint("b", ("127.0.0.1",), silent.getsockname()[1])
        a.service.send(PLAN, SnapshotId(1, 1, SET_ID), hangs)
        connection, _ = silent.accept()
        a.service.turn(0, b.service.start_listening(), 1)
        connection.close()
        assert not a.told.get(timeout=GUARD_S).problem
        assert read(b.vault, 0, 1) == content


def test_what_an_earlier_attempt_wanted_to_send_does_not_hold_up_the_next() -> None:
    """The host that died is not there any more; its successor has another secret and another address."""
    tried = threading.Event()
    points = Points({"replica.begin": lambda **_: tried.set()})
    again = secrets.token_bytes(32)
    with hosts(Host("a", persist_s=GUARD_S, points=points), Host("b", secret=again)) as (a, b):
        put(a.vault, PLAN)
        gone = nobody()
        a.service.turn(0, gone, 1)
        a.service.send(PLAN, SnapshotId(1, 1, SET_ID), gone)
        assert tried.wait(GUARD_S)
        a.service.use_secret(again)
        a.service.turn(0, None, 2)
        assert "another attempt has begun" in a.told.get(timeout=GUARD_S).problem
        peer = b.service.start_listening()
        a.service.turn(0, peer, 2)
        b.vault.begin(2)
        put(a.vault, PLAN, step=2, attempt=2)
        assert not a.send(PLAN, peer, 2, 2).problem
        assert steps(b.vault) == [2]


def test_a_transfer_to_the_same_place_goes_on() -> None:
    half, go_on = threading.Event(), threading.Event()

    def hold(**_: object) -> None:
        half.set()
        go_on.wait(GUARD_S)

    tries: list[int] = []
    points = Points({"replica.half": hold, "replica.begin": lambda **_: tries.append(1)})
    with hosts(Host("a", persist_s=GUARD_S, points=points), Host("b")) as (a, b):
        peer = b.service.start_listening()
        put(a.vault, PLAN)
        a.service.turn(0, peer, 1)
        a.service.send(PLAN, SnapshotId(1, 1, SET_ID), peer)
        assert half.wait(GUARD_S)
        a.service.use_secret(SECRET)
        a.service.turn(0, Endpoint(*vars(peer).values()), 1)
        go_on.set()
        assert not a.told.get(timeout=GUARD_S).problem
        assert len(tries) == 1
