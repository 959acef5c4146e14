"""The failure of a job by its lines: which class, which line said so first, which host or rank it points to.

What L4 (arXiv 2503.20263) found to work is done in this order: lines that healthy jobs have, too, are left out
(cross-job), then those after which the job went on (temporal); what all ranks say alike blames no machine, what one
host says does (spatial). A writer that first notices another's end is a victim, and what it says afterwards a
consequence. Of what is left the first is the cause; on its host, the deepest: a GPU's error explains the exception
that it led to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from phalanx.core.config import Config
from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.logs.failure_classes import OUTSIDE, FailureClass, class_of
from phalanx.detect.logs.killed_processes import KilledRank, is_told_by_launcher, killed_ranks
from phalanx.detect.logs.link_blame import blame_of_link, says_no_answer
from phalanx.detect.logs.log_blame import Blame, blame_by_notices, blame_named_by_others, named_hosts
from phalanx.detect.logs.log_digest import LogDigest, LogEvent, in_job_time
from phalanx.detect.logs.log_ends import gives_up, goes_on, tries_again, went_on
from phalanx.detect.logs.log_findings import (
    BY_HAND,
    Cause,
    detection_of,
    kind_of,
    last_error,
    line_tables,
    unexplained,
)
from phalanx.detect.logs.outside_end import ended_from_outside, without_outside

JUDGE = "logs"

_INFRASTRUCTURE_OF_NCCL = ("NCCL", "network", "connection", "CUDA", "NVLink", "ECC", "node")
_EXCEPTION = re.compile(r"^\W{0,3}(?:\[?rank ?\d{1,6}\]?:? ?)?[\w.]{0,100}(?:Error|Exception|Exit)\b")
_TORCH_WARNS = re.compile(r"^\[W\d{0,4}\b|^(?:TCPStore|ProcessGroupNCCL|socket)\.cpp:\d{1,6}\]")
_END_LINES = 200
_ONLY_KILLED = "words-killed"  # the rule of processes that were killed by SIGKILL, which nobody says why
_UNANSWERED = re.compile(r"\bfrom peer\b|[Rr]etry (?:count|counter)|status=12\b|error 12\b|vendor err 129\b")
_OF_NETWORKS = ("network error", "connection error", "storage error", "remote error")
_SHARED = ("storage error", "network error")  # what kernels of many hosts say alike is of what they share
_OF_OTHERS = ("node failure", "NCCL remote error")  # who says so is there; who says nothing, or is named, is not
_BELOW = 8  # lines below a notice, with a traceback between, in which its explanation may stand
_NEAR_CALM = 3  # harmless lines between two that explain each other
_GRACE = 10  # times `steps_after`
_DEEP = 8  # from this depth on a class is explained by nothing that another rank says


class LogPolicy(Config):
    """Numbers of the judge of logs."""

    window_s: float = Field(
        3600.0, gt=0, description="how long before the first failing rank a host's kernel may have said why"
    )
    tolerance_s: float = Field(
        5.0, ge=0, description="lines that are closer than this are taken as simultaneous, as clocks differ"
    )
    clocks_s: float = Field(
        60.0, ge=0, description="how far the clock of a host without steps in its logs may be wrong"
    )
    chain_s: float = Field(60.0, ge=0, description="how long after a host's first line its others still explain it")
    steps_after: int = Field(3, ge=1, description="steps that a job makes after a line from which on it was harmless")
    common_share: float = Field(
        0.5, gt=0, le=1, description="share of ranks that say the same from which on no machine is at fault"
    )


def judge_logs(digest: LogDigest, policy: LogPolicy | None = None) -> JudgeVerdict:
    """Why the job failed; nothing where its lines show no failure."""
    policy = policy or LogPolicy()
    looked_at = f"{digest.lines:,} lines in {digest.templates:,} templates of {len(digest.writers)} writers"
    if not digest.lines:
        return JudgeVerdict(JUDGE, abstains=("there are no lines; give folders or files that hold logs",))
    if 2 * sum(writer.garbled for writer in digest.writers) > digest.lines:
        return JudgeVerdict(JUDGE, abstains=("most lines are no text in UTF-8; give logs",), looked_at=looked_at)
    events = [event for event in (in_job_time(one, digest) for one in digest.events) if _counts(event, digest, policy)]
    explained = [event for event in events if event.rule is not None]
    cause = _find_cause(explained, digest, policy)
    if cause is None:
        found = unexplained(events, digest) or last_error(digest)
        return JudgeVerdict(JUDGE, (found,) if found else (), looked_at=looked_at, tables=line_tables(events, digest))
    return JudgeVerdict(JUDGE, (detection_of(cause, digest),), looked_at=looked_at, tables=line_tables(events, digest))


def _counts(event: LogEvent, digest: LogDigest, policy: LogPolicy) -> bool:
    """Whether a line may have to do with the failure."""
    rule = event.rule
    if rule is not None and (rule.severity == "note" or not (rule.kind or rule.notices)):
        return False
    kind = class_of(rule.kind) if rule is not None else None
    is_deep = kind is not None and kind.depth >= _DEEP
    # Whoever is asked to end has some time to do so; a job that was requeued makes many more steps in the same log.
    most_steps = policy.steps_after * (_GRACE if kind is not None and kind.name == OUTSIDE else 1)
    if event.template in digest.known and not is_deep:
        return False
    if event.source == "output":
        is_nccl = "NCCL" in event.text
        if event.level in ("DEBUG", "INFO") and not is_nccl and (kind is None or kind.name != OUTSIDE):
            return False
        if rule is not None and rule.general and not _is_near_end(event, digest):
            return False
        is_chatter = "NCCL INFO" in event.text  # of plugins that are not there, of connections that are tried again
        if is_chatter and not (kind is not None and kind.name.startswith(_INFRASTRUCTURE_OF_NCCL)):
            return False
        is_tried = tries_again(event.text) and not gives_up(event.text) and (is_chatter or not is_nccl)
        if is_tried or goes_on(event.text):
            return False
        if digest.made_all_steps and not _ends_badly(event):
            return False
        if went_on(event, digest, policy.steps_after):
            return False
        writer = digest.by_key.get(event.writer_key)
        if writer is not None and (writer.ended_well or writer.progress - event.progress >= most_steps):
            return False
    slack_s = _slack_s(event, digest, policy)
    later = [at for at in digest.progress_s if event.unix_s is not None and at > event.unix_s + slack_s]
    if len(later) >= most_steps:
        return False
    outputs = [writer for writer in digest.writers if writer.source == "output" and writer.progress]
    return not (outputs and all(writer.ended_well for writer in outputs))


def _ends_badly(event: LogEvent) -> bool:
    """Whether a line is graver than what processes say that end one after the other, or sum up, after all steps."""
    if event.rule is None or event.rule.kind == OUTSIDE or event.level in ("ERROR", "CRITICAL"):
        return True
    if event.level == "WARNING":
        return False
    return bool(_EXCEPTION.search(event.text)) or not (event.rule.notices or event.rule.general)


def _is_near_end(event: LogEvent, digest: LogDigest) -> bool:
    """Whether a line of a general rule, which harmless lines may match, stands where its writer's log ends."""
    writer = digest.by_key.get(event.writer_key)
    return writer is None or writer.lines - event.number < _END_LINES


