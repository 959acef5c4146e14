"""Whether a rank that has begun and ended no span for long gets on all the same: it evaluates, saves, prepares data.

A loop of somebody else seldom says so by a span. So ranks that a hang would be blamed on are looked at three times
within a second: their CPU time, files, sockets and memory, and where they are in their code, where py-spy may look.
What counts as movement is what does for the driver of `phalanx run` (`phalanx.detect.hangs.stack_traces`).

Of ranks of other hosts only what their writers kept is known: the share of a core that they used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.detect.detection import Detection, JudgeVerdict
from phalanx.detect.hangs.hang_judge import STATES, of_program
from phalanx.detect.hangs.python_stacks import Frame, waits_for_peers, waits_in_program
from phalanx.detect.hangs.socket_activity import QuietRank, StillnessWatch, is_asleep
from phalanx.detect.hangs.stack_dumps import native_library, variables_of
from phalanx.detect.hangs.stack_traces import COMPUTES, UNKNOWN_PLACE, WAITS_FOR_GPU, works_in
from phalanx.telemetry.unfinished_spans import RankAtRest

LOOKS = 3
"""As sockets and pipes need, which count when they carry something between all of them."""
GAP_S = 0.2
_VARIABLES_S, _PY_SPY_S = 0.05, 5.0
_MOST_RANKS = 16
"""Looked at: a look takes a tenth of a second and more for each, in which py-spy halts it."""

_UNSEEN = 0.9
"""Of the confidence, where it cannot be seen whether those that are named move."""

_PAUSES = ("evaluation", "persist", "snapshot", "startup", "user", "step", "")
"""Kinds of the innermost span of a rank that may well take many steps; empty: it is in none. Of the others three usual
steps are odd enough."""


@dataclass(frozen=True)
class RankMotion:
    """What looks at a rank have shown.

    Attributes:
        moves: None: it cannot be told.
        words: that follow its name: what it does, or why it cannot be told, with the cure after a semicolon.
        frames: of its main thread, innermost first; empty: not known.
        sleeps: the main thread is in a sleep of a set time, or waits for what somebody types.
    """

    moves: bool | None
    words: str
    frames: tuple[Frame, ...] = ()
    sleeps: bool = False


Look = Callable[[Mapping[int, int]], Mapping[int, RankMotion]]
"""Looks at ranks of this host, by their processes."""


def look_at_ranks(pids: Mapping[int, int]) -> dict[int, RankMotion]:
    """Look at these ranks of this host, a few times within a second; the first ones, of many."""
    watch = StillnessWatch(counts_ready=False, asks_libraries=False)
    quiet = [QuietRank(rank, pid, (0,)) for rank, pid in sorted(pids.items()) if pid != os.getpid()][:_MOST_RANKS]
    found: dict[int, RankMotion] = {}
    for number in range(LOOKS):
        left = [one for one in quiet if one.rank not in found]
        if number and left:
            time.sleep(GAP_S)
        watch.look(left)
        for one in left:
            seen = watch.stillness_of(one.rank)
            if number and seen is not None and seen.looks > number:
                if not seen.still_s:
                    found[one.rank] = _motion(seen.why, seen.frames, can_see=watch.program is not None)
                elif seen.goes_round and watch.program is not None:
                    found[one.rank] = _round_and_round(watch.program, one.pid, _motion("", seen.frames))
    for one in quiet:
        if one.rank not in found and (seen := watch.stillness_of(one.rank)) is not None:
            found[one.rank] = replace(_motion("", seen.frames), sleeps=is_asleep(one.pid))
    return found


def _round_and_round(program: Path, pid: int, found: RankMotion) -> RankMotion:
    """Of a rank that computes at one place of Python code: an endless loop, much work of one line (by its variables,
    which change), or one long call of a compiled library, which takes longest to tell."""
    where, before = found.frames[0], None
    for number in range(LOOKS):
        if number:
            time.sleep(_VARIABLES_S)
        now = variables_of(program, pid, time.monotonic() + _PY_SPY_S)
        if now is None:
            return replace(found, moves=None, words=f"computes in one place, {where}; look again")
        if before is not None and now != before:
            return replace(found, moves=True, words=f"computes, and its variables change, in {where}")
        before = now
    library = native_library(program, pid, time.monotonic() + _PY_SPY_S)
    works = None if library is None else works_in(library)
    if works is None:
        what = f"computes in one call, {where}" if library is None else f"waits for its GPU or its peers, in {library}"
        return replace(found, moves=None, words=f"{what}; look again, or give dumps of the flight recorder")
    if works:
        return replace(found, moves=True, words=f"computes in {library}, now in {where}")
    return replace(found, words=f"goes round in one place, and none of its variables changes, in {where}")


def _motion(moved: str, frames: tuple[Frame, ...], *, can_see: bool = True) -> RankMotion:
    where = f", in {frames[0]}" if frames else ""
    if moved == UNKNOWN_PLACE:
        cure = "allow ptrace (SYS_PTRACE)" if can_see else "install py-spy (pip install py-spy)"
        return RankMotion(None, f"computes, and whether it gets on cannot be seen; {cure}")
    if moved == WAITS_FOR_GPU:
        return RankMotion(None, f"waits for its GPU{where}, and whether that works cannot be seen; look at its dumps")
    if moved:
        return RankMotion(True, f"{moved}{where.replace(', in', ', now in')}", frames)
    return RankMotion(False, f"did not move while it was looked at{where}", frames)


def motion_as_kept(one: RankAtRest) -> RankMotion:
    """Of a rank that its own host's writer has seen last."""
    kind = pause_of(one)
    if one.cpu_share < 0:
        return RankMotion(None, f"cannot be looked at from here; judge the run on its host, {one.host}")
    used = f"used {one.cpu_share:.0%} of a core while it stood still"
    if one.cpu_share >= COMPUTES:
        return RankMotion(None, f"{used}, and whether it gets on cannot be seen; judge the run on its host, {one.host}")
    if kind in ("evaluation", "persist", "snapshot", "startup"):
        return RankMotion(None, f"{used}, and may wait for files or a network; judge the run on its host, {one.host}")
    return RankMotion(False, used)


