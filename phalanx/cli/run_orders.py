"""`phalanx run stop`, `drain`, `evict` and `return`, and finding the job that a command of `phalanx run` is about."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from phalanx.core.errors import UserError
from phalanx.core.units import duration
from phalanx.run.api.api_client import Client
from phalanx.run.api.job import this_person
from phalanx.run.decide import actions
from phalanx.run.decide.policy import Policy
from phalanx.run.driver.job_status import end_without_driver, remember
from phalanx.run.job_folder import (
    Card,
    Life,
    ask_supervisor,
    end_executors,
    end_supervisor,
    life,
    living_executors,
    read_card,
    supervisor_of,
    write_card,
)
from phalanx.run.left_behind import clear_left
from phalanx.run.secrets import read_token

RUNS = Path("runs")
_WAIT_S = 0.2
_LAST_WORDS_S = 2.0  # from the driver's last answer to the card that says how the job has ended
_NEXT_DRIVER_S = 30.0  # for a supervisor to start the next driver, which a signal makes it do at once

Result = TypeVar("Result")

FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Run folder; without it the newest under runs/ whose driver lives, else the newest.",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")


@dataclass(frozen=True)
class FoundJob:
    """A job; `shown` is its folder, as a person writes it, `life` that of its driver."""

    folder: Path
    shown: Path
    card: Card
    life: Life

    @property
    def is_over(self) -> bool:
        """It has ended, says its card."""
        return self.card.status is not None

    def dead_text(self, since_s: float | None = None) -> str:
        """That its driver is dead, and how it is started again."""
        living = len(living_executors(self.folder))
        hosts = f"; {living} of its hosts live and go on" if living else "; none of its hosts lives on this machine"
        for_so_long = f" since {duration(since_s)} or less" if since_s is not None else ""
        again = "start it again with the command that started it: it takes over; or `phalanx run stop` ends the job"
        if supervisor_of(self.folder) is not None:
            again = "its supervisor is about to start it again"
        return f"the driver of the job {self.card.job!r} is dead{for_so_long}{hosts if self.is_local else ''}; {again}"

    @property
    def is_local(self) -> bool:
        """Its hosts are processes of a machine."""
        return self.card.backend == "local"


def find_job(folder: Path | None) -> FoundJob:
    """The job of a folder; without one, the job that is meant, which is said then. UserError: there is none."""
    if folder is not None:
        found = _look(folder)
        if found is None:
            known = sorted(str(path.parent) for path in RUNS.glob("*/job.json"))
            cure = f"give one of {', '.join(known[:5])}" if known else "give the run folder that `phalanx run` named"
            raise UserError("no job was ever run there", cure=cure, field="--folder", value=str(folder))
        return found
    jobs = [found for path in RUNS.glob("*/job.json") if (found := _look(path.parent)) is not None]
    if not jobs:
        raise UserError("there is no job under runs/", cure="give --folder, or go to where it was started")
    living = [found for found in jobs if found.life == "lives"]
    chosen = max(living or jobs, key=lambda found: found.card.began_unix_s)
    if len(jobs) > 1:
        which = "the newest of those that live" if len(living) > 1 else "the only one that lives"
        click.echo(f"job in {chosen.shown} ({which if living else 'the newest; none lives'})", err=True)
    return chosen


def client_at(url: str, token_file: Path | None) -> Client:
    """Of a driver whose folder is not here. UserError: there is no token for it."""
    if token_file is None:
        cure = "give --driver-token FILE, a copy of secret/token in its run folder, or the folder itself"
        raise UserError("a driver answers only to its token", cure=cure, value=url)
    return Client.at(url, read_token(token_file, "--token-file"))


def in_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it; a driver that does not answer becomes a UserError."""
    try:
        return asyncio.run(work)
    except ConnectionError as error:
        raise _unanswered(error) from error


