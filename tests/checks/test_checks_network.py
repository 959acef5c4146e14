"""Measuring between hosts, clocks, and naming the bad host out of pairs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from checks_helpers import empty_host
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checks import system_settings
from phalanx.checks.check_host import host_from_settings
from phalanx.checks.network import check_loopback, check_peers, judge_peers
from phalanx.checks.pairwise_tests import (
    Pair,
    Rates,
    Threshold,
    bad_pairs,
    name_bad_hosts,
    plan_neighbours,
    plan_suspects,
    slow_hosts,
)
from phalanx.checks.peer_bandwidth import PeerError, PeerMeasure, _introduce, measure_peer, serve_peer
from phalanx.core.errors import UserError

_SMALL = 1 << 20
_MEASURE = PeerMeasure("h:1", 10e9, 10e9, 1e-5, 0.0, 1e-6)


def test_a_peer_is_measured_in_both_directions() -> None:
    with serve_peer() as port:
        measured = measure_peer(f"127.0.0.1:{port}", transfer_bytes=_SMALL)
        again = measure_peer(f"127.0.0.1:{port}", transfer_bytes=0)
    assert measured.send_bytes_per_s > 0
    assert measured.receive_bytes_per_s > 0
    assert 0 < measured.clock_error_s <= measured.latency_s
    assert abs(again.clock_ahead_s) <= again.clock_error_s + 0.5  # one clock, two readings


def test_who_serves_and_who_asks_prove_that_they_know_the_key() -> None:
    with serve_peer(key=b"one key") as port:
        address = f"127.0.0.1:{port}"
        assert measure_peer(address, transfer_bytes=0, key=b"one key").latency_s > 0
        for key in (b"another", None):
            with pytest.raises(PeerError):
                measure_peer(address, transfer_bytes=0, limit_s=5.0, key=key)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(30)
            hello = stranger.recv(32, socket.MSG_WAITALL)
            stranger.sendall(hello + bytes(16))  # what is sent back proves nothing
            assert stranger.recv(1) == b""


def test_a_peer_that_only_pretends_to_know_the_key_is_noticed() -> None:
    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"phalanx peer 2".ljust(16, b"\0") + bytes(16))
            connection.recv(48, socket.MSG_WAITALL)
            connection.sendall(bytes(48))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(PeerError, match="does not know the key"):
            measure_peer(f"127.0.0.1:{server.getsockname()[1]}", transfer_bytes=0, key=b"one key")
        thread.join()


def test_other_hosts_are_not_served_without_a_key() -> None:
    with pytest.raises(UserError, match="--token-file"), serve_peer("0.0.0.0"):
        pass
    with serve_peer("0.0.0.0", key=b"one key") as port:
        assert port


def test_in_a_recovery_one_good_peer_clears_a_suspect(tmp_path: Path) -> None:
    slow, good = replace(_MEASURE, peer="a:1", send_bytes_per_s=1e9), replace(_MEASURE, peer="b:1")
    limit = Threshold(5.0, "given")
    for is_suspect, outcome in ((False, "fail"), (True, "pass")):
        assert judge_peers([slow, good], {}, limit, is_suspect=is_suspect).outcome == outcome
    assert "about that end" in judge_peers([good], {"a:1": "no way"}, limit, is_suspect=True).reason
    assert judge_peers([slow], {"b:1": "no way"}, limit, is_suspect=True).outcome == "fail"
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    # Where nothing listens any more the network has answered: that says nothing against this host.
    assert check_peers(empty_host(tmp_path, peers=(closed,), is_suspect=True)).outcome == "skip"
    assert check_peers(empty_host(tmp_path, peers=(closed,))).outcome == "fail"


def test_a_check_of_peers_reads_the_key_from_its_file(tmp_path: Path) -> None:
    key = tmp_path / "token"
    key.write_text("one key\n")
    with serve_peer(key=b"one key") as port:
        host = empty_host(tmp_path, peers=(f"127.0.0.1:{port}",), peer_key=key, unix_s=time.time)
        assert system_settings.check_clock(host).outcome == "pass"
        assert host_from_settings(host.settings()).peer_key == key
        missing = replace(host, peer_key=tmp_path / "none")
        assert "key cannot be read" in check_peers(missing).reason


@pytest.mark.parametrize("ahead_s", [3600.0, -90.0])
def test_a_clock_that_is_wrong_is_told_of(tmp_path: Path, ahead_s: float) -> None:
    with serve_peer(clock_ns=lambda: time.time_ns() + round(ahead_s * 1e9)) as port:
        host = empty_host(tmp_path, peers=(f"127.0.0.1:{port}",), unix_s=time.time)
        result = system_settings.check_clock(host)
    assert result.outcome == "fail"
    assert result.value == pytest.approx(abs(ahead_s), abs=10)
    assert ("ahead of us" if ahead_s > 0 else "behind us") in result.reason


def test_our_wrong_clock_is_seen_by_most_peers_and_one_wrong_peer_is_not_ours(tmp_path: Path) -> None:
    right = [replace(_MEASURE, peer=f"h{number}:1") for number in range(3)]
    wrong = replace(_MEASURE, peer="h9:1", clock_ahead_s=-40.0)
    limit = Threshold(1.0, "test")
    theirs = system_settings.judge_clock([*right, wrong], True, limit)
    assert (theirs.outcome, theirs.reason) == ("pass", "h9:1: its clock is 40 s behind us; ours agrees with most")
    assert theirs.bad_peers == {"h9:1": "its clock is 40 s behind us"}
    ours = system_settings.judge_clock([replace(each, clock_ahead_s=5.0) for each in right], False, limit)
    assert ours.outcome == "fail"
    assert "not synchronised" in ours.reason
    # What the way there takes is no skew.
    assert (
        system_settings.judge_clock([replace(_MEASURE, clock_ahead_s=2.0, clock_error_s=1.5)], None, limit).outcome
        == "pass"
    )


def test_an_injected_clock_of_ours(tmp_path: Path) -> None:
    with serve_peer() as port:
        host = empty_host(tmp_path, peers=(f"127.0.0.1:{port}",), unix_s=lambda: time.time() - 300)
        assert system_settings.check_clock(host).outcome == "fail"


@pytest.mark.parametrize(
    ("answers", "synchronised"),
    [
        ({"chronyc": "Stratum         : 3\nLeap status     : Normal\n"}, True),
        ({"chronyc": "Leap status     : Not synchronised\n", "timedatectl": "yes\n"}, False),
        ({"timedatectl": "yes\n"}, True),
        ({"timedatectl": "no\n"}, False),
        ({"timedatectl": "\n"}, None),
        ({}, None),
    ],
)
def test_daemons_that_keep_the_clock(tmp_path: Path, answers: dict[str, str], synchronised: bool | None) -> None:
    host = empty_host(tmp_path, run=lambda command, limit_s: answers.get(command[0]))
    assert system_settings.ask_daemon(host) is synchronised
    assert system_settings.check_clock(host).outcome == ("skip" if synchronised is None else "pass")


def _serve_once(answer: Callable[[socket.socket], None]) -> tuple[int, threading.Thread]:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server:
            connection, _ = server.accept()
            with connection:
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    return server.getsockname()[1], thread


def test_what_is_no_peer_is_refused() -> None:
    port, thread = _serve_once(lambda connection: connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n"))
    with pytest.raises(PeerError):
        measure_peer(f"127.0.0.1:{port}", transfer_bytes=_SMALL, limit_s=60.0)
    thread.join()
    with pytest.raises(PeerError, match="refused"):
        measure_peer(f"127.0.0.1:{port}")


def test_a_peer_that_hangs_up_is_told_of() -> None:
    port, thread = _serve_once(lambda connection: None)
    with pytest.raises(PeerError):
        measure_peer(f"127.0.0.1:{port}")
    thread.join()


@pytest.mark.parametrize("request_bytes", [b"X" + bytes(8), b"S" + b"\xff" * 8, b"R" + b"\xff" * 8])
def test_the_server_closes_on_nonsense_and_serves_on(request_bytes: bytes) -> None:
    with serve_peer() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            _introduce(connection, None)
            connection.sendall(request_bytes)
            assert connection.recv(1) == b""
        assert measure_peer(f"127.0.0.1:{port}", transfer_bytes=_SMALL).latency_s > 0


def test_loopback_is_measured(tmp_path: Path) -> None:
    result = check_loopback(empty_host(tmp_path))
    assert (result.outcome, result.unit) == ("pass", "GB/s")
    assert result.value
    slow = check_loopback(empty_host(tmp_path, expected={"loopback": 1e6}))
    assert (slow.outcome, slow.threshold_source) == ("fail", "given with --expect")


def test_a_slow_peer_is_named_against_the_others() -> None:
    rates = {"a:1": 10e9, "b:1": 9.5e9, "c:1": 3e9, "d:1": 10.5e9}
    measured = [replace(_MEASURE, peer=peer, send_bytes_per_s=rate) for peer, rate in rates.items()]
    result = judge_peers(measured, {})
    assert result.outcome == "fail"
    assert "c:1: 3 GB/s, less than 10" in result.reason
    assert "a:1" not in result.reason
    assert judge_peers(measured[:2], {}).reason.endswith("no threshold is known")
    assert judge_peers(measured[:2], {"x:1": "x:1: refused"}).outcome == "fail"
    assert judge_peers([], {"x:1": "x:1: refused"}).outcome == "fail"
    assert judge_peers(measured, {}, Threshold(1.0, "given")).outcome == "pass"


def test_what_was_found_is_told_by_peer_too() -> None:
    measured = [replace(_MEASURE, peer="a:1", send_bytes_per_s=3e9), replace(_MEASURE, peer="b:1")]
    result = judge_peers(measured, {"x:1": "x:1: timed out"}, Threshold(5.0, "given"))
    assert result.peer_rates == {"a:1": pytest.approx(3e9), "b:1": pytest.approx(10e9)}
    assert result.bad_peers == {"a:1": "3 GB/s, less than 5", "x:1": "no measure: timed out"}


def test_a_way_that_lets_little_through_is_given_up_in_time() -> None:
    """Each wait ends within its limit, since now and then a little comes."""
    ended = threading.Event()

    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while not ended.wait(0.05):
                try:
                    connection.sendall(b"T")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        try:
            with pytest.raises(PeerError, match=r"no measure within 0\.5 s"):
                measure_peer(f"127.0.0.1:{server.getsockname()[1]}", key=b"a key", within_s=0.5)
        finally:
            ended.set()
            thread.join()


def test_peers_are_tested_or_told_of(tmp_path: Path) -> None:
    assert check_peers(empty_host(tmp_path)).outcome == "skip"
    with serve_peer() as port:
        good = check_peers(empty_host(tmp_path, peers=(f"127.0.0.1:{port}",)))
    assert (good.outcome, good.unit) == ("pass", "GB/s")
    gone = check_peers(empty_host(tmp_path, peers=(f"127.0.0.1:{port}",)))
    assert gone.outcome == "fail"


def test_two_hosts_cannot_tell_which_is_slow() -> None:
    assert slow_hosts({"a": 1.0, "b": 10.0}) == {}
    assert slow_hosts({"a": 1.0, "b": 10.0, "c": 10.0}) == {"a": 10.0}


# Neighbours


class _Network:
    """Pairs are as slow as their slower host; a dead host gives no result."""

    def __init__(self, rates: dict[str, float | None]) -> None:
        self.rates = rates
        self.turns: list[list[Pair]] = []

    def __call__(self, pairs: Sequence[Pair]) -> Rates:
        self.turns.append(list(pairs))
        members = [host for pair in pairs for host in pair]
        assert len(set(members)) == len(members), "a host is in two pairs at the same time"
        return {pair: self._rate(pair) for pair in pairs}

    def _rate(self, pair: Pair) -> float | None:
        both = [self.rates[host] for host in pair]
        return None if None in both else min(rate for rate in both if rate is not None)


def test_one_slow_host_of_eight_is_named_in_two_rounds() -> None:
    network = _Network({f"h{number}": 10e9 for number in range(8)} | {"h3": 4e9})
    judged = name_bad_hosts(list(network.rates), network)
    assert list(judged.bad) == ["h3"]
    assert "4 GB/s, less than 7" in judged.bad["h3"]
    assert judged.cleared == ("h2",)
    assert len(network.turns) == 2
    assert len(network.turns[1]) == 2


def test_an_odd_host_and_a_dead_one() -> None:
    network = _Network({"a": 10e9, "b": 10e9, "c": None})
    judged = name_bad_hosts(["a", "b", "c"], network)
    assert list(judged.bad) == ["c"]
    assert name_bad_hosts(["a"], network).bad == {}
    assert plan_neighbours([]) == []


def test_without_a_good_host_nobody_is_blamed() -> None:
    network = _Network({"a": 10e9, "b": None})
    judged = name_bad_hosts(["a", "b"], network)
    assert judged.bad == {}
    assert judged.open is not None
    assert set(judged.open) == {"a", "b"}


@given(st.lists(st.sampled_from([1e9, 2e9, 6e9, 6.5e9, 8e9, 9e9, 1e10]), max_size=30))
def test_a_pair_is_held_against_the_median_of_the_others(rates: list[float]) -> None:
    pairs = {(f"a{number}", f"b{number}"): rate for number, rate in enumerate(rates)}
    for share in (0.5, 0.7):
        others = {pair: [rate for other, rate in pairs.items() if other != pair] for pair in pairs}
        slow = [pair for pair, rate in pairs.items() if len(pairs) > 2 and rate < share * median(others[pair])]
        assert list(bad_pairs(pairs, None, share)) == slow


def test_suspects_outnumber_good_hosts() -> None:
    assert plan_suspects(["a", "b", "c"], ["x", "y"]) == [[("a", "x"), ("b", "y")], [("c", "x")]]


@given(st.integers(2, 40), st.data())
def test_whoever_is_bad_is_named_and_nobody_else(size: int, data: st.DataObject) -> None:
    hosts = [f"h{number}" for number in range(size)]
    bad = data.draw(st.sets(st.sampled_from(hosts)))
    slow = data.draw(st.sets(st.sampled_from(sorted(bad)))) if bad else set()
    network = _Network({host: (3e9 if host in slow else None) if host in bad else 10e9 for host in hosts})
    judged = name_bad_hosts(hosts, network, Threshold(7e9, "test"))
    assert set(judged.bad) <= bad
    left_open = set(judged.open or {})
    if not left_open:
        assert set(judged.bad) == bad
    else:  # no pair was good at all
        assert not judged.bad
        assert bad <= left_open


def test_a_command_line_serves_until_it_is_ended(tmp_path: Path) -> None:
    key = tmp_path / "secret" / "token"
    words = [sys.executable, "-m", "phalanx.cli.main", "check", "--serve", "127.0.0.1:0", "--token-file", str(key)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[3].rstrip(";")
        assert measure_peer(address, transfer_bytes=0, key=key.read_bytes().strip()).latency_s > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_command_line_serves_no_stranger_of_another_host() -> None:
    words = [sys.executable, "-m", "phalanx.cli.main", "check", "--serve", "0.0.0.0:0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--token-file" in done.stderr
