"""Slow machine, unbalanced stage or uneven sequence lengths: who makes a step longer than it need be.

    verdict = judge_stragglers(facts, StragglerPolicy())

One rule each (arXiv 2505.05713, section 5, says why these three are what jobs suffer from):

slow rank, slow host
    computes longer than the ranks of its own stage, in most steps since it began, by more than chance and than what
    ranks differ by anyway. It keeps others waiting, so it waits least. Only this is a machine's fault.
slow stage
    a stage without peers, or all of a stage at once, became slower while the job ran: a machine's fault most likely,
    since the program was the same before. To be checked.
unbalanced stage
    all workers of a stage compute longer than those of other stages, from the beginning: the split of layers.
uneven sequence lengths
    passes differ from micro-batch to micro-batch, on all workers, and forward and backward of one go together.
slow loading
    a rank waits for its batches, its peers do not.
slow now and then
    a rank is as fast as its peers in most steps, and much slower in others (`odd_steps.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from pydantic import Field

from phalanx.core.config import Config
from phalanx.detect.detection import Advice, Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.stragglers.odd_steps import slow_now_and_then
from phalanx.detect.stragglers.replay import Seconds
from phalanx.detect.stragglers.slow_since import LEAST_NOISE, Level, begins_above, last_level
from phalanx.detect.stragglers.straggler_facts import StragglerFacts
from phalanx.detect.stragglers.straggler_tables import straggler_tables
from phalanx.detect.stragglers.what_if import worker_slowdowns
from phalanx.telemetry.alike_ranks import FEW_RANKS, LEAST_RANKS, doubt_of, excess_limit

JUDGE = "stragglers"
_TO_SD = 1.4826
_CHANCE = 0.001  # of a name in a job without a slow machine, by noise that is normal
_MORE_WORK = 0.6  # of the confidence, in who makes more passes of a step than its peers
_ENOUGH_PEERS = 4  # from so many on, a rank has to stick out among them as well
_LEAST_SPREAD = 0.03
_GO_TOGETHER = 0.5
_LEAST_LOADS = 20  # steps in which a rank waits for its batches, where it did not before: a file may be slow for a few
_REAL_TIME_S = 1e8  # imported traces that do not say when they were begin at Unix time 0


class StragglerPolicy(Config):
    """What counts as slow, and what is advised."""

    excess: float = Field(
        0.05, gt=0.005, le=10, description="how much longer than its peers a slow rank computes, as a share"
    )
    least_share: float = Field(
        0.02, gt=0, lt=1, description="share of a step that something has to cost before it is reported"
    )
    least_steps: int = Field(5, ge=4, le=1000, description="steps that are needed for a verdict")
    evidence: float = Field(
        1.0, gt=0, le=10, description="of what noise allows, the share that is needed to name a rank; less names more"
    )
    steady_share: float = Field(0.75, gt=0.5, le=1, description="share of steps in which a slow rank is slow")
    evict_confidence: float = Field(
        0.95, ge=0.5, le=1, description="confidence from which on eviction is advised; below it the host is checked"
    )
    evict_share: float = Field(
        0.05, gt=0, lt=1, description="share of a step that a slow host has to cost before its eviction is advised"
    )
    delays_share: float = Field(
        0.4, gt=0, le=1, description="share of a step that goes by between spans from which on it is said"
    )
    most_steps: int = Field(200, ge=5, le=100_000, description="the newest steps that are looked at")
    most_spans: int = Field(
        2_000_000, ge=1000, description="spans that are read at most: of larger jobs fewer steps are looked at"
    )


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes longer than its peers; `rank` is a place."""

    rank: int
    level: Level
    excess: float
    steady: float
    peers: int
    strength: float
    waited_least: float
    passes: float
    usual_passes: float


