"""The live view of a job: lines that scroll above a panel on a terminal, lines only elsewhere.

The lower end of the live view: the job, its hosts and the last events, in as many lines as there are.

A job followed at a terminal, or into a file.

On a terminal lines scroll by above a panel; elsewhere there are lines only. What ranks write can neither control the
terminal nor be taken for markup. A terminal that takes nothing (Ctrl-S, a line that hangs) holds up the view only: all
is drawn by a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from phalanx.core.units import duration
from phalanx.run.incidents.incident_pages import incidents_folder, page_of
from phalanx.run.logs.log_lines import cut
from phalanx.run.reports import terminal_text
from phalanx.run.reports.recent_events import HostView, Item, Overview, Source, Told, Wrote
from phalanx.run.reports.terminal_text import Ranks

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
        first = terminal_text.said(told).partition("\n")[0]
        return _cut(f" {terminal_text.clock(told.unix_s)} {first}", terminal_text.COLOURS[told.level] or "dim", width)


def _title(now: Overview) -> RenderableType:
    style = "bold green" if now.phase == "running" and not now.incident else "bold yellow"
    attempt = f" · attempt {now.attempt}" if now.attempt else ""
    advice = " · advises only" if now.advise_only else ""
    text = Text.assemble(terminal_text.harmless(now.job), " · ", (now.phase, style), f"{attempt}{advice}")
    text.append(f" · {duration(now.age_s)}" if now.age_s else "")
    return Rule(text, align="left", style="dim")


def _job(now: Overview, width: int) -> list[Text]:
    parts = [terminal_text.progress(now) or f"no step yet, {now.phase} for {duration(now.phase_s)}"]
    if now.step_age_s >= 0:
        is_late = now.limit_s >= 0 and now.quiet_s > now.limit_s / 4
        limit = f" (limit {terminal_text.age(now.limit_s)})" if is_late else ""
        moved = f", movement {terminal_text.age(now.quiet_s)} ago" if terminal_text.moves_otherwise(now) else ""
        parts.append(f"last {terminal_text.age(now.step_age_s)} ago{moved}{limit}")
    parts.append("1 recovery" if now.recoveries == 1 else f"{now.recoveries} recoveries")
    spares = now.hosts_by_state.get("spare", sum(host.state == "spare" for host in now.hosts))
    parts.append(f"{spares} spare{'' if spares == 1 else 's'} ready")
    lines = [_cut(" " + " · ".join(parts), "", width)]
    if now.incident is not None:
        why = terminal_text.harmless(now.incident.why)
        text = f" incident {now.incident.number}, open for {terminal_text.age(now.incident.age_s)}: {why}"
        lines.append(_cut(text, "yellow", width))
    return lines


def _cut(text: str, style: str, width: int) -> Text:
    line = Text(text, style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(max(width - 1, 1), overflow="ellipsis")
    return line


# Hosts


def chosen(now: Overview, rows: int) -> list[HostView]:
    """Those that are shown in so many lines: first those that need to be looked at, then by their place."""
    order = sorted(now.hosts, key=lambda host: (terminal_text.is_calm(host), host.place < 0, host.place, host.name))
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
        lines.append(_cut(f" … of {total:,} hosts: {terminal_text.counted(now)}", "dim", width))
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
    names = [terminal_text.harmless(host.name) for host in hosts]
    return [
        _Column("host", [cut(name, _NAME_CHARS) for name in names]),
        _Column("state", [host.state for host in hosts]),
        _Column("ranks", [_ranks(host) for host in hosts], 0, True),
        _Column("step", [_step(host) for host in hosts], 1, True),
        _Column("s/step", [_pace(host) for host in hosts], 2, True),
        _Column("heard", [terminal_text.age(host.silent_s) for host in hosts], 1, True),
        _Column("cpu", [_cpu(host) for host in hosts], 3, True),
        _Column("mem", [_memory(host) for host in hosts], 4, True),
        _Column("gpu", [_gpu(host) for host in hosts] if has_gpus else [], 3, True),
        _Column("doing", [terminal_text.harmless(doing(host)) for host in hosts]),
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
    return "; ".join(filter(None, (about, terminal_text.link_troubles(host))))


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


_log = logging.getLogger(__name__)

REFRESH_S = 0.25
STATUS_S = 30.0
"""Where there is no terminal, the job's state is a line so often at most, and only when it is another."""

