"""Since when a rank is slow, where it was so before the steps whose spans are looked at.

Spans are read of the newest steps only, and older ones are gone after some time; the sums of each rank and step stay.
They hold the waits inside passes too, so that they name nobody, but show when what is known now began.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from phalanx.detect.detection import Detection, Onset
from phalanx.detect.stragglers.replay import Seconds
from phalanx.detect.stragglers.slow_since import LEAST_SIDE, begins_above
from phalanx.detect.stragglers.straggler_facts import StragglerFacts
from phalanx.detect.stragglers.straggler_judge import StragglerPolicy, excess_of_ranks
from phalanx.telemetry.queries import Trace

_OF_MACHINES = ("slow rank", "slow host")
_MOST_STEPS, _MOST_PEERS = 20_000, 15

_SUMS = """
select step, rank, forward_ns + backward_ns as own_ns, end_ns from steps
where forward_ns > 0 and attempt = (select max(attempt) from steps where forward_ns > 0)
    and list_contains($ranks, rank) order by step
"""


def with_onsets(
    found: Sequence[Detection], trace: Trace, facts: StragglerFacts, policy: StragglerPolicy
) -> tuple[Detection, ...]:
    """The same; of ranks that have been slow for longer than spans show, since when by the sums of the attempt."""
    return tuple(_with_onset(one, trace, facts, policy) if one.what in _OF_MACHINES else one for one in found)


def _with_onset(found: Detection, trace: Trace, facts: StragglerFacts, policy: StragglerPolicy) -> Detection:
    rank, known = found.who[0].ranks[0], found.since.step
    stage = facts.places.stage[facts.places.ranks == rank]
    peers = [int(one) for one in facts.places.ranks[np.isin(facts.places.stage, stage)] if one != rank]
    ranks = [rank, *peers[:_MOST_PEERS]]
    steps, own_s, end_s = _sums(trace, ranks, int(facts.steps[-1]))
    if not len(steps) or known is None:
        return found
    logs = excess_of_ranks(own_s, np.isfinite(own_s).astype(float), np.zeros(len(ranks), np.int64))[:, 0]
    onset = begins_above(logs, policy.excess / 2, math.log1p(policy.excess) / 2)
    if onset is None or steps[onset[0]] > known - LEAST_SIDE:
        return found  # spans know it better, or what waits in its passes hides it
    first, before = onset
    before_s = float(end_s[first - 1]) if first and found.since.unix_s is not None else None
    why = f"by the sums of older steps it is so since step {int(steps[first]):,}"
    if not math.isnan(before):
        why += f"; before, it differed from its peers by {math.expm1(before):+.0%}"
    return replace(found, since=Onset(before_s, int(steps[first])), why=(*found.why, why))


def _sums(trace: Trace, ranks: Sequence[int], last: int) -> tuple[Seconds, Seconds, Seconds]:
    """Steps, seconds of each rank in its passes (steps by ranks, NaN where not known), and when each step ended."""
    table = trace.ask(_SUMS, max(0, last - _MOST_STEPS), last, {"ranks": list(ranks)})
    step, rank = table["step"].to_numpy(), table["rank"].to_numpy()
    steps, row = np.unique(step, return_inverse=True)
    column = np.array([ranks.index(int(one)) for one in rank], np.int64)
    own_s, end_s = np.full((len(steps), len(ranks)), np.nan), np.zeros(len(steps))
    own_s[row, column] = table["own_ns"].to_numpy() / 1e9
    np.maximum.at(end_s, row, table["end_ns"].to_numpy() / 1e9)
    return steps, own_s, end_s
