"""What people read of a job, as plain words and as lines of a terminal that nothing can break out of."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Literal, NamedTuple

from rich.text import Text

from phalanx.core.units import duration
from phalanx.run.decide.actions import KeepDetection
from phalanx.run.logs.log_lines import strip_ansi
from phalanx.run.reports.recent_events import HostView, Item, Overview, Told, Wrote
from phalanx.run.secrets import scrub_text

Ranks = Literal["0", "all", "none"]
"""Whose lines are shown."""

COLOURS = {"info": "", "warning": "yellow", "error": "bold red", "good": "green"}

_APART_S = 1.0  # between the last step and the last movement, until they are shown apart
_LINKS = 2  # of a host, whose troubles are named; of more only how many
_TURNS = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """One line of text without anything that controls a terminal, or that turns the direction of what is read."""
    plain = _TURNS.sub("", strip_ansi(text.replace("\t", "    ")))
    return plain.encode(errors="replace").decode()


def clock(unix_s: float) -> str:
    """Time of day, of this machine."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(unix_s))
    except (ValueError, OverflowError, OSError):  # of a clock that is beside itself
        return "--:--:--"


def is_shown(item: Item, ranks: Ranks) -> bool:
    """Whether this is shown beside the lines of these ranks; what repeats such a line is not shown twice."""
    rank = item.rank if isinstance(item, Wrote) else item.quotes
    is_wanted = ranks == "all" or (ranks == "0" and rank == 0)
    return is_wanted if isinstance(item, Wrote) else rank < 0 or not is_wanted


def line(item: Item) -> Text:
    """An item, as it scrolls by."""
    if isinstance(item, Wrote):
        return Text.assemble((f"[rank {item.rank}] ", "dim"), harmless(item.text))
    return Text.assemble((f"{clock(item.unix_s)} ", "dim"), (event_text(item), COLOURS[item.level]))


def event_text(item: Told) -> str:
    """An event, with what it is about; of several lines each stays one."""
    about = f"incident {item.incident}: " if item.incident else f"{item.host}: " if item.host else ""
    by = "" if item.by in ("", "driver") or item.by.startswith("executor of ") else f"{item.by}: "
    return "\n".join(harmless(part) for part in scrub_text(f"{about}{by}{item.text}").split("\n"))


def progress(now: Overview) -> str:
    """Steps, in a few words; empty: there are none."""
    if now.step < 0:
        return ""
    rate = f", {now.steps_per_s:.3g} steps/s" if now.steps_per_s >= 0 else ""
    return f"step {now.step:,}{rate}"


def moves_otherwise(now: Overview) -> bool:
    """Whether something other than a step has moved since the last step."""
    return 0 <= now.quiet_s < now.step_age_s - _APART_S


def is_calm(host: HostView) -> bool:
    """Whether nothing about it needs to be looked at."""
    is_up = host.seen is None or all(one.is_up for one in host.seen.interfaces)
    return host.state in ("active", "spare") and not host.leaves and host.silent_s < 5 and is_up


def host_order(host: HostView) -> tuple[bool, bool, int, str]:
    """Sorts hosts: first those that need to be looked at, then by their place."""
    return is_calm(host), host.place < 0, host.place, host.name


class HostFigures(NamedTuple):
    """Of its slowest ranks, newest step and seconds of the last one; share of its GPUs in use; None: not known."""

    step: int | None
    step_s: float | None
    gpu: float | None


def host_figures(host: HostView) -> HostFigures:
    """The figures of a host that every view shows."""
    step = min((worker.step for worker in host.workers if worker.step >= 0), default=None)
    step_s = max((worker.last_step_s for worker in host.workers if worker.last_step_s > 0), default=None)
    used = [one.utilisation for one in (host.seen.accelerators if host.seen else ()) if one.utilisation >= 0]
    return HostFigures(step, step_s, sum(used) / len(used) if used else None)


