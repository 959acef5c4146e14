"""Error counters of ports, as errors per received bit between this check and the one before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.memory import recall, remember
from phalanx.checks.ports import Port, read_ports
from phalanx.checks.result import CheckResult, passed, skipped
from phalanx.checks.thresholds import Threshold
from phalanx.core.kernel_files import boot_id

_NAME = "nic-errors"
_ACTION = "clean or replace cable and transceiver"

FEWEST = 10
"""Fewer errors are not yet a rate."""

WORST_RATE = Threshold(1e-12, "bit error rate that InfiniBand and Ethernet links have to keep")


def run(host: Host) -> CheckResult:
    """Compare the counters with those of the check before."""
    ports = [port for port in read_ports(host) if port.errors and port.received_bits is not None]
    if not ports:
        return skipped(_NAME, "no port counts its errors")
    boot = boot_id(host.proc)
    before = recall(host.cache, _NAME)
    now = {port.identity: [sum(port.errors.values()), port.received_bits] for port in ports}
    remember(host.cache, _NAME, {"boot": boot, "ports": now})
    if before.get("boot") != boot:
        total = sum(errors for errors, _ in now.values() if errors)
        return passed(_NAME, f"first reading since the boot, {total} errors so far; a rate needs a second one")
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
        return passed(_NAME, "nothing was received since the check before")
    worst = max(rates, key=lambda name: rates[name])
    bad = [name for name, (rate, new) in rates.items() if new >= FEWEST and rate > WORST_RATE.value]
    reason = "; ".join(f"{name}: {rates[name][1]} errors since the check before" for name in bad)
    common = (rates[worst][0], "errors/bit", WORST_RATE.value, WORST_RATE.source)
    return CheckResult(_NAME, "fail" if bad else "pass", reason, *common, _ACTION if bad else "")


CHECK = Check(_NAME, "ports receive no more errors than their standard allows", "passive", run)
