"""What is said of a failure: the verdict of a cause, and of errors that no rule explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.detect.detection import Advice, Culprit, Detection, Onset
from phalanx.detect.logs.failure_classes import OUTSIDE, FailureClass, class_of
from phalanx.detect.logs.line_templates import quoted
from phalanx.detect.logs.log_blame import Blame
from phalanx.detect.logs.log_digest import LogDigest, LogEvent
from phalanx.detect.logs.log_ends import tries_again

BY_HAND = "stopped by a person"
_LAST_LINES = 3  # of a writer's log in which an error counts as its end


@dataclass(frozen=True)
class Cause:
    """What is taken for the cause: its class, the line that shows it, and whom it points to."""

    kind: FailureClass
    event: LogEvent
    blame: Blame
    same: int
    victims: int
    is_common: bool
    confidence: float


def detection_of(cause: Cause, digest: LogDigest) -> Detection:
    """The verdict of a cause: where, since when, why, and what to do."""
    kind, event, blame = cause.kind, cause.event, cause.blame
    where = _where(cause)
    sentence = f"{kind.name} {where}: {quoted(event.text)}"
    if kind.name == BY_HAND:
        ranks = sum(1 for writer in digest.writers if writer.source == "output" and writer.rank is not None)
        on = (
            f" on all {ranks} ranks"
            if cause.same == ranks > 1
            else f" on {cause.same} of {ranks} ranks"
            if ranks
            else ""
        )
        sentence = f"interrupted (KeyboardInterrupt){on}"
    if kind.name == OUTSIDE and event.rule is not None:
        sentence = f"the job was ended from outside: {event.rule.meaning}"
    why = [f"{event.place} says it{_after(event)}: {quoted(event.text, 200)}", *blame.why]
    if event.rule is not None:
        why.append(event.rule.meaning)
    if cause.is_common:
        why.append(f"{_alike(cause)} say the same: no machine is at fault")
    if cause.victims:
        who = "1 other writer only notices" if cause.victims == 1 else f"{cause.victims} other writers only notice"
        why.append(f"{who} that somebody is gone")
    then = [event.rule.action] if event.rule is not None else []
    is_program = cause.is_common and kind.family not in ("infrastructure", "other")
    is_program |= event.rule is not None and event.rule.fault == "user" and kind.family == "infrastructure"
    advice: Advice = "program" if is_program else kind.host_advice
    if not blame.hosts and advice in ("check", "exclude"):
        advice = "watch"
    if blame.hosts and advice in ("check", "exclude"):
        then += [f"check {host} before it is used again: `phalanx check`" for host in blame.hosts]
    return Detection(
        kind.name,
        sentence,
        _culprits(cause, digest),
        Onset(event.unix_s, _step_of(digest)),
        round(cause.confidence, 2),
        tuple(why),
        tuple(then),
        advice,
        {"family": kind.family, "same_ranks": cause.same, "victims": cause.victims, "lines": digest.lines},
    )


def _culprits(cause: Cause, digest: LogDigest) -> tuple[Culprit, ...]:
    blame = cause.blame
    if blame.hosts:
        if len(blame.hosts) == 1:
            return (Culprit("host", blame.hosts[0], blame.ranks, blame.hosts),)
        own = {host: tuple(one for one in blame.ranks if digest.host_of(one) == host) for host in blame.hosts}
        return tuple(Culprit("host", host, own[host], (host,)) for host in blame.hosts)
    return tuple(Culprit("rank", str(rank), (rank,)) for rank in blame.ranks)


def _where(cause: Cause) -> str:
    blame = cause.blame
    if len(blame.hosts) > 1:
        return f"on {' or '.join(blame.hosts)}"
    if blame.hosts:
        ranks = ", ".join(map(str, blame.ranks[:8]))
        return f"on {blame.hosts[0]}" + (f" (rank {ranks})" if ranks else "")
    if blame.ranks:
        return f"of rank {', '.join(map(str, blame.ranks[:8]))}"
    return f"of {_alike(cause)} alike" if cause.is_common else "of an unknown host"


def _alike(cause: Cause) -> str:
    return f"{cause.same} hosts' kernels" if cause.event.source == "kernel" else f"{cause.same} ranks"


def unexplained(events: Sequence[LogEvent], digest: LogDigest) -> Detection | None:
    """A job that ended with a traceback or a critical line that no rule explains."""
    last = [event for event in events if event.rule is None and event.source == "output"]
    grave = [event for event in last if event.level == "CRITICAL" or event.text.startswith("Traceback")]
    if not grave:
        return None
    event = min(grave, key=lambda one: (one.unix_s or 0.0, one.number))
    said = quoted(event.raised or event.text)
    if event.text.startswith("Traceback") and not event.raised:
        said = "its log ends before it names the exception"
    hosts = {one.host for one in grave if one.host}
    ranks = sorted({one.rank for one in grave if one.rank is not None})
    who = (Culprit("host", event.host, tuple(ranks), (event.host,)),) if len(hosts) == 1 else ()
    why = [f"{len(grave)} writers end with lines of this kind"]
    root = digest.root_cause
    if root.rank is not None:
        who = (Culprit("rank", str(root.rank), (root.rank,), (root.host,) if root.host else ()),)
        why.append(f"torchrun saw rank {root.rank} end first, with exit code {root.exit_code or 'unknown'}")
    return Detection(
        "unknown failure",
        f"no rule explains the first error, of {event.place}: {said}",
        who,
        Onset(event.unix_s, _step_of(digest)),
        0.3,
        tuple(why),
        ("read the lines after it, and add a rule (docs/detect_logs.md) or a labelled incident (`--learn`)",),
    )


def last_error(digest: LogDigest) -> Detection | None:
    """An error at the end of a log whose run had not made all of its steps, where nothing graver was found."""
    if any(writer.ended_well for writer in digest.writers):
        return None
    ends = []
    for event in digest.events:
        writer = digest.by_key[event.writer_key]
        is_last = event.progress == writer.progress and writer.lines - event.number < _LAST_LINES
        is_unfinished = writer.of_steps is not None and writer.step + 1 < writer.of_steps
        is_error = event.source == "output" and event.level in ("ERROR", "CRITICAL")
        is_news = event.template not in digest.known and not tries_again(event.text)
        if is_error and is_last and is_unfinished and is_news:
            ends.append(event)
    if not ends:
        return None
    event = min(ends, key=lambda one: (one.unix_s or 0.0, one.number))
    writer = digest.by_key[event.writer_key]
    same = len({one.writer_key for one in ends})
    is_known = event.rule is not None and class_of(event.rule.kind).family == "other"
    what = kind_of(event) if is_known else "unknown failure"
    why = [f"{event.place} says it last, after step {writer.step:,} of {writer.of_steps or 0:,}"]
    why += [f"{same} writers end so"] if same > 1 else []
    then = [event.rule.action] if event.rule else ["read the lines before it, and add a rule (docs/detect_logs.md)"]
    sentence = f"{what} at step {writer.step:,}: {quoted(event.text)}"
    advice: Advice = "program" if is_known else "watch"
    return Detection(
        what, sentence, (), Onset(event.unix_s, writer.step), 0.7 if is_known else 0.3, tuple(why), tuple(then), advice
    )


def line_tables(events: Sequence[LogEvent], digest: LogDigest) -> dict[str, list[dict[str, object]]]:
    """The lines that were looked at, in order, and how far clocks of hosts are ahead."""
    ordered = sorted(events, key=lambda event: (event.unix_s or 0.0, event.writer, event.number))
    rows: list[dict[str, object]] = [
        {
            "unix_s": event.unix_s, "host": event.host, "rank": event.rank, "source": event.source,
            "class": kind_of(event), "rule": event.rule.name if event.rule else "",
            "notices": bool(event.rule and event.rule.notices), "text": event.text[:300],
            "template": digest.template_texts.get(event.template, ""),
        }
        for event in ordered[:200]
    ]  # fmt: skip
    clocks: list[dict[str, object]] = [{"host": host, "ahead_s": ahead} for host, ahead in digest.ahead_s.items()]
    return {"lines": rows, "clocks": clocks}


def kind_of(event: LogEvent) -> str:
    """The class of failures that a line shows; empty: none."""
    return event.rule.kind if event.rule is not None else ""


def _step_of(digest: LogDigest) -> int | None:
    step = max((writer.step for writer in digest.writers), default=-1)
    return step if step >= 0 else None


def _after(event: LogEvent) -> str:
    return "" if not event.progress else f" after {event.progress:,} steps of its log"
