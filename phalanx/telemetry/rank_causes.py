"""Ranks, hosts and links that keep the others waiting: each a function from evidence to findings.

Costs are upper bounds of what a step would be shorter by, and overlap: who waits for a slow rank also waits in a
collective. So each function is given what was found before, and leaves out what that explains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from statistics import fmean, median
from typing import Any

from phalanx.telemetry.alike_ranks import LEAST_RANKS
from phalanx.telemetry.evidence import Evidence
from phalanx.telemetry.findings import (
    LEAST_SHARE,
    Action,
    Finding,
    listed,
    named_ranks,
    verb_of,
    waits_by_axis,
)

_SLOW_LINK = 1.5  # of the median of the links that do the same
_ALONE = 2.0  # times the others' wait for data makes a rank the one to blame
_FEW = 0.1  # of all ranks
_STANDS_OUT = 0.2


def slow_ranks(evidence: Evidence, step_s: float, _: Sequence[Finding]) -> Iterator[Finding]:
    """Ranks that compute longer than those alike."""
    if evidence.slow is None or not evidence.slow.slow:
        return
    slow = evidence.slow.slow
    worst = slow[0]
    lost_s = min(worst["own_s"] - worst["peers_s"], step_s)
    ranks = tuple(sorted(one["rank"] for one in slow))
    hosts = tuple(dict.fromkeys(one["host"] for one in slow))
    is_certain = worst["slow_share"] >= 0.95 and worst["steps"] >= 20 and worst["peers"] > LEAST_RANKS
    because = [
        f"{named_ranks([one['rank']], evidence)} computed {one['own_s']:.4g} s of a step, the others of"
        f" stage {one['stage']} {one['peers_s']:.4g} s ({one['excess']:+.0%}),"
        f" in {one['slow_share']:.0%} of {one['steps']} steps"
        for one in slow[:3]
    ]
    if lost_s < step_s * LEAST_SHARE:
        return
    yield Finding(
        "slow rank",
        f"{named_ranks(ranks, evidence)} {verb_of(ranks, 'computes', 'compute')}"
        f" {worst['excess']:.0%} longer than {verb_of(ranks, 'its', 'their')} stage, and the others wait",
        lost_s,
        lost_s / step_s,
        "certain" if is_certain else "likely",
        (*because, *_odd_counters(evidence, hosts)),
        ranks,
        hosts,
        actions=(
            Action(f"Test {', '.join(hosts[:3])}: run this there", "phalanx check --full"),
            _cure(ranks, hosts[0], {one["host"] for one in evidence.slow.ranked}),
            Action("See by how much each rank is slower", f"phalanx trace slow {evidence.run}"),
        ),
    )


def _cure(ranks: Sequence[int], host: str, hosts: Set[str]) -> Action:
    """Where all ranks are on one host, it is not the host that makes some of them slow, and no other goes on."""
    if len(hosts) > 1:
        return Action("Take the host out: in a job of phalanx run a spare takes its place", f"phalanx run evict {host}")
    place = f"at the cores and the device of rank {listed(ranks)}"
    return Action(f"Look at what else runs on {host}, and {place}: the other ranks of this host are well")


def _odd_counters(evidence: Evidence, hosts: Sequence[str]) -> Iterator[str]:
    """Counters in which a slow host differs from the others by a fifth: a hot GPU, a clock held down."""
    by_name: dict[str, dict[str, list[float]]] = {}
    for row in evidence.counters:
        by_name.setdefault(row["name"], {}).setdefault(row["host"], []).append(row["value"])
    for name, by_host in sorted(by_name.items()):
        usual = [fmean(values) for host, values in by_host.items() if host not in hosts]
        for host in hosts[:3]:
            if len(usual) >= 2 and host in by_host and (middle := median(usual)):
                ratio = fmean(by_host[host]) / middle
                if abs(ratio - 1) > _STANDS_OUT and abs(ratio - 1) > 2 * (max(usual) - min(usual)) / abs(middle):
                    yield f"{host}: {name} was {fmean(by_host[host]):.4g}, of other hosts {middle:.4g}"


def slow_links(evidence: Evidence, step_s: float, _: Sequence[Finding]) -> Iterator[Finding]:
    """Groups or pairs of ranks whose bytes take longer than those of the others, nobody being late."""
    by_group: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in evidence.wires:
        by_group.setdefault((row["group"], row["is_pair"]), []).append(row)
    waited = {(row["group"], row["first_rank"]): row["mean_s"] for row in evidence.waits}
    for (group, is_pair), rows in sorted(by_group.items()):
        usual_s = median(row["wire_s"] for row in rows)
        worst = max(rows, key=lambda row: row["wire_s"])
        if len(rows) < LEAST_RANKS or worst["wire_s"] < _SLOW_LINK * usual_s:
            continue
        ranks = tuple(worst["ranks"])
        most_s = worst["wire_s"] - usual_s
        hidden = not is_pair and waited.get((group, ranks[0]), 0.0) < most_s / 2
        lost_s = min(most_s, waited.get((group, ranks[0]), most_s)) if not is_pair else most_s
        if lost_s < step_s * LEAST_SHARE:
            continue
        hosts = tuple(dict.fromkeys(filter(None, (evidence.host_of.get(rank, "") for rank in ranks))))
        among = "between" if is_pair else "among"
        yield Finding(
            "slow link",
            f"A link {among} ranks {listed(ranks)} ({' and '.join(hosts[:4]) or 'hosts unknown'}) is slow:"
            f" {group or 'unnamed'} communication there takes"
            f" {worst['wire_s'] / usual_s if usual_s else math.inf:.1f} times as long as in the other groups",
            lost_s,
            lost_s / step_s,
            "possible" if hidden else "likely",
            (
                f"{group}: {worst['wire_s']:.4g} s of a step there, {usual_s:.4g} s in the median of {len(rows)}"
                " groups, each by the member that came last, so that waiting for others is left out",
            ),
            ranks,
            hosts,
            group,
            actions=(
                Action(f"On {hosts[-1] if hosts else 'one host'}, let others test against it",
                       "phalanx check --serve 0.0.0.0:29400"),
                Action(f"Then on {hosts[0] if hosts else 'the others'}",
                       f"phalanx check --only peers --peer {hosts[-1] if hosts else 'HOST'}:29400"),
            ),
        )  # fmt: skip


def data(evidence: Evidence, step_s: float, _: Sequence[Finding]) -> Iterator[Finding]:
    """Waiting for batches: of one rank, or of all."""
    if evidence.averages is None or not len(evidence.averages):
        return
    waits = dict(zip(evidence.averages["rank"].to_pylist(), evidence.averages["data_s"].to_pylist(), strict=True))
    each = {rank: seconds or 0.0 for rank, seconds in waits.items()}
    usual_s, lost_s = median(each.values()), min(max(each.values()), step_s)
    if lost_s < step_s * LEAST_SHARE:
        return
    few = sorted(rank for rank, seconds in each.items() if seconds > _ALONE * usual_s and seconds > lost_s / 2)
    blamed = tuple(few) if usual_s < lost_s / _ALONE and len(few) <= max(1, _FEW * len(each)) < len(each) else ()
    hosts = tuple(dict.fromkeys(filter(None, (evidence.host_of.get(rank, "") for rank in blamed))))
    who = f"{named_ranks(blamed, evidence)} {verb_of(blamed, 'waits', 'wait')}" if blamed else "All ranks wait"
    yield Finding(
        "data",
        f"{who} for data: the loader delivers less than the devices take",
        lost_s,
        lost_s / step_s,
        "certain" if evidence.steps >= 20 else "likely",
        (f"waiting for a batch took {lost_s:.4g} s of a step on the slowest rank, {usual_s:.4g} s in the median",),
        blamed,
        hosts,
        actions=(
            Action(f"Test the storage of {hosts[0]}" if hosts else "Test the storage", "phalanx check --only disk"),
            Action("Load with more workers, or from files that were tokenized before", "phalanx data prepare CONFIG"),
        ),
    )


def late_ranks(evidence: Evidence, step_s: float, found: Sequence[Finding]) -> Iterator[Finding]:
    """Waiting for members that come late, where nothing else explains why they do."""
    if any(one.cause in ("slow rank", "data", "unbalanced stages") and one.share > LEAST_SHARE for one in found):
        return
    linked = {one.group for one in found if one.cause == "slow link"}
    behind_links = {rank for one in found if one.cause == "slow link" for rank in one.ranks}
    for group, rows in waits_by_axis(evidence).items():
        if group in linked:
            continue
        lost_s = min(fmean(max(0.0, row["mean_s"] - row["least_s"]) for row in rows), step_s)
        if lost_s < step_s * LEAST_SHARE:
            continue
        skew = next((row for row in evidence.skew if row["group"] == group), None)
        is_one = skew is not None and skew["last_share"] > 0.5
        late = (skew["last_rank"],) if skew is not None and is_one else ()
        if behind_links.intersection(late):
            continue
        who = f"for {named_ranks(late, evidence)}" if late else "for now one, now another of them"
        told = (f"launches are {skew['mean_s']:.4g} s apart, up to {skew['largest_s']:.4g} s",) if skew else ()
        yield Finding(
            "late ranks",
            f"In {group or 'unnamed'} groups ranks wait {lost_s / step_s:.0%} of a step {who}",
            lost_s,
            lost_s / step_s,
            "likely" if is_one else "possible",
            (f"{group}: members wait {lost_s:.4g} s of a step longer than the one that waits least", *told),
            late,
            tuple(filter(None, (evidence.host_of.get(rank, "") for rank in late))),
            group,
            actions=(
                Action("See what the late ranks do meanwhile",
                       f"phalanx trace export {evidence.run} late.json.gz --steps {evidence.last_step}"),
                Action("Look for what runs beside training on the host: garbage collection, other processes",
                       "phalanx check"),
            ),
        )  # fmt: skip


def waits_of_unknown_groups(evidence: Evidence, step_s: float, found: Sequence[Finding]) -> Iterator[Finding]:
    """Waiting in groups whose members are not known, so that nobody can be blamed for it."""
    known_s = sum(row["mean_s"] * row["members"] for row in evidence.waits) / max(1, evidence.ranks)
    explained_s = sum(one.lost_s for one in found if one.cause == "slow rank")
    lost_s = evidence.breakdown.get("wait", 0.0) - known_s - explained_s
    if lost_s < step_s * LEAST_SHARE:
        return
    yield Finding(
        "communication",
        f"Ranks wait {lost_s / step_s:.0%} of a step for others; for whom is not known",
        lost_s,
        lost_s / step_s,
        "possible",
        (f"of {evidence.breakdown['wait']:.4g} s of waiting, {known_s:.4g} s are in groups whose members are known",),
        actions=(
            Action("Record collectives with the ranks of their groups (docs/trace.md)"),
            Action("See who waits and who does not", f"phalanx trace slow {evidence.run}"),
        ),
    )
