"""What the driver's judges find, in the one shape of `phalanx.detect.detection`: who, since when, how sure, why.

An event such as `SlowHost` is what may be acted upon; beside it a `Detected` says the same for people, pages and
programs. What judges of `phalanx detect` find becomes the same event.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from phalanx.detect.detection import Advice, Culprit, Detection, Onset, named
from phalanx.run.decide.events import (
    OF_THE_HOST,
    Detected,
    Event,
    LossBroken,
    Noticed,
    SlowHost,
    SuspectsNamed,
    TrafficSilent,
)
from phalanx.run.decide.state import State

_log = logging.getLogger(__name__)

JUDGED: Final = (SlowHost, SuspectsNamed, TrafficSilent, LossBroken, Noticed)
"""Events of the driver's judges; the others report what happened."""

_CORRUPTION_RULE = "silent-corruption"
_GRAVITY: Mapping[Advice, int] = {"none": 0, "watch": 1, "program": 1, "check": 2, "exclude": 3, "evict": 4}
_MOST_REASONS, _MOST_CULPRITS, _MOST_RANKS = 6, 16, 64
_MOST_CHARACTERS = 500
_IN_DOUBT = 0.5
"""Where two judges name different ranks."""


def detected_of(state: State, event: Event) -> Detected | None:
    """What an event of `JUDGED` says, given the state after it; None: nothing that names or means anything more."""
    try:
        told = _SAYS[type(event)](state, event)
    except Exception:  # what is shown is no reason to end
        _log.exception("a verdict could not be put into words: %s", event)
        return None
    if told is None:
        return None
    judge, found, is_of_incident = told
    incident = state.incident.number if is_of_incident and state.incident is not None else 0
    return Detected(event.at_s, judge, bounded(found), incident, is_told=True)


def is_news(state: State, detected: Detected) -> bool:
    """Whether this judge has not said the same of the same culprits before, or advises something graver now."""
    gravity, who = _GRAVITY[detected.found.advice], _culprits(detected.found)
    return not any(
        kept.judge == detected.judge
        and detected.incident in (0, kept.incident)  # each incident is one of its own
        and _GRAVITY[kept.found.advice] >= gravity
        and _culprits(kept.found) == who
        for kept in state.detections
    )


def bounded(found: Detection) -> Detection:
    """So much of it as is worth keeping in a journal, and only numbers that are finite."""
    figures = {
        name: value for name, value in found.figures.items() if not isinstance(value, float) or math.isfinite(value)
    }
    who = tuple(
        replace(one, ranks=tuple(one.ranks[:_MOST_RANKS]), hosts=tuple(one.hosts[:_MOST_RANKS]))
        for one in found.who[:_MOST_CULPRITS]
    )
    return replace(
        found,
        sentence=_cut(found.sentence),
        who=who,
        why=tuple(_cut(one) for one in found.why[:_MOST_REASONS] if one),
        then=tuple(_cut(one) for one in found.then[:_MOST_REASONS] if one),
        figures=figures,
    )


def _culprits(found: Detection) -> tuple[object, ...]:
    """Hosts, so that two judges agree on one; where there are none, what is named."""
    hosts = tuple(sorted(named(found, "hosts")))
    return hosts or (found.what, *sorted(one.name for one in found.who))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    line = line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 1]}…"
    return line.rstrip(".") or "?"


_Told = tuple[str, Detection, bool]
"""The judge, what it has found, and whether that belongs to the report that is open."""


def _of_slow(state: State, event: SlowHost) -> _Told | None:
    if state.place_of(event.host) < 0:
        return None
    then = [f"run `phalanx check --full` on {event.host}"]
    then += ["`phalanx detect stragglers` on the run tells a slow machine from an unbalanced stage, where it has spans"]
    if not state.policy.replace_slow:
        then.append("set run.policy.replace_slow to have such a host replaced when a spare is ready")
    found = Detection(
        "slow host",
        f"{event.host} takes {event.factor:.2f} times as long for a step as the others",
        (_host(state, event.host),),
        Onset(step=event.since_step if event.since_step >= 0 else None),
        0.95,
        (event.why,),
        tuple(then),
        "check",
        {"slowdown": event.factor},
    )
    return "stragglers", found, False