def _find_cause(explained: Sequence[LogEvent], digest: LogDigest, policy: LogPolicy) -> Cause | None:
    """What the job failed of, or who ended it."""
    outside, events = without_outside(explained)
    cause = _find_failure(events, outside, digest, policy)
    failed = [] if cause is None or cause.kind.name == BY_HAND else [cause.event]
    notices = [event for event in events if event.rule is not None and event.rule.notices]
    ended = ended_from_outside(outside, [e for e in failed if e not in notices], notices, policy.tolerance_s)
    if ended is None or (digest.root_cause.rank is not None and ended.rule and ended.rule.severity != "fatal"):
        return cause
    victims = len({event.writer_key for event in notices})
    return Cause(class_of(OUTSIDE), ended, Blame(), 0, victims, False, 0.9 if _severity(ended) == "fatal" else 0.6)


def _find_failure(
    events: Sequence[LogEvent], outside: Sequence[LogEvent], digest: LogDigest, policy: LogPolicy
) -> Cause | None:
    """What the job failed of; who was told to end (`outside`) says afterwards what follows from that."""
    output = _particular([event for event in events if event.source == "output"])
    fatal = [event for event in output if event.rule is not None and event.rule.severity == "fatal"]
    killed = killed_ranks(events, digest)
    kernel = [event for event in events if event.source == "kernel" and _severity(event) == "fatal"]
    kernel += [one.event for one in killed]
    if not fatal and not kernel:
        return None
    notices = [event for event in output if event.rule is not None and event.rule.notices]
    kept = _without_consequences(fatal, [*notices, *outside])
    own = [event for event in kept if event.rule is not None and not event.rule.notices]
    # That a launcher found a process killed tells least: whatever the process itself said before comes first.
    own = [event for event in own if not is_told_by_launcher(event)] or own
    times = [event.unix_s for event in fatal if event.unix_s is not None]
    began_s = min(times, default=None)
    causes = own + [event for event in kernel if _is_near(event, began_s, policy)]
    if notices and all(kind_of(event) == BY_HAND for event in causes):
        asked_s = min((event.unix_s for event in causes if event.unix_s is not None), default=None)
        before = [one for one in notices if asked_s is None or (one.unix_s is not None and one.unix_s < asked_s)]
        if causes and any(kind_of(one) for one in before):  # who interrupts a job that hangs is not its cause
            return _only_noticed(before, events, digest, policy)
    unanswered = [event for event in causes if kind_of(event) == "network error" and _UNANSWERED.search(event.text)]
    if len({event.host for event in unanswered}) > 1 and len(unanswered) == len(causes):  # of the same who is gone
        return _only_noticed([*notices, *causes], events, digest, policy)
    causes = _without_effects(causes, unanswered, digest, policy)
    if not causes:
        causes = _explanations(fatal, notices)
    if not causes:
        return _only_noticed(notices, events, digest, policy) if notices else None
    return _first_cause(causes, notices, events, killed, digest, policy)


