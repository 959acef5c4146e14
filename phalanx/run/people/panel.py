"""The lower end of the live view: the job, its hosts and the last events, in as many lines as there are. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.text import Text

from phalanx.core.units import duration
from phalanx.run.logs.lines import cut
from phalanx.run.people import words
from phalanx.run.people.hub import Told
from phalanx.run.people.overview import HostView, Overview

_MOST_SHARE = 0.5
"""Of the terminal's lines; the rest is for lines that scroll by."""

_STYLES = {
    "active": "green",
    "spare": "cyan",
    "joining": "blue",
    "draining": "yellow",
    "unknown": "yellow",
    "suspect": "magenta",
    "evicted": "red",
    "gone": "red",
}
_EVENTS = 3
_NAME_CHARS = 24
_LEAST_DOING = 20


class Panel:
    """What stands at the lower end of the terminal.

    Args:
        now: the job.
        events: of which the last are shown where there is room.
        trouble: why nothing newer is known; empty: it is.
    """

    def __init__(self, now: Overview, events: Sequence[Told] = (), trouble: str = "") -> None:
        self._now, self._events, self._trouble = now, events, trouble

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.laid_out(console.width, console.height)

    def laid_out(self, width: int, height: int) -> RenderableType:
        """For a terminal of so many columns and lines; of these one at least stays free."""
        room = max(min(height - 1, max(round(height * _MOST_SHARE), 10)), 1)
        heads = [_title(self._now), *_job(self._now, width)]
        heads += [_cut(f" {self._trouble}", "bold red", width)] if self._trouble else []
        heads = heads[:room]
        events = [self._event(told, width) for told in self._events[-_EVENTS:]] if room - len(heads) > 8 else []
        rows = room - len(heads) - len(events) - 1
        parts: list[RenderableType] = [*heads]
        if rows > 0 and self._now.hosts:
            parts.append(hosts_table(self._now, width, rows))
        return Group(*parts, *events)

    def _event(self, told: Told, width: int) -> Text:
        first = words.said(told).partition("\n")[0]
        return _cut(f" {words.clock(told.unix_s)} {first}", words.COLOURS[told.level] or "dim", width)


def _title(now: Overview) -> RenderableType:
    style = "bold green" if now.phase == "running" and not now.incident else "bold yellow"
    attempt = f" · attempt {now.attempt}" if now.attempt else ""
    advice = " · advises only" if now.advise_only else ""
    text = Text.assemble(words.harmless(now.job), " · ", (now.phase, style), f"{attempt}{advice}")
    text.append(f" · {duration(now.age_s)}" if now.age_s else "")
    return Rule(text, align="left", style="dim")


def _job(now: Overview, width: int) -> list[Text]:
    parts = [words.progress(now) or f"no step yet, {now.phase} for {duration(now.phase_s)}"]
    if now.step_age_s >= 0:
        is_late = now.limit_s >= 0 and now.quiet_s > now.limit_s / 4
        limit = f" (limit {words.age(now.limit_s)})" if is_late else ""
        moved = f", movement {words.age(now.quiet_s)} ago" if words.moves_otherwise(now) else ""
        parts.append(f"last {words.age(now.step_age_s)} ago{moved}{limit}")
    parts.append("1 recovery" if now.recoveries == 1 else f"{now.recoveries} recoveries")
    spares = now.hosts_by_state.get("spare", sum(host.state == "spare" for host in now.hosts))
    parts.append(f"{spares} spare{'' if spares == 1 else 's'} ready")
    lines = [_cut(" " + " · ".join(parts), "", width)]
    if now.incident is not None:
        why = words.harmless(now.incident.why)
        text = f" incident {now.incident.number}, open for {words.age(now.incident.age_s)}: {why}"
        lines.append(_cut(text, "yellow", width))
    return lines


