"""Which rank holds up the others, from the evidence of all of them; or that this cannot be known.

Looked for in this order, and the first that names a few ranks decides:

1. ranks that did not answer: a rank that waits still does, one that hangs does not (MegaScale, arXiv 2402.15627,
   section 5.2);
2. processes that are stopped or dead;
3. ranks that do not wait, while by NCCL's flight records others wait for them: `phalanx.detect.hangs.hang_analysis`;
4. processes that are stuck in the kernel, which one that waits for its GPU may be too;
5. ranks at an older step;
6. ranks whose stack is not in a collective while all others' are; else those whose stack is not that of most
   (ByteRobust, arXiv 2509.16293, clusters stacks by their text), first by functions, then by lines.

Flight records add to the first two: a rank that they name is named beside the silent ones, since a rank that waits for
a silent one is not at fault. The verdict also reports the other kinds of evidence, whether they agree or not.

Ranks of several hosts that differ by their stacks are named as the smallest group of the layout that holds them: they
share a fault which one of them, or what is between them, has caused. Where more than half differ, or too few answer,
no rank is blamed: one that waits would be as likely as one that holds up the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from phalanx.detect.hangs.flight_records import FlightRecord, MemberTexts, read_record
from phalanx.detect.hangs.hang_analysis import HangVerdict, blame, list_ranks
from phalanx.detect.hangs.hang_judge import HangContext, judge_hang
from phalanx.detect.hangs.python_stacks import Frame, has_ended, main_stack, waits_for_peers, without_lines
from phalanx.detect.hangs.rank_places import RankPlaces
from phalanx.run.messages import RankEvidence

_BAD_STATES = {
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "is dead and not yet reaped",
    "X": "is dead",
    "D": "is stuck in the kernel",
}
# A process that is seen in one of these states has only been too slow to give its stacks.
_ALIVE = ("R", "S", "D", "I")
_STOPPED = frozenset("TtZX")
_KERNEL_WAITS = {
    "waits for a lock or another thread": re.compile("futex"),
    "waits for a pipe": re.compile("pipe|fifo|wait_for_partner"),
    "sleeps": re.compile("nanosleep|hrtimer"),
    "waits for a socket": re.compile("tcp|sk_wait|skb|sock|wait_woken"),
    "waits for input": re.compile("poll|select"),
    "waits for a file system": re.compile("nfs|fuse|rpc_|folio|page_bit|io_schedule|xfs|ext4|request_wait"),
    "waits for a child": re.compile("do_wait$|wait4|waitid"),
}
"""By functions of the kernel."""
_FOR_OTHERS = "waits for other ranks"
_PLACE_FRAMES = 4
_PLACE_CHARACTERS = 200
_WHY_CHARACTERS = 1500


@dataclass(frozen=True)
class Suspects:
    """The ranks that are named.

    Attributes:
        ranks: in order; empty: not known.
        why: one line, also when no rank is named.
        by: what decided: ``silence``, ``state``, ``step``, ``collective``, ``stack``; empty: nothing did.
        is_group: these ranks share a fault, which need not be of each of them.
        line: what `phalanx detect hang` says of the flight records alone; empty: there are none, or they name nobody.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    why: str
    by: str = ""
    is_group: bool = False
    line: str = ""


