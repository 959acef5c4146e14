"""Who holds up a run that stands still, from our own spans: for gloo on CPUs too, where there is no flight recorder.

Each rank's ring says how many collectives of each operation and group it has begun, and in which it waits now
(`phalanx.telemetry.unfinished_spans`). That is turned into what a flight record says, and the waiting is followed in
the same way (`phalanx.detect.hangs.hang_analysis`). Operations of a group are counted each by itself: a rank that waits
in the 417th all-gather waits for members that have begun 416.

Collectives that somebody's own loop records (`Recording.span`) have no members. Where the waiting says nothing, a run
that stands still is a hang all the same: a rank that is in something else while all others are in a collective is named
with less confidence, else nobody is.

On a GPU the host does not wait in collectives, and nothing is seen to wait: then only who is behind the others can be
told, and flight-recorder dumps say more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.detect.detection import Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.hangs.flight_records import (
    FlightRecord,
    GroupId,
    GroupPart,
    Launch,
    MemberTexts,
    Transfer,
)
from phalanx.detect.hangs.hang_analysis import list_ranks
from phalanx.detect.hangs.hang_judge import STATES, HangContext, HangPolicy, judge_hang
from phalanx.detect.hangs.python_stacks import Frame
from phalanx.detect.hangs.rank_motion import Look, look_at_ranks, motion_as_kept, to_look_at, weighed
from phalanx.detect.hangs.rank_places import RankPlaces, read_layout
from phalanx.telemetry.alike_ranks import groups_of
from phalanx.telemetry.run_list import read_run
from phalanx.telemetry.unfinished_spans import RankAtRest, Unfinished, ranks_at_rest

_TRANSFER = re.compile(r"(send|receive)\b")
_STEPS_STILL = 3.0
"""A run makes no step for this many times as long as one usually takes, before it is judged."""

_ODD_CONFIDENCE, _NOBODY_CONFIDENCE = 0.6, 0.5  # members of the collectives are not known


def judge_run(
    run: Path,
    policy: HangPolicy | None = None,
    *,
    stacks: Mapping[int, Sequence[Frame]] | None = None,
    look: Look = look_at_ranks,
) -> JudgeVerdict:
    """Who holds up a run that stands still; of one that goes on, that nothing is wrong.

    Args:
        run: its folder. Ranks of this host are looked at as they are now; of others what their writers kept counts,
            which they do when a host has stood still for some seconds.
        stacks: of main threads, innermost first, where they were read.
        look: looks at ranks of this host before they are named, whether they get on without spans.

    Raises:
        UserError: there is no such folder, or it has no spans.
    """
    policy = policy or HangPolicy()
    if not (run / "telemetry").is_dir():
        raise UserError("has no spans", cure="name the folder of a run that records spans", field=str(run))
    ranks = ranks_at_rest(run)
    if not ranks:
        if (state := read_run(run).state) in ("finished", "stopped", "imported"):
            return JudgeVerdict("hang", looked_at=f"the run goes on no more: {state}")
        why = "none of its ranks is on this host, and no writer has kept what they stood still in"
        return JudgeVerdict("hang", abstains=(f"{why}; judge it on one of its hosts while it stands still",))
    now = [one for one in ranks if not one.is_kept]
    if not now and (state := read_run(run).state) == "finished" and (run / "telemetry" / "steps").is_dir():
        return JudgeVerdict("hang", looked_at=f"the run goes on no more: {state}")
    if now and all(one.state in ("gone", "Z", "X") for one in ranks):
        why = "all of its ranks have died, and no writer had found before that they stood still"
        return JudgeVerdict("hang", abstains=(f"{why}; `phalanx detect logs {run}` reads what they wrote last",))
    moved_s = _still_s(now or ranks)
    looked_at = f"{len(ranks)} ranks, the newest span {moved_s:.1f} s ago"
    patience_s = max(policy.least_wait_s, _STEPS_STILL * max(one.usual_step_s for one in ranks))
    if now and moved_s < patience_s:  # what a writer kept stood still by its rule, which knows the run's pauses
        return JudgeVerdict("hang", looked_at=looked_at)
    layout = None
    try:
        layout = read_layout(str(run))
    except UserError:  # a script of somebody else has no config: groups say it
        layout = None
    context = replace(context_of(ranks, groups_of(run / "telemetry"), layout), stacks=stacks or {})
    verdict = _judged(ranks, context, policy, moved_s)
    if not (looked := to_look_at(verdict, ranks)):
        return verdict
    seen = {one.rank: motion_as_kept(one) for one in looked if one.is_kept}
    seen |= look({one.rank: one.pid for one in looked if not one.is_kept})
    frames = {rank: motion.frames for rank, motion in seen.items() if motion.frames}
    if not _names(verdict) and frames and not any(motion.moves for motion in seen.values()):
        verdict = _judged(ranks, replace(context, stacks={**frames, **context.stacks}), policy, moved_s)
    return weighed(replace(verdict, looked_at=looked_at), looked, seen, context.doing)


def _judged(ranks: Sequence[RankAtRest], context: HangContext, policy: HangPolicy, moved_s: float) -> JudgeVerdict:
    """By spans, and stacks where they are known."""
    verdict = judge_hang(context, policy)
    if verdict.detections:
        return verdict
    if not any(one.usual_step_s for one in ranks):
        why = f"no step has ended, and nothing has begun or ended for {moved_s:.0f} s; it may still start: look again"
        return replace(verdict, abstains=(*verdict.abstains, why))
    return replace(verdict, detections=(_standing_still(ranks, context, policy),))


def _names(verdict: JudgeVerdict) -> bool:
    return any(who.kind == "rank" for found in verdict.detections for who in found.who)


def _still_s(ranks: Sequence[RankAtRest]) -> float:
    return min((one.still_s for one in ranks if one.state not in STATES), default=max(one.still_s for one in ranks))


def _standing_still(ranks: Sequence[RankAtRest], context: HangContext, policy: HangPolicy) -> Detection:
    """A run that stands still, and nobody is seen to wait for a member: who is not where all others are, or nobody."""
    meets = {one.rank: span for one in ranks if (span := _current(one)) is not None and _is_meeting(span)}
    odd = [one for one in ranks if one.rank not in meets and _current(one) is not None]
    still_s = _still_s(ranks)
    since = Onset(max((one.newest_s for one in ranks if one.state not in STATES), default=ranks[0].newest_s))
    told = [one for one in ranks if one.rank in context.doing]
    why = [f"rank {one.rank} {context.doing[one.rank]}" for one in sorted(told, key=lambda one: one.rank in meets)[:6]]
    figures = {"still_s": still_s, "waiting": len(meets)}
    if odd and meets and len(odd) <= policy.most_share * len(ranks) and len(odd) + len(meets) == len(ranks):
        names = tuple(one.rank for one in odd)
        inside = " or ".join(sorted({_named(span) for span in meets.values()})[:2])
        others = "the other is" if len(meets) == 1 else f"the {len(meets)} others are"
        hosts = context.places.hosts(names)
        return Detection(
            "hang",
            f"{context.places.describe_all(names)} {context.doing[names[0]]}, while {others} in {inside}:"
            f" the run has stood still for {still_s:.0f} s",
            tuple(Culprit("rank", str(rank), (rank,), context.places.hosts([rank])) for rank in names),
            since,
            _ODD_CONFIDENCE,
            (
                *why,
                "the collective was recorded without its group: that the others wait for these is likely, not known",
            ),
            (
                f"read the stack of {list_ranks(names[:4])} while it lives (`py-spy dump`)",
                f"run `phalanx check` on {', '.join(hosts[:4]) or 'its host'} if the stack shows no reason",
            ),
            "watch",
            figures,
        )
    where = f"{len(meets)} of {len(ranks)} ranks are in collectives whose members are not known"
    return Detection(
        "hang",
        f"the run has stood still for {still_s:.0f} s, and nobody can be named:"
        f" {where if meets else 'no rank is seen to wait for others'}",
        (),
        since,
        _NOBODY_CONFIDENCE,
        tuple(why),
        ("read the stacks of its ranks (`--pids`, `--stacks`)", "look again: the same verdict means that it hangs"),
        "watch",
        figures,
    )


def _current(one: RankAtRest) -> Unfinished | None:
    """The innermost span that a rank is in; None: in none."""
    return next((span for span in reversed(one.begun) if span.is_under_way and _is_told(span)), None)


def _is_told(span: Unfinished) -> bool:
    """Whether it is known if it has ended: of collectives of groups only their waits say it."""
    return span.kind != "collective" or not span.group


def _is_meeting(span: Unfinished) -> bool:
    return span.kind in ("collective", "wait")


def context_of(
    ranks: Sequence[RankAtRest], described: Sequence[Mapping[str, object]] = (), layout: Layout | None = None
) -> HangContext:
    """What the judge looks at.

    Args:
        described: groups of the run with their members, as `phalanx.telemetry.alike_ranks.groups_of` gives them: ranks
            that are silent are known by them.
    """
    texts = MemberTexts()
    members = {rank for one in described for rank in one["ranks"]}  # type: ignore[attr-defined]
    members |= {one.rank for one in ranks} | {peer for one in ranks for span in one.begun for peer in span.ranks}
    everyone = tuple(sorted(members))
    names = sorted({span.name for one in ranks for span in one.begun})
    turns = {name: turn for turn, name in enumerate(names)}
    groups: dict[GroupId, Sequence[int]] = {}
    records: dict[int, FlightRecord] = {}
    for one in ranks:
        record = FlightRecord(has_groups=True)
        for span in one.begun:
            if span.kind not in ("wait", "collective") and span.name != "agree":
                continue
            own = span.ranks or (everyone if span.group == "all" else ())
            if not own:
                record.has_strays = True
                continue
            # Operations are counted each by itself, so each is a group of its own for those who follow the waiting.
            group = GroupId(span.group, texts.text(list(own)), turns[span.name])
            groups[group] = own
            _add(record, span, group)
        records[one.rank] = record
    states = {one.rank: one.state for one in ranks}
    return HangContext(
        RankPlaces(
            everyone, groups, {one.rank: one.host for one in ranks}, layout if _fits(layout, everyone) else None
        ),
        records,
        texts,
        "spans",
        states,
        doing={one.rank: words for one in ranks if (words := doing(one))},
    )


def _fits(layout: Layout | None, ranks: Sequence[int]) -> bool:
    return layout is not None and layout.world_size == len(ranks)


def _add(record: FlightRecord, span: Unfinished, group: GroupId) -> None:
    transfer = _TRANSFER.match(span.name)
    if transfer is not None:
        if span.kind == "wait" and span.is_under_way and span.peer >= 0:
            part = record.parts.setdefault(group, GroupPart(has_transfers=True))
            to = (Transfer(transfer[1] == "send", span.peer),)
            part.launches.append(Launch(0, -1, span.number, span.name, transfers=to, created_ns=_ns(span)))
        return
    part = record.parts.setdefault(group, GroupPart())
    part.newest = max(part.newest, span.number)
    if span.is_under_way and span.kind != "collective":
        part.launches.append(Launch(0, span.number, -1, span.name, created_ns=_ns(span)))


def _ns(span: Unfinished) -> int:
    return round(span.start_s * 1e9)


def doing(one: RankAtRest) -> str:
    """What a rank is in, such as ``is in backward of micro-batch 2, step 412, since 31 s``."""
    span = _current(one)
    if span is None:
        newest = one.begun[-1] if one.begun else None
        return f"began {_named(newest)} last, {one.still_s:.0f} s before" if newest else ""
    return f"is in {_named(span)} since {max(0.0, one.looked_s - span.start_s):.0f} s"


def _named(span: Unfinished) -> str:
    if span.kind == "step" and span.step >= 0:
        return f"step {span.step}"
    words = [f"the wait for {span.name} {span.number}" if span.kind == "wait" else span.kind]
    if span.kind not in ("wait", span.name) and span.name:
        words = [f"{span.kind} {span.name}"]
    if span.group:
        words.append(f"of {span.group}")
    if span.micro_batch >= 0:
        words.append(f"of micro-batch {span.micro_batch}")
    if span.step >= 0:
        words.append(f"in step {span.step}")
    return " ".join(words)
