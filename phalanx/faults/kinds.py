"""What kinds of faults there are: where each may happen, how dangerous it is, and what may be set. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Safety = Literal["safe_in_process", "isolated_destructive", "cluster_destructive"]
PlaceKind = Literal["ranks", "hosts", "spares", "driver", "links"]

SAFETY_ORDER: tuple[Safety, ...] = ("safe_in_process", "isolated_destructive", "cluster_destructive")
"""From harmless to dangerous: the process goes on; a process or a group of them is lost; more than one host suffers."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        text: what happens, for people.
        safety: the least that an incident of this kind has to admit to.
        places: where it may happen.
        settings: what may be set, with the type of each.
        repeats: it happens again at every step for as long as it lasts.
    """

    text: str
    safety: Safety
    places: frozenset[PlaceKind]
    settings: Mapping[str, type] = field(default_factory=dict)
    repeats: bool = False

    @property
    def is_inside(self) -> bool:
        """Whether the worker does it to itself; else the controller of the campaign does it from outside."""
        return "ranks" in self.places


def _worker(does: str, safety: Safety = "isolated_destructive", *, repeats: bool = False, **settings: type) -> Kind:
    return Kind(does, safety, frozenset({"ranks"}), settings, repeats)


def _outside(does: str, safety: Safety, *places: PlaceKind, **settings: type) -> Kind:
    return Kind(does, safety, frozenset(places), settings)


KINDS: Mapping[str, Kind] = {
    "exception": _worker("a Python exception out of the optimizer's step", error=str, text=str),
    "exit": _worker("sys.exit with a status", status=int),
    "signal": _worker("the process sends itself a signal", name=str),
    "pause": _worker("SIGSTOP; SIGCONT when its time is over"),
    "segfault": _worker("a read of address 0"),
    "abort": _worker("abort() of the C library"),
    "deadlock": _worker("a second lock of a C mutex, or a wait in C, with the interpreter's lock held"),
    "sleep": _worker("a sleep in the main thread"),
    "busy-loop": _worker("a loop in the main thread that does nothing"),
    "out-of-memory": _worker("memory is taken until there is none", limit_mb=int),
    "nan": _worker("a parameter becomes NaN after every step", "safe_in_process", repeats=True),
    "corruption": _worker("one bit of one element of a parameter flips", "safe_in_process", bit=int, element=int),
    "slow": _worker("the rank's own time is multiplied", "safe_in_process", factor=float, burn=int),
    "evaluation": _worker("all works for a while without an optimizer step", "safe_in_process"),
    "log-lines": _worker("innocent lines with the words that alarm", "safe_in_process", repeats=True),
    "cpu-hog": _worker("other processes use the cores", "safe_in_process", processes=int),
    "long-checkpoint": _worker("a checkpoint writes for longer than usual", "safe_in_process"),
    "executor-killed": _outside("SIGKILL to the executor of a host", "isolated_destructive", "hosts"),
    "host-killed": _outside("SIGKILL to all processes of a host, its keeper too", "isolated_destructive", "hosts"),
    "link-down": _outside("the network interface of a host goes down", "isolated_destructive", "hosts"),
    "disk-full": _outside("no byte is left on a host's disk", "isolated_destructive", "hosts"),
    "clock-jump": _outside("the wall clock of a host jumps", "safe_in_process", "hosts", offset_s=float),
    "spare-bad": _outside("a spare dies, or stops, as soon as it is needed", "isolated_destructive", "spares", how=str),
    "driver-killed": _outside("SIGKILL to the driver", "cluster_destructive", "driver"),
    "driver-stopped": _outside("SIGSTOP to the driver, SIGCONT later", "cluster_destructive", "driver"),
    "link-cut": _outside("connections of driver and executor break, new ones are refused", "safe_in_process", "links"),
    "link-silent": _outside("nothing of what driver and executor say arrives", "safe_in_process", "links"),
    "link-delayed": _outside("what they say arrives late", "safe_in_process", "links", delay_s=float),
}
"""By name."""
