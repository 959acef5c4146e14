"""Flaps: how often links went down lately. A verdict stays for a window and then goes by itself.

The kernel counts downs since the boot but not when they were, so each check keeps the count and the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.memory import recall, remember
from phalanx.checks.ports import Port, read_ports
from phalanx.checks.result import CheckResult, skipped
from phalanx.checks.thresholds import Threshold
from phalanx.core.kernel_files import boot_id
from phalanx.core.units import duration

_NAME = "nic-flaps"
_ACTION = "keep the host out until it is quiet; check cable, transceiver and switch port"

WINDOW_S = 3600.0
"""For so long a port that flapped is held against the host."""

FEWEST = 2
"""One down may be a switch that was updated; ByteRobust waits for a second one, too."""

SATURATED = 255
"""Link-down counters of InfiniBand have 8 bits and stay at the end (perfquery -R sets them back)."""

LONGEST_GAP_S = 86400.0
"""Between two checks; downs in a longer one may be long past, and are not judged."""


@dataclass(frozen=True)
class Seen:
    """What is remembered of one port: its count, when it was read, and the downs since, as (Unix time, how many)."""

    boot: str
    count: int
    read_s: float
    downs: tuple[tuple[float, int], ...] = ()


def run(host: Host) -> CheckResult:
    """Compare the counters with those of the check before."""
    ports = [port for port in read_ports(host) if port.downs is not None]
    if not ports:
        return skipped(_NAME, "no port counts how often it went down")
    now_s = host.unix_s()
    seen = _from_json(recall(host.cache, _NAME))
    boot = boot_id(host.proc)
    fresh = {port.identity: update(seen.get(port.identity), port.downs or 0, boot, now_s) for port in ports}
    remember(host.cache, _NAME, {name: vars(each) for name, each in {**seen, **fresh}.items()})
    return judge_flaps(ports, fresh, now_s)


def update(before: Seen | None, count: int, boot: str, now_s: float) -> Seen:
    """What is remembered after a reading; downs that are older than the window are forgotten."""
    if before is None:
        return Seen(boot, count, now_s)
    new = count if boot != before.boot or count < before.count else count - before.count
    recent = tuple(event for event in before.downs if now_s - event[0] < WINDOW_S)
    if new and boot == before.boot and now_s - before.read_s <= LONGEST_GAP_S:
        recent += ((now_s, new),)
    return Seen(boot, count, now_s, recent)


def judge_flaps(ports: Iterable[Port], seen: Mapping[str, Seen], now_s: float) -> CheckResult:
    """The verdict on what is remembered."""
    downs = {name: sum(number for _, number in each.downs) for name, each in seen.items()}
    worst = max(downs, key=lambda name: downs[name])
    threshold = Threshold(FEWEST, f"{FEWEST} downs in {duration(WINDOW_S)}; one may be maintenance")
    since_boot = ", ".join(f"{port.name} {port.downs}" for port in ports if port.downs)
    note = f"since the boot: {since_boot}" if since_boot else ""
    full = [port.name for port in ports if port.is_rdma and port.downs == SATURATED]
    if full:
        note += f"; {', '.join(full)} cannot count further, set it back with perfquery -R"
    common = (float(downs[worst]), "downs", threshold.value, threshold.source)
    if downs[worst] < FEWEST:
        return CheckResult(_NAME, "pass", note, *common)
    last_s = max(when for when, _ in seen[worst].downs)
    flapping = ", ".join(
        f"{name.split()[0]} went down {number} times" for name, number in downs.items() if number >= FEWEST
    )
    clears = duration(max(0.0, last_s + WINDOW_S - now_s))
    return CheckResult(_NAME, "fail", f"{flapping}; clears in {clears} without more", *common, _ACTION)


def _from_json(kept: Mapping[str, Any]) -> dict[str, Seen]:
    found = {}
    for name, each in kept.items():
        downs = tuple((float(when), int(number)) for when, number in each["downs"])
        found[name] = Seen(each["boot"], int(each["count"]), float(each["read_s"]), downs)
    return found


CHECK = Check(_NAME, "no link went down repeatedly within the last hour", "passive", run)
