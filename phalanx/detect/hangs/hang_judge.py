"""Who holds up a job that stands still: a judge of what each rank has begun and not ended, of states and of stacks.

What is looked at, the first that names somebody first:

1. processes that are stopped or have ended, while others wait;
2. ranks at which the waiting ends (`phalanx.detect.hangs.hang_analysis`): they never came, they stand still, or they
   called something else;
3. ranks of which nothing was written, where the waiting ends at them: who waits can still write, who hangs cannot
   (MegaScale, arXiv 2402.15627, section 5.2). Dumps get lost for other reasons too: where more are missing than are
   waited for, that is said, and the confidence is less;
4. ranks with another stack than all others, which wait for their peers.

Where the waiting ends in a call to which all have come, or goes in a circle, these ranks are listed as a group that is
to be looked at, and no machine is blamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from phalanx.core.config import Config
from phalanx.detect.detection import Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.hangs.flight_records import FlightRecord, MemberTexts
from phalanx.detect.hangs.hang_analysis import Accusation, Charge, HangVerdict, StalledCall, blame, list_ranks
from phalanx.detect.hangs.python_stacks import Frame, waits_in_program
from phalanx.detect.hangs.rank_places import RankPlaces
from phalanx.detect.hangs.stack_clusters import clusters_of, odd_ones_out

STATES: Mapping[str, str] = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has died and is not yet reaped",
    "X": "has died",
    "gone": "has died",
}
"""Of processes that do nothing any more."""

CONFIDENCE: Mapping[str, float] = {
    "stopped": 0.98,
    "absent": 0.98,
    "stands still": 0.97,
    "mismatch": 0.95,
    "not begun": 0.9,
    "behind": 0.6,
    "silent": 0.9,
    "silent, and others": 0.6,
    "stack": 0.8,
    "waits in program": 0.5,
    "group": 0.5,
}
"""By what names a rank; measured on generated dumps and on real processes (docs/benchmarks/detect_hangs.md)."""

_OPERATIONS = {
    "_all_gather_base": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "_broadcast_oop": "broadcast",
}
_CHARGES: Mapping[Charge, str] = {
    "absent": "never entered",
    "stands still": "{stands} still at",
    "mismatch": "called something else than its peers as",
    "not begun": "launched, but did not begin on the device,",
    "behind": "{is_} behind the others",
}


class HangPolicy(Config):
    """Numbers that a user may set."""

    most_share: float = Field(0.5, gt=0, le=1, description="of all ranks: where more would be named, none is")
    least_wait_s: float = Field(
        5.0,
        ge=0,
        description="what was written so soon after the oldest call that waits may be of a healthy job",
    )


@dataclass(frozen=True)
class HangContext:
    """What is known of a job that stands still.

    Attributes:
        records: of each rank that left one: what it has begun, and what of that is not done.
        source: what these are made of.
        states: of processes, as in /proc, or ``gone``.
        stacks: frames of main threads, innermost first.
        doing: by rank, what it is in or was in last, in words that follow its name.
        written_s: Unix time at which the first record was taken; 0: not known.
        problems: of what could not be read, each with the cure after a semicolon.
    """

    places: RankPlaces
    records: Mapping[int, FlightRecord] = field(default_factory=dict)
    texts: MemberTexts = field(default_factory=MemberTexts)
    source: Literal["dumps", "spans", "stacks"] = "dumps"
    states: Mapping[int, str] = field(default_factory=dict)
    stacks: Mapping[int, Sequence[Frame]] = field(default_factory=dict)
    doing: Mapping[int, str] = field(default_factory=dict)
    written_s: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the job, those without a record too."""
        return tuple(sorted(self.places.ranks))