_MOST_WAITING = 100_000
_AT_ONCE = 500
"""Lines that are drawn together: with each the panel below them is drawn anew."""

_LAST_LOOK_S = 1.5
"""A terminal that has taken nothing for so long takes no more."""

LAST_LINES_S = 30.0
"""In the end, to show all that is still to be shown."""


async def show(source: Source, console: Console, *, ranks: Ranks = "0", folder: Path | None = None) -> None:
    """Follow a job until it has ended, or its driver cannot be reached.

    Args:
        source: the job, here or elsewhere.
        console: where to; what it is decides how it looks.
        ranks: whose lines are shown.
        folder: of the run, to say what to read in the end; None: it is not on this machine.
    """
    within_s = _LAST_LOOK_S  # of somebody who does not want to see more
    is_live = console.is_terminal and not console.is_dumb_terminal
    view: _Plain = _Live(console, ranks) if is_live else _Plain(console, ranks)
    reading = asyncio.create_task(_read(source, view))
    try:
        while not reading.done():
            await _look(source, view)
            await asyncio.wait([reading], timeout=REFRESH_S)
        await reading  # what is wrong with it is said
        await _look(source, view)
        within_s = LAST_LINES_S
    finally:
        reading.cancel()
        view.end(folder)
        await asyncio.to_thread(view.painter.close, within_s, _LAST_LOOK_S)


async def _look(source: Source, view: _Plain) -> None:
    try:
        view.see(await source.overview())
    except OSError as error:
        view.trouble(f"the driver cannot be reached: {error}")


async def _read(source: Source, view: _Plain) -> None:
    try:
        async for item in source.follow(0):
            view.take(item)
    except OSError as error:
        view.trouble(f"the driver cannot be reached: {error}")


_Line = Text | Told | Wrote
"""What is printed; an item becomes text when it is its turn, for very many may wait."""


