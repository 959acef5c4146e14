"""Bandwidth and latency to other hosts, which serve `phalanx.checks.peer.serve_peer` on the training network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.peer import PeerError, PeerMeasure, measure_peer
from phalanx.checks.result import CheckResult, skipped
from phalanx.checks.thresholds import Threshold, given_threshold, slow_hosts

_NAME = "peers"
_BYTES = 64 << 20
_ACTION = "test pairs in two rounds to learn which end is bad; check routes, MTU and the switch ports"


def run(host: Host) -> CheckResult:
    """Measure the way to each peer, one after the other."""
    if not host.peers:
        return skipped(_NAME, "no peers given (--peer)")
    measured, problems = [], {}
    for address in host.peers:
        try:
            measured.append(measure_peer(address, transfer_bytes=_BYTES))
        except (PeerError, ValueError) as error:
            problems[address] = str(error)
    return judge_peers(measured, problems, given_threshold(host, _NAME))


def judge_peers(
    measured: Sequence[PeerMeasure], problems: Mapping[str, str], given: Threshold | None = None
) -> CheckResult:
    """The verdict: against what was given, else each peer against the others."""
    rates = {each.peer: min(each.send_bytes_per_s, each.receive_bytes_per_s) / 1e9 for each in measured}
    limits = {peer: given.value for peer, rate in rates.items() if rate < given.value} if given else slow_hosts(rates)
    bad = [f"{peer}: {rates[peer]:.3g} GB/s, less than {limit:.3g}" for peer, limit in limits.items()]
    bad += [f"no measure: {problem}" for problem in problems.values()]
    latency = f"{max(each.latency_s for each in measured) * 1e6:.0f} µs" if measured else ""
    known = given is not None or len(rates) > 2
    notes = [*bad, latency, "" if known or bad else "no threshold is known"]
    return CheckResult(
        _NAME,
        "fail" if bad else "pass",
        "; ".join(filter(None, notes)),
        min(rates.values(), default=None),
        "GB/s" if rates else "",
        given.value if given else min(limits.values(), default=None),
        given.source if given else "70% of the median of the other peers" if limits else "",
        _ACTION if bad else "",
    )


CHECK = Check(_NAME, "bandwidth and latency to other hosts", "quick", run, 60.0, isolated=True, uses=frozenset({"cpu"}))