def judge_hang(context: HangContext, policy: HangPolicy | None = None) -> JudgeVerdict:
    """Name the ranks that hold up the others, or say why none is named."""
    policy = policy or HangPolicy()
    stopped = {rank: state for rank, state in context.states.items() if state in STATES}
    waits = HangVerdict()
    if context.records:
        waits = blame(context.records, context.texts, context.ranks, stopped.keys())
        if context.source == "spans":
            waits = called_differently(waits, context.places)
    abstains = list(context.problems[:4])
    if (left := len(context.problems) - 4) > 0:
        abstains.append(f"{left} more files cannot be used; see --json")
    if too_soon := _too_soon(context, waits, policy):
        return _verdict(context, waits, [], [*abstains, too_soon])
    if suspended := _suspended(context, stopped):
        return _verdict(context, waits, [suspended], abstains)
    found = _of_stopped(context, stopped, waits) + _of_accused(context, waits)
    if not found:
        found, unsaid = _of_silent(context, waits)
        abstains += unsaid
    elif missing := _missing(context):
        abstains.append(f"{list_ranks(missing)} left no dump; look why, they may wait like the others")
    named = {rank for one in found for culprit in one.who for rank in culprit.ranks if culprit.kind == "rank"}
    if len(named) > policy.most_share * len(context.ranks) and len(context.ranks) > 1:
        abstains.append(
            f"{len(named)} of {len(context.ranks)} ranks stand out, too many to name; look at what they share"
        )
        found = []
        named = set()
    if not named:
        found += _of_stacks(context, waits)
    if not found and (waits.stalled or waits.possible):
        found.append(_nobody(context, waits))
    if not found and context.source == "stacks":
        abstains.append("no rank stands out by its stack; look again later, or give dumps of the flight recorder too")
    found = [_with_stacks(context, one) for one in found]
    return _verdict(context, waits, _one_first_line(found), abstains)


# Kinds of evidence


def called_differently(waits: HangVerdict, places: RankPlaces) -> HangVerdict:
    """The same, where ranks of one circle wait in several calls over the same members: the few called another one.

    By spans operations are counted each by itself, so that no number of a call says that the calls differ. Hosts wait
    there themselves; in dumps several calls may be under way at once, and this says nothing.
    """
    over: dict[tuple[int, ...], list[StalledCall]] = defaultdict(list)
    for call in waits.stalled:
        if call.number >= 0 and set(call.waiting) & set(waits.possible):
            over[tuple(sorted(call.members))].append(call)
    accusations = dict(waits.accusations)
    for calls in over.values():
        most, *others = sorted(calls, key=lambda call: -len(call.waiting))
        if others and len(most.waiting) > sum(len(call.waiting) for call in others):
            for call in others:
                words = (
                    f"called {_operation(call)} {call.number} of group {places.group_name(call.group, call.members)}"
                )
                words += f", {len(most.waiting)} others {_operation(most)} {most.number}"
                accusations |= {rank: Accusation("mismatch", words, most) for rank in call.waiting}
    if accusations == waits.accusations:
        return waits
    guilty = {rank: one.words for rank, one in sorted(accusations.items())}
    held = {rank: tuple(sorted(set(waits.possible) - guilty.keys())) for rank in guilty}
    return replace(waits, guilty=guilty, accusations=accusations, possible=(), held_up={**held, **waits.held_up})


def _of_stopped(context: HangContext, stopped: Mapping[int, str], waits: HangVerdict) -> list[Detection]:
    if not stopped or 2 * len(stopped) > len(context.ranks):
        return []  # where most have ended, the job is over; where most are stopped, `_suspended` says so
    ranks = tuple(sorted(stopped))
    others = {rank for call in waits.stalled for rank in call.waiting} - set(ranks)
    what = " or ".join(dict.fromkeys(STATES[stopped[rank]] for rank in ranks))
    waiting = f"; {_others_wait(len(others))}" if others else ""
    then = "look for the signal or the debugger that stopped it" if stopped[ranks[0]] in "Tt" else "read its log"
    return [
        Detection(
            "stopped rank",
            f"{context.places.describe_all(ranks)} {what}{waiting}",
            _culprits(context, ranks),
            _since(waits.stalled),
            CONFIDENCE["stopped"],
            tuple(_doing(context, ranks)),
            (then, *_check(context, ranks)),
            "check",
            {"waiting": len(others)},
        )
    ]


