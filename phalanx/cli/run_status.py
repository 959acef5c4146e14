"""`phalanx run status`. Torch-free."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.cli.run_find import Found, find_job, folder_option, in_loop, json_option
from phalanx.cli.tables import make_console, make_table
from phalanx.core.units import duration
from phalanx.run.api.bodies import status_body
from phalanx.run.api.client import Client
from phalanx.run.driver.overview import overview
from phalanx.run.driver.past import remember
from phalanx.run.now import read_clocks
from phalanx.run.people.overview import HostView, Overview
from phalanx.run.people.words import harmless, link_troubles, moves_otherwise

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
    words = ""
    if found.life == "dead":
        now, words = _from_journal(found, most)
    else:
        now = in_loop(_from_driver(found, most))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(status_body(now)), indent=1) + b"\n")
        click.echo(words, err=True, nl=bool(words))
    else:
        show(now, make_console(), words)
    sys.exit(DEAD if found.life == "dead" and now.status is None else 0)


async def _from_driver(found: Found, most: int) -> Overview:
    async with Client(found.folder) as client:
        return await client.status(most)


def _from_journal(found: Found, most: int) -> tuple[Overview, str]:
    """What was written down of a job whose driver does not live, and what to say of that."""
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


def show(now: Overview, console: Console, words: str = "") -> None:
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