def _particular(events: Sequence[LogEvent]) -> list[LogEvent]:
    """Without lines of general rules and guesses, where particular rules show a cause."""
    particular = [event for event in events if event.rule is not None and not event.rule.general]
    shows = any(event.rule and event.rule.severity == "fatal" and not event.rule.notices for event in particular)
    return particular if shows else list(events)


def _without_consequences(fatal: Sequence[LogEvent], notices: Sequence[LogEvent]) -> list[LogEvent]:
    """Lines of writers that had not noticed another's end before; a launcher ends others before it says who failed."""
    noticed: dict[tuple[str, bool], int] = {}
    for event in notices:
        for is_launchers in (False, True) if kind_of(event) else (False,):
            key = event.writer_key, is_launchers
            noticed[key] = min(event.number, noticed.get(key, event.number))
    kept = []
    for event in fatal:
        depth = class_of(event.rule.kind).depth if event.rule else 0
        is_of_child = event.process is not None
        if event.number <= noticed.get((event.writer_key, is_of_child), event.number) or depth >= _DEEP:
            kept.append(event)
    return kept


def _without_effects(
    causes: Sequence[LogEvent], unanswered: Sequence[LogEvent], digest: LogDigest, policy: LogPolicy
) -> list[LogEvent]:
    """Without peers that do not answer, as other ranks report them, where something else had ended a process before."""
    other = [one for one in causes if one not in unanswered and not kind_of(one).endswith(_OF_NETWORKS)]
    if not other or not unanswered:
        return list(causes)
    first_s = min((one.unix_s for one in other if one.unix_s is not None), default=None)
    writers = {one.writer_key for one in other}
    return [
        one
        for one in causes
        if one not in unanswered
        or one.writer_key in writers
        or (first_s is not None and one.unix_s is not None and one.unix_s < first_s - _slack_s(one, digest, policy))
    ]


def _slack_s(event: LogEvent, digest: LogDigest, policy: LogPolicy) -> float:
    """How far the time of a line may be wrong."""
    return policy.tolerance_s if event.host in digest.timed_hosts else max(policy.tolerance_s, policy.clocks_s)


def _explanations(fatal: Sequence[LogEvent], notices: Sequence[LogEvent]) -> list[LogEvent]:
    """What stands right below a notice of the same writer and says why, as NCCL's "Last error:" does, on one host."""
    noticed = {(event.writer_key, event.number): class_of(kind_of(event)).depth for event in notices}
    told = [
        event
        for event in fatal
        if (event.writer_key, event.number) not in noticed
        and any(
            class_of(kind_of(event)).depth > noticed.get((event.writer_key, event.number - before), 99)
            for before in range(1, _BELOW + 1)
        )
    ]
    return told if len({event.host or event.writer_key for event in told}) == 1 else []