def _suspended(context: HangContext, stopped: Mapping[int, str]) -> Detection | None:
    """Most ranks are stopped (Ctrl-Z, a debugger, a frozen container): a fact about the job, and no machine's fault."""
    ranks = sorted(rank for rank, state in stopped.items() if state in "Tt")
    if 2 * len(ranks) <= len(context.ranks):
        return None
    by = " or ".join(dict.fromkeys(STATES[stopped[rank]].removeprefix("is stopped ") for rank in ranks))
    which = "its rank" if len(context.ranks) == 1 else f"all {len(ranks)} ranks"
    if len(ranks) < len(context.ranks):
        which = f"{len(ranks)} of {len(context.ranks)} ranks ({list_ranks(ranks)})"
    return Detection(
        "suspended job",
        f"The job is suspended: {which} {'is' if len(ranks) == 1 else 'are'} stopped {by}",
        (),
        _since(()),
        CONFIDENCE["stopped"],
        tuple(_doing(context, ranks)),
        ("let it go on (`fg`, `kill -CONT`), or look for what stopped it: a shell, a debugger, a scheduler",),
        "none",
        {"stopped": len(ranks)},
    )


def _of_accused(context: HangContext, waits: HangVerdict) -> list[Detection]:
    """One detection of all ranks that did the same at the same call, though it may be in several groups."""
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    waits = replace(waits, accusations={rank: _first_of(one, rank, waits) for rank, one in waits.accusations.items()})
    for rank, one in waits.accusations.items():
        call = one.call
        what = () if call is None else (_operation(call), call.number, context.places.dimension(*_group(call)))
        alike[one.charge, *what].append(rank)
    return sorted(
        (_accused(context, ranks, waits) for ranks in alike.values()),
        key=lambda one: (-one.confidence, -int(one.figures["waiting"])),
    )


def _first_of(one: Accusation, rank: int, waits: HangVerdict) -> Accusation:
    """The same of the collective that comes first, of several that a rank never entered.

    One whose other absent ranks wait in another of these comes after that. Of the rest the first is the one in which
    ranks wait for longest; a transfer may be launched long before it is needed.
    """
    calls = [call for call in waits.stalled if rank in call.absent and call.since_ns]

    def comes_after(call: StalledCall) -> bool:
        return any(set(call.absent) & set(other.waiting) for other in calls if other is not call)

    first = min(calls, key=lambda call: (call.number < 0, comes_after(call), call.since_ns), default=None)
    if one.charge != "absent" or first is None or first == one.call:
        return one
    what = first.operation if first.number < 0 else f"{first.operation} {first.number} of {first.group.description}"
    verb = "waits" if len(first.waiting) == 1 else "wait"
    return Accusation("absent", f"never came to {what}, in which {list_ranks(first.waiting)} {verb}", first)


def _accused(context: HangContext, ranks: Sequence[int], waits: HangVerdict) -> Detection:
    accusations = [waits.accusations[rank] for rank in ranks]
    first = accusations[0]
    calls = [one.call for one in accusations if one.call is not None]
    held = {rank for one in ranks for rank in waits.held_up.get(one, ())} - waits.accusations.keys()
    who = context.places.describe_all(ranks)
    where = f" {_called(context, calls)}" if calls else ""
    did = _CHARGES[first.charge].format(
        stands="stands" if len(ranks) == 1 else "stand", is_="is" if len(ranks) == 1 else "are"
    )
    is_program = first.charge == "mismatch"
    direct = {rank for call in calls for rank in call.waiting} - set(ranks)
    why = [f"rank {rank} {one.words}" for rank, one in zip(ranks[:4], accusations, strict=False)]
    if held - direct:
        why.append(f"{len(direct)} wait in it, {len(held - direct)} through them")
    compare = "compare the code and the data of these ranks with their peers': they went on to different calls"
    return Detection(
        "mismatched call" if is_program else "hang",
        f"{who} {did}{where}" + (f"; {_others_wait(len(held))}" if held else ""),
        _culprits(context, ranks),
        _since(calls),
        CONFIDENCE[first.charge] * (1.0 if context.records.keys() >= set(context.ranks) else 0.95),
        (*why, *_doing(context, ranks)),
        (compare,) if is_program else _check(context, ranks),
        "program" if is_program else "watch" if first.charge == "behind" else "check",
        {
            "waiting": len(held),
            "number": first.call.number if first.call else -1,
            "operation": _operation(first.call) if first.call else "",
            "group": context.places.group_name(first.call.group, first.call.members) if first.call else "",
            "dimension": context.places.dimension(*_group(first.call)) if first.call else "",
        },
    )


