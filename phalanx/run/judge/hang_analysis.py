"""Who holds up the others, by the flight records of all ranks: who is waited for, and waits for nobody.

Launches of a group go to one stream: a collective begins on a rank when those before it are done, and ends when all
ranks have begun it. So whoever has launched a collective that is not done waits for every rank that has not. One that
is behind in one group may wait in another one itself; whoever follows the waiting comes to the ranks that began it:

- a rank that is waited for and has nothing under way: it never came;
- a rank whose record stands still at what others have finished with its help: its GPU, or who watches it, is dead;
- a rank that called something else than the others of its group;
- a rank that has launched what the others have begun on their GPUs, and has not begun it on its own.

Where waiting ends in a collective that all have launched, or goes in a circle, one of these ranks is at fault, and the
records do not say which. Where it ends at a rank that lives and has left no record, that is said, and nobody is named:
dumps get lost for many reasons, and that rank may wait for another one.

So it is with a record that does not say who is in a group that it has used: its waiting cannot be seen by the others.

A record tells of what its ring still holds (see `phalanx.run.judge.flight_records`). What a rank has not launched, or
is not held up by, is only taken for true where the record shows that nothing it has forgotten could say otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from phalanx.run.judge.flight_records import AT_ONCE, UNKNOWN_CALL, FlightRecord, GroupId, Launch, MemberTexts, Part

_IN_STEP = frozenset(
    (
        *("all_reduce", "all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base"),
        *("all_to_all", "all_to_all_single", "barrier", "all_reduce_barrier"),
    )
)
"""None ends on any rank before it has begun on all."""


@dataclass(frozen=True)
class Blame:
    """What the records say.

    Attributes:
        guilty: by rank, what it did or did not, in words that follow its name.
        possible: one of these is at fault too, and it cannot be told which.
        why: of `possible`, or why nobody is named, or who is not known of.
    """

    guilty: Mapping[int, str] = field(default_factory=dict)
    possible: tuple[int, ...] = ()
    why: str = ""


def blame(
    records: Mapping[int, FlightRecord], texts: MemberTexts, ranks: Collection[int], silent: Collection[int] = ()
) -> Blame:
    """Follow the waiting.

    Args:
        records: of the ranks that have left one.
        texts: with which they were read.
        ranks: of the job.
        silent: of these, those that are known to answer nothing: whoever waits for them waits for good reason.
    """
    return _WaveFront(records, texts, ranks, silent).blame() if any(records.values()) else Blame()


@dataclass(eq=False)
class _Group:
    """A process group and the parts of its members in it; `whole`: ranks whose records hold all they have launched."""

    id: GroupId
    members: tuple[int, ...]
    parts: dict[int, Part]
    whole: frozenset[int]

    def __post_init__(self) -> None:
        # Of a group that has transfers too, the watchdog's numbers may be those of transfers.
        self.has_status = all(part.counts_calls for part in self.parts.values())
        self.pending = {
            rank: pending
            for rank, part in self.parts.items()
            if (pending := [one for one in part.launches if not one.is_done and not one.transfers and one.number >= 0])
        }
        self.done = {rank: self._done(rank, part) for rank, part in self.parts.items()}

    def newest(self, rank: int) -> int:
        """Number of its last collective; -1: none is known."""
        part = self.parts.get(rank, Part())
        return max(part.newest, part.status[0] if part.status and self.has_status else -1)

    def front(self, rank: int) -> Launch | None:
        """The first of its collectives that is not done."""
        return min(self.pending.get(rank, ()), key=lambda one: one.number, default=None)

    def _done(self, rank: int, part: Part) -> int:
        """Number of the last collective that a rank is known to have finished; -1: none is."""
        front = self.front(rank) if rank in self.whole else None
        known = max((one.number for one in part.launches if one.is_done and not one.transfers), default=-1)
        before = -1 if front is None else front.number - 1
        return max(known, before, part.status[1] if part.status and self.has_status else -1)

    def __str__(self) -> str:
        return f"{self.id.description} ({_ranks(self.members)})"


@dataclass(eq=False)
class _Front:
    """A collective, or the transfers from one rank to another, that ranks wait in.

    Attributes:
        waiting: which launch each of them waits in.
        absent: those that have not launched it.
        unknown: those of which that cannot be told.
        ended: it is done on some rank.
    """

    name: str
    group: _Group
    members: tuple[int, ...]
    waiting: dict[int, Launch]
    absent: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()
    ended: bool = False
    late: set[int] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        return not self.absent and not self.unknown

    def stops(self) -> set[int]:
        """Whom it waits for."""
        return {*self.absent, *self.unknown, *self.late}


class _WaveFront:
    def __init__(
        self,
        records: Mapping[int, FlightRecord],
        texts: MemberTexts,
        ranks: Collection[int],
        silent: Collection[int],
    ) -> None:
        self._ranks = frozenset(ranks)
        self._silent = frozenset(silent) & self._ranks
        self._records = _joinable({rank: records[rank] for rank in sorted(records) if rank in self._ranks})
        self._groups = list(self._join(texts))
        self._fronts: list[_Front] = []
        for group in self._groups:
            self._fronts += self._collectives(group)
        self._heads = self._first_blocked()
        for group in self._groups:
            self._fronts += self._transfers(group)
        self._frozen = dict(self._frozen_records())
        for front in self._fronts:
            for rank in front.waiting.keys() & self._frozen.keys():
                del front.waiting[rank]  # what it seems to wait in may be done
        self._fronts = [front for front in self._fronts if front.waiting]
        self._waits: dict[int, list[_Front]] = defaultdict(list)
        for front in self._fronts:
            for rank in front.waiting:
                self._waits[rank].append(front)
        self._find_late()

    # What there is

    def _join(self, texts: MemberTexts) -> Iterator[_Group]:
        parts: dict[GroupId, dict[int, Part]] = defaultdict(dict)
        whole = frozenset(rank for rank, record in self._records.items() if record.oldest <= 0 and not record.lacks)
        for rank, record in self._records.items():
            for group, part in record.parts.items():
                parts[group][rank] = part
        for group in sorted(parts):
            named = texts.ranks(group.members)
            members = tuple(rank for rank in named if rank in self._ranks) or tuple(sorted(parts[group]))
            here = frozenset(members)
            if len(members) > 1 and any(part.launches or part.status for part in parts[group].values()):
                yield _Group(group, members, {rank: part for rank, part in parts[group].items() if rank in here}, whole)

    def _collectives(self, group: _Group) -> Iterator[_Front]:
        fronts: dict[int, dict[int, Launch]] = defaultdict(dict)
        for rank in group.pending:
            front = group.front(rank)
            assert front is not None
            fronts[front.number][rank] = front
        for number, waiting in sorted(fronts.items()):
            came = {rank: self._came(group, rank, number) for rank in group.members if rank not in waiting}
            yield _Front(
                f"{next(iter(waiting.values())).name} {number}",
                group,
                group.members,
                waiting,
                frozenset(rank for rank, has in came.items() if has is False),
                frozenset(rank for rank, has in came.items() if has is None),
                any(done >= number for done in group.done.values()),
            )

    def _came(self, group: _Group, rank: int, number: int) -> bool | None:
        """Whether a rank has launched this collective; None: it cannot be told."""
        record = self._records.get(rank)
        if record is None:
            return None
        newest = group.newest(rank)
        if newest >= number:
            return True
        part = group.parts.get(rank)
        is_unused = record.has_groups if part is None else part.is_unused
        # Whoever has nothing under way has not come, whatever the ring has forgotten.
        is_idle = record.tells_all and not self._is_waiting(record)
        return False if newest >= 0 or is_unused or record.oldest <= 0 or is_idle else None

    @staticmethod
    def _is_waiting(record: FlightRecord) -> bool:
        return any(not launch.is_done for part in record.parts.values() for launch in part.launches)

    def _first_blocked(self) -> dict[int, int]:
        """Order of the first launch of each rank that is not done and held up the next ones."""
        heads = {}
        for rank, record in self._records.items():
            pending = [one for part in record.parts.values() for one in part.launches if not one.is_done]
            heads[rank] = min((one.order for one in pending if not self._is_passed(record, one)), default=-1)
        return heads

    @staticmethod
    def _is_passed(record: FlightRecord, launch: Launch) -> bool:
        """Whether the rank went on without it."""
        at_once = AT_ONCE if launch.transfers else 1
        return launch.order + at_once <= record.passed

    def _transfers(self, group: _Group) -> Iterator[_Front]:
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
        self, group: _Group, sender: int, receiver: int, sends: Sequence[Launch], receives: Sequence[Launch]
    ) -> Iterator[_Front]:
        name, both = f"transfer from rank {sender} to rank {receiver}", (sender, receiver)
        matched = min(len(sends), len(receives))
        if matched:
            yield _Front(name, group, both, {sender: sends[0], receiver: receives[0]})
        rank, peer, alone = (
            (sender, receiver, sends[matched:]) if len(sends) > matched else (receiver, sender, receives[matched:])
        )
        if not alone:
            return
        # A short send may be done before it is received: a receive that other work holds up says nothing of its sender.
        if rank == receiver and peer in self._records and alone[0].order != self._heads[rank]:
            return
        alone_for, nobody = frozenset({peer}), frozenset[int]()
        absent, unknown = (alone_for, nobody) if peer in self._records else (nobody, alone_for)
        yield _Front(name, group, both, {rank: alone[0]}, absent, unknown)

    def _find_late(self) -> None:
        """Ranks that have launched something, and by their records are still at something before it."""
        for front in self._fronts:
            front.late |= self._frozen.keys() & set(front.members)
            if not front.is_full:
                continue
            first = next(iter(front.waiting.values()))
            if not first.transfers:
                behind = {rank: one for rank in front.group.pending if (one := front.group.front(rank)) is not None}
                front.late |= {rank for rank, one in behind.items() if one.number < first.number}
            for rank, launch in front.waiting.items():
                if 0 <= self._heads[rank] < launch.order and not self._is_behind(front, rank):
                    front.late.add(rank)

    def _is_behind(self, front: _Front, rank: int) -> bool:
        """Whether what holds up the rank is of this very group."""
        return any(one.order == self._heads[rank] for one in front.group.pending.get(rank, ()))

    # Judgement

    def blame(self) -> Blame:
        if not self._waits and not self._frozen:
            return self._who_is_behind()
        guilty: dict[int, str] = {}
        for found in (self._strangers(), self._frozen.items(), self._not_begun(), self._never_came()):
            for rank, why in found:
                guilty.setdefault(rank, why)
        for rank, why in list(self._held_by_none(self._explained(guilty))):
            guilty.setdefault(rank, why)
        guilty = {rank: why for rank, why in guilty.items() if rank not in self._silent}
        possible, words = self._circles(guilty)
        words += self._without_record(self._explained({*guilty, *possible}))
        return Blame(dict(sorted(guilty.items())), tuple(sorted(possible)), "; ".join(words[:3]))

    def _strangers(self) -> Iterator[tuple[int, str]]:
        """Who called something else than most of its group."""
        for front, calls in self._mismatches():
            (most, count), *others = Counter(calls.values()).most_common()
            if count > others[0][1]:
                for rank, call in calls.items():
                    if call != most:
                        number = front.name.rpartition(" ")[2]
                        yield rank, f"called {call} as collective {number} of {front.group}, {count} others {most}"

    def _mismatches(self) -> Iterator[tuple[_Front, dict[int, str]]]:
        for front in self._fronts:
            first = next(iter(front.waiting.values()))
            if not first.transfers:
                calls = {
                    rank: f"{one.name} of {one.shape}" if one.shape else one.name
                    for rank, part in front.group.parts.items()
                    for one in part.launches
                    if one.number == first.number and not one.transfers and one.name != UNKNOWN_CALL
                }
                if len(set(calls.values())) > 1:
                    yield front, calls

    def _frozen_records(self) -> Iterator[tuple[int, str]]:
        """Whose record stands still at what others have finished, which they could not without it."""
        for group in self._groups:
            best = nlargest(2, ((done, other) for other, done in group.done.items()))
            if len(best) < 2:
                continue
            for rank, pending in group.pending.items():
                first = group.front(rank)
                assert first is not None
                done, other = best[0] if best[0][1] != rank else best[-1]
                helped = [one for one in pending if first.number < one.number <= done and one.name in _IN_STEP]
                if helped:
                    yield (
                        rank,
                        f"stands still at {first.name} {first.number} of {group} by its record, though it has "
                        f"taken part in {helped[-1].name} {helped[-1].number}, which rank {other} has finished",
                    )

    def _not_begun(self) -> Iterator[tuple[int, str]]:
        """Who has not begun on its GPU what others have; only with timing."""
        for front in self._fronts:
            if self._is_stuck(front) and all(self._records[rank].has_timing for rank in front.waiting):
                waits = [rank for rank, one in front.waiting.items() if one.is_started]
                for rank in front.waiting:
                    if waits and rank not in waits:
                        yield (
                            rank,
                            f"has launched {front.name} of {front.group}, which its GPU has not begun "
                            f"and {_ranks(waits)} have",
                        )

    def _never_came(self) -> Iterator[tuple[int, str]]:
        """Who is waited for and has nothing under way."""
        for front in self._fronts:
            for rank in front.absent:
                if rank not in self._waits and self._records[rank].tells_all:
                    yield rank, self._absent(front)

    def _absent(self, front: _Front) -> str:
        if next(iter(front.waiting.values())).transfers:
            return f"never came to the {front.name}, which {_ranks(front.waiting)} waits in"
        verb = "waits" if len(front.waiting) == 1 else "wait"
        return f"never came to {front.name} of {front.group}, in which {_ranks(front.waiting)} {verb}"

    def _without_record(self, explained: set[int]) -> list[str]:
        """Where waiting ends at ranks that have left no record."""
        words = []
        for front in self._fronts:
            unknown = front.unknown - self._records.keys() - self._silent
            if unknown and not front.absent and not explained >= front.waiting.keys():
                left = f"{_ranks(unknown)} left no record that can be used"
                words.append(f"{left}, and {_ranks(front.waiting)} wait in {front.name}")
        return words

    def _held_by_none(self, explained: set[int]) -> Iterator[tuple[int, str]]:
        """Who is waited for, and what it has under way did not hold it up, or is done on all others."""
        for front in self._fronts:
            is_known = not next(iter(front.waiting.values())).transfers or self._tell_all(front.waiting)
            if is_known and not explained >= front.waiting.keys():
                for rank in front.absent - self._silent:
                    if self._tell_all([rank]) and not any(self._holds(one, rank) for one in self._waits[rank]):
                        yield rank, self._absent(front)

    def _holds(self, front: _Front, rank: int) -> bool:
        """Whether a rank may wait in this for others."""
        waits = bool(front.stops() - {rank}) or self._is_stuck(front) or not self._tell_all(front.members)
        return waits and not self._is_passed(self._records[rank], front.waiting[rank])

    def _tell_all(self, ranks: Iterable[int]) -> bool:
        return all(rank in self._records and self._records[rank].tells_all for rank in ranks)

    def _explained(self, guilty: Iterable[int]) -> set[int]:
        """All who wait for these, through whomever."""
        waiting_for: dict[int, set[int]] = defaultdict(set)
        for front in self._fronts:
            for rank in front.stops():
                waiting_for[rank].update(front.waiting)
        seen: set[int] = set()
        to_do = [*guilty, *self._silent]
        while to_do:
            rank = to_do.pop()
            if rank not in seen:
                seen.add(rank)
                to_do += waiting_for[rank]
        return seen

    def _is_stuck(self, front: _Front) -> bool:
        """All have come, nobody waits elsewhere, and it does not end."""
        return (
            front.is_full
            and not front.ended
            and not front.late
            and front.waiting.keys() >= set(front.members)
            and self._tell_all(front.members)
            and all(one.order == self._heads[rank] for rank, one in front.waiting.items())
        )

    def _circles(self, guilty: Collection[int]) -> tuple[set[int], list[str]]:
        """Where waiting ends that leads to nobody known: in a collective that is stuck, in a circle, in a mismatch."""
        possible: set[int] = set()
        words: list[str] = []
        for front, calls in self._mismatches():
            if not possible.union(guilty) & calls.keys():
                possible |= calls.keys()
                words.append(
                    f"{_ranks(calls)} called {' and '.join(sorted(set(calls.values())))} "
                    f"as one collective of {front.group}"
                )
        known = {*guilty, *self._silent}
        for front in self._fronts:
            if self._is_stuck(front) and not known.union(possible) & set(front.members):
                possible |= set(front.members)
                words.append(
                    f"{_ranks(front.members)} have all come to {front.name} of {front.group}, and it does not end"
                )
        left = self._waits.keys() - self._explained({*guilty, *possible})
        edges = {rank: {to for front in self._waits[rank] for to in front.stops()} for rank in left}
        edges |= {to: set() for ends in list(edges.values()) for to in ends - left}  # of whom too little is known
        for circle in _sinks(edges):
            if len(circle) > 1 and self._tell_all(circle):
                possible |= circle
                words.append(f"{_ranks(circle)} wait for each other")
        return possible, words

    def _who_is_behind(self) -> Blame:
        """Nobody waits: who has launched less than most of its group."""
        guilty = {}
        for group in self._groups:
            newest = {rank: part.newest for rank, part in group.parts.items() if part.launches or part.is_unused}
            common, count = Counter(newest.values()).most_common(1)[0] if newest else (-1, 0)
            for rank, number in newest.items():
                if number < common and 2 * count > len(group.members) and self._tell_all([rank]):
                    guilty[rank] = f"has launched collective {number} of {group}, most {common}"
        return Blame(guilty)


def _joinable(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
    """Those whose groups are known to be those of the others: another one is as good as lost.

    Where no record says who is in its groups, as old versions do not, a name is the same group on all ranks.
    """
    by_members = any(group.members for record in records.values() for group in record.parts)
    return {rank: record for rank, record in records.items() if not (by_members and record.has_strays)}


def _sinks(edges: Mapping[int, Collection[int]]) -> Iterator[set[int]]:
    """Strongly connected components from which nothing leads away."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    component: dict[int, int] = {}
    for root in sorted(edges):
        if root in index:
            continue
        work: list[tuple[int, Iterator[int]]] = []
        _enter(root, index, low, stack, work, edges)
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
                _enter(to, index, low, stack, work, edges)
            elif to not in component:
                low[rank] = min(low[rank], index[to])


def _enter(
    rank: int,
    index: dict[int, int],
    low: dict[int, int],
    stack: list[int],
    work: list[tuple[int, Iterator[int]]],
    edges: Mapping[int, Collection[int]],
) -> None:
    index[rank] = low[rank] = len(index)
    stack.append(rank)
    work.append((rank, iter(sorted(edges[rank]))))


def _ranks(ranks: Iterable[int]) -> str:
    """Such as ``rank 3`` or ``ranks 3, 4, 5 and 9 more``."""
    named = sorted(ranks)
    shown = ", ".join(map(str, named[:8]))
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return f"rank{'s' if len(named) > 1 else ''} {shown}{more}"