def doing(host: HostView) -> str:
    """What a host is about, or why it is in its state; and what was wrong with its links."""
    if host.is_checking:
        return "being checked"
    phases = ", ".join(dict.fromkeys(worker.phase or worker.state for worker in host.workers))
    about = phases if host.state == "active" and not host.leaves else host.leaves or host.why
    return "; ".join(filter(None, (about, link_troubles(host))))


def link_troubles(host: HostView) -> str:
    """What was wrong with the links that training uses since the host's executor began; empty: nothing."""
    found = []
    for link in host.seen.interfaces if host.seen is not None else ():
        parts = [] if link.is_up else ["down"]
        if link.flaps:
            parts.append(f"went down {'once' if link.flaps == 1 else f'{link.flaps:,} times'}")
        if link.errors:
            parts.append(f"{link.errors:,} error{'' if link.errors == 1 else 's'}")
        if parts:
            found.append(f"{link.name}: {', '.join(parts)}")
    more = [f"{len(found) - _LINKS} more links"] if len(found) > _LINKS else []
    return "; ".join([*found[:_LINKS], *more])


def counted(now: Overview) -> str:
    """How many hosts are in which state, such as ``4 active, 1 spare``."""
    states = now.hosts_by_state or Counter(host.state for host in now.hosts)
    order = ("active", "spare", "joining", "unknown", "suspect", "draining", "evicted", "gone")
    known = [(state, states[state]) for state in order if states.get(state)]
    return ", ".join(f"{count:,} {state}" for state, count in known) or "no host yet"


def status(now: Overview) -> str:
    """The job in one line."""
    parts = [f"{now.phase}, attempt {now.attempt}" if now.attempt else now.phase]
    parts += [words] if (words := progress(now)) else []
    parts += [counted(now)]
    parts += [_recoveries(now)] if now.recoveries else []
    parts += [f"incident {now.incident.number} is open"] if now.incident else []
    return "; ".join(parts)


def ending(now: Overview) -> str:
    """How the job has ended, in one line."""
    if now.status is None:
        return f"the driver is not heard of any more; the job was {status(now)}"
    took = f" after {duration(now.age_s)}" if now.age_s > 0 else ""
    share = [f"effective training time {100 * now.training_s / now.age_s:.1f} %"] if now.age_s > 0 else []
    known = [_recoveries(now)] if now.recoveries else []
    if now.step > 0:  # a script that makes no steps is not a training
        known = [f"{now.step:,} steps", _recoveries(now), *share]
    facts = ", ".join(known)
    if now.status == 0:
        return f"done{took}: {facts}" if facts else f"done{took}"
    why = f"ended with status {now.status}{took}: {harmless(scrub_text(now.ended))}"
    return f"{why} ({facts})" if facts else why


def found_by_judges(now: Overview, most: int) -> list[str]:
    """What judges have found, a line each, the newest last; of more than `most`, how many came before."""
    lines = [detection_text(kept) for kept in now.detections[-most:]]
    before = now.detection_count - len(lines)
    return [f"judges have found {before:,} more before:", *lines] if before > 0 else lines


def detection_text(kept: KeepDetection) -> str:
    """What a judge has found: who, how sure, and what to do next."""
    found = kept.found
    advice = f"; advice: {found.advice}" if found.advice != "none" else ""
    report = f"; incident {kept.incident}" if kept.incident else ""
    words = (
        f"{clock(kept.unix_s)} judge of {kept.judge}: {found.sentence} ({found.confidence:.0%} sure{advice}{report})"
    )
    return harmless(scrub_text(words))


def _recoveries(now: Overview) -> str:
    return "1 recovery" if now.recoveries == 1 else f"{now.recoveries:,} recoveries"


def age(seconds: float) -> str:
    """A short time; empty: not known."""
    return "" if seconds < 0 else f"{seconds:.1f}s" if seconds < 60 else duration(seconds)