def ask_or_read(
    found: FoundJob, ask: Callable[[Client], Coroutine[Any, Any, Result]], read: Callable[[FoundJob], Result]
) -> Result:
    """Ask the driver while it answers, else read what is written of the job.

    Between its last answer and its end a driver is a process that lives and does not listen: the card says then, at the
    latest after `_LAST_WORDS_S`, that the job is over. Raises UserError where a driver that lives does not answer.
    """

    async def work() -> Result:
        async with Client(found.folder) as client:
            return await ask(client)

    until_s = time.monotonic() + _LAST_WORDS_S
    while found.life != "dead" and not found.is_over:
        try:
            return asyncio.run(work())
        except ConnectionError as error:
            found = _look(found.shown) or found
            if found.life != "dead" and not found.is_over and time.monotonic() > until_s:
                raise _unanswered(error) from error
            time.sleep(_WAIT_S)
    return read(found)


def _unanswered(error: ConnectionError) -> UserError:
    return UserError(str(error), cure="try again in a moment; `phalanx run status` says whether it lives")


def _look(folder: Path) -> FoundJob | None:
    card = read_card(folder.absolute())
    return None if card is None else FoundJob(folder.absolute(), folder, card, life(card))


@click.command()
@FOLDER
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
@FOLDER
def drain(host: str, folder: Path | None) -> None:
    """Let HOST leave as soon as another can take its place."""
    _order("drain", host, folder)


@click.command()
@click.argument("host")
@FOLDER
def evict(host: str, folder: Path | None) -> None:
    """Let HOST leave at once, and not come back."""
    _order("evict", host, folder)


@click.command()
@click.argument("host")
@FOLDER
def give_back(host: str, folder: Path | None) -> None:
    """Let an evicted HOST come back, or a draining one stay."""
    _order("return", host, folder)


@click.command()
def clean() -> None:
    """Take away what killed processes of this user have left on this host; what lives stays."""
    for path in (gone := clear_left(kept_s=60.0)):
        click.echo(f"removed {path}")
    if not gone:
        click.echo("nothing was left")


def _order(what: str, host: str, folder: Path | None) -> None:
    found = _unfinished(folder)
    if found.life == "dead":
        raise UserError(found.dead_text(), cure="then ask again")

    async def give() -> str:
        async with Client(found.folder) as client:
            return await client.order(what, host, this_person())

    click.echo(in_loop(give()))


async def _stop(found: FoundJob, grace_s: float | None, wait: bool, *, is_asked: bool = False) -> str:
    """Have the driver end the job; `is_asked`: it may have been asked by a signal before."""
    async with Client(found.folder) as client:
        # Asked a second time it would give ranks no time.
        is_stopping = is_asked and grace_s is None and (await client.status(0)).phase == "stopping"
        done = "it is stopping" if is_stopping else await client.stop(this_person(), grace_s)
    if not wait:
        return done
    click.echo(done, file=sys.stderr)
    return await _ended(found)


async def _ended(found: FoundJob) -> str:
    """Wait for the end of a job that is being stopped; how it was."""
    while True:
        card = read_card(found.folder)
        if card is None or card.status is not None:
            return "it has ended" if card is None else f"it has ended with status {card.status}: {card.ended}"
        if life(card) == "dead":
            raise UserError(found.dead_text(), cure="then stop it again")
        await asyncio.sleep(_WAIT_S)


def _stop_dead(found: FoundJob, grace_s: float | None, wait: bool) -> str:
    """End a job whose driver is dead: the next one does it, if there will be one; else its executors are ended here.

    Raises:
        UserError: its hosts are not processes of this machine, and no supervisor starts a driver.
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
    status, reason = actions.STOPPED, f"stopped by {this_person()}, while its driver was dead"
    finish = end_without_driver(folder, card, past, this_person()) if past is not None else None
    if finish is not None:
        status, reason = finish.status, finish.reason
    write_card(folder, msgspec.structs.replace(card, status=status, ended=reason))
    hosts = f"{count} {'host' if count == 1 else 'hosts'}"
    return f"its driver was dead: its {hosts} on this machine and all their ranks are ended; status {status}: {reason}"


def _next_driver(found: FoundJob) -> FoundJob | None:
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


def _unfinished(folder: Path | None) -> FoundJob:
    """The job; UserError: it is over."""
    found = find_job(folder)
    card = found.card
    if found.is_over:
        problem = f"the job {card.job!r} in {found.shown} is over (status {card.status}: {card.ended})"
        raise UserError(problem, cure="give the --folder of one that runs")
    return found
