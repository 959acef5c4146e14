"""What a restore has to tell: what it took from where, how fast, and what it refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from phalanx.checkpoint.fit import Differences
from phalanx.core import units

Kind = Literal["memory", "peer", "durable"]


class Rate(NamedTuple):
    """What came over one network interface of another host, or from one other place.

    Attributes:
        place: ``this host``, ``durable``, or a host and its interface.
        bytes: by all ranks together.
        seconds: of the rank that took longest.
        possible_bytes_per_s: of the interface; None where it is not known.
    """

    kind: Kind
    place: str
    bytes: int
    seconds: float
    possible_bytes_per_s: float | None = None

    @property
    def share(self) -> float | None:
        """Of the possible rate; None where that is not known."""
        if not self.possible_bytes_per_s or self.seconds <= 0:
            return None
        return self.bytes / self.seconds / self.possible_bytes_per_s

    def __str__(self) -> str:
        """``eth0 of host b: 1.20 GiB at 1.35 GB/s, 54 % of what is possible``."""
        rate = f" at {self.bytes / self.seconds / 1e9:.2f} GB/s" if self.seconds > 0 else ""
        share = "" if self.share is None else f", {self.share:.0%} of what is possible"
        return f"{self.place}: {units.size(self.bytes)}{rate}{share}"


@dataclass(frozen=True)
class Restored:
    """A state that was taken back; the same on all ranks, but for `differences.missing`.

    Attributes:
        step, attempt: of the state.
        state: what training had given besides tensors.
        source: ``memory`` where all came from keepers of the ranks' own hosts, ``peer`` where some came from another
            host's, ``durable`` where it came from durable storage.
        name: of the durable checkpoint; empty where it came from memory.
        seconds: in all, with looking and refusals.
        bytes_by_kind: what all ranks together took from each kind of source; with reading whole runs or archives,
            and nothing twice that was given on within a group.
        rates: by place.
        refusals: one line for each copy or checkpoint that was refused.
        differences: names on one side only.
    """

    step: int
    attempt: int
    state: Any
    source: Kind
    name: str = ""
    seconds: float = 0.0
    bytes_by_kind: Mapping[Kind, int] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()
    refusals: tuple[str, ...] = ()
    differences: Differences = field(default_factory=Differences)

    @property
    def only_in_memory(self) -> bool:
        """Whether it lies in the memory of hosts, and perhaps nowhere else."""
        return self.source != "durable"


def together(rates: Iterable[Rate]) -> tuple[Rate, ...]:
    """The rates of all ranks, by place."""
    found: dict[tuple[Kind, str], Rate] = {}
    for rate in rates:
        known = found.get((rate.kind, rate.place))
        if known is not None:
            rate = rate._replace(bytes=rate.bytes + known.bytes, seconds=max(rate.seconds, known.seconds))
        found[rate.kind, rate.place] = rate
    return tuple(found[key] for key in sorted(found))
