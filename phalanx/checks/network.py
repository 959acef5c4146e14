"""The network: this host to itself (the network stack), to others, and all-to-all among its own ranks.

Other hosts serve `phalanx.checks.peer_bandwidth.serve_peer`. The ranks are NCCL's over the GPUs, else gloo's over some
cores.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence

from phalanx.checks.check_host import Check, CheckResult, Host, failed, skipped
from phalanx.checks.collective import CollectiveError, run_here
from phalanx.checks.nvml import NoGpusError, SilentGpusError
from phalanx.checks.pairwise_tests import Threshold, slow_hosts
from phalanx.checks.peer_bandwidth import PeerError, PeerMeasure, measure_peer, read_key, serve_peer
from phalanx.checks.thresholds import OtherWork, all_to_all_threshold, given_threshold, judge

_LOOPBACK_NAME = "loopback"
_LOOPBACK_BYTES = 128 << 20
_LOOPBACK_ACTION = "look for other work on the host, and for filters: nft list ruleset, tc qdisc show dev lo"


def check_loopback(host: Host) -> CheckResult:
    """Serve and measure."""
    with serve_peer() as port, OtherWork(host.proc) as other:
        measured = measure_peer(f"127.0.0.1:{port}", transfer_bytes=_LOOPBACK_BYTES)
    rate = min(measured.send_bytes_per_s, measured.receive_bytes_per_s) / 1e9
    result = judge(host, _LOOPBACK_NAME, rate, "GB/s", action=_LOOPBACK_ACTION, other=other)
    return result.explained(result.reason, f"{measured.latency_s * 1e6:.0f} µs")


LOOPBACK = Check(
    _LOOPBACK_NAME,
    "bandwidth and latency to itself",
    "quick",
    check_loopback,
    30.0,
    isolated=True,
    uses=frozenset({"cpu", "memory"}),
)


_PEERS_NAME = "peers"
_PEERS_BYTES = 64 << 20
_WITHIN_S = 10.0  # of one peer: the checks of a recovery are waited for no longer than 30 s
_PEERS_ACTION = "test pairs in two rounds to learn which end is bad; check routes, MTU and the switch ports"


def check_peers(host: Host) -> CheckResult:
    """Measure the way to each peer, one after the other."""
    if not host.peers:
        return skipped(_PEERS_NAME, "no peers given (--peer)")
    measured, problems = [], {}
    for address in host.peers:
        try:
            key = read_key(host.peer_key) if host.peer_key else None
            measured.append(measure_peer(address, transfer_bytes=_PEERS_BYTES, within_s=_WITHIN_S, key=key))
        except (PeerError, ValueError) as error:
            if host.is_suspect and isinstance(error.__cause__, ConnectionRefusedError):
                continue  # that host answers, so the network works: only its executor has gone
            problems[address] = str(error)
    if not measured and not problems:
        return skipped(_PEERS_NAME, "no peer serves any more")
    return judge_peers(measured, problems, given_threshold(host, _PEERS_NAME), is_suspect=host.is_suspect)


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
            doubt; see `phalanx.checks.pairwise_tests`.
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
        _PEERS_NAME,
        "fail" if is_bad else "pass",
        "; ".join(filter(None, notes)),
        min(rates.values(), default=None),
        "GB/s" if rates else "",
        given.value if given else min(limits.values(), default=None),
        given.source if given else "70% of the median of the other peers" if limits else "",
        _PEERS_ACTION if is_bad else "",
        bad,
        {peer: rate * 1e9 for peer, rate in rates.items()},
    )


PEERS = Check(
    _PEERS_NAME,
    "bandwidth and latency to other hosts",
    "quick",
    check_peers,
    60.0,
    isolated=True,
    uses=frozenset({"cpu"}),
)


_ALL_TO_ALL_NAME = "all-to-all"
_GPU_BYTES = 512 << 20  # as the published figures
_CPU_BYTES = 16 << 20
_MOST_RANKS = 8
_LIMIT_S = 80.0


def check_all_to_all(host: Host) -> CheckResult:
    """Exchange data between all ranks, and check what arrives."""
    try:
        gpus = host.gpus.read()
    except NoGpusError:
        gpus = ()
    except SilentGpusError as silent:
        return failed(_ALL_TO_ALL_NAME, str(silent), "take the host out; reset the GPUs or reboot")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = len(gpus) if gpus else min(_MOST_RANKS, cores)
    if size < 2:
        return skipped(_ALL_TO_ALL_NAME, f"one {'GPU' if gpus else 'core'} has nobody to exchange with")
    if gpus and not importlib.import_module("torch").cuda.is_available():
        return skipped(_ALL_TO_ALL_NAME, "torch cannot use CUDA here")
    known = all_to_all_threshold(gpus[0].name, size) if gpus else None
    what = f"{size} GPUs, NCCL" if gpus else f"{size} processes, gloo"
    try:
        num_bytes = _GPU_BYTES if gpus else _CPU_BYTES
        with OtherWork(host.proc) as other:
            rate = run_here("all-to-all", size, num_bytes=num_bytes, limit_s=_LIMIT_S, on_gpus=bool(gpus))
    except CollectiveError as error:
        action = "look at NVLink, fabric manager and dmesg; NCCL_DEBUG=INFO tells more"
        return failed(_ALL_TO_ALL_NAME, f"{what}: {error}", action)
    action = "look at NVLink and PCIe of each GPU; take the host out" if gpus else "look for other work on the host"
    result = judge(host, _ALL_TO_ALL_NAME, rate / 1e9, "GB/s", known=known, action=action, hardware=what, other=other)
    return result.explained(result.reason, what)


ALL_TO_ALL = Check(
    _ALL_TO_ALL_NAME,
    "all-to-all among the ranks of this host",
    "full",
    check_all_to_all,
    90.0,
    isolated=True,
    uses=frozenset({"cpu", "memory", "gpu"}),
)
