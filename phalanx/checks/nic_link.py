"""Links of network cards: is every port up that was up before, or that training is told to use?

A port that was never seen up, such as the second one of a card without a cable, is not judged: nobody knows whether it
should be up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.memory import recall, remember
from phalanx.checks.ports import Port, is_named, read_ports
from phalanx.checks.result import CheckResult, failed, passed, skipped
from phalanx.checks.thresholds import given_threshold, hold

_NAME = "nic-link"
_ACTION = "check cable, transceiver and switch port; if it shall stay down, delete nic-link.json in the cache folder"


def run(host: Host) -> CheckResult:
    """Read all ports and judge them."""
    ports = read_ports(host)
    if not ports:
        return skipped(_NAME, "no network card here")
    seen_up = set(recall(host.cache, _NAME).get("up", []))
    remember(host.cache, _NAME, {"up": sorted(seen_up | {port.identity for port in ports if port.is_up})})
    result = judge_links(ports, seen_up, host.environment)
    given = given_threshold(host, _NAME)
    if result.outcome == "pass" and given and result.value is not None:
        return replace(hold(_NAME, result.value, "ports up", given, _ACTION))
    return result


def judge_links(ports: Iterable[Port], seen_up: Iterable[str], environment: Mapping[str, str]) -> CheckResult:
    """The verdict on ports; `seen_up` has the identities of those that were up before."""
    ports, seen_up = list(ports), set(seen_up)
    bad: list[str] = []
    unknown: list[str] = []
    for port in ports:
        if port.is_up or port.is_off:
            continue
        why = _why_bad(port, port.identity in seen_up, is_named(port, environment))
        (bad if why else unknown).append(f"{port.name} {why}".strip())
    # Interfaces may just be in another network namespace; RDMA devices are seen in all of them.
    gone = seen_up - {port.identity for port in ports}
    bad += [f"{name} is gone" for name in sorted(gone) if "/" in name]
    up = sum(port.is_up for port in ports)
    if bad:
        return failed(_NAME, "; ".join(bad), _ACTION, value=up, unit="ports up")
    note = f"not judged, since never seen up: {', '.join(unknown)}" if unknown else ""
    return passed(_NAME, note, value=up, unit="ports up")


def _why_bad(port: Port, was_up: bool, named: bool) -> str:
    if port.stuck:
        return f"has a link but stays in state {port.stuck}"
    if named:
        return "is down and named for training"
    if was_up:
        return "is down and was up at an earlier check"
    if port.ups or port.downs:
        return f"is down and went down {port.downs} times since the boot"
    return ""


CHECK = Check(_NAME, "every port that training needs is up", "passive", run)
