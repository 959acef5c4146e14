"""Small values between all ranks over a tree: what they come to, what they cost in a job of any size, who is blamed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from phalanx.core.peers import ALONE, PeerError, Peers
from phalanx.ipc.rank_tree import FAN_OUT, OperationKind, TreeMessage, TreeNode, children_of, entries, parent_of
from phalanx.ipc.tree_peers import TreePeers


class Board:
    """A store in memory; what is not there in time raises, as torch's do."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self._values: dict[str, bytes] = {}
        self._changed, self._timeout_s = threading.Condition(), timeout_s

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self._timeout_s):
                raise RuntimeError(f"wait timeout after {self._timeout_s} s, keys: {key}")
            return self._values[key]


def tree(board: Board, rank: int, size: int, timeout_s: float = 20.0) -> TreePeers:
    return TreePeers(board, rank, size, host="127.0.0.1", name=f"node{rank}", timeout_s=timeout_s)


def on_ranks(size: int, body: Callable[[TreePeers], Any], timeout_s: float = 20.0) -> list[Any]:
    """What `body` returned on each rank, or the error that it raised there."""
    board = Board()

    def main(rank: int) -> Any:
        peers = tree(board, rank, size, timeout_s)
        try:
            return body(peers)
        except Exception as error:
            return error
        finally:
            peers.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))


def error_of(body: Callable[[], Any]) -> str:
    with pytest.raises(PeerError) as caught:
        body()
    return str(caught.value)


def say_everything(peers: Peers) -> tuple[Any, ...]:
    peers.barrier()
    highest = peers.ask_highest(7 * (peers.rank == peers.size - 1))
    gathered = peers.gather({"rank": peers.rank, "text": "ä" * (peers.rank % 5)})
    told = peers.broadcast([peers.rank, "x" * 9])
    lowest = peers.lowest([peers.rank, "no"] if peers.rank % 3 == 1 else None)
    collected = peers.collect(peers.rank)
    return gathered, told, lowest, peers.lowest(None), collected, highest()


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_values_reach_whom_they_are_for(size: int) -> None:
    expected = [{"rank": rank, "text": "ä" * (rank % 5)} for rank in range(size)]
    for rank, found in enumerate(on_ranks(size, say_everything)):
        collected = None if rank else list(range(size))
        lowest = [1, "no"] if size > 1 else None
        assert found == (expected, [0, "x" * 9], lowest, None, collected, 7)


def test_one_rank_alone() -> None:
    assert say_everything(ALONE) == ([{"rank": 0, "text": ""}], [0, "x" * 9], None, None, [0], 7)


def test_large_values_are_passed_on_whole() -> None:
    def body(peers: TreePeers) -> Any:
        return peers.gather(str(peers.rank) * 3_000_000), peers.broadcast("b" * 3_000_000 if peers.rank == 0 else 0)

    for gathered, told in on_ranks(3, body):
        assert [(text[0], len(text)) for text in gathered] == [(str(rank), 3_000_000) for rank in range(3)]
        assert len(told) == 3_000_000


@pytest.mark.parametrize("operation", ["gather", "ask_highest"])
def test_who_does_not_come_is_named_on_all_ranks_within_the_timeout(operation: str) -> None:
    """Two levels below the first rank, while its parent waits, too."""
    late, done = 40, threading.Event()
    assert parent_of(late) == 1

    def body(peers: TreePeers) -> Any:
        peers.barrier()
        peers.timeout_s = 0.5
        if peers.rank == late:
            done.wait(200)
            return None
        try:
            called = getattr(peers, operation)(1)
            return called() if operation == "ask_highest" else called
        except PeerError as error:
            if peers.rank == 0:
                done.set()
            return error

    begin = time.monotonic()
    found = on_ranks(41, body, timeout_s=200.0)
    assert time.monotonic() - begin < 100
    for rank, error in enumerate(found):
        if rank != late:
            assert isinstance(error, PeerError) and "within 0.5 s" in str(error), (rank, error)
            assert f"rank {late} on node{late}" in str(error) and "rank 3 " not in str(error).partition(":")[2]


def test_the_first_rank_is_named_when_it_says_nothing() -> None:
    done = threading.Event()

    def body(peers: TreePeers) -> Any:
        peers.barrier()
        if peers.rank == 0:
            done.wait(200)
            return None
        peers.timeout_s = 0.3
        try:
            return peers.broadcast(None)
        except PeerError as error:
            done.set()
            return error

    _, *errors = on_ranks(34, body)
    assert all("these have not come to hear rank 0: rank 0 on node0" in str(error) for error in errors), errors