def _first_cause(
    causes: Sequence[LogEvent],
    notices: Sequence[LogEvent],
    events: Sequence[LogEvent],
    killed: Sequence[KilledRank],
    digest: LogDigest,
    policy: LogPolicy,
) -> Cause:
    """The earliest, and on its host the deepest."""
    first_s = min((event.unix_s for event in causes if event.unix_s is not None), default=None)
    near = [
        event
        for event in causes
        if first_s is None or event.unix_s is None or event.unix_s <= first_s + policy.tolerance_s
    ]
    spread = {
        event.rule.kind: len({one.host or one.writer_key for one in near if kind_of(one) == kind_of(event)})
        for event in near
        if event.rule
    }
    chosen = min(near, key=lambda event: (-_rank_of(event), spread[kind_of(event)], event.unix_s or 0.0, event.number))
    own_place = chosen.host or chosen.writer_key
    chain = [
        event
        for event in events
        if (event.host or event.writer_key) == own_place and event.rule is not None and not event.rule.notices
        and _is_of_chain(event, chosen, policy) and _is_beside(event, chosen)
    ]  # fmt: skip
    kills = [one.event for one in killed]
    deepest = min(
        [chosen, *chain],
        key=lambda event: (-_rank_of(event), event not in kills, event.unix_s or 0.0, event.number),
    )
    kind = class_of(kind_of(deepest))
    same = [event for event in causes if kind_of(event) in (kind_of(deepest), kind_of(chosen))]
    ranks = {event.writer_key for event in same if event.source == "output"}
    writers = [writer for writer in digest.writers if writer.source == "output" and writer.rank is not None]
    hosts = {event.host for event in same if event.host}
    is_common = (
        deepest.source == "output" and len(ranks) >= 2 and len(ranks) >= policy.common_share * max(len(writers), 2)
        and (len(hosts) > 1 or len({writer.host for writer in writers}) <= 1)
    )  # fmt: skip
    alike = len(ranks)
    if deepest.source == "kernel" and kind.name in _SHARED:
        told = {one.host for one in events if one.source == "kernel" and one.host and kind_of(one) == kind.name}
        is_common = len(told) > 1 and len(told) >= policy.common_share * len(digest.hosts)
        alike = len(told) if is_common else alike
    blame = _blame_of_cause(deepest, same, notices, is_common, kind, digest)
    is_common = is_common and not blame.hosts
    victims = len({event.writer_key for event in notices} - ranks)
    confidence = 0.6 if is_common and kind.per_host else 0.9 if blame.hosts or is_common else 0.75
    if deepest.rule is not None and deepest.rule.name == _ONLY_KILLED:
        confidence = 0.6
    if killings := [one for one in killed if one.event is deepest]:
        of_ranks = tuple(one.rank for one in killings if one.rank is not None)
        hosts_of = (deepest.host,) if deepest.host else ()
        blame, confidence = Blame(hosts_of, of_ranks, tuple(one.why for one in killings), 1.0), 0.95
    elif says_no_answer(deepest) and (not blame.hosts or blame.hosts == (deepest.host,)) and not is_common:
        link = blame_of_link(deepest, events, digest, 2 * policy.chain_s, policy.chain_s)
        deepest, blame, confidence = link or (deepest, blame, confidence)
    elif deepest.process is not None and deepest.process == digest.root_cause.process and not blame.ranks:
        rank = digest.root_cause.rank
        blame = replace(blame, ranks=() if rank is None else (rank,))
    elif not (blame.hosts or blame.ranks or is_common):
        blame = blame_named_by_others(kind.name, events, digest)
    return Cause(kind, deepest, blame, alike, victims, is_common, confidence)


def _blame_of_cause(
    event: LogEvent,
    same: Sequence[LogEvent],
    notices: Sequence[LogEvent],
    is_common: bool,
    kind: FailureClass,
    digest: LogDigest,
) -> Blame:
    hosts = {one.host for one in same if one.host}
    named = (event.named_host,) if event.named_host else () if event.host else named_hosts(event, digest)
    if len(named) == 1:  # as schedulers do
        return Blame(named, digest.ranks_of(named[0]), ("the line names it",), 1.0)
    if kind.name in ("network error", "connection error") and (len(hosts) > 1 or is_common):
        # Several complain of the same peer: it, and not they.
        peers = {host for one in same for host in named_hosts(one, digest)}
        count = {host: len({one.host for one in same if host in named_hosts(one, digest)}) for host in peers}
        if count and (most := max(count.values())) > 1 and list(count.values()).count(most) == 1:
            host = max(count, key=lambda one: count[one])
            return Blame((host,), digest.ranks_of(host), (f"{most} hosts name it",), most / max(len(hosts), 1))
    if kind.name == "node failure" and not event.host and event.rank is None:  # a scheduler says so, and names nobody
        return blame_by_notices(notices, digest)
    if is_common and kind.name in _OF_OTHERS:
        return blame_by_notices([*notices, *same], digest)
    if is_common or kind.name == BY_HAND:
        return Blame()
    rank = event.rank
    if rank is None and event.host:
        complaining = {one.rank for one in same if one.host == event.host and one.rank is not None}
        return Blame((event.host,), tuple(sorted(complaining)), ("it says so first",), 1.0)
    ranks = () if rank is None else (rank,)
    host = event.host or (digest.host_of(rank) if rank is not None else "")
    return Blame((host,) if host else (), ranks, ("it says so first",), 1.0)