def _of_silent(context: HangContext, waits: HangVerdict) -> tuple[list[Detection], list[str]]:
    """Ranks without a record, where the waiting ends at them; and what is to be said of others that left none."""
    missing = set(_missing(context))
    if not missing or not context.records:
        return [], []
    ends = [call for call in waits.stalled if missing & {*call.unknown} and not call.absent]
    waited = sorted({rank for call in ends for rank in call.unknown} & missing)
    what = {"dumps": "left no dump", "spans": "left no spans", "stacks": "gave no stacks"}[context.source]
    if not waited:
        return [], [f"{list_ranks(missing)} {what}, and nobody is seen to wait for them; look why none was written"]
    if 2 * len(missing) > len(context.ranks):
        return [], [f"{len(missing)} of {len(context.ranks)} ranks {what}; collect more of them"]
    first = min(ends, key=lambda call: (call.since_ns or 1 << 63, len(call.unknown)))
    others = missing - set(waited)
    held = {rank for call in ends for rank in call.waiting}
    is_clear = len(waited) == 1 or _is_a_host(context, waited)
    them = "it" if len(waited) == 1 else "them"
    call = _called(context, [first])
    why = [f"who waits can still write, who hangs cannot: {list_ranks(waited)} {what}, and ranks wait for {them}"]
    if others:
        why.append(f"{list_ranks(others)} {what} either, and nobody waits for them: some get lost for other reasons")
    if not is_clear:
        why.append("any of these may wait for another one of them: at least one hangs, the others may have lost theirs")
    sure = "silent" if is_clear and not others else "silent, and others"
    who = (Culprit("group", list_ranks(waited), tuple(waited), context.places.hosts(waited)),)
    found = Detection(
        "silent rank",
        f"{context.places.describe_all(waited)} {what}, and {_others_wait(len(held))} for {them} in {call}"
        f"{'' if is_clear else '; at least one of them hangs'}",
        _culprits(context, waited) if is_clear else who,
        _since([first]),
        CONFIDENCE[sure],
        tuple(why),
        (*_check(context, waited), f"look for what {list_ranks(waited)} left elsewhere, and judge again with it"),
        "check" if is_clear else "watch",
        {"waiting": len(held), "silent": len(missing)},
    )
    return [found], []


def _of_stacks(context: HangContext, waits: HangVerdict) -> list[Detection]:
    odd = odd_ones_out(context.stacks)
    if odd is None:
        return []
    ranks = odd.ranks
    possible = set(waits.possible)
    narrowed = tuple(rank for rank in ranks if rank in possible)
    if possible and narrowed:
        ranks = narrowed
    if 2 * len(ranks) > len(context.ranks) > 1:
        return []
    others = len(context.stacks) - len(odd.ranks)
    return [
        Detection(
            "hang",
            f"{context.places.describe_all(ranks)} {odd.words}; {_others(others, odd.others)}",
            _culprits(context, ranks),
            _since(waits.stalled),
            CONFIDENCE["stack"] + (0.1 if narrowed else 0),
            (odd.why, *([waits.why] if narrowed and waits.why else []), *_doing(context, ranks)),
            (f"look at the stack of {list_ranks(ranks[:3])} again: the same place means that it does not get on",),
            "check" if odd.others_wait else "watch",
            {"waiting": others},
        )
    ]


