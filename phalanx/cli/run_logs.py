"""`phalanx run logs`. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.text import Text

from phalanx.cli.run_find import Found, find_job, folder_option, in_loop, json_option
from phalanx.run.api.bodies import LogLine, line_body
from phalanx.run.api.client import Client
from phalanx.run.card import life, read_card
from phalanx.run.logs.files import Follower, last_lines, rank_folders
from phalanx.run.logs.lines import strip_ansi

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_POLL_S = 0.2


@click.command()
@click.argument("rank", type=click.IntRange(0), required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on as they write, until the job ends.")
@click.option("-n", "--lines", "last", type=click.IntRange(0, 10_000), default=40, show_default=True, help="How many.")
@folder_option
@json_option
def logs(rank: int | None, follow: bool, last: int, folder: Path | None, as_json: bool) -> None:
    """What RANK has written, or all ranks together.

    Read from the log files where they can be reached from here, else asked of the driver.
    """
    found = find_job(folder)
    if found.is_over and follow:
        click.echo("the job is over: there is nothing to follow", err=True)
    printer = _Printer(as_json)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        in_loop(_print(found, rank, last, follow and not found.is_over, printer))


async def _print(found: Found, rank: int | None, last: int, follow: bool, printer: _Printer) -> None:
    folder = found.card.log_folder(found.folder)
    if rank_folders(folder, rank) or found.life != "lives":
        if not follow:
            printer.lines(map(line_body, last_lines(folder, rank, last)))
            return
        async for lines in _follow_files(found, folder, rank, last):
            printer.lines(lines)
        return
    async with Client(found.folder) as client:
        if not follow:
            printer.lines(await client.logs(rank, last))
            return
        async for line in client.follow_logs(rank, last):
            printer.lines([line])


async def _follow_files(found: Found, folder: Path, rank: int | None, last: int) -> AsyncIterator[list[LogLine]]:
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
                click.echo(found.say_dead(), err=True)
                return
            await asyncio.sleep(_POLL_S)
    finally:
        follower.close()


class _Printer:
    """Lines of ranks, each rank in its colour; nothing that a rank writes moves the terminal."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console(soft_wrap=True, highlight=False)

    def lines(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            if self._as_json:
                click.echo(msgspec.json.encode(line))
            else:
                self._console.print(_shown(line))


def _shown(line: LogLine) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(line.unix_s)) if line.unix_s else "--:--:--"
    text = Text(f"{clock} ", style="dim")
    text.append(f"[rank {line.rank}] ", style=_COLOURS[line.rank % len(_COLOURS)])
    return text.append(strip_ansi(line.text), style="default")
