"""Which ranks compute longer than those that do the same work, step after step.

A rank is compared by its own time (forward and backward, without waiting inside them) with the median of the ranks of
its pipeline stage in the same step. So a stage that is heavier than others blames nobody, and neither does a long batch
that meets another rank each time. Where there is too little to compare, nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.telemetry.alike_ranks import LEAST_RANKS, STEADY_SHARE, chance_limit, doubt_of, excess_limit, is_doubtful
from phalanx.telemetry.queries import Trace

LEAST_STEPS = 5

EXCESS = 0.05
"""MegaScale's slow hosts were about 10 % slower (5.1); ranks of one kind differ by 1 to 2 %."""

_OWN_TIMES = """
with each as (
    select rank, step, any_value(host) as host, sum(step_ns) as step_ns,
        sum(forward_ns) as forward_ns, sum(backward_ns) as backward_ns, sum(wait_ns) as wait_ns
    from steps group by rank, step having sum(forward_ns + backward_ns) > 0
), placed as (
    select e.*, forward_ns + backward_ns as own_ns, coalesce(stage, 0) as stage
    from each e left join stages using (rank)
), usual as (
    -- the lower median: where two of four ranks are slow, the other two are what is usual
    select stage, step, quantile_disc(own_ns, 0.5) as own_ns, quantile_disc(forward_ns, 0.5) as forward_ns,
        quantile_disc(backward_ns, 0.5) as backward_ns, quantile_disc(wait_ns, 0.5) as wait_ns, count(*) as peers
    from placed group by stage, step
)
select p.rank, any_value(p.host) as host, p.stage, count(*) as steps, max(u.peers) as peers,
    median(p.own_ns) / 1e9 as own_s, median(u.own_ns) / 1e9 as peers_s,
    median(p.own_ns / u.own_ns) - 1 as excess, mad(p.own_ns / u.own_ns) as varies,
    avg((p.own_ns > u.own_ns * (1 + $excess / 2))::int) as slow_share,
    median(p.forward_ns) / 1e9 as forward_s, median(u.forward_ns) / 1e9 as peers_forward_s,
    median(p.backward_ns) / 1e9 as backward_s, median(u.backward_ns) / 1e9 as peers_backward_s,
    median(p.wait_ns) / 1e9 as wait_s, median(u.wait_ns) / 1e9 as peers_wait_s
from placed p join usual u using (stage, step) group by p.rank, p.stage order by excess desc, p.rank
"""


@dataclass(frozen=True)
class SlowRanks:
    """What was found.

    Attributes:
        ranked: all ranks, the slowest first: ``rank, host, stage, steps, peers, own_s, peers_s, excess`` (0.1: 10 %
            longer), ``varies`` (the excess from step to step, as a median deviation), ``slow_share`` (of steps), and
            forward, backward and wait with those of the peers.
        slow: those of them that are slow beyond doubt.
        unsure: those that take far longer, where ranks differ by too much, or too few steps agree, to call them slow.
        abstains: why nothing is said of some ranks, or of all; empty: all were compared.
    """

    ranked: list[dict[str, Any]]
    slow: list[dict[str, Any]]
    abstains: list[str]
    unsure: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.slow:
            hosts: dict[str, list[dict[str, Any]]] = {}
            for one in self.slow:
                hosts.setdefault(one["host"], []).append(one)
            names = ", ".join(_named(host, own) for host, own in list(hosts.items())[:5])
            more = f" and {len(hosts) - 5} more hosts" if len(hosts) > 5 else ""
            return f"slow: {names}{more}; the first computes {self.slow[0]['excess']:.0%} longer than its stage"
        if not self.ranked or self.abstains:
            return "no verdict: " + ("; ".join(self.abstains) or "there are no forward or backward spans")
        most = max(one["excess"] for one in self.ranked)
        return f"no slow rank: none of {len(self.ranked)} computes more than {most:.1%} longer than its stage's median"

    @property
    def doubt(self) -> str:
        """What to say of a figure in which nobody stands out, in a few words; empty: all are well."""
        if self.slow:
            first = self.slow[0]
            return f"rank {first['rank']} ({first['host']}) is slow among the ranks of its stage"
        if self.unsure:
            worst = self.unsure[0]
            return f"rank {worst['rank']} takes {worst['excess']:.0%} longer, which is not sure to be its own fault"
        return "too little to compare" if self.abstains or not self.ranked else ""


def find_slow_ranks(
    trace: Trace, first: int | None = None, last: int | None = None, *, excess: float = EXCESS
) -> SlowRanks:
    """Compare ranks of the same stage by their own time.

    Args:
        trace: of the run.
        first: step, as in `Trace`.
        last: step, included.
        excess: how much longer than its peers makes a rank slow; 0.05 is 5 %.
    """
    rows = trace.ask(_OWN_TIMES, first, last, {"excess": excess}).to_pylist()
    by_stage: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_stage.setdefault(row["stage"], []).append(row)
    slow: list[dict[str, Any]] = []
    unsure: list[dict[str, Any]] = []
    abstains: list[str] = []
    for stage, ranks in sorted(by_stage.items()):
        steps = max(row["steps"] for row in ranks)
        if len(ranks) < LEAST_RANKS:
            abstains.append(f"stage {stage} has {_count(len(ranks), 'rank')}, {LEAST_RANKS} are needed to compare")
        elif steps < LEAST_STEPS:
            abstains.append(f"stage {stage} has {_count(steps, 'step')}, {LEAST_STEPS} are needed to tell chance apart")
        else:
            excesses = [row["excess"] for row in ranks]
            limit = excess_limit(excesses, excess)
            lasting = [row for row in ranks if row["excess"] > chance_limit(row["varies"], row["steps"])]
            odd = [row for row in lasting if row["excess"] > limit and row["slow_share"] >= STEADY_SHARE]
            may_be = [
                row for row in lasting
                if row not in odd and is_doubtful(row["excess"], row["slow_share"], excesses, excess)
            ]  # fmt: skip
            abstains += [_doubt(row, excesses) for row in may_be[:1]]
            slow, unsure = slow + odd, unsure + may_be
    for found in (slow, unsure):
        found.sort(key=lambda row: (-row["excess"], row["rank"]))
    return SlowRanks(rows, slow, abstains, unsure)


def _doubt(row: dict[str, Any], excesses: list[float]) -> str:
    return doubt_of(_named(row["host"], [row]), row["excess"], row["slow_share"], excesses)


def _named(host: str, slow: list[dict[str, Any]]) -> str:
    """A slow rank, or all of a host at once: then it is the machine."""
    if len(slow) == 1:
        return f"rank {slow[0]['rank']} (host {host}, stage {slow[0]['stage']})"
    ranks = sorted(one["rank"] for one in slow)
    return f"host {host} ({len(ranks)} ranks from {ranks[0]} to {ranks[-1]})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
