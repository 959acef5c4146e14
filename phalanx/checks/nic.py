"""Network cards: links, rates, flaps and errors of their ports.

A port that was never seen up, such as the second one of a card without a cable, is not judged: nobody knows whether it
should be up. The kernel counts downs and errors since the boot but not when they were, so each check keeps the counts
and the time; a verdict on flaps stays for a window and then goes by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.checks.check_host import Check, CheckResult, Host, failed, passed, recall, remember, skipped
from phalanx.checks.network_ports import Port, is_named, read_ports
from phalanx.checks.pairwise_tests import Threshold
from phalanx.checks.thresholds import given_threshold, hold
from phalanx.core.host import boot_id
from phalanx.core.units import duration

_LINK_NAME = "nic-link"
_LINK_ACTION = (
    "check cable, transceiver and switch port; if it shall stay down, delete nic-link.json in the cache folder"
)


def check_link(host: Host) -> CheckResult:
    """Read all ports and judge them."""
    ports = read_ports(host)
    if not ports:
        return skipped(_LINK_NAME, "no network card here")
    seen_up = set(recall(host.cache, _LINK_NAME).get("up", []))
    remember(host.cache, _LINK_NAME, {"up": sorted(seen_up | {port.identity for port in ports if port.is_up})})
    result = judge_links(ports, seen_up, host.environment)
    given = given_threshold(host, _LINK_NAME)
    if result.outcome == "pass" and given and result.value is not None:
        return hold(_LINK_NAME, result.value, "ports up", given, _LINK_ACTION)
    return result


def judge_links(ports: Iterable[Port], seen_up: Iterable[str], environment: Mapping[str, str]) -> CheckResult:
    """The verdict on ports; `seen_up` has the identities of those that were up before."""
    ports, seen_up = list(ports), set(seen_up)
    bad: list[str] = []
    unknown: list[str] = []
    for port in ports:
        if port.is_up or port.is_off:
            continue
        why = ""
        if port.stuck:
            why = f"has a link but stays in state {port.stuck}"
        elif is_named(port, environment):
            why = "is down and named for training"
        elif port.identity in seen_up:
            why = "is down and was up at an earlier check"
        elif port.ups or port.downs:
            why = f"is down and went down {port.downs} times since the boot"
        (bad if why else unknown).append(f"{port.name} {why}".strip())
    # Interfaces may just be in another network namespace; RDMA devices are seen in all of them.
    gone = seen_up - {port.identity for port in ports}
    bad += [f"{name} is gone" for name in sorted(gone) if "/" in name]
    up = sum(port.is_up for port in ports)
    if bad:
        return failed(_LINK_NAME, "; ".join(bad), _LINK_ACTION, value=up, unit="ports up")
    note = f"not judged, since never seen up: {', '.join(unknown)}" if unknown else ""
    return passed(_LINK_NAME, note, value=up, unit="ports up")


LINK = Check(_LINK_NAME, "every port that training needs is up", "passive", check_link)


_RATE_NAME = "nic-rate"
_RATE_ACTION = "reseat or replace cable and transceiver, check the switch port's speed and the card's PCIe slot"


def check_rate(host: Host) -> CheckResult:
    """Read the rates of all ports that are up."""
    rates = {port.identity: port for port in read_ports(host) if port.is_up and port.rate_gbps}
    if not rates:
        return skipped(_RATE_NAME, "no port that is up tells its rate")
    before = {name: float(rate) for name, rate in recall(host.cache, _RATE_NAME).items()}
    best = {name: max(port.rate_gbps or 0.0, before.get(name, 0.0)) for name, port in rates.items()}
    remember(host.cache, _RATE_NAME, {**before, **best})
    return judge_rates(rates.values(), before, given_threshold(host, _RATE_NAME))


def judge_rates(ports: Iterable[Port], before: Mapping[str, float], given: Threshold | None) -> CheckResult:
    """The verdict on the port that lags most behind what it is held against."""
    ports = list(ports)
    kinds: dict[str, list[float]] = defaultdict(list)
    for port in ports:
        kinds[port.kind].append(port.rate_gbps or 0.0)

    def known(port: Port) -> Threshold | None:
        alike, earlier = kinds[port.kind], before.get(port.identity, 0.0)
        if len(alike) > 1 and max(alike) >= earlier:
            return Threshold(max(alike), f"the fastest of this host's {len(alike)} ports of its kind")
        return Threshold(earlier, "this port at an earlier check") if earlier else None

    held = [(port, given or known(port)) for port in ports]
    port, threshold = min(held, key=lambda pair: (pair[0].rate_gbps or 0.0) / pair[1].value if pair[1] else 1.0)
    result = hold(_RATE_NAME, port.rate_gbps or 0.0, "Gb/s", threshold, _RATE_ACTION)
    if result.outcome == "fail":
        slow = sum(1 for each, limit in held if limit and (each.rate_gbps or 0.0) < limit.value)
        more = f" (and {slow - 1} more)" if slow > 1 else ""
        return result.explained(f"{port.name}{more}: {result.reason}")
    return result


RATE = Check(_RATE_NAME, "ports run at the rate of their like, and as before", "passive", check_rate)


_FLAPS_NAME = "nic-flaps"
_FLAPS_ACTION = "keep the host out until it is quiet; check cable, transceiver and switch port"

WINDOW_S = 3600.0
"""For so long a port that flapped is held against the host."""

FLAPS_FEWEST = 2
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


def check_flaps(host: Host) -> CheckResult:
    """Compare the counters with those of the check before."""
    ports = [port for port in read_ports(host) if port.downs is not None]
    if not ports:
        return skipped(_FLAPS_NAME, "no port counts how often it went down")
    now_s = host.unix_s()
    seen = {}
    for name, kept in recall(host.cache, _FLAPS_NAME).items():
        downs = tuple((float(when), int(number)) for when, number in kept["downs"])
        seen[name] = Seen(kept["boot"], int(kept["count"]), float(kept["read_s"]), downs)
    boot = boot_id(host.proc)
    fresh = {port.identity: update(seen.get(port.identity), port.downs or 0, boot, now_s) for port in ports}
    remember(host.cache, _FLAPS_NAME, {name: vars(each) for name, each in {**seen, **fresh}.items()})
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
    threshold = Threshold(FLAPS_FEWEST, f"{FLAPS_FEWEST} downs in {duration(WINDOW_S)}; one may be maintenance")
    since_boot = ", ".join(f"{port.name} {port.downs}" for port in ports if port.downs)
    note = f"since the boot: {since_boot}" if since_boot else ""
    full = [port.name for port in ports if port.is_rdma and port.downs == SATURATED]
    if full:
        note += f"; {', '.join(full)} cannot count further, set it back with perfquery -R"
    common = (float(downs[worst]), "downs", threshold.value, threshold.source)
    if downs[worst] < FLAPS_FEWEST:
        return CheckResult(_FLAPS_NAME, "pass", note, *common)
    last_s = max(when for when, _ in seen[worst].downs)
    flapping = ", ".join(
        f"{name.split()[0]} went down {number} times" for name, number in downs.items() if number >= FLAPS_FEWEST
    )
    clears = duration(max(0.0, last_s + WINDOW_S - now_s))
    return CheckResult(_FLAPS_NAME, "fail", f"{flapping}; clears in {clears} without more", *common, _FLAPS_ACTION)


FLAPS = Check(_FLAPS_NAME, "no link went down repeatedly within the last hour", "passive", check_flaps)


_ERRORS_NAME = "nic-errors"
_ERRORS_ACTION = "clean or replace cable and transceiver"

ERRORS_FEWEST = 10
"""Fewer errors are not yet a rate."""

WORST_RATE = Threshold(1e-12, "bit error rate that InfiniBand and Ethernet links have to keep")


def check_errors(host: Host) -> CheckResult:
    """Compare the counters with those of the check before."""
    ports = [port for port in read_ports(host) if port.errors and port.received_bits is not None]
    if not ports:
        return skipped(_ERRORS_NAME, "no port counts its errors")
    boot = boot_id(host.proc)
    before = recall(host.cache, _ERRORS_NAME)
    now = {port.identity: [sum(port.errors.values()), port.received_bits] for port in ports}
    remember(host.cache, _ERRORS_NAME, {"boot": boot, "ports": now})
    if before.get("boot") != boot:
        total = sum(errors for errors, _ in now.values() if errors)
        return passed(_ERRORS_NAME, f"first reading since the boot, {total} errors so far; a rate needs a second one")
    return judge_errors(ports, before["ports"])


def judge_errors(ports: Iterable[Port], before: Mapping[str, Any]) -> CheckResult:
    """The verdict on the port with the highest rate."""
    rates = {}
    for port in ports:
        errors, bits = before.get(port.identity, (None, None))
        if errors is None or port.received_bits is None or port.received_bits <= bits:
            continue
        new = sum(port.errors.values()) - errors
        rates[port.name] = (new / (port.received_bits - bits), new)
    if not rates:
        return passed(_ERRORS_NAME, "nothing was received since the check before")
    worst = max(rates, key=lambda name: rates[name])
    bad = [name for name, (rate, new) in rates.items() if new >= ERRORS_FEWEST and rate > WORST_RATE.value]
    reason = "; ".join(f"{name}: {rates[name][1]} errors since the check before" for name in bad)
    common = (rates[worst][0], "errors/bit", WORST_RATE.value, WORST_RATE.source)
    return CheckResult(_ERRORS_NAME, "fail" if bad else "pass", reason, *common, _ERRORS_ACTION if bad else "")


ERRORS = Check(_ERRORS_NAME, "ports receive no more errors than their standard allows", "passive", check_errors)