def _cut(text: str, style: str, width: int) -> Text:
    line = Text(text, style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(max(width - 1, 1), overflow="ellipsis")
    return line


# Hosts


def chosen(now: Overview, rows: int) -> list[HostView]:
    """Those that are shown in so many lines: first those that need to be looked at, then by their place."""
    order = sorted(now.hosts, key=lambda host: (words.is_calm(host), host.place < 0, host.place, host.name))
    total = max(sum(now.hosts_by_state.values()), len(order))
    return order if total <= rows else order[: max(rows - 1, 0)]


def hosts_table(now: Overview, width: int, rows: int) -> RenderableType:
    """Hosts under heads, in so many lines besides the heads at most."""
    shown = chosen(now, rows)
    columns = _fitting([column for column in _columns(now, shown) if column.cells], width)
    lines = [_row([column.head for column in columns], columns, width, "dim")]
    for number, host in enumerate(shown):
        row = _row([column.cells[number] for column in columns], columns, width)
        row.highlight_words([f" {host.state} "], _STYLES.get(host.state, ""))
        lines.append(row)
    total = max(sum(now.hosts_by_state.values()), len(now.hosts))
    if len(shown) < total:
        lines.append(_cut(f" … of {total:,} hosts: {words.counted(now)}", "dim", width))
    return Group(*lines)


@dataclass(frozen=True)
class _Column:
    """A head, and what stands under it for each host.

    Attributes:
        rank: of columns that are left out where there is no room, those with the highest go first.
        is_number: it stands at the right.
    """

    head: str
    cells: list[str]
    rank: int = 0
    is_number: bool = False

    @property
    def size(self) -> int:
        """In cells of the terminal."""
        return max(cell_len(text) for text in [self.head, *self.cells])


def _columns(now: Overview, hosts: Sequence[HostView]) -> list[_Column]:
    has_gpus = any(host.seen is not None and host.seen.accelerators for host in now.hosts)
    names = [words.harmless(host.name) for host in hosts]
    return [
        _Column("host", [cut(name, _NAME_CHARS) for name in names]),
        _Column("state", [host.state for host in hosts]),
        _Column("ranks", [_ranks(host) for host in hosts], 0, True),
        _Column("step", [_step(host) for host in hosts], 1, True),
        _Column("s/step", [_pace(host) for host in hosts], 2, True),
        _Column("heard", [words.age(host.silent_s) for host in hosts], 1, True),
        _Column("cpu", [_cpu(host) for host in hosts], 3, True),
        _Column("mem", [_memory(host) for host in hosts], 4, True),
        _Column("gpu", [_gpu(host) for host in hosts] if has_gpus else [], 3, True),
        _Column("doing", [words.harmless(doing(host)) for host in hosts]),
    ]


def _fitting(columns: list[_Column], width: int) -> list[_Column]:
    """Without those for which there is no room; the last one is cut, but not to nothing."""
    while True:
        taken = sum(column.size + 1 for column in columns[:-1])
        least = max(column.rank for column in columns)
        if width - taken > _LEAST_DOING or not least:
            return columns
        last = max(number for number, column in enumerate(columns) if column.rank == least)
        columns = columns[:last] + columns[last + 1 :]


def _row(texts: Sequence[str], columns: Sequence[_Column], width: int, style: str = "") -> Text:
    cells = [
        " " * (column.size - cell_len(text)) + text if column.is_number else set_cell_size(text, column.size)
        for text, column in zip(texts, columns, strict=True)
    ]
    return _cut(" " + " ".join(cells).rstrip(), style, width)


def doing(host: HostView) -> str:
    """What a host is about, or why it is in its state; and what was wrong with its links."""
    if host.is_checking:
        return "being checked"
    phases = ", ".join(dict.fromkeys(worker.phase or worker.state for worker in host.workers))
    about = phases if host.state == "active" and not host.leaves else host.leaves or host.why
    return "; ".join(filter(None, (about, words.link_troubles(host))))


def _ranks(host: HostView) -> str:
    if not host.ranks:
        return ""
    first, last = host.ranks[0], host.ranks[-1]
    return str(first) if first == last else f"{first}-{last}"


def _step(host: HostView) -> str:
    steps = [worker.step for worker in host.workers if worker.step >= 0]
    return str(min(steps)) if steps else ""


def _pace(host: HostView) -> str:
    slowest = max((worker.last_step_s for worker in host.workers), default=0.0)
    return f"{slowest:.3g}" if slowest > 0 else ""


def _cpu(host: HostView) -> str:
    return f"{100 * host.seen.cpu_load:.0f}%" if host.seen is not None else ""


def _memory(host: HostView) -> str:
    seen = host.seen
    return f"{100 * (1 - seen.memory_free_bytes / seen.memory_bytes):.0f}%" if seen and seen.memory_bytes else ""


def _gpu(host: HostView) -> str:
    known = [one.utilisation for one in (host.seen.accelerators if host.seen else ()) if one.utilisation >= 0]
    return f"{100 * sum(known) / len(known):.0f}%" if known else ""
