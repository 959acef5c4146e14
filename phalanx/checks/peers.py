"""Bandwidth and latency to other hosts, which serve `phalanx.checks.peer.serve_peer` on the training network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.peer import PeerError, PeerMeasure, measure_peer, read_key
from phalanx.checks.result import CheckResult, skipped
from phalanx.checks.thresholds import Threshold, given_threshold, slow_hosts

_NAME = "peers"
_BYTES = 64 << 20
_WITHIN_S = 10.0  # of one peer: the checks of a recovery are waited for no longer than 30 s
_ACTION = "test pairs in two rounds to learn which end is bad; check routes, MTU and the switch ports"


def run(host: Host) -> CheckResult:
    """Measure the way to each peer, one after the other."""
    if not host.peers:
        return skipped(_NAME, "no peers given (--peer)")
    measured, problems = [], {}
    for address in host.peers:
        try:
            key = read_key(host.peer_key) if host.peer_key else None
            measured.append(measure_peer(address, transfer_bytes=_BYTES, within_s=_WITHIN_S, key=key))
        except (PeerError, ValueError) as error:
            if host.is_suspect and isinstance(error.__cause__, ConnectionRefusedError):
                continue  # that host answers, so the network works: only its executor has gone
            problems[address] = str(error)
    if not measured and not problems:
        return skipped(_NAME, "no peer serves any more")
    return judge_peers(measured, problems, given_threshold(host, _NAME), is_suspect=host.is_suspect)


def judge_peers(
    measured: Sequence[PeerMeasure],
    problems: Mapping[str, str],
    given: Threshold | None = None,
    *,
    is_suspect: bool = False,
) -> CheckResult:
    """The verdict: against what was given, else each peer against the others.

    Args:
        is_suspect: the peers are believed good: if the way to one of them is good, this host is, and the others are in
            doubt; see `phalanx.checks.neighbours`.
    """
    rates = {each.peer: min(each.send_bytes_per_s, each.receive_bytes_per_s) / 1e9 for each in measured}
    limits = {peer: given.value for peer, rate in rates.items() if rate < given.value} if given else slow_hosts(rates)
    bad = {peer: f"{rates[peer]:.3g} GB/s, less than {limit:.3g}" for peer, limit in limits.items()}
    bad |= {peer: f"no measure: {problem.removeprefix(f'{peer}: ')}" for peer, problem in problems.items()}
    is_cleared = is_suspect and len(limits) < len(rates)
    latency = f"{max(each.latency_s for each in measured) * 1e6:.0f} µs" if measured else ""
    known = given is not None or len(rates) > 2
    cleared = "the way to the others is good, so this is about that end" if bad and is_cleared else ""
    said = "; ".join(f"{peer}: {why}" for peer, why in bad.items())
    notes = [said, cleared, latency, "" if known or bad else "no threshold is known"]
    is_bad = bool(bad) and not is_cleared
    return CheckResult(
        _NAME,
        "fail" if is_bad else "pass",
        "; ".join(filter(None, notes)),
        min(rates.values(), default=None),
        "GB/s" if rates else "",
        given.value if given else min(limits.values(), default=None),
        given.source if given else "70% of the median of the other peers" if limits else "",
        _ACTION if is_bad else "",
        bad,
        {peer: rate * 1e9 for peer, rate in rates.items()},
    )


CHECK = Check(_NAME, "bandwidth and latency to other hosts", "quick", run, 60.0, isolated=True, uses=frozenset({"cpu"}))
