"""What people read of a job, as plain words and as lines of a terminal that nothing can break out of."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Literal

from rich.text import Text

from phalanx.core.units import duration
from phalanx.run.logs.log_lines import strip_ansi
from phalanx.run.messages import Interface
from phalanx.run.reports.recent_events import HostView, Item, Overview, Told, Wrote
from phalanx.run.secrets import scrub_text

Ranks = Literal["0", "all", "none"]
"""Whose lines are shown."""

COLOURS = {"info": "", "warning": "yellow", "error": "bold red", "good": "green"}

_APART_S = 1.0
"""Between the last step and the last movement, until they are told apart."""

_LINKS = 2
"""Of a host, whose troubles are told; of more only how many."""

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
    """Whether somebody who wants the lines of these ranks wants this."""
    if isinstance(item, Wrote):
        return _shows(ranks, item.rank)
    return item.quotes < 0 or not _shows(ranks, item.quotes)


def _shows(ranks: Ranks, rank: int) -> bool:
    return ranks == "all" or (ranks == "0" and rank == 0)


def line(item: Item) -> Text:
    """An item, as it scrolls by."""
    if isinstance(item, Wrote):
        return Text.assemble((f"[rank {item.rank}] ", "dim"), harmless(item.text))
    return Text.assemble((f"{clock(item.unix_s)} ", "dim"), (said(item), COLOURS[item.level]))


def said(item: Told) -> str:
    """What was said, with whom it is about; of several lines each stays one."""
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
    """Whether something has moved since the last step, which is no step."""
    return 0 <= now.quiet_s < now.step_age_s - _APART_S


def is_calm(host: HostView) -> bool:
    """Whether nothing about it needs to be looked at."""
    is_up = host.seen is None or all(one.is_up for one in host.seen.interfaces)
    return host.state in ("active", "spare") and not host.leaves and host.silent_s < 5 and is_up


def link_troubles(host: HostView) -> str:
    """What was wrong with the links that training uses since the host's executor began; empty: nothing."""
    found = [text for one in (host.seen.interfaces if host.seen is not None else ()) if (text := _link_trouble(one))]
    more = [f"{len(found) - _LINKS} more links"] if len(found) > _LINKS else []
    return "; ".join([*found[:_LINKS], *more])


def _link_trouble(interface: Interface) -> str:
    parts = [] if interface.is_up else ["down"]
    parts += [f"went down {_times(interface.flaps)}"] if interface.flaps else []
    parts += [f"{interface.errors:,} error{'' if interface.errors == 1 else 's'}"] if interface.errors else []
    return f"{interface.name}: {', '.join(parts)}" if parts else ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


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
    facts = ", ".join(_facts(now))
    if now.status == 0:
        return f"done{took}: {facts}" if facts else f"done{took}"
    why = f"ended with status {now.status}{took}: {harmless(scrub_text(now.ended))}"
    return f"{why} ({facts})" if facts else why


def _facts(now: Overview) -> list[str]:
    """What was made of the time; a script that makes no steps is not a training."""
    if now.step <= 0:
        return [_recoveries(now)] if now.recoveries else []
    share = [f"effective training time {100 * now.training_s / now.age_s:.1f} %"] if now.age_s > 0 else []
    return [f"{now.step:,} steps", _recoveries(now), *share]


def _recoveries(now: Overview) -> str:
    return "1 recovery" if now.recoveries == 1 else f"{now.recoveries:,} recoveries"


def age(seconds: float) -> str:
    """A short time; empty: not known."""
    return "" if seconds < 0 else f"{seconds:.1f}s" if seconds < 60 else duration(seconds)