def test_a_neighbour_that_does_not_answer_at_once_is_waited_for_however_short_the_timeout_is() -> None:
    """Else one whose thread gets no turn on a busy machine would be named for the ranks that it knows to be missing."""
    waits: list[float] = []

    class Answer(Future[bytes]):
        """It is there when it is asked for the fourth time."""

        def result(self, timeout: float | None = None) -> bytes:
            assert timeout is not None
            waits.append(timeout)
            if len(waits) < 4:
                raise TimeoutError
            return b"the answer"

    board = Board()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: tree(board, rank, 2), range(2))
        list(pool.map(TreePeers.barrier, (first, second)))  # else rank 1 may not have connected when it is asked
    first.timeout_s = 0.3
    number, _ = first._start(OperationKind.GATHER, 0)
    with second._lock:  # without which its thread does nothing
        assert first._wait(OperationKind.GATHER, number, Answer()) == b"the answer"
    assert waits == [0.3, 0.2, 0.2, 0.2]
    for peers in (first, second):
        peers.close()


def test_who_never_connects_is_named() -> None:
    board, size = Board(), 3
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: tree(board, rank, size, 0.3), range(2))
        errors = list(pool.map(lambda peers: error_of(peers.barrier), (first, second)))
        list(pool.map(TreePeers.close, (first, second)))
    assert all("rank 2, which has not connected" in error for error in errors)


def test_who_connects_late_hears_what_was_said_before() -> None:
    board = Board()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tree, board, 0, 2).result()
        assert first.broadcast("early") == "early"
        second = tree(board, 1, 2)
        assert second.broadcast(None) == "early"
        list(pool.map(TreePeers.close, (first, second)))


def test_a_parent_that_never_comes_is_named() -> None:
    with pytest.raises(PeerError, match="rank 1 on node1 was to meet rank 0, which has not come: wait timeout"):
        tree(Board(0.1), 1, 2)


def has_begun_to_leave(peers: TreePeers) -> bool:
    return "has left the others" in error_of(peers.barrier)


def test_who_connects_when_the_others_have_failed_hears_who_it_was() -> None:
    """Not that its parent, which leaves because of that, has ended: by then it may not even have been let in."""
    board = Board()
    with ThreadPoolExecutor(3) as pool:
        first, second = pool.map(lambda rank: tree(board, rank, 4), range(2))
        _, port, token, _ = json.loads(board.get("peers/0"))
        with socket.create_connection(("127.0.0.1", port)) as slow:
            second.close()
            assert "rank 1 on node1 has ended" in error_of(first.barrier)
            leaving = pool.submit(first.close)
            while not has_begun_to_leave(first):
                pass
            slow.sendall(bytes.fromhex(token) + (2).to_bytes(4, "big") + b"node2".ljust(64, b"\0"))
            slow.settimeout(10)
            assert b"rank 1 on node1 has ended" in slow.recv(4096)
        third = tree(board, 3, 4)
        assert "rank 1 on node1 has ended" in error_of(third.barrier)
        leaving.result(10)
        third.close()


def test_who_connects_when_the_first_rank_is_leaving_hears_what_it_said() -> None:
    board = Board()
    with ThreadPoolExecutor(1) as pool:
        first = tree(board, 0, 2)
        first.broadcast("last words")
        leaving = pool.submit(first.close)
        while not has_begun_to_leave(first):
            pass
        second = tree(board, 1, 2)
        assert second.broadcast(None) == "last words"
        leaving.result(10)
        second.close()


def test_nobody_waits_for_ranks_that_nothing_is_owed_to() -> None:
    first = tree(Board(), 0, 2)
    begin = time.monotonic()
    first.close()
    assert time.monotonic() - begin < 5  # of 10 s that are given to whom something was sent


def test_who_leaves_is_named_on_all_ranks_at_once() -> None:
    """Also in what had been begun before."""

    def body(peers: TreePeers) -> Any:
        answer = peers.ask_highest(peers.rank) if peers.rank != 40 else None
        peers.collect(0)
        return None if answer is None else answer()

    begin = time.monotonic()
    found = on_ranks(41, body, timeout_s=200.0)
    assert time.monotonic() - begin < 100
    for error in found[:40]:
        assert isinstance(error, PeerError) and "rank 40 on node40 " in str(error).partition(": ")[2], error


def test_ranks_that_do_different_things_are_told_so() -> None:
    found = on_ranks(3, lambda peers: peers.gather(1) if peers.rank == 2 else peers.barrier())
    for error in found:  # which of them comes first is chance, but both are named
        assert isinstance(error, PeerError) and "rank 2 on node2 is to gather values" in str(error), found
        assert re.search("rank [01] on node[01] is to meet", str(error)), found


def test_who_is_done_may_leave_before_the_others_have_heard() -> None:
    found = on_ranks(34, lambda peers: peers.gather("x" * 100_000))
    assert all(len(values) == 34 for values in found)


def test_nobody_is_let_in_who_has_not_read_the_store() -> None:
    board = Board()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tree, board, 0, 2, 10.0).result()
        _, port, token, _ = json.loads(board.get("peers/0"))
        wrong_token, right = bytes(16), bytes.fromhex(token)
        pretenders = [wrong_token + b"\0\0\0\1" + bytes(64), right + b"\0\0\0\7" + bytes(64)]
        for said in (b"GET / HTTP/1.1\r\n\r\n" * 8, *pretenders):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)
                stranger.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        second = tree(board, 1, 2)
        assert list(pool.map(lambda peers: peers.gather(peers.rank), (first, second))) == [[0, 1]] * 2
        list(pool.map(TreePeers.close, (first, second)))


