"""Each host as it is now: the worst of its ranks by their spans, and what the driver of the job says of it.

The driver hears each host once a second, and knows at once of a process that ended: its word counts before that of
spans, which come a second or two later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.run.api.bodies import HostBody, Status
from phalanx.run.decide.state import HostState
from phalanx.telemetry.rank_states import JobState

Look = Literal["dead", "cut off", "stopped", "leaves", "slow", "waits", "joins", "spare", "well"]
"""How a host is shown, the worst first. Cut off: nothing is heard of it. Stopped: a rank of it stands still, fell
behind or did the least. Leaves: it is drained, suspected or gone."""

LOOKS: Mapping[Look, str] = {
    "dead": "✕",
    "cut off": "?",
    "stopped": "■",
    "leaves": "↗",
    "slow": "▲",
    "waits": "…",
    "joins": "+",
    "spare": "○",
    "well": "·",
}
"""A sign for each, so that no colour is needed to tell them apart."""

CUT_OFF_S = 2.0
"""Executors report once a second; the driver itself waits longer before it acts."""

STOPPED_S = 30.0
"""A rank of which nothing moves for less may do something that cannot be seen; one whose process was stopped is told at
once."""

_OF_STANDING: Mapping[str, Look] = {
    "dead": "dead",
    "behind": "stopped",
    "stopped first": "stopped",
    "silent": "cut off",
    "waits": "waits",
}
_OF_STATE: Mapping[HostState, Look] = {
    "joining": "joins",
    "spare": "spare",
    "active": "well",
    "unknown": "cut off",
    "suspect": "leaves",
    "draining": "leaves",
    "evicted": "leaves",
    "gone": "leaves",
}
_WORST = {look: place for place, look in enumerate(LOOKS)}


@dataclass(frozen=True)
class HostNow:
    """A host.

    Attributes:
        why: in words what is wrong; empty: nothing.
        state: as the driver has it; empty: there is none.
        silent_s: since the driver heard of it; None: no driver says.
    """

    name: str
    look: Look
    ranks: tuple[int, ...]
    why: str = ""
    state: str = ""
    silent_s: float | None = None

    @property
    def sign(self) -> str:
        """For those who do not see colours."""
        return LOOKS[self.look]

    @property
    def is_wrong(self) -> bool:
        """Whether a person should look at it."""
        return self.look in ("dead", "cut off", "stopped", "slow", "leaves")


def hosts_now(
    job: JobState | None, slow: Mapping[int, float], status: Status | None = None, listed: Sequence[HostBody] = ()
) -> list[HostNow]:
    """All hosts that spans or the driver know, by name.

    Args:
        job: of spans; None: there are none.
        slow: ranks that compute longer than their peers, and by how much (0.1: 10 %).
        status: of the driver; None: there is none, or it does not answer.
        listed: all hosts of the driver; empty: those of `status`.
    """
    found: dict[str, HostNow] = {}
    names: dict[int, str] = {}
    for host in listed or (status.hosts if status is not None else ()):
        found[host.name] = _of_driver(host)
        names |= dict.fromkeys(host.ranks, host.name)
    by_host: dict[str, list[HostNow]] = {}
    for one in job.ranks if job is not None else ():
        name = names.get(one.rank, one.host)
        look = _OF_STANDING.get(one.standing, "well")
        why = f"rank {one.rank}: {one.why}" if one.why and look not in ("well", "waits") else ""
        if look == "well" and one.rank in slow:
            look, why = "slow", f"rank {one.rank} computes {slow[one.rank]:.0%} longer than its peers"
        by_host.setdefault(name, []).append(HostNow(name, look, (one.rank,), why))
    for name, ranks in by_host.items():
        worst = min(ranks, key=lambda one: _WORST[one.look])
        others = sum(one.look == worst.look for one in ranks) - 1
        why = worst.why + (f", and {others} more of its ranks" if worst.why and others else "")
        own = HostNow(name, worst.look, tuple(one.ranks[0] for one in ranks), why)
        known = found.get(name)
        found[name] = own if known is None else _joined(known, own)
    return sorted(found.values(), key=lambda host: _natural(host.name))


def looks_of(hosts: Iterable[HostNow]) -> dict[Look, int]:
    """How many hosts there are of each, the worst first."""
    counts = dict.fromkeys(LOOKS, 0)
    for host in hosts:
        counts[host.look] += 1
    return {look: count for look, count in counts.items() if count}


def _of_driver(host: HostBody) -> HostNow:
    look: Look = _OF_STATE.get(host.state, "well")  # type: ignore[call-overload]
    why = host.leaves or host.why
    ended = [one for one in host.workers if one.state == "ended"]
    stopped = [one for one in host.workers if one.stopped_s > 0 and one.state != "ended"]
    still = [one for one in host.workers if one.still_s > 0]
    if host.silent_s > CUT_OFF_S and host.state not in ("evicted", "gone"):
        look, why = "cut off", f"not heard of for {host.silent_s:.0f} s"
    elif ended and host.state == "active":
        look, why = "dead", f"rank {ended[0].rank} has ended" + f", and {len(ended) - 1} more" * (len(ended) > 1)
    elif stopped:
        look, why = "stopped", f"the process of rank {stopped[0].rank} is stopped, for {stopped[0].stopped_s:.0f} s"
    elif still and look == "well":
        # The driver itself waits for a minute: what prints now and then, or waits for a file, is well.
        longest = max(still, key=lambda one: one.still_s)
        look = "stopped" if longest.still_s >= STOPPED_S else "waits"
        why = f"rank {longest.rank} has not moved for {longest.still_s:.0f} s"
    silent_s = host.silent_s if host.silent_s >= 0 else None
    return HostNow(host.name, look, tuple(host.ranks), why, host.state, silent_s)


def _joined(driver: HostNow, spans: HostNow) -> HostNow:
    """The worse of both; what spans say of a host that is not in the job any more is past."""
    if driver.state in ("evicted", "gone", "spare", "joining"):
        return driver
    worse = spans if _WORST[spans.look] < _WORST[driver.look] else driver
    return HostNow(driver.name, worse.look, driver.ranks or spans.ranks, worse.why, driver.state, driver.silent_s)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """``node-2`` before ``node-10``."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for letter in f"{name}\0":
        if letter.isdecimal():
            digits += letter
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, letter))
    return parts