def pause_of(one: RankAtRest) -> str:
    """The kind of the innermost span that a rank is in; empty: it is in none that says when it ends."""
    inside = (span.kind for span in reversed(one.begun) if span.is_under_way)
    return next((kind for kind in inside if kind != "collective"), "")


def may_pause(one: RankAtRest) -> bool:
    """Whether a rank is where a healthy one may well be for many steps."""
    return pause_of(one) in _PAUSES


def to_look_at(verdict: JudgeVerdict, ranks: Sequence[RankAtRest]) -> list[RankAtRest]:
    """Ranks on whose movement a verdict depends: those that a hang is blamed on; where it names nobody, those that are
    in no collective, else all. Processes that are stopped or dead, and mistakes of programs, need no looks."""
    named = {rank for found in _hangs(verdict) for rank in _ranks(found)}
    alive = [one for one in ranks if one.state not in STATES]
    if named:
        return [one for one in alive if one.rank in named]
    if not _hangs(verdict):
        return []
    return [one for one in alive if pause_of(one) != "wait"] or alive


def weighed(
    verdict: JudgeVerdict, looked: Sequence[RankAtRest], motions: Mapping[int, RankMotion], doing: Mapping[int, str]
) -> JudgeVerdict:
    """The verdict, given how the ranks that it depends on move.

    One of them that moves is a sign of life of the whole run: nothing is wrong. Where it cannot be told, and a rank is
    where healthy ones may be for long, it is not called a hang.

    Args:
        looked: from `to_look_at`.
        doing: what ranks are in, in words that follow their names.
    """
    hangs = _hangs(verdict)
    if not hangs or not looked:
        return verdict
    rows = [
        {"rank": rank, "moves": motion.moves, "words": motion.words, "frames": list(map(str, motion.frames))}
        for rank, motion in sorted(motions.items())
    ]
    tables = {**verdict.tables, "motion": rows}
    for wanted in (True, None):
        shown = [one for one in looked if one.rank in motions and motions[one.rank].moves is wanted]
        shown = [one for one in shown if wanted or may_pause(one)]
        if not shown:
            continue
        words = _words(shown[0], motions[shown[0].rank], doing, _who_waits(hangs[0]))
        left = tuple(found for found in verdict.detections if found not in hangs)
        if wanted:
            return replace(verdict, detections=left, looked_at=f"{verdict.looked_at}; {words}", tables=tables)
        return replace(verdict, detections=left, abstains=(*verdict.abstains, words), tables=tables)
    detections = tuple(_seen(found, motions) if found in hangs else found for found in verdict.detections)
    return replace(verdict, detections=detections, tables=tables)


