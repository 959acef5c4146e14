"""A job followed at a terminal, or into a file.

On a terminal lines scroll by above a panel with the job, its hosts and the last events; elsewhere there are lines only.
What ranks write can neither control the terminal nor be taken for markup. A terminal that takes nothing (Ctrl-S, a line
that hangs) holds up the view only: all is drawn by a thread of its own.
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

_MOST_SHARE = 0.5  # of the terminal's lines; the rest is for lines that scroll by

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
    """The job at the lower end of the terminal, with why nothing newer is known, and the last of `events`."""

    def __init__(self, now: Overview, events: Sequence[Told] = (), trouble: str = "") -> None:
        self._now, self._events, self._trouble = now, events, trouble

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.laid_out(console.width, console.height)

    def laid_out(self, width: int, height: int) -> RenderableType:
        """For a terminal of so many columns and lines; of these one at least stays free."""
        now = self._now
        room = max(min(height - 1, max(round(height * _MOST_SHARE), 10)), 1)
        style = "bold green" if now.phase == "running" and not now.incident else "bold yellow"
        attempt = f" · attempt {now.attempt}" if now.attempt else ""
        advice = " · advises only" if now.advise_only else ""
        title = Text.assemble(terminal_text.harmless(now.job), " · ", (now.phase, style), f"{attempt}{advice}")
        title.append(f" · {duration(now.age_s)}" if now.age_s else "")
        heads: list[RenderableType] = [Rule(title, align="left", style="dim"), *_job_lines(now, width)]
        if self._trouble:
            heads.append(_cut(f" {self._trouble}", "bold red", width))
        heads = heads[:room]
        events = []
        if room - len(heads) > 8:
            for event in self._events[-_EVENTS:]:
                first = terminal_text.event_text(event).partition("\n")[0]
                colour = terminal_text.COLOURS[event.level] or "dim"
                events.append(_cut(f" {terminal_text.clock(event.unix_s)} {first}", colour, width))
        rows = room - len(heads) - len(events) - 1
        table = [_hosts_table(now, width, rows)] if rows > 0 and now.hosts else []
        return Group(*heads, *table, *events)


def _job_lines(now: Overview, width: int) -> list[Text]:
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


def _hosts_table(now: Overview, width: int, rows: int) -> RenderableType:
    """Hosts under heads, in so many lines besides the heads at most: first those that need to be looked at."""
    order = sorted(now.hosts, key=terminal_text.host_order)
    total = max(sum(now.hosts_by_state.values()), len(order))
    shown = order if total <= rows else order[: max(rows - 1, 0)]
    columns = _fitting(_columns(now, shown), width)
    lines = [_row([column.head for column in columns], columns, width, "dim")]
    for number, host in enumerate(shown):
        row = _row([column.cells[number] for column in columns], columns, width)
        row.highlight_words([f" {host.state} "], _STYLES.get(host.state, ""))
        lines.append(row)
    if len(shown) < total:
        lines.append(_cut(f" … of {total:,} hosts: {terminal_text.counted(now)}", "dim", width))
    return Group(*lines)


@dataclass(frozen=True)
class _Column:
    """A head, and what stands under it for each host; of columns without room, those of the highest rank go first."""

    head: str
    cells: list[str]
    rank: int = 0
    is_number: bool = False

    @property
    def width(self) -> int:
        return max(cell_len(text) for text in [self.head, *self.cells])


_HEADS = (
    ("host", 0, False),
    ("state", 0, False),
    ("ranks", 0, True),
    ("step", 1, True),
    ("s/step", 2, True),
    ("heard", 1, True),
    ("cpu", 3, True),
    ("mem", 4, True),
    ("gpu", 3, True),
    ("doing", 0, False),
)


def _columns(now: Overview, hosts: Sequence[HostView]) -> list[_Column]:
    rows = []
    for host in hosts:
        seen, (step, step_s, gpu) = host.seen, terminal_text.host_figures(host)
        ranks = f"{host.ranks[0]}-{host.ranks[-1]}" if len(host.ranks) > 1 else "".join(map(str, host.ranks))
        memory = 1 - seen.memory_free_bytes / seen.memory_bytes if seen is not None and seen.memory_bytes else None
        rows.append(
            [
                cut(terminal_text.harmless(host.name), _NAME_CHARS),
                host.state,
                ranks,
                "" if step is None else str(step),
                "" if step_s is None else f"{step_s:.3g}",
                terminal_text.age(host.silent_s),
                f"{100 * seen.cpu_load:.0f}%" if seen is not None else "",
                "" if memory is None else f"{100 * memory:.0f}%",
                "" if gpu is None else f"{100 * gpu:.0f}%",
                terminal_text.harmless(terminal_text.doing(host)),
            ]
        )
    if not rows:
        return []
    has_gpus = any(host.seen is not None and host.seen.accelerators for host in now.hosts)
    columns = [_Column(head, [row[n] for row in rows], rank, right) for n, (head, rank, right) in enumerate(_HEADS)]
    return [column for column in columns if column.head != "gpu" or has_gpus]


def _fitting(columns: list[_Column], width: int) -> list[_Column]:
    """Without those for which there is no room; the last one is cut, but not to nothing."""
    while True:
        taken = sum(column.width + 1 for column in columns[:-1])
        least = max((column.rank for column in columns), default=0)
        if width - taken > _LEAST_DOING or not least:
            return columns
        last = max(number for number, column in enumerate(columns) if column.rank == least)
        columns = columns[:last] + columns[last + 1 :]


def _row(texts: Sequence[str], columns: Sequence[_Column], width: int, style: str = "") -> Text:
    cells = [
        " " * (column.width - cell_len(text)) + text if column.is_number else set_cell_size(text, column.width)
        for text, column in zip(texts, columns, strict=True)
    ]
    return _cut(" " + " ".join(cells).rstrip(), style, width)


_log = logging.getLogger(__name__)

REFRESH_S = 0.25
STATUS_S = 30.0  # without a terminal, the job's state is a line so often at most, and only when it is another

_SHOWN_DETECTIONS = 10  # what judges have found, when a job has ended

_MOST_WAITING = 100_000
_AT_ONCE = 500  # lines that are drawn together: with each the panel below them is drawn anew
_STUCK_S = 1.5  # a terminal that has taken nothing for so long takes no more
LAST_LINES_S = 30.0  # in the end, to show all that is still to be shown


async def show(source: Source, console: Console, *, ranks: Ranks = "0", folder: Path | None = None) -> None:
    """Follow a job until it has ended, or its driver cannot be reached.

    Lines of `ranks` are shown; in the end, what to read in the run's `folder`; None: it is not on this machine.
    """
    within_s = _STUCK_S  # after an interrupt
    is_live = console.is_terminal and not console.is_dumb_terminal
    view: _Plain = _Live(console, ranks) if is_live else _Plain(console, ranks)
    reading = asyncio.create_task(_read(source, view))
    try:
        while not reading.done():
            await _update(source, view)
            await asyncio.wait([reading], timeout=REFRESH_S)
        await reading  # raises what is wrong with it
        await _update(source, view)
        within_s = LAST_LINES_S
    finally:
        reading.cancel()
        view.end(folder)
        await asyncio.to_thread(view.painter.close, within_s, _STUCK_S)


async def _update(source: Source, view: _Plain) -> None:
    try:
        view.update(await source.overview())
    except OSError as error:
        view.trouble(f"the driver cannot be reached: {error}")


async def _read(source: Source, view: _Plain) -> None:
    try:
        async for item in source.follow(0):
            view.add(item)
    except OSError as error:
        view.trouble(f"the driver cannot be reached: {error}")


_Line = Text | Told | Wrote  # what is printed; an item becomes text when it is its turn, for very many may wait


class _Painter:
    """Does what writes to the terminal, in order, in a thread; of very much, it leaves out what may be left out."""

    def __init__(self, print_lines: Callable[[list[_Line]], None]) -> None:
        self._print_lines = print_lines
        self._waiting: queue.SimpleQueue[Callable[[], None] | _Line | None] = queue.SimpleQueue()
        self._drawn = 0
        self._thread = threading.Thread(target=self._work, name="view", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        return self._waiting.qsize() >= _MOST_WAITING

    @property
    def is_idle(self) -> bool:
        return self._waiting.empty()

    def put(self, paint: Callable[[], None] | _Line) -> None:
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
    """Lines only."""

    def __init__(self, console: Console, ranks: Ranks) -> None:
        self.painter = _Painter(self._print_lines)
        self._console, self._ranks = console, ranks
        self._now: Overview | None = None
        self._trouble = ""
        self._left_out = 0
        self._status, self._status_s = "", time.monotonic()

    def add(self, item: Item) -> None:
        if not terminal_text.is_shown(item, self._ranks):
            return
        if self.painter.is_behind:
            self._left_out += 1
            return
        if self._left_out:
            self.painter.put(Text(f"({self._left_out} lines are not shown: the terminal is slow)", style="dim"))
            self._left_out = 0
        self.painter.put(item)

    def update(self, now: Overview) -> None:
        self._now, self._trouble = now, ""
        due = time.monotonic() - self._status_s >= STATUS_S
        if due and now.status is None and (text := terminal_text.status(now)) != self._status:
            self._status, self._status_s = text, time.monotonic()
            clock = (f"{terminal_text.clock(now.unix_s)} ", "dim")
            self.painter.put(Text.assemble(clock, terminal_text.harmless(text)))

    def trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            self.painter.put(Text(terminal_text.harmless(text), style="bold red"))

    def end(self, folder: Path | None) -> None:
        """Say what judges have found, then how it ended, and what to read."""
        if self._now is None:
            return
        colour = "bold green" if self._now.status == 0 else "bold red" if self._now.status else "bold yellow"
        for line in terminal_text.found_by_judges(self._now, _SHOWN_DETECTIONS):
            self.painter.put(Text(line, style="yellow"))
        # Last of all, whatever was found and when: people and scripts look for the end there.
        self.painter.put(Text(terminal_text.ending(self._now), style=colour))
        if folder is None:
            return
        if self._now.incidents:
            page = page_of(folder, self._now.incidents)
            more = f", all {self._now.incidents} in {incidents_folder(folder)}" if self._now.incidents > 1 else ""
            self.painter.put(Text(f"incident: {page}{more}"))
        if self._now.status and (folder / "logs").is_dir():
            self.painter.put(Text(f"logs: {folder / 'logs'}"))

    def _print_lines(self, lines: list[_Line]) -> None:
        self._console.print(_texts(lines), soft_wrap=True, highlight=False)


class _Live(_Plain):
    """Lines above a panel."""

    def __init__(self, console: Console, ranks: Ranks) -> None:
        super().__init__(console, ranks)
        self._events: deque[Told] = deque(maxlen=5)
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self.painter.put(self._live.start)

    def add(self, item: Item) -> None:
        if isinstance(item, Told):
            self._events.append(item)
        super().add(item)

    def update(self, now: Overview) -> None:
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
