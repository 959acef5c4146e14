"""Stacks of main threads, clustered: which ranks are elsewhere than the others (ByteRobust, arXiv 2509.16293).

Ranks that wait for their peers may do so in several places; whoever is not among them holds them up. Where nobody is
seen to wait, a minority stands out by its functions, else by its lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.detect.hangs.python_stacks import Frame, has_ended, waits_for_peers, without_lines


@dataclass(frozen=True)
class StackCluster:
    """Ranks whose main threads have the same functions on their stacks.

    Attributes:
        frames: of one of them, innermost first.
        waits: they are in a collective, or may be.
    """

    ranks: tuple[int, ...]
    frames: tuple[str, ...]
    waits: bool


@dataclass(frozen=True)
class OddRanks:
    """Ranks that are elsewhere.

    Attributes:
        words: where, that follow their names.
        others: what the others do.
        others_wait: all of them wait for their peers.
    """

    ranks: tuple[int, ...]
    words: str
    others: str
    others_wait: bool
    why: str


def clusters_of(stacks: Mapping[int, Sequence[Frame]]) -> list[StackCluster]:
    """By functions and files, the smallest first: the odd ones are what is looked for."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in sorted(stacks):
        if stacks[rank]:
            alike[without_lines(tuple(stacks[rank]))].append(rank)
    found = [
        StackCluster(tuple(ranks), tuple(map(str, stacks[ranks[0]])), waits_for_peers(stacks[ranks[0]]))
        for ranks in alike.values()
    ]
    return sorted(found, key=lambda one: (len(one.ranks), one.ranks))


def odd_ones_out(stacks: Mapping[int, Sequence[Frame]]) -> OddRanks | None:
    """Who is elsewhere than the others; None: nobody, or it cannot be told."""
    clusters = clusters_of(stacks)
    known = [rank for cluster in clusters for rank in cluster.ranks]
    elsewhere = [cluster for cluster in clusters if not cluster.waits]
    ranks = tuple(sorted(rank for cluster in elsewhere for rank in cluster.ranks))
    if ranks and len(ranks) < len(known):
        if 2 * len(ranks) > len(known):
            return None
        ended = all(has_ended(stacks[rank]) for rank in ranks)
        words = f"{'has' if len(ranks) == 1 else 'have'} ended" if ended else f"{_is(ranks)} in {places(stacks, ranks)}"
        return OddRanks(ranks, words, "wait in collectives", True, _sizes(clusters))
    if len(known) < 3:  # of two stacks each is as odd as the other
        return None
    for key in (without_lines, tuple):
        kinds = Counter(key(tuple(stacks[rank])) for rank in known)
        common, count = kinds.most_common(1)[0]
        odd = tuple(rank for rank in known if key(tuple(stacks[rank])) != common)
        if 2 * count > len(known) and odd:
            at = next(str(stacks[rank][0]) for rank in known if rank not in odd)
            waits = bool(ranks == () and waits_for_peers(next(stacks[rank] for rank in known if rank not in odd)))
            if waits:  # all are in collectives: another one of them is no sign of guilt
                return None
            return OddRanks(
                tuple(sorted(odd)), f"{_is(odd)} in {places(stacks, odd)}", f"are in {at}", False, _sizes(clusters)
            )
    return None


def places(stacks: Mapping[int, Sequence[Frame]], ranks: Iterable[int]) -> str:
    """Where ranks are, by their innermost functions."""
    return ", ".join(sorted({str(stacks[rank][0]) for rank in ranks if stacks[rank]})[:3]) or "no function"


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _sizes(clusters: Sequence[StackCluster]) -> str:
    shown = "; ".join(
        f"{len(one.ranks)} in {one.frames[0]}{' (waits for peers)' if one.waits else ''}" for one in clusters[:4]
    )
    more = f"; {len(clusters) - 4} more kinds" if len(clusters) > 4 else ""
    return f"{len(clusters)} kinds of stacks: {shown}{more}"