def weighed_by_processes(verdict: JudgeVerdict, pids: Mapping[int, int], look: Look = look_at_ranks) -> JudgeVerdict:
    """A verdict by stacks that were read once, given how those that it names move: one that does is no hang."""
    named = {rank for found in _hangs(verdict) for rank in _ranks(found)} & pids.keys()
    if not named:
        return verdict
    motions = look({rank: pids[rank] for rank in named})
    if moving := sorted(rank for rank, motion in motions.items() if motion.moves):
        left = tuple(found for found in verdict.detections if found not in _hangs(verdict))
        words = f"{verdict.looked_at}; rank {moving[0]} gets on: {motions[moving[0]].words}"
        return replace(verdict, detections=left, looked_at=words)
    detections = tuple(_seen(found, motions) if found in _hangs(verdict) else found for found in verdict.detections)
    return replace(verdict, detections=detections)


def _hangs(verdict: JudgeVerdict) -> list[Detection]:
    return [found for found in verdict.detections if found.what == "hang"]


def _ranks(found: Detection) -> list[int]:
    return [rank for who in found.who if who.kind == "rank" for rank in who.ranks]


def _words(one: RankAtRest, motion: RankMotion, doing: Mapping[int, str], who_waits: str) -> str:
    where = doing.get(one.rank, "")
    if motion.moves:
        return f"rank {one.rank} {f'{where}, and ' if where else ''}gets on: {motion.words}{who_waits}"
    problem, _, cure = motion.words.partition("; ")
    pause = "as it would be if it evaluated, saved or hung"
    return f"rank {one.rank} {where or 'is in no span'}{who_waits}, {pause}: it {problem}; {cure}"


def _who_waits(hang: Detection) -> str:
    count, operation = int(hang.figures.get("waiting", 0)), hang.figures.get("operation", "")
    if not count or not operation:
        return ""
    number = int(hang.figures.get("number", -1))
    call = f"{operation}{f' {number}' if number >= 0 else ''} of group {hang.figures.get('group', '')}"
    return f", while {count} {'other waits' if count == 1 else 'others wait'} in {call}"


def _seen(found: Detection, motions: Mapping[int, RankMotion]) -> Detection:
    """A hang, with what looks at those that it names have shown; where that is not known, it is less sure."""
    seen = {rank: motions[rank] for rank in _ranks(found) if rank in motions}
    why = [f"rank {rank} {motion.words.partition('; ')[0]}" for rank, motion in list(seen.items())[:4]]
    is_sure = all(motion.moves is False for motion in seen.values())
    found = replace(found, why=(*found.why, *why), confidence=found.confidence * (1.0 if is_sure else _UNSEEN))
    waits = {rank: at for rank, motion in seen.items() if (at := _waits_at(motion)) is not None}
    return of_program(found, waits) if waits and waits.keys() == set(_ranks(found)) else found


def _waits_at(motion: RankMotion) -> Frame | None:
    """Where it waits in its own program; None: it does not, or that is not known."""
    if motion.moves is not False or not motion.frames:
        return None
    if motion.sleeps and not waits_for_peers(motion.frames):
        return motion.frames[0]
    return waits_in_program(motion.frames)
