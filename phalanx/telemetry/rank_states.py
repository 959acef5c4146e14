"""Where each rank stands now: its newest step, what it did last, and who died, fell behind or stopped first.

Ranks of a job wait for each other, so that one that is gone stops all. What tells it from its victims: its process
ended without closing its ring (`phalanx.telemetry.rank_deaths`), or it stands at an earlier step, or it did
less than the others in the step that none finished. Where the others did no more either, nobody is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from phalanx.telemetry.queries import Trace
from phalanx.telemetry.rank_deaths import deaths_among
from phalanx.telemetry.span_store import live_spans, parts

Standing = Literal["moves", "ended", "dead", "behind", "stopped first", "waits", "silent"]
"""Moves, or has: nothing is wrong. Waits: for one that is named, or for one that nobody can name. Silent: a host from
which nothing comes any more."""

QUIET_S = 2.5
"""A step may take longer than this: quiet is also measured in steps (`_QUIET_STEPS`)."""

_QUIET_STEPS = 3.0
_STEPS = 20
_MOST_SUSPECTS = 0.25
_SHORT_OF_NS = 5_000_000

_PAUSED = "a signal or a debugger has stopped its process"

_NEWEST = """
with own as (select * from all_steps where attempt = (select max(attempt) from all_steps))
select rank, max(host) as host, max(step) as step, max(end_ns) as end_ns,
    coalesce(max(step) filter (step_ns > 0), -1) as done_step,
    median(step_ns) filter (step_ns > 0) / 1e9 as step_s,
    (select max(attempt) from all_steps) as attempt
