"""What a person means by a folder or a URL: a run, a folder of runs, or a job of `phalanx run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from phalanx.core.errors import UserError, not_permitted

RUNS = Path("runs")

TARGET = click.argument("target", required=False, metavar="[RUN|FOLDER|JOB|URL]")
TOKEN = click.option(
    "--driver-token",
    "token_file",
    type=click.Path(path_type=Path),
    envvar="PHALANX_TOKEN_FILE",
    metavar="FILE",
    help="File with the token of the job at URL, where its folder is not here.",
)


@dataclass(frozen=True)
class Target:
    """A folder, and what it is; of a driver at a URL the folder is empty."""

    kind: Literal["run", "runs", "job", "driver"]
    folder: Path
    url: str = ""


def find_target(given: str | None) -> Target:
    """What is meant; without a word the folder ``runs``.

    Raises:
        UserError: there is no such folder.
    """
    from phalanx.telemetry.run_access import is_closed, is_folder, is_there
    from phalanx.telemetry.run_list import is_run, run_folders

    if given is not None and given.startswith(("http://", "https://")):
        url = given.rstrip("/")
        folder = _job_at(url)
        return Target("driver", Path(), url) if folder is None else Target("job", folder)
    folder = RUNS if given is None else Path(given)
    # A job's folder may be that of its run, too: the job knows more.
    if is_there(folder / "job.json"):
        return Target("job", folder)
    if is_run(folder):
        return Target("run", folder)
    if is_closed(folder):
        raise not_permitted(folder)
    if not is_folder(folder):
        problem = "is a file" if folder.exists() else "there is no such folder"
        cure = "give a run folder, a folder of runs, the folder of a job, or the URL of its driver"
        raise UserError(problem, cure=cure, value=str(folder))
    jobs = list(folder.glob("*/job.json"))
    if jobs and next(run_folders(folder), None) is None:
        return Target("job", newest_job(jobs))
    return Target("runs", folder)


def newest_job(cards: list[Path]) -> Path:
    """The folder of the newest of these jobs whose driver lives, else of the newest."""
    from phalanx.run.job_folder import life, read_card

    found = [(path.parent, card) for path in cards if (card := read_card(path.parent)) is not None]
    return max(found, key=lambda job: (life(job[1]) == "lives", job[1].began_unix_s))[0]


def _job_at(url: str) -> Path | None:
    """The folder of the job whose driver listens there, if it lies under ``runs`` or is this one."""
    from phalanx.run.job_folder import read_card

    for path in (Path("job.json"), *RUNS.glob("*/job.json")):
        try:
            card = read_card(path.parent)
        except UserError:
            continue
        if card is not None and card.http and card.http.rstrip("/") == url:
            return path.parent
    return None
