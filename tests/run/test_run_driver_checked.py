"""Answers to checks as events: what is of the host alone, and what is between it and its peers."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import pytest

from phalanx.checks.check_host import CheckResult, failed, passed
from phalanx.checks.network import judge_peers
from phalanx.checks.pairwise_tests import Threshold
from phalanx.checks.peer_bandwidth import PeerMeasure
from phalanx.checks.system_settings import judge_clock
from phalanx.run import messages
from phalanx.run.clock import Now
from phalanx.run.decide.events import CheckFailed, CheckPassed
from phalanx.run.driver.hosts import HostWatch, judged, serves_at

NOW = Now(5.0, 1005.0)
PEERS = {"b": "10.0.0.2:4001"}
FAST = PeerMeasure("10.0.0.2:4001", 4e9, 3e9, 1e-5, 0.0, 1e-6)


def hello(host: str, boot: str, port: int = 4000) -> messages.Hello:
    return messages.Hello(1, host, "10.0.0.1", 2, 0, [], "", boot, 1, 0, [], port)


@pytest.fixture(name="hosts")
def hosts_fixture() -> HostWatch:
    watch = HostWatch(1.0)
    for host in "abc":
        watch.on_hello(hello(host, f"boot of {host}" if host != "c" else "boot of a"), NOW)
    return watch


def answer(*found: CheckResult) -> messages.Checked:
    """As it comes over the wire."""
    outcomes = [messages.CheckOutcome(**asdict(result)) for result in found]
    encoded = msgspec.msgpack.encode(messages.Checked(7, outcomes))
    return msgspec.msgpack.decode(encoded, type=messages.Checked)


def test_a_way_that_is_good_is_told_with_its_rate(hosts: HostWatch) -> None:
    told = judged("a", answer(passed("gemm"), judge_peers([FAST], {})), PEERS, hosts, NOW)
    assert told == CheckPassed(1005.0, "a", 7, {}, {"b": 3e9})


def test_a_rate_within_one_machine_or_of_a_host_that_is_not_known_tells_nothing(hosts: HostWatch) -> None:
    for peer in ("c", "stranger"):
        told = judged("a", answer(judge_peers([FAST], {})), {peer: FAST.peer}, hosts, NOW)
        assert told == CheckPassed(1005.0, "a", 7, {}, {peer: 0.0})


def test_what_is_wrong_between_two_hosts_is_told_as_that_and_put_together(hosts: HostWatch) -> None:
    ahead = PeerMeasure(FAST.peer, 0.0, 0.0, 1e-5, 40.0, 1e-6)
    clocks = judge_clock([ahead], None, Threshold(1.0, "test"))
    told = judged("a", answer(clocks, judge_peers([], {FAST.peer: f"{FAST.peer}: timed out"})), PEERS, hosts, NOW)
    assert isinstance(told, CheckFailed) and told.is_between
    assert told.bad_peers == {"b": "its clock is 40 s ahead of us; no measure: timed out"}
    assert told.why.startswith("clock: ") and "; peers: " in told.why


def test_a_failure_of_the_host_itself_is_its_own_whatever_is_between(hosts: HostWatch) -> None:
    found = failed("gemm-repeat", "not the same bits", "replace it"), judge_peers([], {FAST.peer: "timed out"})
    told = judged("a", answer(*found), PEERS, hosts, NOW)
    assert isinstance(told, CheckFailed) and not told.is_between and told.bad_peers
    told = judged("a", answer(failed("peers", "no answer within 60 s", "")), PEERS, hosts, NOW)
    assert isinstance(told, CheckFailed) and not told.is_between


def test_of_addresses_that_none_of_its_peers_has_nothing_is_told(hosts: HostWatch) -> None:
    found = answer(judge_peers([FAST], {"10.0.0.9:1": "timed out"}, is_suspect=True))
    assert judged("a", found, {"b": ""}, hosts, NOW) == CheckPassed(1005.0, "a", 7)
    assert judged("a", found, PEERS, hosts, NOW) == CheckPassed(1005.0, "a", 7, {}, {"b": 3e9})


def test_where_a_host_serves_measurements() -> None:
    assert serves_at(hello("a", "x", 4001)) == "10.0.0.1:4001" and serves_at(hello("a", "x", 0)) == ""