from own group by rank order by rank
"""

_LAST_SPANS = """
select rank, arg_max(
    kind || case when name in ('', kind) then '' else ' ' || name end
        || case when "group" = '' then '' else ' of ' || "group" end, end_ns
) as last
from all_spans where attempt = $attempt and kind != 'step' group by rank
"""


@dataclass(frozen=True)
class RankState:
    """One rank.

    Attributes:
        step: the newest in which it did anything; done_step: the newest that it finished; -1: none.
        end_ns: when its newest span ended, Unix.
        last: that span, such as ``forward chunk 0``; empty: single spans are not kept.
        why: it stands so; empty: nothing is wrong.
    """

    rank: int
    host: str
    step: int
    done_step: int
    end_ns: int
    last: str = ""
    standing: Standing = "moves"
    why: str = ""


@dataclass(frozen=True)
class JobState:
    """All ranks of the newest attempt, and in one line what is the matter.

    Attributes:
        step_s: median of the newest steps; None: none is finished.
        quiet_s: since anything of any rank ended; of a run that goes on.
        verdict: one line; empty: all is well.
    """

    ranks: tuple[RankState, ...]
    step_s: float | None
    quiet_s: float
    verdict: str

    @property
    def wrong(self) -> list[RankState]:
        """Those in trouble themselves; victims that wait are left out."""
        return [one for one in self.ranks if one.standing not in ("moves", "ended", "waits")]


def newest_step(trace: Trace) -> int | None:
    """The newest step that any rank of the newest attempt has begun, by the names of files and what is being written.

    A run that goes on from a checkpoint does steps again that an earlier attempt had done. None: there is no step.
    """
    closed = parts(trace.folder, "steps")
    live = live_spans(trace.folder)
    attempts = live["attempt"].to_numpy()
    attempt = max((part.attempt for part in closed), default=-1)
    if live.num_rows:
        attempt = max(attempt, int(attempts.max()))
    newest = [part.last_step for part in closed if part.attempt == attempt]
    if (of_attempt := live["step"].to_numpy()[attempts == attempt]).size:
        newest.append(int(of_attempt.max()))
    return max(newest, default=None)


def rank_states(
    trace: Trace,
    now_ns: int,
    *,
    is_running: bool,
    is_complete: bool = False,
    connection: Any = None,
    with_last: bool = True,
    paused: Collection[int] = (),
    began_ns: int = 0,
) -> JobState:
    """Where all ranks stand.

    Args:
        now_ns: Unix time.
        is_running: whether a process trains in the run; of one that ended nobody is late.
        is_complete: all its steps are done: whatever was begun after them does not matter.
        connection: of `trace.connect`, over the newest steps; None: makes one.
        with_last: look up what each did last, in single spans.
        paused: ranks whose processes a signal or a debugger has stopped, where that is known: spans cannot tell them
            from those that wait for them.
        began_ns: when the newest start of the run began, Unix time; 0: not known. What was recorded before says nothing
            of the processes that live now.
    """
    if connection is None:
        connection = trace.connect((newest_step(trace) or 0) - _STEPS, None)
    rows = connection.sql(_NEWEST).to_arrow_table().to_pylist()
    if not rows:
        return JobState((), None, 0.0, "")
    lasts: dict[int, str] = {}
    if with_last:
        asked = {"attempt": rows[0]["attempt"]}
        lasts = dict(connection.sql(_LAST_SPANS, params=asked).fetchall())
    at_first: Standing = "ended" if is_complete and not is_running else "moves"
    ranks = [
        RankState(
            row["rank"], row["host"], row["step"], row["done_step"], row["end_ns"], lasts.get(row["rank"], ""), at_first
        )
        for row in rows
    ]
    lengths = [row["step_s"] for row in rows if row["step_s"]]
    step_s = median(lengths) if lengths else None
    ended_ns = {one.rank: one.end_ns for one in ranks}
    noted = deaths_among(line for (line,) in connection.sql("select details from incidents").fetchall())
    dead = [one for one in noted if one.attempt == rows[0]["attempt"] and ended_ns.get(one.rank, 0) <= one.at_ns]
    died = {one.rank: one.at_ns for one in dead}
    gone = [RankState(one.rank, one.host, -1, -1, one.at_ns, "", at_first) for one in dead if one.rank not in ended_ns]
    ranks = sorted([*ranks, *gone], key=lambda one: one.rank)
    quiet_s = max(0.0, (now_ns - max(one.end_ns for one in ranks)) / 1e9) if is_running else 0.0
    if is_running and began_ns > max(one.end_ns for one in ranks):
        starting = tuple(replace(one, standing="waits", why="has begun no step since it was started") for one in ranks)
        return JobState(starting, step_s, 0.0, "")
    if is_complete and not is_running:
        return JobState(tuple(ranks), step_s, 0.0, "")
    judged = [
        replace(one, standing="stopped first", why=_PAUSED) if one.rank in paused and one.standing != "dead" else one
        for one in _judged(ranks, died, quiet_s, step_s, is_running=is_running)
    ]
    return JobState(tuple(judged), step_s, quiet_s, _verdict(judged, quiet_s, step_s, is_running=is_running))


def _judged(
    ranks: Sequence[RankState],
    died: Mapping[int, int],
    quiet_s: float,
    step_s: float | None,
    *,
    is_running: bool,
) -> list[RankState]:
    frontier = max(one.step for one in ranks)
    is_unfinished = all(one.done_step < frontier for one in ranks)
    is_still = is_running and quiet_s > _limit_s(step_s)
    short = _short_of_others(ranks, frontier) if is_unfinished and (is_still or not is_running) else set()
    first_dead_ns = min(died.values(), default=0)
    judged = []
    for one in ranks:
        if one.rank in died:
            # The others of a job that one rank ends are ended with it: the first is what matters.
            late_s = (died[one.rank] - first_dead_ns) / 1e9
            where = f" in step {one.step}" if one.step >= 0 else ""
            why = f"its process ended{where}" + (f", {late_s:.1f} s after the first" if late_s > 1 else "")
            judged.append(replace(one, standing="dead", why=why))
        elif one.step < frontier - 1 and (not is_running or _age_s(one, ranks, quiet_s) > _limit_s(step_s)):
            # Writers of hosts look at different moments: what is only written later is no step behind.
            why = f"stands at step {one.step}, others at {frontier}"
            judged.append(replace(one, standing="behind" if is_running else "ended", why=why))
        elif one.rank in short:
            did = f"; the last it did: {one.last.strip()}" if one.last else ""
            judged.append(replace(one, standing="stopped first", why=f"did the least in step {frontier}{did}"))
        elif is_still:
            judged.append(replace(one, standing="waits", why=f"nothing for {quiet_s:.0f} s"))
        else:
            judged.append(one if is_running else replace(one, standing="ended"))
    return judged


def _age_s(one: RankState, ranks: Sequence[RankState], quiet_s: float) -> float:
    """Since anything of one rank ended."""
    return quiet_s + (max(other.end_ns for other in ranks) - one.end_ns) / 1e9


def _limit_s(step_s: float | None) -> float:
    """For how long a job that makes steps may do nothing that ends."""
    return max(QUIET_S, _QUIET_STEPS * (step_s or 0.0))


def _short_of_others(ranks: Sequence[RankState], frontier: int) -> set[int]:
    """Ranks whose newest span ended clearly before most others', or that never began the newest step; few, or none."""
    behind = {one.rank for one in ranks if one.step < frontier}
    inside = sorted(one.end_ns for one in ranks if one.step == frontier)
    if not behind and inside:
        middle_ns = inside[len(inside) // 2]
        behind = {one.rank for one in ranks if one.end_ns < middle_ns - _SHORT_OF_NS}
    return behind if len(behind) <= max(1, int(_MOST_SUSPECTS * len(ranks))) else set()


def _verdict(ranks: Sequence[RankState], quiet_s: float, step_s: float | None, *, is_running: bool) -> str:
    dead = [one for one in ranks if one.standing == "dead"]
    named = dead or [one for one in ranks if one.standing in ("behind", "stopped first")]
    quiet = f"; nothing moved for {quiet_s:.0f} s" if is_running and quiet_s > _limit_s(step_s) else ""
    if named:
        first = named[0]
        what = {"dead": "dead", "behind": "behind", "stopped first": "stopped first"}[first.standing]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        who = ", ".join(f"rank {one.rank} ({one.host})" for one in named[:3])
        return f"{what}: {who}{more}; {first.why}{quiet}"
    if quiet:
        return f"nothing moved for {quiet_s:.0f} s; no rank did less than the others, so none is named"
    return ""