class _Painter:
    """Does what writes to the terminal, in order, in a thread; with very much of it what may be left out is.

    Args:
        print_lines: prints lines together.
    """

    def __init__(self, print_lines: Callable[[list[_Line]], None]) -> None:
        self._print_lines = print_lines
        self._waiting: queue.SimpleQueue[Callable[[], None] | _Line | None] = queue.SimpleQueue()
        self._drawn = 0
        self._thread = threading.Thread(target=self._work, name="view", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        """Whether more waits than can be drawn."""
        return self._waiting.qsize() >= _MOST_WAITING

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return self._waiting.empty()

    def put(self, paint: Callable[[], None] | _Line) -> None:
        """Have it drawn, or a line printed."""
        self._waiting.put(paint)

    def close(self, within_s: float, stuck_s: float) -> None:
        """Draw what waits, for so long at most, or until the terminal has taken nothing for `stuck_s`."""
        self._waiting.put(None)
        until_s = time.monotonic() + within_s
        while self._thread.is_alive() and time.monotonic() < until_s:
            drawn = self._drawn
            self._thread.join(stuck_s)
            if self._drawn == drawn:
                return

    def _work(self) -> None:
        lines: list[_Line] = []
        while True:
            paint = self._waiting.get()
            if isinstance(paint, _Line):
                lines.append(paint)
                if len(lines) < _AT_ONCE and not self._waiting.empty():
                    continue
            if lines:
                self._draw(partial(self._print_lines, lines))
                lines = []
            if paint is None:
                return
            if not isinstance(paint, _Line):
                self._draw(paint)

    def _draw(self, paint: Callable[[], None]) -> None:
        try:
            paint()
        except (OSError, ValueError):  # the terminal is gone: the job is not
            pass
        except Exception:
            _log.exception("something cannot be shown")
        self._drawn += 1


class _Plain:
    """Lines only.

    Attributes:
        painter: that draws them.
    """

    def __init__(self, console: Console, ranks: Ranks) -> None:
        self.painter = _Painter(self._print_lines)
        self._console, self._ranks = console, ranks
        self._now: Overview | None = None
        self._trouble = ""
        self._left_out = 0
        self._status, self._status_s = "", time.monotonic()

    def take(self, item: Item) -> None:
        """Something was said or written."""
        if not terminal_text.is_shown(item, self._ranks):
            return
        if self.painter.is_behind:
            self._left_out += 1
            return
        if self._left_out:
            self._print(Text(f"({self._left_out} lines are not shown: the terminal is slow)", style="dim"))
            self._left_out = 0
        self._print(item)

    def see(self, now: Overview) -> None:
        """The job now."""
        self._now, self._trouble = now, ""
        due = time.monotonic() - self._status_s >= STATUS_S
        if due and now.status is None and (text := terminal_text.status(now)) != self._status:
            self._status, self._status_s = text, time.monotonic()
            self._print(Text.assemble((f"{terminal_text.clock(now.unix_s)} ", "dim"), terminal_text.harmless(text)))

    def trouble(self, text: str) -> None:
        """Nothing newer is known."""
        if text != self._trouble:
            self._trouble = text
            self._print(Text(terminal_text.harmless(text), style="bold red"))

    def end(self, folder: Path | None) -> None:
        """Say how it ended, and what to read."""
        if self._now is None:
            return
        colour = "bold green" if self._now.status == 0 else "bold red" if self._now.status else "bold yellow"
        self._print(Text(terminal_text.ending(self._now), style=colour))
        for hint in hints(self._now, folder):
            self._print(Text(hint))

    def _print(self, line: _Line) -> None:
        self.painter.put(line)

    def _print_lines(self, lines: list[_Line]) -> None:
        self._console.print(_texts(lines), soft_wrap=True, highlight=False)


class _Live(_Plain):
    """Lines above a panel."""

    def __init__(self, console: Console, ranks: Ranks) -> None:
        super().__init__(console, ranks)
        self._events: deque[Told] = deque(maxlen=5)
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self.painter.put(self._live.start)

    def take(self, item: Item) -> None:
        if isinstance(item, Told):
            self._events.append(item)
        super().take(item)

    def see(self, now: Overview) -> None:
        self._now, self._trouble = now, ""
        self._draw()

    def trouble(self, text: str) -> None:
        self._trouble = text
        self._draw()

    def end(self, folder: Path | None) -> None:
        self.painter.put(self._live.stop)
        super().end(folder)

    def _draw(self) -> None:
        if self._now is not None and self.painter.is_idle:
            panel = Panel(self._now, tuple(self._events), terminal_text.harmless(self._trouble))
            self.painter.put(lambda: self._live.update(panel, refresh=True))

    def _print_lines(self, lines: list[_Line]) -> None:
        self._console.print(_texts(lines), highlight=False)


def _texts(lines: list[_Line]) -> Group:
    return Group(*(line if isinstance(line, Text) else terminal_text.line(line) for line in lines))


def hints(now: Overview, folder: Path | None) -> list[str]:
    """What to read about how it ended."""
    if folder is None:
        return []
    hints = []
    if now.incidents:
        page = page_of(folder, now.incidents)
        more = f", all {now.incidents} in {incidents_folder(folder)}" if now.incidents > 1 else ""
        hints.append(f"incident: {page}{more}")
    if now.status and (folder / "logs").is_dir():
        hints.append(f"logs: {folder / 'logs'}")
    return hints