def judge_stragglers(facts: StragglerFacts, policy: StragglerPolicy) -> JudgeVerdict:
    """Who makes steps longer than they need be, and whether a machine is at fault."""
    steps, ranks = len(facts.steps), len(facts.places.ranks)
    looked_at = f"{steps} steps of {ranks} ranks"
    if steps:
        looked_at += f", steps {facts.steps[0]} to {facts.steps[-1]}"
    if steps < policy.least_steps:
        reason = f"{steps} steps have spans, {policy.least_steps} are needed; look again later, or give more steps"
        return JudgeVerdict(JUDGE, (), (reason,), looked_at)
    slow, abstains = _slow_ranks(facts, policy)
    found = [
        *_slow_machines(facts, slow, policy),
        *_stages(facts, policy, slow),
        *_uneven_lengths(facts, policy),
        *_slow_loading(facts, policy),
    ]
    found.sort(key=lambda one: -float(one.figures.get("lost_share", 0.0)))
    named = {rank for one in found for who in one.who for rank in who.ranks}
    if not _is_uneven(facts):
        found += slow_now_and_then(facts, policy.steady_share, named)
    abstains += [*_slow_by_themselves(facts, policy, named), *_unexplained(facts, policy, found)]
    if facts.unordered:
        abstains.append(f"spans of {facts.unordered} steps contradict each other; compare the clocks of hosts")
    return JudgeVerdict(JUDGE, tuple(found), tuple(abstains), looked_at, straggler_tables(facts))


def excess_of_ranks(own_s: Seconds, passes: Seconds, stage: np.ndarray, *, is_whole: bool = False) -> Seconds:
    """Logarithm of each rank's time over the lower median of its stage in the same step: steps by ranks.

    Only ranks of which all passes of a step were recorded are compared, unless `is_whole`: spans may have been dropped.
    """
    own_s = own_s.copy()
    for one in np.unique(stage) if not is_whole else ():
        members = np.flatnonzero(stage == one)
        few = passes[:, members] < passes[:, members].max(axis=1, keepdims=True)
        own_s[:, members] = np.where(few, np.nan, own_s[:, members])
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(own_s)
    logs[~np.isfinite(logs)] = np.nan
    found = np.full(logs.shape, np.nan)
    for one in np.unique(stage):
        members = np.flatnonzero(stage == one)
        if len(members) > 1:
            found[:, members] = logs[:, members] - _low_median(logs[:, members])
    return found


