"""`phalanx run status`, `logs`, `incidents` and `attach`: looking at a job, which is left alone.

What the driver knows is asked of it while it answers; of a job that is over, or whose driver is dead, the run folder
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import click
import msgspec
from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.cli.run_orders import (
    Found,
    ask_or_read,
    dumped,
    find_job,
    folder_option,
    in_loop,
    is_at_terminal,
    json_option,
)
from phalanx.cli.tables import make_console, make_table
from phalanx.core.units import duration
from phalanx.run.api.bodies import IncidentLine, LogLine, line_body, status_body
from phalanx.run.api.client import Client
from phalanx.run.clock import read_clocks
from phalanx.run.driver.job_status import overview, remember
from phalanx.run.incidents.incident_pages import incidents_folder, listed, load, to_markdown
from phalanx.run.incidents.report import Incident
from phalanx.run.job_folder import life, read_card
from phalanx.run.logs.log_files import Follower, last_lines, rank_folders
from phalanx.run.logs.log_lines import strip_ansi
from phalanx.run.reports.live_view import show
from phalanx.run.reports.recent_events import HostView, Item, Overview
from phalanx.run.reports.terminal_text import Ranks, harmless, link_troubles, moves_otherwise

_STYLES = {
    "active": "green",
    "spare": "cyan",
    "unknown": "yellow",
    "suspect": "red",
    "draining": "yellow",
    "joining": "blue",
    "evicted": "red",
    "gone": "dim",
}

DEAD = 3
"""Exit status of `phalanx run status` where the job has not ended and its driver is dead."""


@click.command()
@folder_option
@json_option
@click.option(
    "--hosts", "most", type=click.IntRange(0, 1000), default=40, help="So many hosts, those in trouble first."
)
def status(folder: Path | None, as_json: bool, most: int) -> None:
    """How a job is: its attempt, steps and hosts. Works after its end too, from its journal."""
    found = find_job(folder)
    now, words = ask_or_read(found, lambda client: _from_driver(client, most), lambda found: _from_journal(found, most))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(status_body(now)), indent=1) + b"\n")
        click.echo(words, err=True, nl=bool(words))
    else:
        show_status(now, make_console(), words)
    sys.exit(DEAD if words else 0)


async def _from_driver(client: Client, most: int) -> tuple[Overview, str]:
    return await client.status(most), ""


def _from_journal(found: Found, most: int) -> tuple[Overview, str]:
    """What was written down of a job whose driver does not answer any more, and what to say of that."""
    past = remember(found.folder, found.card)
    if past is None:
        return _nothing(found), found.say_dead()
    seen = overview(past.known, read_clocks(), most)
    if past.is_over:
        return seen, ""
    return seen, found.say_dead(max(time.time() - past.last_unix_s, 0.0))


def _nothing(found: Found) -> Overview:
    return Overview(
        job=found.card.job,
        unix_s=time.time(),
        phase="waiting",
        phase_s=0.0,
        attempt=0,
        world_size=0,
        hosts_wanted=0,
        workers_per_host=0,
        hosts=(),
    )


def show_status(now: Overview, console: Console, words: str = "") -> None:
    """Print a job.

    Args:
        words: what else is to be said of it, such as that its driver is dead.
    """
    for line in _head(now, words):
        console.print(line)
    if now.hosts:
        console.print()
        console.print(_table(now))
    hidden = sum(now.hosts_by_state.values()) - len(now.hosts)
    if hidden > 0:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(now.hosts_by_state.items()))
        console.print(f"[dim]and {hidden} more hosts; in all {counts}[/dim]")


def _head(now: Overview, words: str) -> Iterator[RenderableType]:
    yield Text.from_markup(f"[bold]{escape(now.job)}[/bold]  {_phase(now)}")
    if words:
        yield Text(words, style="bold yellow")
    facts = [f"attempt {now.attempt}", f"{now.world_size} ranks"] if now.attempt else []
    if now.step >= 0:
        facts.append(f"step {now.step}")
    if now.steps_per_s >= 0:
        facts.append(f"{now.steps_per_s:.3g} steps/s")
    if now.step_age_s >= 0:
        limit = f" (looked into after {duration(now.limit_s)})" if now.limit_s >= 0 else ""
        moved = f", last movement {duration(now.quiet_s)} ago" if moves_otherwise(now) else ""
        facts.append(f"last step {duration(now.step_age_s)} ago{moved}{limit}")
    facts += [
        f"{_count(now.recoveries, 'recovery', 'recoveries')}",
        f"{_count(now.incidents, 'incident', 'incidents')}",
    ]
    yield Text(", ".join(facts))
    if now.checkpoints:
        yield Text(harmless(now.checkpoints), style="yellow")
    if now.incident is not None:
        why = f": {now.incident.why}" if now.incident.why else ""
        yield Text(f"incident {now.incident.number}, for {duration(now.incident.age_s)}{why}", style="yellow")
    if now.advise_only:
        yield Text("its policy only advises", style="yellow")


def _phase(now: Overview) -> str:
    if now.status is not None:
        colour = "green" if now.status == 0 else "red"
        return f"[{colour}]ended with status {now.status}[/]: {escape(now.ended)}"
    colour = "green" if now.phase == "running" else "yellow"
    return f"[{colour}]{now.phase}[/] for {duration(now.phase_s)}"


def _table(now: Overview) -> Table:
    table = make_table("host", "state", "ranks", "step", "heard", "notes", right=(3, 4), whole=(0,))
    for host in sorted(now.hosts, key=lambda host: (host.place < 0, host.place, host.name)):
        table.add_row(
            escape(host.name),
            f"[{_STYLES.get(host.state, 'default')}]{host.state}[/]",
            _ranks(host.ranks),
            _step(host),
            f"{duration(host.silent_s)} ago" if host.silent_s >= 0 else "–",
            escape(_notes(host)),
        )
    return table


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "–"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def _step(host: HostView) -> str:
    steps = [worker.step for worker in host.workers if worker.step >= 0]
    if not steps:
        return "–"
    return str(steps[0]) if min(steps) == max(steps) else f"{min(steps)}–{max(steps)}"


def _notes(host: HostView) -> str:
    phases = sorted({worker.phase for worker in host.workers if worker.phase not in ("", "step")})
    parts = ["is being checked"] if host.is_checking else []
    return harmless("; ".join([*parts, *phases, *filter(None, (host.why, host.leaves, link_troubles(host)))]))


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


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


_INCIDENT_STYLES = {"recovered": "green", "open": "yellow", "gave up": "red"}


@click.command()
@click.argument("number", type=click.IntRange(1), required=False)
@folder_option
@json_option
def incidents(number: int | None, folder: Path | None, as_json: bool) -> None:
    """What went wrong and what was done, in a list; with NUMBER, the page of one."""
    found = find_job(folder)
    if number is not None:
        incident = _one(found, number)
        if as_json:
            click.echo(dumped(incident))
        elif is_at_terminal():
            make_console().print(Markdown(to_markdown(incident)))
        else:
            click.echo(to_markdown(incident))
        return
    lines = _all(found)
    if as_json:
        click.echo(dumped(lines))
    else:
        _show(lines)


def _show(lines: list[IncidentLine]) -> None:
    if not lines:
        click.echo("nothing went wrong so far")
        return
    table = make_table("#", "when", "attempt", "result", "took", "lost steps", "what", right=(0, 2, 4, 5))
    for line in lines:
        table.add_row(
            str(line.number),
            time.strftime("%m-%d %H:%M:%S", time.localtime(line.began_unix_s)),
            str(line.attempt),
            f"[{_INCIDENT_STYLES.get(line.result, 'default')}]{line.result}[/]",
            "–" if line.seconds is None else duration(line.seconds),
            str(line.lost_steps),
            escape(line.title),
        )
    make_console().print(table)


def _are_here(found: Found) -> bool:
    return found.life != "lives" or incidents_folder(found.folder).is_dir()


def _one(found: Found, number: int) -> Incident:
    if _are_here(found):
        return load(found.folder, number)
    return ask_or_read(found, lambda client: client.incident(number), lambda found: load(found.folder, number))


def _all(found: Found) -> list[IncidentLine]:
    if _are_here(found):
        return _written(found)
    return ask_or_read(found, lambda client: client.incidents(), _written)


def _written(found: Found) -> list[IncidentLine]:
    names = IncidentLine.__struct_fields__
    return [IncidentLine(*(getattr(one, name) for name in names)) for one in listed(found.folder)]


_AGAIN_S = 0.5
_GIVES_UP_S = 90.0


@click.command()
@folder_option
@click.option("--show", "ranks", type=click.Choice(get_args(Ranks)), default="0", help="Whose lines are shown.")
def attach(folder: Path | None, ranks: Ranks) -> None:
    """Watch a job as where it was started; Ctrl-C leaves it alone. Ends with the job's exit status."""
    found = find_job(folder)
    console = Console(stderr=True)
    if found.life == "lives" and not found.is_over:
        console.print(f"job {found.card.job} in {found.shown}; Ctrl-C leaves it alone", highlight=False)
        try:
            asyncio.run(show(Attached(found.folder), console, ranks=ranks, folder=found.shown))
        except KeyboardInterrupt:
            console.print("it goes on without you", highlight=False)
            return
    _leave(find_job(found.shown))


