"""What the ranks of a job have written: `phalanx run logs`, and `phalanx logs` of a job.

Read from the log files where they can be reached from here, else asked of the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.text import Text

from phalanx.cli.run_orders import AS_JSON, FOLDER, FoundJob, client_at, find_job, in_loop
from phalanx.cli.targets import Target
from phalanx.run.api.api_client import Client
from phalanx.run.api.bodies import LogLine, line_body
from phalanx.run.job_folder import life, read_card
from phalanx.run.logs.log_files import Follower, last_lines, rank_folders
from phalanx.run.logs.log_lines import strip_ansi
from phalanx.telemetry.run_log_lines import Wanted

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_POLL_S = 0.2
_MOST_LINES = 10_000


@click.command()
@click.argument("rank", type=click.IntRange(0), required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on as they write, until the job ends.")
@click.option("-n", "--lines", "last", type=click.IntRange(0, 10_000), default=40, show_default=True, help="How many.")
@FOLDER
@AS_JSON
def logs(rank: int | None, follow: bool, last: int, folder: Path | None, as_json: bool) -> None:
    """What RANK has written, or all ranks together.

    Read from the log files where they can be reached from here, else asked of the driver.
    """
    found = find_job(folder)
    if found.is_over and follow:
        click.echo("the job is over: there is nothing to follow", err=True)
    console = None if as_json else Console(emoji=False, soft_wrap=True, highlight=False)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        in_loop(_print_logs(found, _Shown(rank, last, follow and not found.is_over, console)))


def print_job_logs(
    target: Target, token_file: Path | None, wanted: Wanted, last: int, *, follow: bool, as_json: bool
) -> None:
    """Print the lines of a job that are wanted: of its folder, or of a driver elsewhere."""
    console = None if as_json else Console(emoji=False, soft_wrap=True, highlight=False)

    def takes(line: LogLine) -> bool:
        is_new = line.unix_s >= wanted.since_unix_s or not line.unix_s
        return is_new and (wanted.pattern is None or wanted.pattern.search(strip_ansi(line.text)) is not None)

    is_all = wanted.pattern is None and not wanted.since_unix_s
    shown = _Shown(wanted.rank, last, follow, console, None if is_all else takes)
    if target.kind == "driver":
        in_loop(_print_of_driver(client_at(target.url, token_file), shown))
        return
    found = find_job(target.folder)
    in_loop(_print_logs(found, replace(shown, follow=follow and not found.is_over)))


@dataclass(frozen=True)
class _Shown:
    """Which lines of a job: of a rank or all, how many, and of these those that are taken; console None: as JSON."""

    rank: int | None
    last: int
    follow: bool
    console: Console | None
    takes: Callable[[LogLine], bool] | None = None

    @property
    def read(self) -> int:
        """How many lines are looked at for `last` that are taken."""
        return self.last if self.takes is None else _MOST_LINES

    def print(self, lines: Iterable[LogLine], *, last: bool = False) -> None:
        """Those that are taken; `last`: of these the last ones."""
        kept = [line for line in lines if self.takes is None or self.takes(line)]
        _print_lines(kept[-self.last :] if last and self.last else [] if last else kept, self.console)


async def _print_logs(found: FoundJob, shown: _Shown) -> None:
    folder = found.card.log_folder(found.folder)
    if not rank_folders(folder, shown.rank) and found.life == "lives":
        await _print_of_driver(Client(found.folder), shown)
        return
    if not shown.follow:
        shown.print(map(line_body, last_lines(folder, shown.rank, shown.read)), last=True)
        return
    async for lines in _follow_files(found, folder, shown.rank, shown.last):
        shown.print(lines)


async def _print_of_driver(client: Client, shown: _Shown) -> None:
    async with client:
        if not shown.follow:
            shown.print(await client.logs(shown.rank, shown.read), last=True)
            return
        async for line in client.follow_logs(shown.rank, shown.last):
            shown.print([line])


async def _follow_files(found: FoundJob, folder: Path, rank: int | None, last: int) -> AsyncIterator[list[LogLine]]:
    """Until the driver has ended; while it is being started again this goes on."""
    follower = Follower(folder, rank, last=last)
    dead_since_s: float | None = None
    try:
        while True:
            if lines := follower.poll():
                yield [line_body(line) for line in lines]
                continue
            card = read_card(found.folder)
            if card is None or card.status is not None:
                return
            is_dead = life(card) == "dead"
            dead_since_s = (dead_since_s or time.monotonic()) if is_dead else None
            if dead_since_s is not None and time.monotonic() - dead_since_s > 60:
                click.echo(found.dead_text(), err=True)
                return
            await asyncio.sleep(_POLL_S)
    finally:
        follower.close()


def _print_lines(lines: Iterable[LogLine], console: Console | None) -> None:
    """Each rank in its colour, nothing that a rank writes moves the terminal; None: as JSON."""
    for line in lines:
        if console is None:
            click.echo(msgspec.json.encode(line))
            continue
        clock = time.strftime("%H:%M:%S", time.localtime(line.unix_s)) if line.unix_s else "--:--:--"
        text = Text(f"{clock} ", style="dim")
        text.append(f"[rank {line.rank}] ", style=_COLOURS[line.rank % len(_COLOURS)])
        console.print(text.append(strip_ansi(line.text), style="default"))