def find_suspects(
    evidence: Iterable[RankEvidence], host_of: Mapping[int, str], groups: Iterable[frozenset[int]] = ()
) -> Suspects:
    """Name the ranks that hold up the others.

    Args:
        evidence: of the ranks that could be asked; one that is missing has not answered.
        host_of: where every rank of the attempt runs.
        groups: sets of ranks that work together in the layout (of a tensor, a pipeline, a data axis), where known.
    """
    by_rank = {one.rank: one for one in evidence if one.rank in host_of}
    ranks = sorted(host_of)
    verdicts = _Verdicts(ranks, host_of, [frozenset(group) for group in groups])
    known = [by_rank[rank] for rank in ranks if rank in by_rank]
    stopped = [one for one in known if one.state in _STOPPED]
    texts = MemberTexts()
    records: dict[int, FlightRecord] = {}
    for rank in ranks:
        # A record that cannot be read does not count: a rank may write anything.
        with suppress(ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            if rank in by_rank and (text := by_rank[rank].flight_record):
                records[rank] = read_record(msgspec.json.decode(text), texts)
    waits = blame(records, texts, ranks, frozenset(verdicts.silent(by_rank)))
    line = _in_one_line(records, texts, host_of) if waits.guilty else ""
    # In the order of the docstring above, and all of them: the first decides, the others are reported beside it. Stacks
    # are compared by functions first, since ranks in one loop are at different lines by chance.
    looks: dict[str, Callable[[], Suspects | None]] = {
        "silence": lambda: verdicts.silence(by_rank),
        "state": lambda: verdicts.states(stopped),
        "collective": lambda: verdicts.collectives(waits, known),
        "kernel": lambda: verdicts.states(known),
        "step": lambda: verdicts.steps(known),
        "stack": lambda: (
            verdicts.waiting(known)
            or verdicts.clusters(known, without_lines)
            or verdicts.clusters(known, lambda frames: frames)
        ),
    }
    found = {kind: one for kind, look in looks.items() if (one := look()) is not None}
    if not found:
        return Suspects((), (), "; ".join(filter(None, ("cannot tell: no rank stands out from the others", waits.why))))
    kind, first = next(iter(found.items()))
    if not first.ranks:
        return replace(first, line=line)
    # By the records others may be at fault too, which the silent and the stopped did not cause.
    if kind in ("silence", "state") and (more := found.get("collective")) is not None and not more.is_group:
        first = verdicts.joined(first, more)
        found.pop("collective")
    # The other kinds do not decide, but people want to know whether they agree.
    others = [found[other] for other in ("collective", "step", "stack") if other in found and other != kind]
    agree = [other.by for other in others if other.ranks == first.ranks]
    words = [first.why, *(["so by " + " and ".join(agree)] if agree else [])]
    words += [f"but by {other.by} {other.why}" for other in others if not set(other.ranks) <= set(first.ranks)]
    if kind == "collective" and waits.guilty and waits.why:
        words.append(f"one more of these too: {waits.why}" if waits.possible else waits.why)
    return replace(first, why="; ".join(words)[:_WHY_CHARACTERS], line=line)


def _in_one_line(records: Mapping[int, FlightRecord], texts: MemberTexts, host_of: Mapping[int, str]) -> str:
    groups = {group: texts.ranks(group.members) for one in records.values() for group in one.parts if group.members}
    verdict = judge_hang(HangContext(RankPlaces(host_of.keys(), groups, host_of), records, texts))
    return verdict.sentence[:_WHY_CHARACTERS]


class _Verdicts:
    """Whether ranks that differ are few enough, or enough of one kind, to be named."""

    def __init__(self, ranks: Sequence[int], host_of: Mapping[int, str], groups: Sequence[frozenset[int]]) -> None:
        self._ranks = ranks
        self._host_of = host_of
        here = [group & set(ranks) for group in groups]
        self._groups = sorted(here, key=lambda group: (len(group), sorted(group)))

    def _named(self, ranks: Iterable[int], by: str, what: str, most: float = 0.5) -> Suspects | None:
        """These ranks if their share is at most `most`, else the group that they are, else None."""
        named = tuple(sorted(set(ranks)))
        if not named or len(named) == len(self._ranks):
            return None
        hosts = self._hosts(named)
        # The smallest group of the layout, but not all ranks, that holds all of these: they share a fault.
        holding = (group for group in self._groups if set(named) <= group and len(group) < len(self._ranks))
        if by == "stack" and len(hosts) > 1 and (group := next(holding, None)) is not None:
            members = tuple(sorted(group))
            why = f"{list_ranks(named)} {what}; all of the group {list_ranks(members)}"
            return Suspects(members, self._hosts(members), why, by, is_group=True)
        if len(named) <= most * len(self._ranks):
            return Suspects(named, hosts, f"{list_ranks(named)} on {', '.join(hosts)} {what}", by)
        return None

    def _hosts(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(sorted({self._host_of[rank] for rank in ranks}))

    def silent(self, by_rank: Mapping[int, RankEvidence]) -> list[int]:
        return [rank for rank in self._ranks if rank not in by_rank or _is_silent(by_rank[rank])]

    def silence(self, by_rank: Mapping[int, RankEvidence]) -> Suspects | None:
        silent = self.silent(by_rank)
        states = {by_rank[rank].state for rank in silent if rank in by_rank} & set(_BAD_STATES)
        known = f" ({', '.join(_BAD_STATES[state] for state in sorted(states))})" if states else ""
        if silent and (found := self._named(silent, "silence", f"did not answer{known}, the others did")) is None:
            # The few that answer stand out, but not because they hold up the others.
            return Suspects((), (), f"cannot tell: {len(silent)} of {len(self._ranks)} ranks did not answer")
        return found if silent else None

    def joined(self, first: Suspects, more: Suspects) -> Suspects:
        """Both together, if they are not too many."""
        ranks = tuple(sorted({*first.ranks, *more.ranks}))
        if ranks == first.ranks or 2 * len(ranks) > len(self._ranks):
            return first
        return replace(first, ranks=ranks, hosts=self._hosts(ranks), why=f"{first.why}; {more.why}")

    def states(self, known: Sequence[RankEvidence]) -> Suspects | None:
        bad = [one for one in known if one.state in _BAD_STATES]
        what = " or ".join(dict.fromkeys(_BAD_STATES[one.state] for one in bad))
        return self._named((one.rank for one in bad), "state", what)

    def steps(self, known: Sequence[RankEvidence]) -> Suspects | None:
        steps = {one.rank: one.step for one in known if one.step >= 0}
        if not steps:
            return None
        # Of two steps that as many ranks are at the later one counts: the others are behind.
        common = max(Counter(steps.values()).items(), key=lambda item: (item[1], item[0]))[0]
        behind = {rank: step for rank, step in steps.items() if step < common}
        least = min(behind.values(), default=0)
        oldest = [rank for rank, step in behind.items() if step == least]
        return self._named(oldest, "step", f"at step {least}, most at {common}")

    def collectives(self, found: HangVerdict, known: Sequence[RankEvidence]) -> Suspects | None:
        """Ranks that flight records name; stacks may show what is not in the records."""
        elsewhere = {one.rank for one in known if one.stacks and not waits_for_peers(main_stack(one.stacks))}
        stacks = {one.rank for one in known if one.stacks}
        named = set(found.guilty)
        if named <= stacks and named & elsewhere and named - elsewhere:
            named &= elsewhere  # the others wait too, in something that NCCL knows nothing of
        if named:
            # As everywhere here: of more than half no rank stands out.
            if 2 * len(named) > len(self._ranks):
                return None
            words = [f"rank {rank} on {self._host_of[rank]} {found.guilty[rank]}" for rank in sorted(named)[:4]]
            more = [f"{len(named) - 4} more like these"] if len(named) > 4 else []
            ranks = tuple(sorted(named))
            return Suspects(ranks, self._hosts(ranks), "; ".join(words + more), "collective")
        alone = elsewhere & set(found.possible)
        if alone and alone != set(found.possible) <= stacks:
            return self._named(alone, "collective", f"not in a collective by its stack, and {found.why}")
        if found.possible and 2 * len(found.possible) <= len(self._ranks):
            ranks = tuple(sorted(found.possible))
            why = f"one of these at least, and the records do not say which: {found.why}"
            return Suspects(ranks, self._hosts(ranks), why, "collective", is_group=True)
        return None

    def waiting(self, known: Sequence[RankEvidence]) -> Suspects | None:
        """Ranks that are elsewhere while all others wait in a collective."""
        # A rank whose stacks could not be read proves nothing either way.
        stacks = {one.rank: main_stack(one.stacks) for one in known if one.stacks}
        elsewhere = [rank for rank, frames in stacks.items() if not waits_for_peers(frames)]
        ended = [one for one in known if one.rank in elsewhere and has_ended(stacks[one.rank])]
        if ended and len(ended) == len(elsewhere):
            what = _ended([name for one in ended for name in one.kept_by])
        else:
            what = f"in {_places(stacks, elsewhere)}"
        return self._named(elsewhere, "stack", f"{what}, all others in a collective")

    def clusters(self, known: Sequence[RankEvidence], key: Callable[[tuple[Frame, ...]], Hashable]) -> Suspects | None:
        """Ranks with another stack than most, if most have the same."""
        stacks = {one.rank: main_stack(one.stacks) for one in known if one.stacks}
        if len(stacks) < 3:  # of two stacks each is as odd as the other
            return None
        kinds = Counter(key(frames) for frames in stacks.values())
        common, count = kinds.most_common(1)[0]
        if 2 * count <= len(stacks):
            return None
        others = [rank for rank, frames in stacks.items() if key(frames) != common]
        if not any(waits_for_peers(frames) for frames in stacks.values() if key(frames) == common):
            # A rank that waits for those that are elsewhere stands out among them, but does not hold them up.
            others = [rank for rank in others if not waits_for_peers(stacks[rank])]
        at = next(str(frames[0]) for frames in stacks.values() if key(frames) == common) if common else "nothing"
        return self._named(others, "stack", f"in {_places(stacks, others)}, {count} others in {at}")


def _places(stacks: Mapping[int, tuple[Frame, ...]], ranks: Iterable[int]) -> str:
    return ", ".join(sorted({str(stacks[rank][0]) for rank in ranks if stacks[rank]})[:3]) or "no function"


def place_of(evidence: Iterable[RankEvidence]) -> str:
    """Where the first rank is that does not wait for others, by its innermost functions; empty: there is none.

    It is known again when the same comes back, whatever the lines and the step.
    """
    for one in sorted(evidence, key=lambda one: one.rank):
        frames = main_stack(one.stacks)
        if frames and not waits_for_peers(frames):
            return " < ".join(without_lines(frames)[:_PLACE_FRAMES])[:_PLACE_CHARACTERS]
    return ""


@dataclass(frozen=True)
class Wait:
    """What some ranks without steps do, in words for one of them."""

    ranks: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        """Such as ``ranks 0, 2: each waits for other ranks, in barrier (…)``."""
        return f"{list_ranks(self.ranks)}:{' each' if len(self.ranks) > 1 else ''} {self.what}"


def waits_of(evidence: Iterable[RankEvidence]) -> list[Wait]:
    """What each rank waits for, as far as can be seen: those that do the same together.

    Returns:
        Ranks that do not wait for others first, then what most do.
    """
    same: dict[str, list[int]] = {}
    for one in sorted(evidence, key=lambda one: one.rank):
        same.setdefault(_what(one), []).append(one.rank)
    found = (Wait(tuple(ranks), what) for what, ranks in same.items())
    return sorted(found, key=lambda wait: (wait.what.startswith(_FOR_OTHERS), -len(wait.ranks)))


def _what(one: RankEvidence) -> str:
    frames = main_stack(one.stacks)
    where = f", in {frames[0]}" if frames else ""
    if _is_silent(one):
        return "did not answer"
    if one.state in _STOPPED:
        return f"{_BAD_STATES[one.state]}{where}"
    if one.kept_by or has_ended(frames):
        return _ended(one.kept_by)
    if waits_for_peers(frames):
        return f"{_FOR_OTHERS}{where}"
    if one.state == "R":
        return f"runs{where}"
    if one.waits_in:
        found = next((words for words, function in _KERNEL_WAITS.items() if function.search(one.waits_in)), "")
        return f"{found or 'waits in the kernel'} ({one.waits_in}){where}"
    return f"waits{where}" if where else "could not be looked at"


def _ended(threads: Sequence[str]) -> str:
    names = [f"'{name}'" for name in dict.fromkeys(threads)]
    if not names:
        return "has ended in its main thread, and another thread keeps its process alive"
    if len(names) == 1:
        return f"has ended in its main thread, and thread {names[0]} keeps its process alive"
    who = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"has ended in its main thread, and threads {who} keep its process alive"


def _is_silent(one: RankEvidence) -> bool:
    """Whether a rank did not answer; of a process that is seen to live only the stacks were not read in time."""
    return one.is_silent and one.state not in _ALIVE
