"""Rates that network cards have agreed on with their switches: as high as those of their like, and as before?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.memory import recall, remember
from phalanx.checks.ports import Port, read_ports
from phalanx.checks.result import CheckResult, skipped
from phalanx.checks.thresholds import Threshold, given_threshold, hold

_NAME = "nic-rate"
_ACTION = "reseat or replace cable and transceiver, check the switch port's speed and the card's PCIe slot"


def run(host: Host) -> CheckResult:
    """Read the rates of all ports that are up."""
    rates = {port.identity: port for port in read_ports(host) if port.is_up and port.rate_gbps}
    if not rates:
        return skipped(_NAME, "no port that is up tells its rate")
    before = {name: float(rate) for name, rate in recall(host.cache, _NAME).items()}
    best = {name: max(port.rate_gbps or 0.0, before.get(name, 0.0)) for name, port in rates.items()}
    remember(host.cache, _NAME, {**before, **best})
    return judge_rates(rates.values(), before, given_threshold(host, _NAME))


def judge_rates(ports: Iterable[Port], before: Mapping[str, float], given: Threshold | None) -> CheckResult:
    """The verdict on the port that lags most behind what it is held against."""
    ports = list(ports)
    kinds: dict[str, list[float]] = defaultdict(list)
    for port in ports:
        kinds[port.kind].append(port.rate_gbps or 0.0)
    held = [(port, given or _known(port, kinds[port.kind], before)) for port in ports]
    port, threshold = min(held, key=lambda pair: (pair[0].rate_gbps or 0.0) / pair[1].value if pair[1] else 1.0)
    result = hold(_NAME, port.rate_gbps or 0.0, "Gb/s", threshold, _ACTION)
    if result.outcome == "fail":
        slow = sum(1 for each, limit in held if limit and (each.rate_gbps or 0.0) < limit.value)
        more = f" (and {slow - 1} more)" if slow > 1 else ""
        return result.explained(f"{port.name}{more}: {result.reason}")
    return result


def _known(port: Port, alike: list[float], before: Mapping[str, float]) -> Threshold | None:
    earlier = before.get(port.identity, 0.0)
    if len(alike) > 1 and max(alike) >= earlier:
        return Threshold(max(alike), f"the fastest of this host's {len(alike)} ports of its kind")
    return Threshold(earlier, "this port at an earlier check") if earlier else None


CHECK = Check(_NAME, "ports run at the rate of their like, and as before", "passive", run)
