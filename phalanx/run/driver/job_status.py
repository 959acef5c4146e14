"""The job at this moment, from all that the driver knows, or from its journal while no driver lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path

import msgspec

from phalanx.core.errors import UserError
from phalanx.run.clock import JobClock, Now
from phalanx.run.decide.actions import Finish, ranks_of
from phalanx.run.decide.decide import decide, event_from_json
from phalanx.run.decide.events import HostGone, StopAsked
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Progress, State, initial
from phalanx.run.driver.attempt import AttemptWatch
from phalanx.run.driver.hosts import Heard
from phalanx.run.driver.write_ahead import Book, Header, Met, Note, clock_of
from phalanx.run.job_folder import Card
from phalanx.run.journal import JournalError, open_journal, read_journal
from phalanx.run.messages import VERSION
from phalanx.run.reports.recent_events import HostView, IncidentView, Overview

_URGENT = ("suspect", "unknown", "draining", "joining", "evicted", "active", "spare", "gone")
"""States of hosts, those first that people want to see when not all are shown."""

SHOWN_DETECTIONS = 16


@dataclass(frozen=True)
class Known:
    """What a job is shown from: `attempt`, `heard`, `other_versions` (of executors, by address) only of a driver that
    lives."""

    state: State
    addresses: Mapping[str, str] = field(default_factory=dict)
    attempt: AttemptWatch | None = None
    heard: Mapping[str, Heard] = field(default_factory=dict)
    other_versions: Mapping[str, int] = field(default_factory=dict)


def overview(known: Known, now: Now, most: int | None = None) -> Overview:
    """What people see.

    Args:
        most: hosts that are shown, those in trouble first; None: all.
    """
    state, attempt = known.state, known.attempt
    watched = attempt if state.phase == "running" else None
    standing = watched.standing(now) if watched is not None else None
    rate = watched.steps_per_s(now) if watched is not None else None
    ending = state.ending if state.phase == "ended" else None
    phase_s = max(now.unix_s - state.phase_since_s, 0.0)
    end_s = state.phase_since_s if state.phase == "ended" else now.unix_s
    incident = None
    if state.incident is not None:
        why = state.recovery.why if state.recovery is not None else ""
        age_s = max(now.unix_s - state.incident.began_s, 0.0)
        incident = IncidentView(number=state.incident.number, age_s=age_s, why=why)
    # Of the present attempt, or of those before while it has made none.
    step = max(attempt.step if attempt is not None else -1, -1)
    if step < 0:
        progress = state.progress
        step = progress.done if progress.done >= 0 else progress.best if progress.best >= 0 else progress.last_done
    if state.phase == "ended":
        step = _of_all_attempts(state.progress, attempt.step if attempt is not None else -1)
    return Overview(
        job=state.job.name,
        unix_s=now.unix_s,
        phase=state.phase,
        phase_s=phase_s if state.phase_since_s else 0.0,
        attempt=state.attempt,
        world_size=state.world_size,
        hosts_wanted=state.job.hosts,
        workers_per_host=state.job.workers_per_host,
        hosts=tuple(host_views(known, now, _most_urgent(state, most))),
        hosts_by_state=dict(Counter(host.state for host in state.hosts.values())),
        step=step,
        steps_per_s=-1.0 if rate is None else rate,
        step_age_s=-1.0 if standing is None else standing.step_s,
        quiet_s=-1.0 if standing is None else standing.quiet_s,
        limit_s=-1.0 if standing is None or not isfinite(standing.limit_s) else standing.limit_s,
        age_s=0.0 if state.began_s is None else max(end_s - state.began_s, 0.0),
        training_s=state.training_s + (phase_s if state.phase == "running" else 0.0),
        recoveries=state.restarts.recoveries,
        incidents=state.incident_count,
        incident=incident,
        version=state.version,
        advise_only=state.policy.advise_only,
        status=None if ending is None else ending.status,
        ended="" if ending is None else ending.reason,
        refused=_refused(known.other_versions),
        detections=state.detections[-SHOWN_DETECTIONS:],
        detection_count=state.detection_count,
        checkpoints="" if watched is None or (first := watched.worker(0)) is None else first.checkpoints,
    )


def _of_all_attempts(progress: Progress, newest: int) -> int:
    """Steps that the job has made; of a script that does not number them those of each attempt count."""
    newest = max(newest, progress.done)
    if progress.is_absolute or progress.best >= 0:
        return max(newest, progress.best)
    return progress.earlier + max(newest, 0) if progress.earlier or newest >= 0 else -1


def _refused(versions: Mapping[str, int]) -> str:
    """That executors are turned away for their version, and what to do."""
    if not versions:
        return ""
    address, version = list(versions.items())[-1]
    more = f" and at {len(versions) - 1} more" if len(versions) > 1 else ""
    return (
        f"refused: an executor at {address}{more} speaks version {version} of the wire, this driver {VERSION}; "
        f"install the same phalanx on both and end that executor: its back end starts another"
    )


def host_views(known: Known, now: Now, names: Iterable[str]) -> Iterator[HostView]:
    """These hosts, those that are still known."""
    state = known.state
    places = {host: place for place, host in enumerate(state.placement)} if state.has_workers else {}
    for name in names:
        if (host := state.hosts.get(name)) is None:
            continue
        heard, attempt, place = known.heard.get(name), known.attempt, places.get(name, -1)
        ranks = tuple(ranks_of(place, state.job.workers_per_host)) if place >= 0 else ()
        yield HostView(
            name=name,
            state=host.state,
            why=host.why,
            leaves=host.leaves,
            rack=host.rack,
            address=known.addresses.get(name, ""),
            place=place,
            ranks=ranks,
            silent_s=-1.0 if heard is None else max(now.monotonic_s - heard.last_s, 0.0),
            is_checking=name in state.checks,
            seen=None if heard is None else heard.state,
            workers=tuple(attempt.workers(ranks)) if attempt is not None else (),
        )


def _most_urgent(state: State, most: int | None) -> list[str]:
    if most is None or len(state.hosts) <= most:
        return list(state.hosts)
    by_state: dict[str, list[str]] = {name: [] for name in _URGENT}
    for name, host in state.hosts.items():
        by_state[host.state].append(name)
    chosen = set(islice((name for names in by_state.values() for name in names), most))
    return [name for name in state.hosts if name in chosen]


@dataclass(frozen=True)
class Past:
    """The job by its journal, whose newest entry is of `last_unix_s`; its time goes on by `clock`."""

    state: State
    addresses: dict[str, str]
    last_unix_s: float
    clock: JobClock


def remember(folder: Path, card: Card) -> Past | None:
    """The job of a run folder; None: its journal is not there, or empty.

    Raises:
        UserError: there is something else. JournalError: it cannot be reached.
    """
    url = card.journal_url(folder)
    if "://" not in url and not Path(url).exists():
        return None
    state, addresses, last_unix_s = initial(Policy(), Job(card.job, 1, 1)), {}, 0.0
    try:
        with read_journal(url, job=card.journal_job) as journal:
            clock = clock_of(journal.read())
            for entry in journal.read():
                last_unix_s = entry.unix_s
                if entry.kind == "event":
                    state, _ = decide(state, event_from_json(entry.json_text))
                elif entry.kind == "note":
                    note = msgspec.json.decode(entry.json_text, type=Note)
                    if isinstance(note, Header):
                        state = initial(note.policy, note.job)
                    elif isinstance(note, Met):
                        addresses[note.host] = note.address
    except msgspec.DecodeError as error:
        cure = "read it with the version of Phalanx that wrote it"
        raise UserError(f"was written by another version ({error})", cure=cure, value=url) from None
    return Past(state, addresses, last_unix_s, clock) if last_unix_s else None


def end_without_driver(folder: Path, card: Card, past: Past, who: str) -> Finish | None:
    """Write down that a person has ended the job, of which no process is left; None: it had ended before.

    Whichever driver had the journal until now cannot write to it any more.

    Raises:
        JournalError: it cannot be written. UserError: another driver has it.
    """
    reason = f"{who}, while its driver was dead"
    with open_journal(card.journal_url(folder), job=card.journal_job) as journal:
        unix_s = past.clock.read().unix_s
        book = Book(journal, past.state.job, past.state.policy, unix_s, past.clock)
        done = list(book.first_actions)
        if not any(isinstance(action, Finish) for action in done):
            done += book.apply(StopAsked(unix_s, reason, 0.0))
            for host in book.state.placement:
                done += book.apply(HostGone(unix_s, host, "it was ended with the job"))
    return next((action for action in done if isinstance(action, Finish)), None)


def is_over(folder: Path, card: Card) -> bool:
    """Whether the job of this card has ended; a driver may have died before it wrote so on the card."""
    if card.status is not None:
        return True
    try:
        past = remember(folder, card)
    except JournalError as error:
        raise UserError(f"the journal cannot be read ({error})", cure="try again", value=str(folder)) from error
    return past is not None and past.state.phase == "ended"