def _low_median(values: Seconds) -> Seconds:
    ordered = np.sort(values, axis=1)
    known = (~np.isnan(values)).sum(axis=1, keepdims=True)
    found: Seconds = np.take_along_axis(ordered, (np.maximum(known, 1) - 1) // 2, axis=1)
    return found


def _slow_ranks(facts: StragglerFacts, policy: StragglerPolicy) -> tuple[list[SlowRank], list[str]]:
    """Ranks that are slow at the end of the steps, the slowest first; and of which ranks nothing can be said."""
    places = facts.places
    logs = excess_of_ranks(facts.own_s, facts.passes, places.stage, is_whole=facts.is_whole)
    found, abstains, lonely = [], list[str](), list[int]()
    for stage in range(places.stages):
        members = np.flatnonzero(places.stage == stage)
        if not facts.passes[:, members].any():
            abstains.append(f"stage {stage} has no forward or backward spans; record them (docs/trace.md)")
            continue
        if len(members) < 2:
            lonely.append(stage)
            continue
        levels = [last_level(logs[:, one], policy.excess / 2) for one in members]
        means = np.array([level.mean for level in levels])
        abstains += _lost_passes(facts, members, levels, stage, policy)
        for at, one in enumerate(members):
            slow = _slow_rank(facts, policy, int(one), levels[at], np.delete(means, at), logs[:, one])
            if slow is not None and len(members) == 2 and _on_one_host(facts, members):
                abstains.append(_one_of_two(facts, slow, stage))
            elif slow is not None and (doubt := _scatter(facts, slow, means, policy)):
                abstains.append(doubt)
            elif slow is not None:
                found.append(slow)
    if lonely:
        which = "each stage" if len(lonely) == places.stages > 1 else f"stage {_listed(lonely)}"
        abstains.append(f"{which} has one rank, which has no peer to compare with; `phalanx check` tests its host")
    return sorted(found, key=lambda one: -one.excess), abstains


def _on_one_host(facts: StragglerFacts, members: np.ndarray) -> bool:
    return len({facts.places.hosts[one] for one in members}) == 1


def _one_of_two(facts: StragglerFacts, slow: SlowRank, stage: int) -> str:
    """Two ranks of one host differ by which cores and caches they got, and by what else runs there."""
    return (
        f"rank {facts.places.ranks[slow.rank]} computes {slow.excess:.0%} longer than the only other rank of stage"
        f" {stage}, on the same host, which decides nothing; see `phalanx trace slow`, and what else runs on the host"
    )


def _scatter(facts: StragglerFacts, slow: SlowRank, means: Seconds, policy: StragglerPolicy) -> str:
    """Why one of three or four ranks is not named: they differ anyway, as `phalanx trace slow` has it; or nothing."""
    excesses = [math.expm1(mean) for mean in means[~np.isnan(means)]]
    if not LEAST_RANKS <= len(excesses) <= FEW_RANKS or slow.excess > excess_limit(excesses, policy.excess):
        return ""
    who = f"rank {facts.places.ranks[slow.rank]}"
    return f"{doubt_of(who, slow.excess, slow.steady, excesses)}; see `phalanx trace slow`"


def _lost_passes(
    facts: StragglerFacts, members: np.ndarray, levels: Sequence[Level], stage: int, policy: StragglerPolicy
) -> Iterator[str]:
    """Ranks that are not compared, since others of their stage have more passes in nearly every step."""
    few = [one for one, level in zip(members, levels, strict=True) if level.values < policy.least_steps]
    lacking = [one for one in few if facts.passes[:, one].any()]
    if lacking:
        ranks = _listed([int(facts.places.ranks[one]) for one in lacking])
        yield (
            f"of rank {ranks} fewer passes are recorded than of others of stage {stage}, and spans may have been lost,"
            " so that they are not compared; see `phalanx trace slow`, and `phalanx trace summary` for what is lost"
        )


def _slow_rank(
    facts: StragglerFacts, policy: StragglerPolicy, rank: int, level: Level, peers: Seconds, logs: Seconds
) -> SlowRank | None:
    peers = peers[~np.isnan(peers)]
    if level.values < policy.least_steps or not len(peers) or not math.expm1(level.mean) > policy.excess:
        return None
    ranks = len(facts.places.ranks)
    needed = NormalDist().inv_cdf(1 - _CHANCE / max(ranks, 2))
    if _is_uneven(facts):  # where long batches meet the same rank for a few steps, it is not slow
        needed *= 2
    # Few values may agree by chance, and micro-batches of uneven lengths differ however few steps were seen.
    few = 1 + 2 / math.sqrt(level.values)
    lengths = _noise_of_lengths(facts, rank)
    strength = level.strength * level.noise / max(level.noise * few, lengths)
    if len(peers) >= _ENOUGH_PEERS:
        spread = max(_TO_SD * float(np.median(np.abs(peers - np.median(peers)))), LEAST_NOISE)
        strength = min(strength, (level.mean - float(np.median(peers))) / spread)
    since = logs[level.first :]
    since = since[~np.isnan(since)]
    steady = float(np.mean(since > math.log1p(policy.excess) / 2))
    if strength < needed * policy.evidence or steady < policy.steady_share:
        return None
    waited = np.mean(facts.waited_s[level.first :], axis=0)
    others = np.flatnonzero(facts.places.stage == facts.places.stage[rank])
    most = float(np.median(waited[others[others != rank]]))
    least = (most - float(waited[rank])) / max(float(np.mean(facts.what_if.recorded_s)), 1e-9)
    passes = np.median(facts.passes[level.first :], axis=0)
    usual = float(np.median(passes[others[others != rank]]))
    strength /= needed
    return SlowRank(
        rank, level, math.expm1(level.mean), steady, len(peers), strength, least, float(passes[rank]), usual
    )


def _is_uneven(facts: StragglerFacts) -> bool:
    """Whether passes of most workers differ by what they compute, since forward and backward differ together."""
    spread = facts.spread[~np.isnan(facts.spread)]
    together = facts.correlation[~np.isnan(facts.correlation)]
    if not len(spread) or not len(together):
        return False
    return float(np.median(spread)) >= _LEAST_SPREAD and float(np.median(together)) >= _GO_TOGETHER


def _noise_of_lengths(facts: StragglerFacts, rank: int) -> float:
    """Standard deviation of a rank's time of a step that unevenness of its micro-batches explains."""
    spread = facts.spread[~np.isnan(facts.spread)]
    passes = float(np.median(facts.passes[:, rank])) / 2
    return float(np.median(spread)) / math.sqrt(max(passes, 1.0)) if len(spread) else 0.0


def confidence_of(slow: SlowRank) -> float:
    """How often such a name is right, at least. Set by hand, not fitted: below what made-up jobs show by evidence and
    noise (`benchmarks/detect_stragglers.py --only evidence`), since real noise is worse than noise that is drawn."""
    certain = 1 - 0.45 * math.exp(-1.2 * (slow.strength - 1)) if slow.strength >= 1 else 0.5
    # the faster one of two is the measure; and who waits for others as well is not the one that all wait for
    doubt = (0.9 if slow.peers < 2 else 1.0) * (0.9 if slow.waited_least < 0 else 1.0)
    doubt *= _MORE_WORK if slow.passes > slow.usual_passes else 1.0
    return round(min(0.99, max(0.5, certain * doubt)), 3)


def _slow_machines(facts: StragglerFacts, slow: Sequence[SlowRank], policy: StragglerPolicy) -> Iterator[Detection]:
    """Slow ranks by host: all ranks of a host that are slow have one cause, the host."""
    places = facts.places
    by_host: dict[str, list[SlowRank]] = {}
    for one in slow:
        by_host.setdefault(places.hosts[one.rank], []).append(one)
    for host, own in by_host.items():
        there = places.hosts.count(host)
        is_host = bool(host) and 1 < there < 2 * len(own)
        for part in [own] if is_host else [[one] for one in own]:
            detection = _slow_machine(facts, part, policy, is_host=is_host)
            if float(detection.figures["lost_share"]) >= policy.least_share:
                yield detection


def _slow_machine(
    facts: StragglerFacts, own: Sequence[SlowRank], policy: StragglerPolicy, *, is_host: bool
) -> Detection:
    places, worst = facts.places, own[0]
    host = places.hosts[worst.rank]
    ranks = tuple(sorted(int(places.ranks[one.rank]) for one in own))
    first = min(one.level.first for one in own)
    workers = sorted({int(places.worker[one.rank]) for one in own})
    lost_s, share = _lost(facts, workers, first)
    named = f"host {host} (ranks {_listed(ranks)})" if is_host else f"rank {_listed(ranks)}"
    if host and not is_host:
        named += f" (host {host}, stage {places.stage[worst.rank]})"
    confidence = max(confidence_of(one) for one in own)
    is_only_host = bool(host) and set(places.hosts) == {host}
    is_sure = confidence >= policy.evict_confidence and share >= policy.evict_share
    # Under `phalanx run` hosts of one machine can stand for several: what acts on the advice knows of spares.
    is_evicted = is_sure and bool(host)
    since_start = math.isnan(worst.level.before)
    why = [
        f"it computes {worst.excess:.0%} longer than the median of stage {places.stage[worst.rank]}"
        f" ({worst.peers} peers), in {worst.steady:.0%} of {worst.level.values} steps",
        f"it waits {worst.waited_least:.0%} of a step {'less' if worst.waited_least >= 0 else 'more'} than its peers:"
        f" they wait for {'it' if worst.waited_least >= 0 else 'others'}",
        f"replayed with its passes as its peers', a step would take {share:.0%} less ({lost_s:.4g} s)",
    ]
    if worst.passes > worst.usual_passes:
        why.append(
            f"it makes {worst.passes:g} passes of a step, its peers {worst.usual_passes:g}: it may have been given more"
            " work, and then no machine is at fault"
        )
    if not since_start:
        why.append(f"before, it differed from its peers by {math.expm1(worst.level.before):+.0%}")
    then = []
    if is_only_host:
        look = f"look at what else runs on {host}, and at the cores and the device of rank {_listed(ranks)}"
        then.append(f"{look}: the other ranks of this host are well")
    if is_evicted:
        where = "in a job with spares " if is_only_host else ""
        then.append(f"{where}`phalanx run evict {host}`: a spare takes its place")
    then.append(f"`phalanx check --full` on {host}" if host else "`phalanx check --full` on its host")
    advice: Advice = "evict" if is_evicted else "check"
    who = Culprit("host" if is_host else "rank", host if is_host else str(ranks[0]), ranks, (host,) if host else ())
    return Detection(
        "slow host" if is_host else "slow rank",
        f"{named} computes {worst.excess:.0%} longer than its peers, which costs {share:.0%} of a step",
        (who,),
        _onset(facts, first),
        confidence,
        tuple(why),
        tuple(then),
        advice,
        {
            "excess": worst.excess,
            "slowdown": float(np.nanmax(worker_slowdowns(facts.since(first).what_if, places)[workers])),
            "lost_s": lost_s,
            "lost_share": share,
            "strength": worst.strength,
            "peers": worst.peers,
            "waited_least_share": worst.waited_least,
        },
    )


def _lost(facts: StragglerFacts, workers: Sequence[int], first: int) -> tuple[float, float]:
    """Seconds and share of a step that the slowest of these workers costs, since it began.

    Several slow workers hide each other: without one of them a step is no shorter. So it is also asked what each would
    cost if it were the only one.
    """
    what_if = facts.what_if
    gains = what_if.replayed_s[first:, None] - what_if.without_s[first:][:, workers]
    alone = what_if.alone_s[first:][:, workers] - what_if.alike_s[first:, None]
    means = [float(np.mean(one[~np.isnan(one)])) for part in (gains, alone) for one in part.T if (~np.isnan(one)).any()]
    lost_s = max([0.0, *means])
    return lost_s, lost_s / max(float(np.mean(what_if.recorded_s[first:])), 1e-12)


def _onset(facts: StragglerFacts, first: int) -> Onset:
    unix_s = float(facts.end_unix_s[first - 1]) if first else float(facts.end_unix_s[0] - facts.what_if.recorded_s[0])
    return Onset(unix_s if unix_s > _REAL_TIME_S else None, int(facts.steps[first]))


def _stages(facts: StragglerFacts, policy: StragglerPolicy, slow: Sequence[SlowRank]) -> Iterator[Detection]:
    """The stage that is heaviest, where that costs something: by how layers were split, or by its machines."""
    places, what_if = facts.places, facts.what_if
    if places.stages < 2:
        return
    usual = np.stack(
        [_low_median(facts.own_s[:, places.stage == stage])[:, 0] for stage in range(places.stages)], axis=1
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(usual)
    heaviest = int(np.argmax(np.nan_to_num(np.median(usual, axis=0))))
    level = last_level(logs[:, heaviest] - np.median(np.delete(logs, heaviest, axis=1), axis=1), policy.excess / 2)
    first = level.first
    lost_s = float(np.mean(what_if.alike_s[first:] - what_if.flat_s[first:]))
    share = lost_s / float(np.mean(what_if.recorded_s[first:]))
    mean_s, own_s = float(np.mean(usual[first:])), float(np.mean(usual[first:, heaviest]))
    if share < policy.least_share or own_s < mean_s * (1 + policy.excess) or level.values < policy.least_steps:
        return
    members = tuple(int(rank) for rank in places.ranks[places.stage == heaviest])
    hosts = tuple(dict.fromkeys(h for h, s in zip(places.hosts, places.stage, strict=True) if s == heaviest and h))
    figures = {"lost_s": lost_s, "lost_share": share, "excess": own_s / mean_s - 1, "slowdown": 1 / (1 - share)}
    why = [
        f"stage {heaviest} computes {own_s:.4g} s of a step, the mean of all stages is {mean_s:.4g} s",
        f"with the same work on each stage a step would take {share:.0%} less ({lost_s:.4g} s)",
    ]
    if not math.isnan(level.before) and level.mean - level.before > policy.excess:
        grew = math.expm1(level.mean - level.before)
        why.insert(0, f"it was {grew:.0%} faster against the other stages before, and the split was the same then")
        yield Detection(
            "slow stage",
            f"stage {heaviest} ({'its only rank' if len(members) == 1 else f'all {len(members)} ranks'}) became"
            f" {grew:.0%} slower, which costs {share:.0%} of a step",
            (Culprit("stage", f"stage {heaviest}", members, hosts),),
            _onset(facts, first),
            0.8 if len(members) == 1 else 0.6,
            tuple(why),
            (f"`phalanx check --full` on {', '.join(hosts[:4]) or 'its hosts'}, then on what these have in common",),
            "check",
            figures,
        )
        return
    if any(places.stage[one.rank] == heaviest for one in slow) and own_s < mean_s * (1 + 2 * policy.excess):
        return
    lonely = len(members) < 2
    if lonely:
        why.append("it has one rank, so that its host may be slow instead; `phalanx check` there tells")
    yield Detection(
        "unbalanced stage",
        f"stage {heaviest} is {own_s / mean_s - 1:.0%} heavier than the mean, which costs {share:.0%} of a step;"
        " no machine is at fault" + (" by what is known" if lonely else ""),
        (Culprit("stage", f"stage {heaviest}", members),),
        Onset(),
        0.7 if lonely else 0.95,
        tuple(why),
        ("Give the stage fewer layers (`parallel.pipeline`; docs/pipeline.md)", "`phalanx plan search CONFIG`"),
        "program",
        figures,
    )


def _uneven_lengths(facts: StragglerFacts, policy: StragglerPolicy) -> Iterator[Detection]:
    """Passes that differ from micro-batch to micro-batch, on all workers."""
    what_if = facts.what_if
    lost_s = float(np.mean(what_if.replayed_s - what_if.even_s))
    share = lost_s / float(np.mean(what_if.recorded_s))
    spread = facts.spread[~np.isnan(facts.spread)]
    together = facts.correlation[~np.isnan(facts.correlation)]
    if share < policy.least_share or not _is_uneven(facts):
        return
    goes = float(np.median(together))
    why = (
        f"passes of one worker differ by {float(np.median(spread)):.0%} from micro-batch to micro-batch",
        f"a long forward pass has a long backward pass: correlation {goes:.2f}",
        f"with passes of one length a step would take {share:.0%} less ({lost_s:.4g} s)",
    )
    figures = {"lost_s": lost_s, "lost_share": share, "spread": float(np.median(spread)), "correlation": goes}
    yield Detection(
        "uneven sequence lengths",
        f"micro-batches take unequally long on all workers, which costs {share:.0%} of a step; no machine is at fault",
        (Culprit("program", "batches"),),
        Onset(),
        round(min(0.98, 0.5 + goes / 2), 3),
        why,
        ("Balance sequence lengths over micro-batches and ranks, or pack to equal attention cost (docs/data.md)",),
        "program",
        figures | {"slowdown": 1 / (1 - share)},
    )


def _slow_loading(facts: StragglerFacts, policy: StragglerPolicy) -> Iterator[Detection]:
    """A rank that waits for its batches, while its peers do not."""
    recorded = facts.what_if.recorded_s[:, None]
    if len(facts.places.ranks) < 3:
        return
    late = facts.data_s - np.median(facts.data_s, axis=1, keepdims=True)
    first = _loads_slowly_from(late / recorded, policy)
    late, recorded = late[first:], recorded[first:]
    shares = np.median(late / recorded, axis=0)
    steady = np.mean(late > policy.least_share * recorded / 2, axis=0)
    odd = np.flatnonzero((shares >= policy.least_share) & (steady >= policy.steady_share))
    if not len(odd) or len(odd) > max(1, len(facts.places.ranks) // 10):
        return
    worst = int(odd[np.argmax(shares[odd])])
    ranks = tuple(int(facts.places.ranks[one]) for one in odd)
    hosts = tuple(dict.fromkeys(facts.places.hosts[one] for one in odd if facts.places.hosts[one]))
    lost_s = float(np.median(late[:, worst]))
    yield Detection(
        "slow loading",
        f"rank {_listed(ranks)} ({', '.join(hosts[:3]) or 'host unknown'}) waits for its batches,"
        f" {shares[worst]:.0%} of a step longer than the others",
        (Culprit("rank", str(ranks[0]), ranks, hosts),),
        _onset(facts, first) if first else Onset(),
        0.8,
        (f"it waits {lost_s:.4g} s of a step longer than the median rank, in {steady[worst]:.0%} of steps",),
        (f"`phalanx check --only disk` on {hosts[0] if hosts else 'its host'}",),
        "check",
        {"lost_s": lost_s, "lost_share": float(shares[worst])},
    )


def _loads_slowly_from(late: Seconds, policy: StragglerPolicy) -> int:
    """The step since which the rank that now waits longest for its batches does so, if it has for some steps.

    Args:
        late: of each step and rank, the share of the step that it waits longer than the median rank.
    """
    worst = late[:, int(np.argmax(np.median(late[-_LEAST_LOADS:], axis=0)))]
    begun = begins_above(worst, policy.least_share / 2, policy.least_share)
    return begun[0] if begun is not None and len(late) - begun[0] >= _LEAST_LOADS else 0


def _slow_by_themselves(facts: StragglerFacts, policy: StragglerPolicy, named: set[int]) -> Iterator[str]:
    """Ranks whose own time differs, where it is not known who waits for whom: what that costs cannot be told."""
    ranks = facts.places.ranks
    if facts.meets or len(ranks) < 2:
        return
    late = slice(len(facts.steps) // 2, None)
    parts = {"passes": np.nan_to_num(facts.own_s), "loading": facts.data_s, "updates": facts.update_s}
    own = sum(parts.values())[late]  # type: ignore[index]
    usual = _low_median(own)
    excess = own - usual
    least = np.maximum(policy.excess * usual, policy.least_share * facts.what_if.recorded_s[late, None])
    odd = np.flatnonzero(np.mean(excess > least, axis=0) >= policy.steady_share)
    odd = odd[np.argsort(-np.median(excess[:, odd], axis=0), kind="stable")]
    if not len(odd) or named >= {int(rank) for rank in ranks[odd]}:
        return
    worst = int(odd[0])
    times = float(np.median(excess[:, worst]) / max(float(np.median(usual)), 1e-9))
    grew = {name: float(np.median(one[late, worst] - _low_median(one[late])[:, 0])) for name, one in parts.items()}
    what = "collectives have no group" if facts.has_strays else "no collectives are recorded"
    also = f" (and {_listed(sorted(int(rank) for rank in ranks[odd[1:]]))})" if len(odd) > 1 else ""
    yield (
        f"{what}: who waits for whom is not known; rank {int(ranks[worst])}{also} computes {times:.0%} longer by"
        f" itself, most of it in {max(grew, key=lambda name: grew[name])}: see `phalanx trace slow`"
    )


def _unexplained(facts: StragglerFacts, policy: StragglerPolicy, found: Sequence[Detection]) -> Iterator[str]:
    """Where most of a step goes by between spans, and nothing that was found costs as much."""
    what_if = facts.what_if
    lost_s = float(np.mean(what_if.recorded_s - what_if.replayed_s))
    share = lost_s / max(float(np.mean(what_if.recorded_s)), 1e-12)
    known = max((float(one.figures.get("lost_share", 0.0)) for one in found), default=0.0)
    if share >= policy.delays_share and share > known:
        yield (
            f"{share:.0%} of a step ({lost_s:.4g} s) goes by between spans, in what is not recorded, and nobody is"
            " blamed for it; record what runs there (docs/trace.md)"
        )


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
