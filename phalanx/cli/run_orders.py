"""`phalanx run stop`, `drain`, `evict` and `return`. Torch-free."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from phalanx.cli.run_find import Found, find_job, folder_option, in_loop
from phalanx.core.errors import UserError
from phalanx.run.api.client import Client
from phalanx.run.api.job import this_person
from phalanx.run.aside import ask_supervisor, end_executors, end_supervisor, supervisor_of
from phalanx.run.card import life, read_card, write_card
from phalanx.run.decide import transition
from phalanx.run.decide.policy import Policy
from phalanx.run.driver.overview import end_without_driver, remember

_WAIT_S = 0.2

_NEXT_DRIVER_S = 30.0
"""For a supervisor to start the next driver, which a signal makes it do at once."""


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
    found, grace_s = _unfinished(folder), 0.0 if without_grace else grace_s
    if found.life == "dead":
        click.echo(_stop_dead(found, grace_s, wait))
    else:
        click.echo(in_loop(_stop(found, grace_s, wait)))


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


async def _stop(found: Found, grace_s: float | None, wait: bool, *, is_asked: bool = False) -> str:
    """Have the driver end the job; `is_asked`: it may have been asked by a signal before."""
    async with Client(found.folder) as client:
        # Asked a second time it would give ranks no time.
        is_stopping = is_asked and grace_s is None and (await client.status(0)).phase == "stopping"
        done = "it is stopping" if is_stopping else await client.stop(this_person(), grace_s)
    if not wait:
        return done
    click.echo(done, file=sys.stderr)
    return await _ended(found)


async def _ended(found: Found) -> str:
    """Wait for the end of a job that is being stopped; how it was."""
    while True:
        card = read_card(found.folder)
        if card is None or card.status is not None:
            return "it has ended" if card is None else f"it has ended with status {card.status}: {card.ended}"
        if life(card) == "dead":
            raise UserError(found.say_dead(), cure="then stop it again")
        await asyncio.sleep(_WAIT_S)


def _stop_dead(found: Found, grace_s: float | None, wait: bool) -> str:
    """End a job whose driver is dead: the next one does it, if there will be one; else its executors are ended here.

    Raises:
        UserError: its hosts are no processes of this machine, and nobody starts a driver.
    """
    folder, card = found.folder, found.card
    if ask_supervisor(folder, signal.SIGTERM) and (following := _next_driver(found)) is not None:
        return in_loop(_ended(following) if following.is_over else _stop(following, grace_s, wait, is_asked=True))
    if not found.is_local:
        cure = f"start it again with the command that started it, or end its hosts by means of {card.backend}"
        raise UserError(f"the driver of the job {card.job!r} is dead, and its hosts are elsewhere", cure=cure)
    end_supervisor(folder)
    past = remember(folder, card)
    if grace_s is None:
        grace_s = past.state.policy.grace_s if past is not None else Policy().grace_s
    count = end_executors(folder, grace_s)
    status, reason = transition.STOPPED, f"stopped by {this_person()}, while its driver was dead"
    finish = end_without_driver(folder, card, past, this_person(), time.time()) if past is not None else None
    if finish is not None:
        status, reason = finish.status, finish.reason
    write_card(folder, msgspec.structs.replace(card, status=status, ended=reason))
    hosts = f"{count} {'host' if count == 1 else 'hosts'}"
    return f"its driver was dead: its {hosts} on this machine and all their ranks are ended; status {status}: {reason}"


def _next_driver(found: Found) -> Found | None:
    """The job with the driver that its supervisor starts; None: none comes up."""
    until_s = time.monotonic() + _NEXT_DRIVER_S
    while time.monotonic() < until_s:
        card = read_card(found.folder)
        if card is not None and (card.status is not None or life(card) == "lives"):
            return replace(found, card=card, life=life(card))
        if supervisor_of(found.folder) is None:
            return None
        time.sleep(0.05)
    return None


def _living(folder: Path | None) -> Found:
    """The job, whose driver can be asked.

    Raises:
        UserError: it is over, or its driver is dead.
    """
    found = _unfinished(folder)
    if found.life == "dead":
        raise UserError(found.say_dead(), cure="then ask again")
    return found


def _unfinished(folder: Path | None) -> Found:
    """The job.

    Raises:
        UserError: it is over.
    """
    found = find_job(folder)
    card = found.card
    if found.is_over:
        raise UserError(
            f"the job {card.job!r} in {found.shown} is over (status {card.status}: {card.ended})",
            cure="give the --folder of one that runs",
        )
    return found


def dumped(value: object) -> str:
    """As JSON for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