def _leave(found: Found) -> None:
    if found.card.status is not None:
        click.echo(f"the job has ended with status {found.card.status}: {found.card.ended}", err=True)
        sys.exit(found.card.status)
    click.echo(found.say_dead(), err=True)
    sys.exit(DEAD)


@dataclass
class Attached:
    """A job whose driver may be started again meanwhile; implements `phalanx.run.reports.recent_events.Source`.

    Args:
        folder: of the run.
        gives_up_s: so long another driver is waited for.
    """

    folder: Path
    gives_up_s: float = _GIVES_UP_S
    _client: Client | None = field(default=None, init=False)

    async def overview(self) -> Overview:
        """See `Source`."""
        if self._client is None:
            self._client = Client(self.folder)
        try:
            return await self._client.overview()
        except ConnectionError:
            await self._client.close()  # the next one may listen elsewhere
            raise

    async def follow(self, number: int) -> AsyncIterator[Item]:
        """What is said, by one driver after another, until the job has ended or no driver comes any more."""
        silent_since_s = time.monotonic()
        driver = self._driver()
        while True:
            with contextlib.suppress(ConnectionError):
                async with Client(self.folder) as client:
                    async for item in client.follow(number):
                        number, silent_since_s = item.number, time.monotonic()
                        yield item
            card = read_card(self.folder)
            if card is None or card.status is not None or time.monotonic() - silent_since_s > self.gives_up_s:
                return
            await asyncio.sleep(_AGAIN_S)
            if self._driver() != driver:  # another one counts anew
                driver, number, silent_since_s = self._driver(), 0, time.monotonic()

    def _driver(self) -> tuple[int, int]:
        card = read_card(self.folder)
        return (card.pid, card.started_ticks) if card is not None else (0, 0)