def _only_noticed(
    notices: Sequence[LogEvent], events: Sequence[LogEvent], digest: LogDigest, policy: LogPolicy
) -> Cause | None:
    """Nobody says why: the class of what was noticed first, and whom that points to."""
    kinds = [event for event in notices if event.rule is not None and event.rule.kind]
    if not kinds:
        return None
    first_s = min((event.unix_s for event in kinds if event.unix_s is not None), default=None)
    near = [
        event
        for event in kinds
        if first_s is None or event.unix_s is None or event.unix_s <= first_s + policy.tolerance_s
    ]
    writers: dict[str, set[str]] = {}
    for event in near:
        writers.setdefault(kind_of(event), set()).add(event.writer_key)
    event = min(near, key=lambda one: (-len(writers[kind_of(one)]), one.unix_s or 0.0, one.number))
    blame = blame_by_notices(kinds, digest)
    torch_warns = all(_TORCH_WARNS.search(one.text) and one.level in ("", "WARNING") for one in kinds)
    if torch_warns:
        blame = Blame(why=("torch only warns, as it does where processes end one after the other",))
    alarms = [one for one in events if one.source == "kernel" and one.host and one.rule and one.rule.kind]
    hosts = {one.host for one in alarms}
    if len(hosts) == 1 and (not blame.hosts or blame.hosts == tuple(hosts)):
        blame = Blame(tuple(hosts), blame.ranks, (*blame.why, "its kernel alone reports a problem"), 0.5)
        near_alarms = [one for one in alarms if _may_explain(one, event, first_s, policy)]
        if near_alarms:
            event = min(near_alarms, key=lambda one: (-_rank_of(one), one.unix_s or 0.0, one.number))
    alone = {one.host for one in near}
    if not (blame.hosts or torch_warns) and event.host and len(alone) == 1 and kind_of(event) == "connection error":
        ranks = tuple(sorted({one.rank for one in near if one.rank is not None}))
        blame = Blame((event.host,), ranks, (*blame.why, "nobody else complains as early"), 0.25)
    confidence = 0.4 + 0.4 * blame.share if blame.hosts or blame.ranks else 0.5
    others = len({one.writer_key for one in kinds} - {event.writer_key})
    return Cause(class_of(kind_of(event)), event, blame, 0, others, False, confidence)


def _severity(event: LogEvent) -> str:
    return event.rule.severity if event.rule is not None else ""


def _rank_of(event: LogEvent) -> float:
    """How near to the cause a line is: its class, and the kernel before ranks."""
    return class_of(kind_of(event)).depth + (0.5 if event.source == "kernel" else 0.0)


def _may_explain(alarm: LogEvent, notice: LogEvent, first_s: float | None, policy: LogPolicy) -> bool:
    """Whether a kernel's alarm stands near enough before what was noticed; a broken machine may say so long before."""
    if first_s is None or alarm.unix_s is None:
        return False
    is_long = kind_of(notice) == "NCCL timeout" or class_of(kind_of(alarm)).depth >= class_of("CUDA error").depth
    before_s = policy.window_s if is_long else 2 * policy.chain_s
    return first_s - before_s <= alarm.unix_s <= first_s + policy.chain_s


def _is_near(event: LogEvent, began_s: float | None, policy: LogPolicy) -> bool:
    if began_s is None or event.unix_s is None:
        return True
    return began_s - policy.window_s <= event.unix_s <= began_s + policy.chain_s


def _is_of_chain(event: LogEvent, chosen: LogEvent, policy: LogPolicy) -> bool:
    if event.source == "output" and event.writer_key != chosen.writer_key and chosen.source == "output":
        return False
    if event.unix_s is None or chosen.unix_s is None:
        return event.writer_key == chosen.writer_key
    before = policy.window_s if _severity(event) == "fatal" else 2 * policy.chain_s
    return chosen.unix_s - before <= event.unix_s <= chosen.unix_s + policy.chain_s


def _is_beside(event: LogEvent, chosen: LogEvent) -> bool:
    """Whether a line of a general rule stands near enough to explain the other: harmless ones stand in any start."""
    if is_told_by_launcher(event) and event is not chosen:
        return False
    is_general = event.rule is not None and event.rule.general
    return not is_general or event.writer_key != chosen.writer_key or abs(chosen.calm - event.calm) < _NEAR_CALM
