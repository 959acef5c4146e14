"""`phalanx run status`, `incidents` and `attach`: looking at a job, which is left alone.

What the driver knows is asked of it while it answers; of a job that is over, or whose driver is dead, the run folder
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.cli.run_orders import AS_JSON, FOLDER, FoundJob, ask_or_read, client_at, find_job, in_loop
from phalanx.cli.tables import make_console, make_table
from phalanx.cli.targets import Target
from phalanx.core.units import duration
from phalanx.run.api.api_client import Client
from phalanx.run.api.bodies import IncidentLine, status_body
from phalanx.run.decide.actions import STOPPED
from phalanx.run.driver.job_status import Known, overview, remember
from phalanx.run.incidents.detections_file import read_detections
from phalanx.run.incidents.incident_pages import incidents_folder, listed, load, to_markdown
from phalanx.run.job_folder import read_card
from phalanx.run.reports.live_view import show
from phalanx.run.reports.recent_events import Item, Overview
from phalanx.run.reports.terminal_text import (
    Ranks,
    detection_text,
    found_by_judges,
    harmless,
    link_troubles,
    moves_otherwise,
)

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

_SHOWN_DETECTIONS = 5

DEAD = 3  # exit status of `phalanx run status` where the job has not ended and its driver is dead


@click.command()
@FOLDER
@AS_JSON
@click.option(
    "--hosts", "most", type=click.IntRange(0, 1000), default=40, help="So many hosts, those in trouble first."
)
def status(folder: Path | None, as_json: bool, most: int) -> None:
    """How a job is: its attempt, steps and hosts. Works after its end too, from its journal."""
    now, warning = _status_of(find_job(folder), most)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(status_body(now)), indent=1) + b"\n")
        click.echo(warning, err=True, nl=bool(warning))
    else:
        show_status(now, make_console(), warning)
    sys.exit(DEAD if warning else 0)


def look_at_job(
    target: Target, token_file: Path | None, as_json: bool, most: int = 40
) -> tuple[Group | str, int, bool]:
    """How the job of a folder, or of a driver elsewhere, is: what to print, exit status, whether it goes on."""
    if target.kind == "job":
        now, warning = _status_of(find_job(target.folder), most)
    else:
        now, warning = in_loop(_ask_elsewhere(target.url, token_file, most)), ""
    status = DEAD if warning else {None: 0, 0: 0, STOPPED: STOPPED}.get(now.status, 1)
    goes_on = now.status is None and not warning
    if as_json:
        body = msgspec.json.encode(status_body(now)).decode()
        click.echo(warning, err=True, nl=bool(warning))
        return body, status, goes_on
    return status_view(now, warning), status, goes_on


async def _ask_elsewhere(url: str, token_file: Path | None, most: int) -> Overview:
    async with client_at(url, token_file) as client:
        return await client.status(most)


def _status_of(found: FoundJob, most: int) -> tuple[Overview, str]:
    """How a job is, by its driver while that answers, else by its journal; and a warning."""

    async def from_driver(client: Client) -> tuple[Overview, str]:
        return await client.status(most), ""

    return ask_or_read(found, from_driver, lambda found: _from_journal(found, most))


def _from_journal(found: FoundJob, most: int) -> tuple[Overview, str]:
    """What was written down of a job whose driver does not answer any more, and what to say of that."""
    past = remember(found.folder, found.card)
    if past is None:
        nothing = Overview(
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
        return nothing, found.dead_text()
    seen = overview(Known(past.state, past.addresses), past.clock.read(), most)
    if past.state.phase == "ended":
        return seen, ""
    return seen, found.dead_text(past.clock.read().unix_s - past.last_unix_s)


def show_status(now: Overview, console: Console, warning: str = "") -> None:
    """Print a job, and a warning such as that its driver is dead."""
    console.print(status_view(now, warning))


def status_view(now: Overview, warning: str = "") -> Group:
    """A job as lines and a table of its hosts."""
    lines: list[Any] = []
    if now.status is not None:
        colour = "green" if now.status == 0 else "red"
        phase = f"[{colour}]ended with status {now.status}[/]: {escape(now.ended)}"
    else:
        colour = "green" if now.phase == "running" else "yellow"
        phase = f"[{colour}]{now.phase}[/] for {duration(now.phase_s)}"
    lines.append(Text.from_markup(f"[bold]{escape(now.job)}[/bold]  {phase}"))
    if warning:
        lines.append(Text(warning, style="bold yellow"))
    facts = [f"attempt {now.attempt}", f"{now.world_size} ranks"] if now.attempt else []
    if now.step >= 0:
        facts.append(f"step {now.step}")
    if now.steps_per_s >= 0:
        facts.append(f"{now.steps_per_s:.3g} steps/s")
    if now.step_age_s >= 0:
        limit = f" (looked into after {duration(now.limit_s)})" if now.limit_s >= 0 else ""
        moved = f", last movement {duration(now.quiet_s)} ago" if moves_otherwise(now) else ""
        facts.append(f"last step {duration(now.step_age_s)} ago{moved}{limit}")
    facts.append(f"{now.recoveries} {'recovery' if now.recoveries == 1 else 'recoveries'}")
    facts.append(f"{now.incidents} {'incident' if now.incidents == 1 else 'incidents'}")
    lines.append(Text(", ".join(facts)))
    if now.refused:
        lines.append(Text(harmless(now.refused), style="bold red"))
    if now.checkpoints:
        lines.append(Text(harmless(now.checkpoints), style="yellow"))
    if now.incident is not None:
        why = f": {now.incident.why}" if now.incident.why else ""
        age = duration(now.incident.age_s)
        lines.append(Text(f"incident {now.incident.number}, for {age}{why}", style="yellow"))
    lines += [Text(line, style="yellow") for line in found_by_judges(now, _SHOWN_DETECTIONS)]
    if now.advise_only:
        lines.append(Text("its policy only advises", style="yellow"))
    if now.hosts:
        lines += [Text(""), _hosts_table(now)]
    hidden = sum(now.hosts_by_state.values()) - len(now.hosts)
    if hidden > 0:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(now.hosts_by_state.items()))
        lines.append(Text(f"and {hidden} more hosts; in all {counts}", style="dim"))
    return Group(*lines)


def _hosts_table(now: Overview) -> Table:
    table = make_table("host", "state", "ranks", "step", "heard", "notes", right=(3, 4), whole=(0,))
    for host in sorted(now.hosts, key=lambda host: (host.place < 0, host.place, host.name)):
        steps = sorted({worker.step for worker in host.workers if worker.step >= 0})
        notes = ["is being checked"] if host.is_checking else []
        notes += sorted({worker.phase for worker in host.workers if worker.phase not in ("", "step")})
        notes += filter(None, (host.why, host.leaves, link_troubles(host)))
        table.add_row(
            escape(host.name),
            f"[{_STYLES.get(host.state, 'default')}]{host.state}[/]",
            _first_to_last(host.ranks),
            _first_to_last(steps),
            f"{duration(host.silent_s)} ago" if host.silent_s >= 0 else "–",
            escape(harmless("; ".join(notes))),
        )
    return table


def _first_to_last(numbers: Sequence[int]) -> str:
    if not numbers:
        return "–"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


_INCIDENT_STYLES = {"recovered": "green", "open": "yellow", "gave up": "red"}


@click.command()
@click.argument("number", type=click.IntRange(1), required=False)
@FOLDER
@AS_JSON
def incidents(number: int | None, folder: Path | None, as_json: bool) -> None:
    """What went wrong and what was done, in a list; with NUMBER, the page of one."""
    found = find_job(folder)
    is_here = found.life != "lives" or incidents_folder(found.folder).is_dir()
    if number is not None:
        incident = (
            load(found.folder, number)
            if is_here
            else ask_or_read(found, lambda client: client.incident(number), lambda found: load(found.folder, number))
        )
        if as_json:
            click.echo(_json(incident))
        elif sys.stdout.isatty():
            make_console().print(Markdown(to_markdown(incident)))
        else:
            click.echo(to_markdown(incident))
        return

    def written(found: FoundJob) -> list[IncidentLine]:
        names = IncidentLine.__struct_fields__
        return [IncidentLine(*(getattr(one, name) for name in names)) for one in listed(found.folder)]

    lines = written(found) if is_here else ask_or_read(found, lambda client: client.incidents(), written)
    if as_json:
        click.echo(_json(lines))
        return
    detections = read_detections(found.folder)
    if not lines and not detections:
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
            "–" if line.lost_steps is None else str(line.lost_steps),
            escape(line.title),
        )
    console = make_console()
    if lines:
        console.print(table)
    for kept in detections:
        text = [detection_text(kept), *(f"    why: {why}" for why in kept.found.why)]
        text += [f"    next: {then}" for then in kept.found.then]
        console.print("\n".join(map(harmless, text)), markup=False, highlight=False, soft_wrap=True)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


_AGAIN_S = 0.5
_GIVES_UP_S = 90.0


@click.command()
@FOLDER
@click.option("--show", "ranks", type=click.Choice(get_args(Ranks)), default="0", help="Whose lines are shown.")
def attach(folder: Path | None, ranks: Ranks) -> None:
    """Watch a job as where it was started; Ctrl-C leaves it alone. Ends with the job's exit status."""
    found = find_job(folder)
    console = Console(emoji=False, stderr=True)
    if found.life == "lives" and not found.is_over:
        console.print(f"job {found.card.job} in {found.shown}; Ctrl-C leaves it alone", highlight=False)
        try:
            asyncio.run(show(Attached(found.folder), console, ranks=ranks, folder=found.shown))
        except KeyboardInterrupt:
            console.print("it goes on without you", highlight=False)
            return
    found = find_job(found.shown)
    if found.card.status is not None:
        click.echo(f"the job has ended with status {found.card.status}: {found.card.ended}", err=True)
        sys.exit(found.card.status)
    click.echo(found.dead_text(), err=True)
    sys.exit(DEAD)


@dataclass
class Attached:
    """A job whose driver may be started again meanwhile; implements `phalanx.run.reports.recent_events.Source`."""

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
        """What is reported, by one driver after another, until the job has ended or no driver comes any more."""
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
