"""Which job a command of `phalanx run` is about. Torch-free."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from phalanx.core.errors import UserError
from phalanx.core.units import duration
from phalanx.run.aside import living_executors, supervisor_of
from phalanx.run.card import Card, Life, life, read_card

RUNS = Path("runs")

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Found:
    """A job.

    Attributes:
        shown: its folder, as a person writes it.
        life: of its driver.
    """

    folder: Path
    shown: Path
    card: Card
    life: Life

    @property
    def is_over(self) -> bool:
        """It has ended, says its card."""
        return self.card.status is not None

    def say_dead(self, since_s: float | None = None) -> str:
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


def folder_option(function: Function) -> Function:
    """``--folder`` of every command."""
    return click.option(
        "--folder",
        type=click.Path(path_type=Path),
        help="Run folder; without it the newest under runs/ whose driver lives, else the newest.",
    )(function)


def json_option(function: Function) -> Function:
    """``--json`` of those that show something."""
    return click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")(function)


def find_job(folder: Path | None) -> Found:
    """The job of a folder, or the one that is meant where none is given, which is said then.

    Raises:
        UserError: there is none.
    """
    if folder is not None:
        found = _look(folder)
        if found is None:
            raise UserError("no job was ever run there", cure=_known_folders(), field="--folder", value=str(folder))
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


def in_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it; a driver that does not answer becomes an error for people.

    Raises:
        UserError: as `work`, and where the driver does not answer.
    """
    try:
        return asyncio.run(work)
    except ConnectionError as error:
        cure = "try again in a moment; `phalanx run status` says whether it lives"
        raise UserError(str(error), cure=cure) from error


def is_at_terminal() -> bool:
    """Whether somebody looks at what is written."""
    return sys.stdout.isatty()


def _look(folder: Path) -> Found | None:
    card = read_card(folder.absolute())
    return None if card is None else Found(folder.absolute(), folder, card, life(card))


def _known_folders() -> str:
    known = sorted(str(path.parent) for path in RUNS.glob("*/job.json"))
    return f"give one of {', '.join(known[:5])}" if known else "give the run folder that `phalanx run` named"
