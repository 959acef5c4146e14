"""What a host answers to a check, as an event. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from phalanx.run import messages
from phalanx.run.decide.events import CheckFailed, CheckPassed
from phalanx.run.driver.hosts import HostWatch
from phalanx.run.now import Now
from phalanx.run.wire.addresses import Address


def serves_at(hello: messages.Hello) -> str:
    """``address:port`` where a host serves measurements of the network; empty: nowhere."""
    return str(Address(hello.address, hello.peer_port)) if hello.peer_port else ""


def judged(
    host: str, answer: messages.Checked, peers: Mapping[str, str], hosts: HostWatch, now: Now
) -> CheckPassed | CheckFailed:
    """Whether it has passed, and what it has found of its peers.

    Args:
        peers: hosts that it was to test the network with, and where they serve measurements now; what is said of
            other addresses is left out.
    """
    names = {address: peer for peer, address in peers.items() if address}
    bad_peers, peer_rates = _bad_peers(answer, names), _peer_rates(host, answer, names, hosts)
    failed = [outcome for outcome in answer.outcomes if outcome.outcome == "fail"]
    if not failed:
        return CheckPassed(now.unix_s, host, answer.number, bad_peers, peer_rates)
    why = "; ".join(f"{outcome.name}: {outcome.reason}" for outcome in failed)
    is_between = all(outcome.bad_peers for outcome in failed)
    return CheckFailed(now.unix_s, host, answer.number, why, bad_peers, peer_rates, is_between)


def _bad_peers(answer: messages.Checked, names: dict[str, str]) -> dict[str, str]:
    said: dict[str, list[str]] = defaultdict(list)
    for outcome in answer.outcomes:
        for address, why in outcome.bad_peers.items():
            if address in names:
                said[names[address]].append(why)
    return {peer: "; ".join(whys) for peer, whys in said.items()}


def _peer_rates(host: str, answer: messages.Checked, names: dict[str, str], hosts: HostWatch) -> dict[str, float]:
    """By name; 0 for hosts that may be on one machine, where a rate tells of its processors."""
    rates = {address: rate for outcome in answer.outcomes for address, rate in outcome.peer_rates.items()}
    here = ("", hosts.machine_of(host))
    return {
        peer: 0.0 if hosts.machine_of(peer) in here else rates[address]
        for address, peer in names.items()
        if address in rates
    }