def _of_suspects(state: State, event: SuspectsNamed) -> _Told | None:
    if state.recovery is None:
        return None
    ranks = event.group_ranks or event.ranks
    names = ", ".join(f"rank {rank} on {state.host_of(rank)}" for rank in ranks[:8])
    why, _, more = event.why.removeprefix(f"{names} ").partition("; ")
    who = tuple(_rank(state, rank) for rank in ranks)
    advice: Advice = "watch"
    if event.group:
        sentence, confidence = f"{names} share a fault: {why}", 0.5
        who = (Culprit("group", event.group, tuple(ranks), tuple(dict.fromkeys(h for one in who for h in one.hosts))),)
    elif not ranks:
        sentence, confidence = f"the job stands still, and nobody stands out: {why}", 0.3
    elif event.is_proven:
        verb = "holds" if len(ranks) == 1 else "hold"
        sentence, confidence, advice = f"{names} {verb} up the others: {why}", 0.9, "check"
    else:
        sentence, confidence = f"the others wait for {names}: {why}", 0.5
        more = "; ".join(filter(None, (more, "that proves no fault of a host")))
    hosts = ", ".join(dict.fromkeys(host for one in who for host in one.hosts))
    then = ["read the stacks beside the report of the incident: `phalanx run incidents`"]
    then = [f"run `phalanx check` on {hosts}", *then] if advice == "check" else then
    since = Onset(state.recovery.began_s)
    found = Detection(
        "hang",
        _cut(sentence),
        who,
        since,
        confidence,
        (event.line, event.spans_say, more, *event.waits),
        tuple(then),
        advice,
    )
    return "hang", _beside_spans(found, event.by_spans), True


def _beside_spans(found: Detection, by_spans: Detection | None) -> Detection:
    """Surer where spans name the same ranks, less sure where they name others; theirs where only they name any."""
    ours, theirs = set(named(found, "ranks")), set(named(by_spans, "ranks")) if by_spans is not None else set()
    if by_spans is None or not theirs:
        return found
    if not ours:
        return replace(
            by_spans, why=(*by_spans.why[:3], f"by stacks, states and steps {found.sentence}", *found.why[2:])
        )
    if ours == theirs and by_spans.advice == "program":
        why = (*found.why[:2], *by_spans.why[:1], *found.why[2:])
        return replace(found, advice="program", confidence=by_spans.confidence, why=why, then=by_spans.then)
    if ours == theirs:
        return replace(found, confidence=max(found.confidence, by_spans.confidence), since=by_spans.since)
    return found if theirs < ours else replace(found, confidence=min(found.confidence, _IN_DOUBT))


def _of_traffic(state: State, event: TrafficSilent) -> _Told | None:
    is_some = 0 < len(event.hosts) < len(set(state.placement))
    what = "no traffic" if event.is_total else "less traffic"
    on = (
        f"the training interfaces of {', '.join(event.hosts[:4])}"
        if is_some
        else "the training interfaces of all hosts"
    )
    carry = "carry nothing" if event.is_total else "carry less than half of what they did"
    found = Detection(
        what,
        f"{on} {carry} for {event.silent_s:.0f} s" + (", and no step is made" if event.without_progress else ""),
        tuple(_host(state, host) for host in event.hosts) if is_some else (),
        Onset(event.at_s - event.silent_s),
        0.5,
        ("by the counters of these interfaces on each host",),
        ("see whether links are down or have errors: `phalanx run status`",),
        "watch",
        {"silent_s": event.silent_s},
    )
    return "traffic", found, state.incident is not None and event.without_progress


def _of_loss(state: State, event: LossBroken) -> _Told | None:
    names = ", ".join(f"rank {rank} on {state.host_of(rank)}" for rank in event.ranks[:8])
    found = Detection(
        "loss not finite",
        f"the loss is not finite from step {event.step} on" + (f", first on {names}" if names else ""),
        tuple(_rank(state, rank) for rank in event.ranks),
        Onset(step=event.step),
        0.9 if names else 0.95,
        ("only these ranks had it at first" if names else "all ranks have the same",),
        ("`phalanx detect loss` on the run names the batch, where it writes its figures",),
        "check" if names else "program",
    )
    return "loss", found, True


def _of_line(state: State, event: Noticed) -> _Told | None:
    """Of lines, those that are fatal and point to the host; others are alerts, or stand in the report."""
    if not event.is_fatal or event.fault not in OF_THE_HOST or event.host not in state.hosts:
        return None
    judge = "corruption" if event.rule == _CORRUPTION_RULE else "logs"
    by = "its kernel" if event.rank < 0 else f"rank {event.rank}"
    who = _host(state, event.host) if event.rank < 0 else _rank(state, event.rank, event.host)
    found = Detection(
        event.rule.replace("-", " ") or "fatal line",
        _cut(f"{event.host} is not well: {by} says {event.text}"),
        (who,),
        Onset(event.at_s),
        0.9,
        (f"the rule {event.rule} takes this line for a fault of the {event.fault}",),
        (f"run `phalanx check` on {event.host}",),
        "check",
    )
    return judge, found, True


_SAYS: Mapping[type, Callable[[State, Any], _Told | None]] = {
    SlowHost: _of_slow,
    SuspectsNamed: _of_suspects,
    TrafficSilent: _of_traffic,
    LossBroken: _of_loss,
    Noticed: _of_line,
}


def _host(state: State, host: str) -> Culprit:
    place, per_host = state.place_of(host), state.job.workers_per_host
    ranks = tuple(range(place * per_host, (place + 1) * per_host)) if place >= 0 else ()
    return Culprit("host", host, ranks, (host,))


def _rank(state: State, rank: int, host: str = "") -> Culprit:
    at = host or state.host_of(rank)
    return Culprit("rank", str(rank), (rank,), (at,) if at else ())
