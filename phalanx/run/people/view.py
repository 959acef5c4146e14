"""A job followed at a terminal, or into a file. Torch-free.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from phalanx.run.incidents.store import incidents_folder, page_of
from phalanx.run.people import words
from phalanx.run.people.hub import Item, Told, Wrote
from phalanx.run.people.overview import Overview
from phalanx.run.people.panel import Panel
from phalanx.run.people.source import Source
from phalanx.run.people.words import Ranks

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
        if not words.is_shown(item, self._ranks):
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
        if due and now.status is None and (text := words.status(now)) != self._status:
            self._status, self._status_s = text, time.monotonic()
            self._print(Text.assemble((f"{words.clock(now.unix_s)} ", "dim"), words.harmless(text)))

    def trouble(self, text: str) -> None:
        """Nothing newer is known."""
        if text != self._trouble:
            self._trouble = text
            self._print(Text(words.harmless(text), style="bold red"))

    def end(self, folder: Path | None) -> None:
        """Say how it ended, and what to read."""
        if self._now is None:
            return
        colour = "bold green" if self._now.status == 0 else "bold red" if self._now.status else "bold yellow"
        self._print(Text(words.ending(self._now), style=colour))
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
            panel = Panel(self._now, tuple(self._events), words.harmless(self._trouble))
            self.painter.put(lambda: self._live.update(panel, refresh=True))

    def _print_lines(self, lines: list[_Line]) -> None:
        self._console.print(_texts(lines), highlight=False)


def _texts(lines: list[_Line]) -> Group:
    return Group(*(line if isinstance(line, Text) else words.line(line) for line in lines))


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