def _nobody(context: HangContext, waits: HangVerdict) -> Detection:
    """All stand still, and it cannot be told who is at fault."""
    possible = waits.possible
    calls = [call for call in waits.stalled if set(call.members) & set(possible)] or list(waits.stalled)
    who: tuple[Culprit, ...] = ()
    if possible:
        name = context.places.group_name(calls[0].group, calls[0].members) if len(calls) == 1 else list_ranks(possible)
        who = (Culprit("group", name, possible, context.places.hosts(possible)),)
    waiting = {rank for call in waits.stalled for rank in call.waiting}
    why = waits.why or "the waiting ends nowhere"
    held = f"{len(waiting)} ranks wait" if len(waiting) > 1 else "a rank waits"
    return Detection(
        "hang",
        f"{held}, and it cannot be told which is at fault: {why}",
        who,
        _since(calls),
        CONFIDENCE["group"],
        (),
        (
            "give the stacks of these ranks too (`--stacks`)" if context.source == "dumps" else "read their stacks",
            "set TORCH_NCCL_ENABLE_TIMING=1 next time: dumps then say which GPU has not begun",
        ),
        "watch",
        {"waiting": len(waiting)},
    )


# Words


def _verdict(
    context: HangContext, waits: HangVerdict, found: Sequence[Detection], abstains: Iterable[str]
) -> JudgeVerdict:
    known = len(context.stacks if context.source == "stacks" else context.records)
    one, many = {"dumps": ("dump", "dumps"), "spans": ("rank's spans", "ranks' spans"), "stacks": ("stack", "stacks")}[
        context.source
    ]
    ranks = len(context.ranks)
    tables: dict[str, list[Mapping[str, Any]]] = {
        "waits": [
            {
                "operation": _operation(call),
                "number": call.number,
                "group": context.places.group_name(call.group, call.members),
                "dimension": context.places.dimension(*_group(call)),
                "members": list(call.members),
                "waiting": list(call.waiting),
                "not_arrived": list(call.absent),
                "not_known": list(call.unknown),
                "since_unix_s": call.since_ns / 1e9 if call.since_ns else None,
            }
            for call in waits.stalled
        ],
        "stacks": [
            {"ranks": list(cluster.ranks), "frames": list(cluster.frames), "waits_for_peers": cluster.waits}
            for cluster in clusters_of(context.stacks)
        ],
        "problems": [{"problem": problem} for problem in context.problems],
    }
    return JudgeVerdict(
        "hang",
        tuple(found),
        tuple(abstains),
        f"{known} {one if known == 1 else many} of {ranks} {'rank' if ranks == 1 else 'ranks'}",
        {name: rows for name, rows in tables.items() if rows},
    )


def _one_first_line(found: list[Detection]) -> list[Detection]:
    """The first sentence also names who else is at fault: it may be the only line that is read."""
    if len(found) < 2:
        return found
    first = found[0]
    more = [culprit.name for one in found[1:] for culprit in one.who if culprit.kind == "rank"]
    if not more:
        return found
    return [replace(first, sentence=f"{first.sentence}; at fault too: {list_ranks(map(int, more))}"), *found[1:]]


def _with_stacks(context: HangContext, found: Detection) -> Detection:
    """Where the ranks that are named stand by their stacks."""
    ranks = [rank for culprit in found.who if culprit.kind == "rank" for rank in culprit.ranks]
    words = [
        f"rank {rank} is in {context.stacks[rank][0]}" for rank in ranks[:4] if context.stacks.get(rank) is not None
    ]
    waits = {rank: at for rank in ranks if (at := waits_in_program(context.stacks.get(rank, ()))) is not None}
    found = replace(found, why=(*found.why, *words)) if words else found
    return of_program(found, waits) if waits and len(waits) == len(ranks) else found


