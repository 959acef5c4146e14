"""The faults of a cluster of 400 GPU servers over 349 days (InfiniteHBD-Trace), and what each kind does to a job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NODES = 400
DAY_S = 86_400.0

Effect = Literal["dies", "fails", "hangs", "slow", "taken out"]
"""What a job notices: the host is gone; a rank there fails and the kernel names a device; ranks stand still; steps take
longer; nothing, but an operator wants the host out."""

_BY_DESCRIPTION: dict[str, Effect] = {
    "GPU PCI link width low": "slow",
    "NIC Link Speed low": "slow",
    "NIC PCI link Width low": "slow",
    "GPU Temperature High": "slow",
    "GPU P2P Bandwidth Low": "slow",
    "nvidia-smi Timeout": "hangs",
}
_BY_CLASS: dict[str, Effect] = {
    "GPU": "fails",
    "NIC": "hangs",
    "Parameter Plane Cable": "hangs",
    "CPU": "dies",
    "Motherboard": "dies",
    "Operating System": "dies",
    "System Crash": "dies",
    "Unknown Error": "dies",
    "Other Failures": "dies",
    "File System": "fails",
}
"""The other classes (fans, power supplies, failed stress tests, firmware, changes) do not stop a host at once."""


@dataclass(frozen=True)
class Fault:
    """A node is bad from `begins_s` to `ends_s`."""

    node: str
    begins_s: float
    ends_s: float
    effect: Effect


def effect_of(kind: dict[str, str]) -> Effect:
    """What a fault of this class and description does."""
    return _BY_DESCRIPTION.get(kind["Desc"]) or _BY_CLASS.get(kind["Class"], "taken out")


def read_trace(path: Path) -> list[Fault]:
    """All faults in the order in which they begin; of two at once on a node the one that began first ends first."""
    faults: list[Fault] = []
    begun: dict[str, list[dict]] = {}
    for event in json.loads(path.read_text()):
        waiting = begun.setdefault(event["node_id"], [])
        if event["event_type"] == "fault_start":
            waiting.append(event)
        elif waiting:
            first = waiting.pop(0)
            begins_s, ends_s = first["event_time"] * DAY_S, event["event_time"] * DAY_S
            faults.append(Fault(event["node_id"], begins_s, ends_s, effect_of(first["fault_type"])))
    return sorted(faults, key=lambda fault: fault.begins_s)
