"""Faults that were recorded (InfiniteHBD-Trace: 400 GPU servers, 349 days), as rates or as histories.

The recorded faults come in bursts: many of them in few weeks, and again on the same hosts. Rates forget this. A
*replay* keeps all of it, with chance only in which hosts begin in the job. Two ways to draw other years from the one:
*by hosts* (each host has the year of one of the recorded ones, drawn with replacement, at the same dates), and
*by blocks* (stretches of days of the whole cluster, drawn with replacement).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from phalanx.core.errors import UserError
from phalanx.simulate.failure_model import DAY_S, Duration, FailureClass, Failures
from phalanx.simulate.failure_model import Effect as EffectOnJob

if TYPE_CHECKING:
    from phalanx.simulate.run_state import History


_LATEST_S = 36_525 * DAY_S
NODES = 400
DAYS = 348.98

Effect = Literal["dies", "fails", "hangs", "slow", "taken out"]
"""What a job notices: the host is gone; a rank there fails and the kernel names a device; ranks stand still; steps take
longer; nothing, but an operator wants the host out."""
EFFECTS: tuple[Effect, ...] = ("dies", "fails", "hangs", "slow", "taken out")

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

DETECTION_S: dict[Effect, float | None] = {"dies": 5.0, "fails": 5.0, "hangs": 42.0, "slow": None, "taken out": 0.0}
"""Until each is noticed and its host known, as `phalanx run` takes (docs/benchmarks/run.md); None: `find_slow_s`."""


@dataclass(frozen=True)
class Fault:
    """A node is bad from `begins_s` to `ends_s`; `kind`: what the trace calls it."""

    node: str
    begins_s: float
    ends_s: float
    effect: Effect
    kind: str = ""


def effect_of(kind: dict[str, str]) -> Effect:
    """What a fault of this class and description does."""
    return _BY_DESCRIPTION.get(kind["Desc"]) or _BY_CLASS.get(kind["Class"], "taken out")


def read_trace(path: Path) -> list[Fault]:
    """All faults in the order in which they begin; of two at once on a node the one that began first ends first."""
    faults: list[Fault] = []
    begun: dict[str, list[dict]] = {}
    try:
        for event in json.loads(path.read_text()):
            waiting = begun.setdefault(event["node_id"], [])
            if event["event_type"] == "fault_start":
                waiting.append(event)
            elif waiting:
                faults.append(_fault(waiting.pop(0), event["event_time"]))
    except OSError as error:
        cure = "name fault_trace.json of InfiniteHBD-Trace"
        raise UserError(f"cannot read it ({error.strerror})", cure=cure, field="trace", value=str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        cure = "give fault_trace.json of InfiniteHBD-Trace, or a file made like it"
        raise UserError("it is no trace of faults", cure=cure, field="trace", value=str(path)) from None
    return sorted(faults, key=lambda fault: fault.begins_s)


def _fault(start: dict, end_days: float) -> Fault:
    kind = start["fault_type"]
    begins_s, ends_s = start["event_time"] * DAY_S, end_days * DAY_S
    if not 0 <= begins_s <= ends_s < _LATEST_S:
        raise ValueError("it ends before it begins, or never")
    return Fault(start["node_id"], begins_s, ends_s, effect_of(kind), kind["Class"])


def on_job(effect: Effect) -> EffectOnJob:
    """The same in words of the simulation."""
    return effect if effect in ("slow", "taken out") else "stops"


def rates_of(faults: Sequence[Fault], nodes: int = NODES, days: float = DAYS, slowdown: float = 1.3) -> Failures:
    """How often each effect hit a host, and how long hosts were away for it; without memory."""
    classes = []
    for effect in EFFECTS:
        lengths_s = tuple(fault.ends_s - fault.begins_s for fault in faults if fault.effect == effect)
        repair = Duration.observed(lengths_s) if lengths_s else Duration.fixed(0.0)
        rate = len(lengths_s) / (nodes * days)
        classes.append(FailureClass(effect, rate, on_job(effect), repair, DETECTION_S[effect], slowdown))
    return Failures(tuple(classes), source=f"{len(faults)} faults of {nodes} hosts in {days:g} days")


def replay(faults: Sequence[Fault], runs: int, seed: int = 0, nodes: int = NODES) -> History:
    """The faults as they were, in each run on other hosts of the job and beside it."""
    return _history([list(faults)] * runs, seed, nodes)


def by_hosts(faults: Sequence[Fault], runs: int, seed: int = 0, nodes: int = NODES) -> History:
    """Each host of each run has the year of one recorded host."""
    import numpy as np

    random = np.random.default_rng((seed, 1))
    own: list[list[Fault]] = [[] for _ in range(nodes)]
    for number, name in enumerate(sorted({fault.node for fault in faults})):
        own[number] = [fault for fault in faults if fault.node == name]
    drawn: list[list[Fault]] = []
    for _ in range(runs):
        hosts = random.integers(0, nodes, nodes).tolist()
        drawn.append([_moved(fault, str(place), 0.0) for place, host in enumerate(hosts) for fault in own[host]])
    return _history(drawn, seed, nodes)


def by_blocks(
    faults: Sequence[Fault],
    runs: int,
    seed: int = 0,
    nodes: int = NODES,
    days: float = DAYS,
    block_days: float = 30.0,
) -> History:
    """Each run has stretches of recorded days, any of them, in any order.

    A stretch that reaches the end of the record goes on at its beginning. Faults end as late as they did, also after
    the end of their stretch.
    """
    import numpy as np

    random = np.random.default_rng((seed, 2))
    block_s, year_s = block_days * DAY_S, days * DAY_S
    begins_s = np.array([fault.begins_s for fault in faults])
    drawn: list[list[Fault]] = []
    for _ in range(runs):
        year: list[Fault] = []
        for number, start_s in enumerate(random.uniform(0, year_s, int(np.ceil(days / block_days)))):
            after_s = (begins_s - start_s) % year_s
            for index in np.flatnonzero(after_s < min(block_s, year_s - number * block_s)).tolist():
                fault = faults[index]
                year.append(_moved(fault, fault.node, number * block_s + after_s[index] - fault.begins_s))
        drawn.append(year)
    return _history(drawn, seed, nodes)


def _moved(fault: Fault, node: str, by_s: float) -> Fault:
    return Fault(node, fault.begins_s + by_s, fault.ends_s + by_s, fault.effect, fault.kind)


def _history(years: Sequence[Sequence[Fault]], seed: int, nodes: int) -> History:
    """Arrays, with the hosts of each run in an order of their own; classes are numbered as `rates_of` does."""
    import numpy as np

    from phalanx.simulate.run_state import History, laid_out

    random = np.random.default_rng((seed, 3))
    places: list[int] = []
    for year in years:
        order = iter(random.permutation(nodes).tolist())
        numbers: dict[str, int] = {}
        for fault in year:
            if fault.node not in numbers:
                numbers[fault.node] = next(order)
        places += [numbers[fault.node] for fault in year]
    flat = [fault for year in years for fault in year]
    count = len(flat)
    return laid_out(
        len(years),
        np.repeat(np.arange(len(years)), [len(year) for year in years]),
        History(
            np.array([fault.begins_s for fault in flat]),
            np.array(places, dtype=np.int64),
            np.array([EFFECTS.index(fault.effect) for fault in flat], dtype=np.int64),
            np.array([fault.ends_s - fault.begins_s for fault in flat]),
            np.ones(count),
            np.zeros(count),
            np.zeros(count, dtype=bool),
            is_fixed=True,
        ),
    )
