"""`phalanx run stop`, `drain`, `evict` and `return`. Torch-free."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import msgspec

from phalanx.cli.run_find import Found, find_job, folder_option, in_loop
from phalanx.core.errors import UserError
from phalanx.run.api.client import Client
from phalanx.run.api.job import this_person
from phalanx.run.card import life, read_card

_WAIT_S = 0.2


@click.command()
@folder_option
@click.option("--now", "without_grace", is_flag=True, help="SIGKILL at once, instead of SIGTERM first.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0, 86_400),
    metavar="SECONDS",
    help="Time between SIGTERM and SIGKILL [run.policy.grace_s]; given again, it can only become less.",
)
@click.option("--wait", is_flag=True, help="Return when the job has ended.")
def stop(folder: Path | None, without_grace: bool, grace_s: float | None, wait: bool) -> None:
    """End a job: its ranks get SIGTERM and some time to save, then SIGKILL."""
    if without_grace and grace_s:
        raise UserError("--now and --grace contradict each other", cure="give one of them")
    found = _living(folder)
    click.echo(in_loop(_stop(found, 0.0 if without_grace else grace_s, wait)))


@click.command()
@click.argument("host")
@folder_option
def drain(host: str, folder: Path | None) -> None:
    """Let HOST leave as soon as another can take its place."""
    _order("drain", host, folder)


@click.command()
@click.argument("host")
@folder_option
def evict(host: str, folder: Path | None) -> None:
    """Let HOST leave at once, and not come back."""
    _order("evict", host, folder)


@click.command()
@click.argument("host")
@folder_option
def give_back(host: str, folder: Path | None) -> None:
    """Let an evicted HOST come back, or a draining one stay."""
    _order("return", host, folder)


def _order(what: str, host: str, folder: Path | None) -> None:
    found = _living(folder)

    async def give() -> str:
        async with Client(found.folder) as client:
            return await client.order(what, host, this_person())

    click.echo(in_loop(give()))


async def _stop(found: Found, grace_s: float | None, wait: bool) -> str:
    async with Client(found.folder) as client:
        done = await client.stop(this_person(), grace_s)
    if not wait:
        return done
    click.echo(done, file=sys.stderr)
    while True:
        card = read_card(found.folder)
        if card is None or card.status is not None:
            return "it has ended" if card is None else f"it has ended with status {card.status}: {card.ended}"
        if life(card) == "dead":
            raise UserError(found.say_dead(), cure="then stop it again")
        await asyncio.sleep(_WAIT_S)


def _living(folder: Path | None) -> Found:
    """The job, whose driver can be asked.

    Raises:
        UserError: it is over, or its driver is dead.
    """
    found = find_job(folder)
    card = found.card
    if found.is_over:
        raise UserError(
            f"the job {card.job!r} in {found.shown} is over (status {card.status}: {card.ended})",
            cure="give the --folder of one that runs",
        )
    if found.life == "dead":
        raise UserError(found.say_dead(), cure="then ask again")
    return found


def dumped(value: object) -> str:
    """As JSON for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
