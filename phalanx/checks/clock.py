"""This host's clock: does something keep it right, and how far is it from those of the peers?"""

from __future__ import annotations

import re
from functools import partial

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.peer import PeerError, PeerMeasure, measure_peer, read_key
from phalanx.checks.result import CheckResult, passed, skipped
from phalanx.checks.thresholds import Threshold, given_threshold

_NAME = "clock"
_ACTION = "set it right: systemctl restart chrony (or systemd-timesyncd), and look why it was not"
_MOST = Threshold(1.0, "what etcd tolerates between its members; stores refuse requests at 900")


def run(host: Host) -> CheckResult:
    """Ask the daemon that keeps the clock, and compare with the peers."""
    synchronised = ask_daemon(host)
    measured, problems = [], []
    for address in host.peers:
        try:
            key = read_key(host.peer_key) if host.peer_key else None
            clock_ns = partial(_unix_ns, host)
            measured.append(
                measure_peer(address, transfer_bytes=0, limit_s=2.0, within_s=5.0, clock_ns=clock_ns, key=key)
            )
        except (PeerError, ValueError) as error:
            problems.append(str(error))
    if not measured:
        if synchronised is None:
            return skipped(_NAME, "; ".join(problems) or "no peers given, and no daemon tells of it")
        return passed(_NAME, "; ".join(problems) or "kept by NTP" if synchronised else "not synchronised by NTP")
    return judge_clock(measured, synchronised, given_threshold(host, _NAME) or _MOST)


def _unix_ns(host: Host) -> int:
    return round(host.unix_s() * 1e9)


def judge_clock(measured: list[PeerMeasure], synchronised: bool | None, threshold: Threshold) -> CheckResult:
    """The verdict: ours is wrong when it is off from most peers; when it is off from few, they are."""
    off = [each for each in measured if abs(each.clock_ahead_s) - each.clock_error_s > threshold.value]
    worst = max(measured, key=lambda each: abs(each.clock_ahead_s))
    is_ours = 2 * len(off) > len(measured)
    bad = {each.peer: f"its clock is {abs(each.clock_ahead_s):.3g} s {_side(each.clock_ahead_s)}" for each in off}
    notes = [f"{peer}: {why}" for peer, why in bad.items()]
    if synchronised is False:
        notes.append("not synchronised by NTP")
    if off and not is_ours:
        notes.append("ours agrees with most")
    return CheckResult(
        _NAME,
        "fail" if is_ours else "pass",
        "; ".join(notes),
        abs(worst.clock_ahead_s),
        "s off",
        threshold.value,
        threshold.source,
        _ACTION if is_ours else "",
        bad,
    )


def _side(ahead_s: float) -> str:
    return "ahead of us" if ahead_s > 0 else "behind us"


def ask_daemon(host: Host) -> bool | None:
    """Whether chrony or systemd says that the clock is synchronised; None: neither can be asked."""
    answer = host.run(["chronyc", "-n", "tracking"], 0.5)
    if answer is not None and (match := re.search(r"^Leap status\s*:\s*(.+)$", answer, re.MULTILINE)):
        return match[1].strip() != "Not synchronised"
    answer = host.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], 0.5)
    return None if answer is None or answer.strip() not in ("yes", "no") else answer.strip() == "yes"


CHECK = Check(_NAME, "the clock is kept, and agrees with the peers'", "quick", run, limit_s=15.0)
