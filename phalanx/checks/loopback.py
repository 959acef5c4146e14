"""Bandwidth and latency of this host to itself: the network stack, without a network."""

from __future__ import annotations

from phalanx.checks.busy import OtherWork
from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.peer import measure_peer, serve_peer
from phalanx.checks.result import CheckResult
from phalanx.checks.thresholds import judge

_NAME = "loopback"
_BYTES = 128 << 20
_ACTION = "look for other work on the host, and for filters: nft list ruleset, tc qdisc show dev lo"


def run(host: Host) -> CheckResult:
    """Serve and measure."""
    with serve_peer() as port, OtherWork(host.proc) as other:
        measured = measure_peer(f"127.0.0.1:{port}", transfer_bytes=_BYTES)
    rate = min(measured.send_bytes_per_s, measured.receive_bytes_per_s) / 1e9
    result = judge(host, _NAME, rate, "GB/s", action=_ACTION, other=other)
    return result.explained(result.reason, f"{measured.latency_s * 1e6:.0f} µs")


CHECK = Check(
    _NAME, "bandwidth and latency to itself", "quick", run, 30.0, isolated=True, uses=frozenset({"cpu", "memory"})
)
