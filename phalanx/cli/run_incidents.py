"""`phalanx run incidents`. Torch-free."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.markdown import Markdown
from rich.markup import escape

from phalanx.cli.run_find import Found, find_job, folder_option, in_loop, is_at_terminal, json_option
from phalanx.cli.run_orders import dumped
from phalanx.cli.tables import make_console, make_table
from phalanx.core.units import duration
from phalanx.run.api.bodies import IncidentLine
from phalanx.run.api.client import Client
from phalanx.run.incidents.report import Incident
from phalanx.run.incidents.store import incidents_folder, listed, load, to_markdown

_STYLES = {"recovered": "green", "open": "yellow", "gave up": "red"}


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
            f"[{_STYLES.get(line.result, 'default')}]{line.result}[/]",
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

    async def ask() -> Incident:
        async with Client(found.folder) as client:
            return await client.incident(number)

    return in_loop(ask())


def _all(found: Found) -> list[IncidentLine]:
    if _are_here(found):
        names = IncidentLine.__struct_fields__
        return [IncidentLine(*(getattr(one, name) for name in names)) for one in listed(found.folder)]

    async def ask() -> list[IncidentLine]:
        async with Client(found.folder) as client:
            return await client.incidents()

    return in_loop(ask())