def test_connections_that_say_nothing_keep_no_rank_out() -> None:
    """As a scanner of ports or a health check holds them: more than a rank lets wait."""
    board = Board()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as silent:
        first = pool.submit(tree, board, 0, 3, 10.0).result()
        _, port, _, _ = json.loads(board.get("peers/0"))
        for _ in range(100):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        others = [tree(board, rank, 3, 10.0) for rank in (1, 2)]
        with ThreadPoolExecutor(3) as ranks:
            assert list(ranks.map(lambda peers: peers.gather(peers.rank), (first, *others))) == [[0, 1, 2]] * 3
            list(ranks.map(TreePeers.close, (first, *others)))


def test_a_killed_rank_is_named_and_nobody_hangs() -> None:
    """A process this time, which says nothing any more."""
    board = Board()
    program = """
        import os, sys
        from phalanx.ipc.tree_peers import TreePeers
        class Told:
            def get(self, key): return sys.argv[1].encode()
        peers = TreePeers(Told(), 1, 3, host="127.0.0.1", name="gone", timeout_s=20.0)
        peers.barrier()
        os.kill(os.getpid(), 9)
    """
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tree, board, 0, 3).result()
        place = board.get("peers/0").decode()
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), place], env=dict(os.environ))
        both = [first, tree(board, 2, 3)]
        list(pool.map(TreePeers.barrier, both))
        for error in pool.map(lambda peers: error_of(peers.barrier), both):
            assert "rank 1 on gone has ended" in error
        list(pool.map(TreePeers.close, both))
    assert child.wait(240) == -9


class Emulated:
    """All nodes of a job in one thread, and what they send."""

    def __init__(self, size: int) -> None:
        self._wire: deque[tuple[int, int, TreeMessage]] = deque()
        self.sent_bytes: Counter[int] = Counter()
        self.messages: Counter[int] = Counter()
        self.nodes = [TreeNode(rank, size, f"rank {rank}", self._sender(rank)) for rank in range(size)]
        for node in self.nodes:
            for neighbour in (*node.children, *((node.parent,) if node.parent is not None else ())):
                node.met(neighbour, f"rank {neighbour}")

    def _sender(self, sender: int) -> Callable[[int, TreeMessage], None]:
        def send(receiver: int, message: TreeMessage) -> None:
            self.sent_bytes[sender] += 18 + len(message.body)
            self.messages[sender] += 1
            self._wire.append((sender, receiver, message))

        return send

    def run(self) -> None:
        while self._wire:
            sender, receiver, message = self._wire.popleft()
            self.nodes[receiver].hear(sender, message)


@pytest.mark.parametrize("size", [2, 64, 2048, 12_288])
def test_a_question_to_all_costs_each_rank_no_more_than_its_children(size: int) -> None:
    job = Emulated(size)
    answers = [node.start(OperationKind.LOWEST, b"%d" % -(node.rank % 100))[1] for node in job.nodes]
    job.run()
    assert {answer.result(0) for answer in answers} == {b"%d" % -min(99, size - 1)}
    assert sum(job.messages.values()) == 2 * (size - 1)
    assert max(job.messages.values()) <= FAN_OUT + 1
    assert max(job.sent_bytes.values()) <= 25 * (FAN_OUT + 1)


def test_a_gather_brings_each_rank_each_value_once() -> None:
    size, value = 12_288, b'["node0123",7]'
    job = Emulated(size)
    answers = [node.start(OperationKind.GATHER, value)[1] for node in job.nodes]
    job.run()
    assert len(entries(answers[-1].result(0))) == len(entries(answers[0].result(0))) == size
    assert sum(job.messages.values()) == 2 * (size - 1)
    assert max(job.sent_bytes.values()) < 1.1 * FAN_OUT * size * (12 + len(value))


def test_the_missing_of_12_288_are_found_wherever_they_are() -> None:
    size, missing = 12_288, {5, 33 * 32 + 4, 12_287}
    job = Emulated(size)
    for node in job.nodes:
        if node.rank not in missing:
            node.start(OperationKind.LOWEST, b"null")
    job.run()
    for asker in (0, 1, 12_286, 700):
        job.nodes[asker].ask_who_is_missing(0)
    job.run()
    for asker in (0, 1, 12_286, 700):
        said = job.nodes[asker].missing(0)
        assert sorted(said.split("; ")) == sorted(f"rank {rank}" for rank in missing)


def test_every_rank_but_the_first_has_one_parent() -> None:
    for size in (1, 2, 33, 34, 1057, 1058, 12_288):
        below = [child for rank in range(size) for child in children_of(rank, size)]
        assert below == list(range(1, size))
        assert all(child in children_of(parent_of(child) or 0, size) for child in below)
