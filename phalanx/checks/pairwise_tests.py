"""Which of several hosts is bad, from tests of pairs in two rounds: plan, then judge. Pure; the transport is passed in.

In the first round neighbours are tested with each other. Whoever was in a bad pair is a suspect, and in the second
round is tested with a host whose own pair was good. A suspect that is bad with a good partner is bad; one that is good
with it was only the partner of a bad one. So one bad host costs two tests, however many hosts there are.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]
Rates = Mapping[Pair, float | None]
"""Bytes per second of each pair; None: the test failed or gave no answer."""

Transport = Callable[[Sequence[Pair]], Rates]
"""Tests these pairs, which share no host, at the same time."""


OTHERS_SHARE = 0.7
"""Of the median of the other hosts: where nvidia-resiliency-ext draws the line for a slow GPU, too."""


@dataclass(frozen=True)
class Threshold:
    """A limit and its origin."""

    value: float
    source: str


@dataclass(frozen=True)
class Judgement:
    """What the two rounds say.

    Attributes:
        bad: hosts that were bad with two partners, the second of them good: name -> why.
        cleared: suspects that were good with a good partner.
        open: suspects that could not be judged, since no good host was there to test them with: name -> why.
    """

    bad: dict[str, str]
    cleared: tuple[str, ...] = ()
    open: dict[str, str] | None = None


def plan_neighbours(hosts: Sequence[str]) -> list[list[Pair]]:
    """The first round: neighbours in pairs; the odd one is tested after that with the host before it."""
    pairs = [(hosts[index], hosts[index + 1]) for index in range(0, len(hosts) - 1, 2)]
    if len(hosts) % 2 and len(hosts) > 1:
        return [pairs, [(hosts[-2], hosts[-1])]]
    return [pairs] if pairs else []


def bad_pairs(rates: Rates, threshold: Threshold | None, share: float = OTHERS_SHARE) -> dict[Pair, str]:
    """Pairs that failed or were slow, and why.

    Args:
        threshold: bytes per second; None: against the median of the other pairs, where there are three or more.
        share: of that median, from which on a pair is good.
    """
    known = sorted(rate for rate in rates.values() if rate is not None)
    found = {}
    for pair, rate in rates.items():
        if rate is None:
            found[pair] = "gave no result"
            continue
        limit = threshold or _others(known, rate, share)
        if limit and rate < limit.value:
            found[pair] = f"{rate / 1e9:.3g} GB/s, less than {limit.value / 1e9:.3g} ({limit.source})"
    return found


def _others(known: list[float], rate: float, share: float) -> Threshold | None:
    """A share of the median of all but one, out of sorted rates; without looking at each of what may be thousands."""
    if len(known) < 3:
        return None
    place, left = bisect.bisect_left(known, rate), len(known) - 1
    low, high = (known[index + (index >= place)] for index in ((left - 1) // 2, left // 2))
    return Threshold(share * (low + high) / 2, f"{share:.0%} of the median of the other pairs")


def doubtful(hosts: Sequence[str], first: Collection[Pair], bad: Collection[Pair]) -> tuple[list[str], list[str]]:
    """After the first round: hosts that were in bad pairs only, and hosts that were in a good one.

    Args:
        first: the pairs that were tested.
        bad: of these.
    """
    in_good = {host for pair in first if pair not in bad for host in pair}
    suspects = {host for pair in bad for host in pair} - in_good
    return [host for host in hosts if host in suspects], [host for host in hosts if host in in_good]


def plan_suspects(suspects: Sequence[str], good: Sequence[str]) -> list[list[Pair]]:
    """The second round: each suspect with a good host of its own, in as many turns as good hosts make necessary."""
    if not good:
        return []
    turns = [suspects[index : index + len(good)] for index in range(0, len(suspects), len(good))]
    return [[(suspect, good[place]) for place, suspect in enumerate(turn)] for turn in turns]


def name_bad_hosts(hosts: Sequence[str], transport: Transport, threshold: Threshold | None = None) -> Judgement:
    """Test all hosts, in the order of who is near whom, and name the bad ones."""
    first = _run(plan_neighbours(hosts), transport)
    first_bad = bad_pairs(first, threshold)
    suspects, good = doubtful(hosts, first, first_bad)
    if not suspects:
        return Judgement({})
    if not good:
        return Judgement({}, open={host: _why(host, first_bad) for host in suspects})
    second = _run(plan_suspects(suspects, good), transport)
    # Two pairs alone have no median, so those of the first round that were good are held beside them.
    known = {pair: rate for pair, rate in first.items() if pair not in first_bad}
    second_bad = {pair: why for pair, why in bad_pairs({**known, **second}, threshold).items() if pair in second}
    bad = {host: _why(host, second_bad) for host in suspects if any(host == pair[0] for pair in second_bad)}
    return Judgement(bad, tuple(host for host in suspects if host not in bad))


def _run(turns: list[list[Pair]], transport: Transport) -> dict[Pair, float | None]:
    found: dict[Pair, float | None] = {}
    for turn in turns:
        answered = transport(turn)
        found.update({pair: answered.get(pair) for pair in turn})
    return found


def _why(host: str, bad: Mapping[Pair, str]) -> str:
    return "; ".join(f"with {pair[pair[0] == host]}: {why}" for pair, why in bad.items() if host in pair)


def slow_hosts(values: Mapping[str, float], share: float = OTHERS_SHARE) -> dict[str, float]:
    """Hosts whose value is less than `share` of the median of the others, with that median.

    Fewer than three hosts say nothing: of two that differ, either may be the slow one.
    """
    if len(values) < 3:
        return {}
    found = {}
    for host, value in values.items():
        median = statistics.median(other for name, other in values.items() if name != host)
        if value < share * median:
            found[host] = median
    return found
