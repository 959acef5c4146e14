"""Which rank holds up the others, by the flight records of all: one that others wait for and that waits for none.

Launches of a group go to one stream: a collective begins on a rank when those before it are done, and ends when all
ranks have begun it. So a rank that has launched a collective that is not done waits for every rank that has not. A rank
that is behind in one group may wait in another one itself; following the waiting leads to the ranks that began it:

- a rank that others wait for and that has nothing under way: it never came;
- a rank whose record stands still at what others have finished with its help: its GPU, or its watchdog, is dead;
- a rank that called something else than the others of its group;
- a rank that has launched what the others have begun on their GPUs, and has not begun it on its own.

Where waiting ends in a collective that all have launched, or goes in a circle, one of these ranks is at fault, and the
records do not say which. Where it ends at a rank that lives and has left no record, no rank is named: dumps get lost
for many reasons, and that rank may wait for another one. The same holds for a record that does not list the members of
a group that it has used: the others cannot see it wait.

A record holds what is still in its ring (`phalanx.detect.hangs.flight_records`). What a rank has not launched, or is
not held up by, is only taken for true where the record shows that nothing it has forgotten could say otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Literal

from phalanx.detect.hangs.flight_records import (
    AT_ONCE,
    UNKNOWN_CALL,
    FlightRecord,
    GroupId,
    GroupPart,
    Launch,
    MemberTexts,
)

_IN_STEP = frozenset(
    (
        *("all_reduce", "all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base"),
        *("all_to_all", "all_to_all_single", "barrier", "all_reduce_barrier"),
    )
)
"""None ends on any rank before it has begun on all."""


Charge = Literal["absent", "stands still", "mismatch", "not begun", "behind"]
"""How a rank holds up the others, see the list above; `behind`: none waits, and it has launched less than most."""


@dataclass(frozen=True)
class StalledCall:
    """A collective, or the transfers from one rank to another, that does not end.

    Attributes:
        operation: such as ``all_gather``, or ``transfer from rank 2 to rank 3``.
        number: among the collectives of its group, from 1; -1: of a transfer.
        members: of the group; the two ranks of a transfer.
        waiting: ranks that wait in it.
        absent: ranks that have not launched it.
        unknown: ranks for which that is not known.
        since_ns: Unix time of the first launch that waits; 0: not known.
    """

    operation: str
    number: int
    group: GroupId
    members: tuple[int, ...]
    waiting: tuple[int, ...]
    absent: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    since_ns: int = 0


@dataclass(frozen=True)
class Accusation:
    """Why a rank is named.

    Attributes:
        words: what it did or did not, that follow its name.
        call: where the others wait for it; None: none waits.
    """

    charge: Charge
    words: str
    call: StalledCall | None = None


@dataclass(frozen=True)
class HangVerdict:
    """What the records say.

    Attributes:
        guilty: what each of these did or did not, in words that follow its name.
        possible: one of these is at fault too, and it cannot be told which.
        why: of `possible`, or why no rank is named.
        accusations: the same of `guilty`, as values.
        stalled: all that does not end: the wait-for graph.
        held_up: by each guilty rank, those that wait for it, directly or through others.
    """

    guilty: Mapping[int, str] = field(default_factory=dict)
    possible: tuple[int, ...] = ()
    why: str = ""
    accusations: Mapping[int, Accusation] = field(default_factory=dict, compare=False)
    stalled: tuple[StalledCall, ...] = field(default=(), compare=False)
    held_up: Mapping[int, tuple[int, ...]] = field(default_factory=dict, compare=False)


def blame(
    records: Mapping[int, FlightRecord], texts: MemberTexts, ranks: Collection[int], silent: Collection[int] = ()
) -> HangVerdict:
    """Follow the waiting.

    Args:
        silent: of these, those that are known not to answer: a rank that waits for them is explained.
    """
    return _WaitGraph(records, texts, ranks, silent).blame() if any(records.values()) else HangVerdict()


@dataclass(eq=False)
class _ProcessGroup:
    """A process group and the parts of its members in it.

    Attributes:
        whole: ranks whose records hold all they have launched.
        is_open: its members are not listed, and more ranks of the job may be in it than are seen.
    """

    id: GroupId
    members: tuple[int, ...]
    parts: dict[int, GroupPart]
    whole: frozenset[int]
    is_open: bool = False

    def __post_init__(self) -> None:
        # Of a group that has transfers too, the watchdog's numbers may be those of transfers.
        self.has_status = all(part.counts_calls for part in self.parts.values())
        self.pending = {
            rank: pending
            for rank, part in self.parts.items()
            if (pending := [one for one in part.launches if not one.is_done and not one.transfers and one.number >= 0])
        }
        # The number of the last collective that each is known to have finished; -1: none is. In a record that holds all
        # launches, whatever comes before the first that is not done is done.
        self.done = {}
        for rank, part in self.parts.items():
            first = self.first_pending(rank) if rank in self.whole else None
            known = max((one.number for one in part.launches if one.is_done and not one.transfers), default=-1)
            before = -1 if first is None else first.number - 1
            self.done[rank] = max(known, before, part.status[1] if part.status and self.has_status else -1)

    def newest(self, rank: int) -> int:
        """Number of its last collective; -1: none is known."""
        part = self.parts.get(rank, GroupPart())
        return max(part.newest, part.status[0] if part.status and self.has_status else -1)

    def first_pending(self, rank: int) -> Launch | None:
        """The first of its collectives that is not done."""
        return min(self.pending.get(rank, ()), key=lambda one: one.number, default=None)

    def __str__(self) -> str:
        return f"{self.id.description} ({list_ranks(self.members)})"


@dataclass(eq=False)
class _Stalled:
    """A collective, or the transfers from one rank to another, that ranks wait in."""

    name: str
    group: _ProcessGroup
    members: tuple[int, ...]
    waiting: dict[int, Launch]
    absent: frozenset[int] = frozenset()  # have not launched it
    unknown: frozenset[int] = frozenset()  # for which that is not known
    ended: bool = False
    late: set[int] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        return not self.absent and not self.unknown

    @property
    def is_transfer(self) -> bool:
        return bool(next(iter(self.waiting.values())).transfers)

    def stops(self) -> set[int]:
        """The ranks that it waits for."""
        return {*self.absent, *self.unknown, *self.late}

    def as_call(self) -> StalledCall:
        """For others."""
        name, _, number = self.name.rpartition(" ")
        times = [one.created_ns for one in self.waiting.values() if one.created_ns]
        return StalledCall(
            self.name if self.is_transfer else name,
            -1 if self.is_transfer else int(number),
            self.group.id,
            self.members,
            tuple(sorted(self.waiting)),
            tuple(sorted(self.absent)),
            tuple(sorted(self.unknown)),
            min(times, default=0),
        )


class _WaitGraph:
    def __init__(
        self,
        records: Mapping[int, FlightRecord],
        texts: MemberTexts,
        ranks: Collection[int],
        silent: Collection[int],
    ) -> None:
        self._ranks = frozenset(ranks)
        self._silent = frozenset(silent) & self._ranks
        # Of a record whose groups cannot be joined with those of the others no more is known than of one that is lost.
        # Where no record lists the members of groups, as old versions do not, a name is the same group on all ranks.
        here = {rank: records[rank] for rank in sorted(records) if rank in self._ranks}
        by_members = any(group.members for record in here.values() for group in record.parts)
        self._records = {rank: one for rank, one in here.items() if not (by_members and one.has_strays)}
        self._groups = list(self._join(texts))
        self._stalled: list[_Stalled] = []
        for group in self._groups:
            self._stalled += self._collectives(group)
        # Order of the first launch of each rank that is not done and held up the next ones.
        self._heads = {}
        for rank, record in self._records.items():
            open_ones = [one for part in record.parts.values() for one in part.launches if not one.is_done]
            self._heads[rank] = min((one.order for one in open_ones if not _is_passed(record, one)), default=-1)
        for group in self._groups:
            self._stalled += self._transfers(group)
        self._frozen = dict(self._frozen_records())
        for stalled in self._stalled:
            for rank in stalled.waiting.keys() & self._frozen.keys():
                del stalled.waiting[rank]  # what it seems to wait in may be done
        self._stalled = [stalled for stalled in self._stalled if stalled.waiting]
        self._waits: dict[int, list[_Stalled]] = defaultdict(list)
        for stalled in self._stalled:
            for rank in stalled.waiting:
                self._waits[rank].append(stalled)
        self._find_late()

    # What there is

    def _join(self, texts: MemberTexts) -> Iterator[_ProcessGroup]:
        parts: dict[GroupId, dict[int, GroupPart]] = defaultdict(dict)
        whole = frozenset(rank for rank, record in self._records.items() if record.oldest <= 0 and not record.lacks)
        for rank, record in self._records.items():
            for group, part in record.parts.items():
                parts[group][rank] = part
        unseen = any(rank not in self._records or not self._records[rank].parts for rank in self._ranks)
        for group in sorted(parts):
            named = texts.ranks(group.members)
            members = tuple(rank for rank in named if rank in self._ranks) or tuple(sorted(parts[group]))
            here = frozenset(members)
            if len(members) > 1 and any(part.launches or part.status for part in parts[group].values()):
                known = {rank: part for rank, part in parts[group].items() if rank in here}
                yield _ProcessGroup(group, members, known, whole, not named and unseen)

    def _collectives(self, group: _ProcessGroup) -> Iterator[_Stalled]:
        by_number: dict[int, dict[int, Launch]] = defaultdict(dict)
        for rank in group.pending:
            first = group.first_pending(rank)
            assert first is not None
            by_number[first.number][rank] = first
        for number, waiting in sorted(by_number.items()):
            came = {rank: self._came(group, rank, number) for rank in group.members if rank not in waiting}
            yield _Stalled(
                f"{next(iter(waiting.values())).name} {number}",
                group,
                group.members,
                waiting,
                frozenset(rank for rank, has in came.items() if has is False),
                frozenset(rank for rank, has in came.items() if has is None),
                any(done >= number for done in group.done.values()),
            )

    def _came(self, group: _ProcessGroup, rank: int, number: int) -> bool | None:
        """Whether a rank has launched this collective; None: not known."""
        record = self._records.get(rank)
        if record is None:
            return None
        newest = group.newest(rank)
        if newest >= number:
            return True
        part = group.parts.get(rank)
        is_unused = record.has_groups if part is None else part.is_unused
        # A rank with nothing under way has not come, whatever the ring has forgotten.
        is_idle = record.tells_all and all(one.is_done for part in record.parts.values() for one in part.launches)
        return False if newest >= 0 or is_unused or record.oldest <= 0 or is_idle else None

    def _transfers(self, group: _ProcessGroup) -> Iterator[_Stalled]:
        pairs: dict[tuple[int, int], tuple[list[Launch], list[Launch]]] = defaultdict(lambda: ([], []))
        for rank, part in group.parts.items():
            for launch in part.launches:
                for transfer in () if launch.is_done else launch.transfers:
                    pair = (rank, transfer.peer) if transfer.is_send else (transfer.peer, rank)
                    pairs[pair][0 if transfer.is_send else 1].append(launch)
        for (sender, receiver), (sends, receives) in sorted(pairs.items()):
            if {sender, receiver} <= self._ranks and sender != receiver:
                yield from self._pair(group, sender, receiver, sends, receives)

    def _pair(
        self, group: _ProcessGroup, sender: int, receiver: int, sends: Sequence[Launch], receives: Sequence[Launch]
    ) -> Iterator[_Stalled]:
        name, both = f"transfer from rank {sender} to rank {receiver}", (sender, receiver)
        matched = min(len(sends), len(receives))
        if matched:
            yield _Stalled(name, group, both, {sender: sends[0], receiver: receives[0]})
        rank, peer, alone = (
            (sender, receiver, sends[matched:]) if len(sends) > matched else (receiver, sender, receives[matched:])
        )
        if not alone:
            return
        # A short send may be done before it is received: a receive that other work holds up says nothing of its sender.
        if rank == receiver and peer in self._records and alone[0].order != self._heads[rank]:
            return
        missing, none = frozenset({peer}), frozenset[int]()
        absent, unknown = (missing, none) if peer in self._records else (none, missing)
        yield _Stalled(name, group, both, {rank: alone[0]}, absent, unknown)

    def _find_late(self) -> None:
        """Ranks that have launched something, and by their records are still at something before it."""
        for stalled in self._stalled:
            stalled.late |= self._frozen.keys() & set(stalled.members)
            if not stalled.is_full:
                continue
            if not stalled.is_transfer:
                number = next(iter(stalled.waiting.values())).number
                firsts = {rank: stalled.group.first_pending(rank) for rank in stalled.group.pending}
                stalled.late |= {rank for rank, one in firsts.items() if one is not None and one.number < number}
            for rank, launch in stalled.waiting.items():
                head = self._heads[rank]
                is_of_group = any(one.order == head for one in stalled.group.pending.get(rank, ()))
                if 0 <= head < launch.order and not is_of_group:
                    stalled.late.add(rank)

    # Judgement

    def blame(self) -> HangVerdict:
        if not self._waits and not self._frozen:
            return self._who_is_behind()
        accused = self._accused()
        for rank, why in list(self._held_by_none(self._explained(accused))):
            accused.setdefault(rank, why)
        accused = {rank: why for rank, why in sorted(accused.items()) if rank not in self._silent}
        guilty = {rank: accusation.words for rank, accusation in accused.items()}
        possible, words = self._circles(guilty)
        # Where waiting ends at ranks that have left no record.
        explained = self._explained({*guilty, *possible})
        for stalled in self._stalled:
            unknown = stalled.unknown - self._records.keys() - self._silent
            if unknown and not stalled.absent and not explained >= stalled.waiting.keys():
                left = f"{list_ranks(unknown)} left no record that can be used"
                words.append(f"{left}, and {list_ranks(stalled.waiting)} wait in {stalled.name}")
        return HangVerdict(
            guilty,
            tuple(sorted(possible)),
            "; ".join(words[:3]),
            accused,
            tuple(stalled.as_call() for stalled in self._stalled),
            {rank: tuple(sorted(self._explained([rank], ()) - {rank})) for rank in guilty},
        )

    def _accused(self) -> dict[int, Accusation]:
        """By rank, what it did or did not; the first that is found of a rank counts."""
        found: dict[int, Accusation] = {}
        for stalled, calls in self._mismatches():  # ranks that called something else than most of their group
            (most, count), *others = Counter(calls.values()).most_common()
            for rank, call in calls.items():
                if count > others[0][1] and call != most:
                    number = stalled.name.rpartition(" ")[2]
                    what = f"called {call} as collective {number} of {stalled.group}, {count} others {most}"
                    found.setdefault(rank, Accusation("mismatch", what, stalled.as_call()))
        for rank, accusation in self._frozen.items():
            found.setdefault(rank, accusation)
        for stalled in self._stalled:  # ranks whose GPU has not begun what others have; only with timing
            if self._is_stuck(stalled) and all(self._records[rank].has_timing for rank in stalled.waiting):
                begun = [rank for rank, one in stalled.waiting.items() if one.is_started]
                for rank in stalled.waiting.keys() - begun if begun else ():
                    what = f"has launched {stalled.name} of {stalled.group}, which its GPU has not begun "
                    words = f"{what}and {list_ranks(begun)} have"
                    found.setdefault(rank, Accusation("not begun", words, stalled.as_call()))
        for stalled in self._stalled:  # ranks that others wait for and that have nothing under way
            for rank in stalled.absent:
                if rank not in self._waits and self._records[rank].tells_all:
                    found.setdefault(rank, self._absent(stalled))
        return found

    def _mismatches(self) -> Iterator[tuple[_Stalled, dict[int, str]]]:
        for stalled in self._stalled:
            if not stalled.is_transfer:
                number = next(iter(stalled.waiting.values())).number
                calls = {
                    rank: f"{one.name} of {one.shape}" if one.shape else one.name
                    for rank, part in stalled.group.parts.items()
                    for one in part.launches
                    if one.number == number and not one.transfers and one.name != UNKNOWN_CALL
                }
                if len(set(calls.values())) > 1:
                    yield stalled, calls

    def _frozen_records(self) -> Iterator[tuple[int, Accusation]]:
        """Ranks whose record stands still at what others have finished, which they could not without them."""
        for group in self._groups:
            best = nlargest(2, ((done, other) for other, done in group.done.items()))
            if len(best) < 2:
                continue
            for rank, pending in group.pending.items():
                first = group.first_pending(rank)
                assert first is not None
                done, other = best[0] if best[0][1] != rank else best[-1]
                helped = [one for one in pending if first.number < one.number <= done and one.name in _IN_STEP]
                if helped:
                    words = (
                        f"stands still at {first.name} {first.number} of {group} by its record, though it has "
                        f"taken part in {helped[-1].name} {helped[-1].number}, which rank {other} has finished"
                    )
                    waiting = tuple(sorted(group.pending.keys() - {rank}))
                    call = StalledCall(first.name, first.number, group.id, group.members, waiting)
                    yield rank, Accusation("stands still", words, call)

    def _absent(self, stalled: _Stalled) -> Accusation:
        if stalled.is_transfer:
            words = f"never came to the {stalled.name}, which {list_ranks(stalled.waiting)} waits in"
        else:
            verb = "waits" if len(stalled.waiting) == 1 else "wait"
            words = f"never came to {stalled.name} of {stalled.group}, in which {list_ranks(stalled.waiting)} {verb}"
        return Accusation("absent", words, stalled.as_call())

    def _held_by_none(self, explained: set[int]) -> Iterator[tuple[int, Accusation]]:
        """Ranks that others wait for; what they have under way did not hold them up, or is done on all others."""
        for stalled in self._stalled:
            is_known = not stalled.is_transfer or self._are_complete(stalled.waiting)
            if is_known and not explained >= stalled.waiting.keys():
                for rank in stalled.absent - self._silent:
                    if self._are_complete([rank]) and not any(self._holds(one, rank) for one in self._waits[rank]):
                        yield rank, self._absent(stalled)

    def _holds(self, stalled: _Stalled, rank: int) -> bool:
        """Whether a rank may wait in this for others."""
        waits = bool(stalled.stops() - {rank}) or self._is_stuck(stalled) or not self._are_complete(stalled.members)
        return waits and not _is_passed(self._records[rank], stalled.waiting[rank])

    def _are_complete(self, ranks: Iterable[int]) -> bool:
        return all(rank in self._records and self._records[rank].tells_all for rank in ranks)

    def _explained(self, guilty: Iterable[int], silent: Iterable[int] | None = None) -> set[int]:
        """All ranks that wait for these, directly or through others, and those that they wait for.

        Args:
            silent: who is waited for besides; None: all that are known not to answer.
        """
        waiting_for: dict[int, list[_Stalled]] = defaultdict(list)
        for stalled in self._stalled:
            for rank in stalled.stops():
                waiting_for[rank].append(stalled)
        seen: set[int] = set()
        done: set[_Stalled] = set()
        to_do = [*guilty, *(self._silent if silent is None else silent)]
        while to_do:
            rank = to_do.pop()
            if rank in seen:
                continue
            seen.add(rank)
            for stalled in waiting_for[rank]:
                if stalled not in done:  # of thousands of ranks many are waited for in the same
                    done.add(stalled)
                    to_do += stalled.waiting
        return seen

    def _is_stuck(self, stalled: _Stalled) -> bool:
        """All have come, none waits elsewhere, and it does not end."""
        return (
            stalled.is_full
            and not stalled.group.is_open
            and not stalled.ended
            and not stalled.late
            and stalled.waiting.keys() >= set(stalled.members)
            and self._are_complete(stalled.members)
            and all(one.order == self._heads[rank] for rank, one in stalled.waiting.items())
        )

    def _circles(self, guilty: Collection[int]) -> tuple[set[int], list[str]]:
        """Where the rest of the waiting ends: in a collective that is stuck, in a circle, in a mismatch."""
        possible: set[int] = set()
        words: list[str] = []
        for stalled, calls in self._mismatches():
            if not possible.union(guilty) & calls.keys():
                possible |= calls.keys()
                words.append(
                    f"{list_ranks(calls)} called {' and '.join(sorted(set(calls.values())))} "
                    f"as one collective of {stalled.group}"
                )
        known = {*guilty, *self._silent}
        for stalled in self._stalled:
            if self._is_stuck(stalled) and not known.union(possible) & set(stalled.members):
                possible |= set(stalled.members)
                came = f"have all come to {stalled.name} of {stalled.group}, and it does not end"
                words.append(f"{list_ranks(stalled.members)} {came}")
        left = self._waits.keys() - self._explained({*guilty, *possible})
        edges = {rank: {to for stalled in self._waits[rank] for to in stalled.stops()} for rank in left}
        edges |= {to: set() for ends in list(edges.values()) for to in ends - left}  # of whom too little is known
        for circle in _sinks(edges):
            if len(circle) > 1 and self._are_complete(circle):
                possible |= circle
                words.append(f"{list_ranks(circle)} wait for each other")
        return possible, words

    def _who_is_behind(self) -> HangVerdict:
        # None waits: ranks that have launched less than most of their group.
        accused = {}
        for group in self._groups:
            newest = {rank: part.newest for rank, part in group.parts.items() if part.launches or part.is_unused}
            common, count = Counter(newest.values()).most_common(1)[0] if newest else (-1, 0)
            for rank, number in newest.items():
                if number < common and 2 * count > len(group.members) and self._are_complete([rank]):
                    words = f"has launched collective {number} of {group}, most {common}"
                    accused[rank] = Accusation("behind", words)
        return HangVerdict({rank: one.words for rank, one in accused.items()}, accusations=accused)


def _is_passed(record: FlightRecord, launch: Launch) -> bool:
    """Whether the rank went on without it."""
    return launch.order + (AT_ONCE if launch.transfers else 1) <= record.passed


def _sinks(edges: Mapping[int, Collection[int]]) -> Iterator[set[int]]:
    """Strongly connected components from which nothing leads away (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    component: dict[int, int] = {}
    work: list[tuple[int, Iterator[int]]] = []

    def enter(rank: int) -> None:
        index[rank] = low[rank] = len(index)
        stack.append(rank)
        work.append((rank, iter(sorted(edges[rank]))))

    for root in sorted(edges):
        if root not in index:
            enter(root)
        while work:
            rank, rest = work[-1]
            to = next(rest, None)
            if to is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[rank])
                if low[rank] == index[rank]:
                    members: set[int] = set()
                    while not members or rank not in members:
                        members.add(stack.pop())
                    component.update(dict.fromkeys(members, rank))
                    if all(component[other] == rank for one in members for other in edges[one]):
                        yield members
            elif to not in index:
                enter(to)
            elif to not in component:
                low[rank] = min(low[rank], index[to])


def list_ranks(ranks: Iterable[int]) -> str:
    """Such as ``rank 3`` or ``ranks 3, 4, 5 and 9 more``."""
    named = sorted(ranks)
    shown = ", ".join(map(str, named[:8]))
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return f"rank{'s' if len(named) > 1 else ''} {shown}{more}"
