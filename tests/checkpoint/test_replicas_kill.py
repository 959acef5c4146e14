"""Hosts that are killed, for real, in the middle of a replica."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from replica_helpers import GUARD_S, SECRET, Host, hosts, make_plan, put, read, steps

from phalanx.checkpoint.format.run_sums import first_fault
from phalanx.checkpoint.keeper_contract import Endpoint


@contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    script = f"import sys; sys.path[:] = {sys.path!r}; from replica_process import main; main()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    try:
        process.stdin.write(f"{SECRET.hex()}\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def keeper(point: str, nth: int) -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    with child("keep", point, nth) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield process, Endpoint(told["host"], tuple(told["addresses"]), told["port"])


@pytest.mark.campaign(but=("replica.half",))
@pytest.mark.parametrize("point", ["replica.begin", "replica.half", "replica.sent"])
def test_a_sender_that_is_killed_leaves_the_older_replica_whole_and_the_next_sender_comes_through(point: str) -> None:
    with hosts(Host("parent")) as (b,):
        port = b.service.start_listening().port
        with child("send", point, 2, port, 1, 2) as process:
            assert process.wait(GUARD_S) == -signal.SIGKILL
        assert 1 in steps(b.vault)
        assert whole(b)
        with child("send", "nowhere", 1, port, 3, 4) as process:
            assert process.wait(GUARD_S) == 0
            assert process.stdout is not None
            assert process.stdout.read() == '""\n""\n'
        assert {3, 4} <= set(steps(b.vault))
        assert whole(b)


def whole(host: Host) -> bool:
    faults = [first_fault(read(host.vault, 0, held.record.step), held.record) for held in host.vault.held()]
    return not any(faults)


@pytest.mark.campaign(but=("replica.committed",))
@pytest.mark.parametrize("point", ["replica.received", "replica.committed"])
def test_a_peer_that_is_killed_is_named_and_its_successor_gets_the_next_snapshot(point: str) -> None:
    with hosts(Host("a", persist_s=0.3)) as (a,):
        plan = make_plan()
        with keeper(point, 2) as (process, peer):
            put(a.vault, plan, 1)
            assert not a.send(plan, peer, 1).problem
            put(a.vault, plan, 2)
            assert "step 2 of rank 0 was not replicated to child" in a.send(plan, peer, 2).problem
            assert process.wait(GUARD_S) == -signal.SIGKILL
        assert a.vault.free(0) is not None
        with keeper("nowhere", 1) as (_, peer):
            put(a.vault, plan, 3)
            assert not a.send(plan, peer, 3).problem