def of_program(found: Detection, waits: Mapping[int, Frame | str]) -> Detection:
    """A hang of ranks that wait for something of their own program: it may yet come, and no host is to blame.

    Args:
        waits: where each of them waits in its program.
    """
    if found.what != "hang" or found.advice == "program":
        return found
    told = [f"rank {rank} waits in its own program, at {at}, in no collective" for rank, at in list(waits.items())[:4]]
    return replace(
        found,
        confidence=min(found.confidence, CONFIDENCE["waits in program"]),
        why=(*told, *found.why),
        then=(
            f"see what {list_ranks(list(waits))} waits for there: another thread, a queue, a sleep, an input",
            "look again: the same place after minutes means that it does not come",
        ),
        advice="program",
    )


def _missing(context: HangContext) -> list[int]:
    return [rank for rank in context.ranks if rank not in context.records and context.states.get(rank) not in STATES]


def _is_a_host(context: HangContext, ranks: Collection[int]) -> bool:
    """Whether these are all ranks of one of several hosts: what they share has failed."""
    hosts = context.places.hosts(ranks)
    there = {rank for rank, host in context.places.host_of.items() if host in hosts}
    return len(hosts) == 1 and there == set(ranks) != set(context.ranks)


def _too_soon(context: HangContext, waits: HangVerdict, policy: HangPolicy) -> str:
    since_s = min((call.since_ns for call in waits.stalled if call.since_ns), default=0) / 1e9
    waited_s = context.written_s - since_s
    if not since_s or not context.written_s or not 0 <= waited_s < policy.least_wait_s:
        return ""
    return (
        f"the calls that wait began {waited_s:.1f} s before they were written down, and the job may just be running; "
        "take them again when it has stood still for longer"
    )


def _culprits(context: HangContext, ranks: Iterable[int]) -> tuple[Culprit, ...]:
    return tuple(Culprit("rank", str(rank), (rank,), context.places.hosts([rank])) for rank in ranks)


def _check(context: HangContext, ranks: Collection[int]) -> tuple[str, ...]:
    hosts = context.places.hosts(ranks)
    where = f"on {', '.join(hosts[:4])}" if hosts else f"on the host of {list_ranks(ranks)}"
    return (f"run `phalanx check` {where}", f"read the stack of {list_ranks(ranks)} while it lives (`py-spy dump`)")


def _doing(context: HangContext, ranks: Iterable[int]) -> list[str]:
    return [f"rank {rank} {context.doing[rank]}" for rank in list(ranks)[:4] if rank in context.doing]


def _others_wait(count: int) -> str:
    return _others(count, "wait")


def _others(count: int, do: str) -> str:
    """What they do, in words that follow several."""
    if count != 1:
        return f"{count} others {do}"
    verb, *more = do.split(" ")
    return " ".join(["1 other", {"wait": "waits", "are": "is"}[verb], *more])


def _group(call: StalledCall) -> tuple[str, Sequence[int]]:
    return call.group.description, call.members


def _operation(call: StalledCall) -> str:
    return _OPERATIONS.get(call.operation, call.operation.replace("_", "-"))


def _called(context: HangContext, calls: Sequence[StalledCall]) -> str:
    """Such as ``all-gather 417 of group shard-1``."""
    first = calls[0]
    names = list(dict.fromkeys(context.places.group_name(call.group, call.members) for call in calls))
    groups = f"group {names[0]}" if len(names) == 1 else f"groups {', '.join(names[:4])}"
    if first.number < 0:
        return f"the {_operation(first)} of {groups}"
    return f"{_operation(first)} {first.number} of {groups}"


def _since(calls: Iterable[StalledCall]) -> Onset:
    since_ns = min((call.since_ns for call in calls if call.since_ns), default=0)
    return Onset(since_ns / 1e9) if since_ns else Onset()
