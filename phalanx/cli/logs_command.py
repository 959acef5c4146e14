"""`phalanx logs`: what a run has logged, from another terminal; of `phalanx run` too."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from phalanx.cli.targets import TARGET, TOKEN, Target, find_target
from phalanx.core.errors import UserError, not_permitted

_POLL_S = 0.2
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_LEVEL_STYLES = {"WARNING": "yellow", "STDERR": "yellow", "ERROR": "red", "CRITICAL": "bold red", "": "red"}


class Since(click.ParamType):
    """``10m`` ago, or a time as ISO 8601 has it, in local time unless it says otherwise; in seconds since 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Of a text."""
        if isinstance(value, float):
            return value
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value)):
            return time.time() - float(match[1]) * _UNITS_S[match[2]]
        try:
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a time; give 90s, 10m, 2h, 3d, or 2026-11-25T19:30", param, ctx)


class Pattern(click.ParamType):
    """A regular expression."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[str]:
        """Of a text."""
        try:
            return value if isinstance(value, re.Pattern) else re.compile(value)
        except re.error as error:
            self.fail(f"{value!r} is not a regular expression ({error})", param, ctx)


@click.command()
@TARGET
@click.option("-f", "--follow", is_flag=True, help="Go on as they write, until it has ended.")
@click.option("-n", "--tail", "last", type=click.IntRange(0), default=40, show_default=True, help="So many lines.")
@click.option("--rank", type=click.IntRange(0), help="Of this rank only.")
@click.option("--since", "since_unix_s", type=Since(), default=0.0, metavar="TIME", help="Not older: 10m, or a time.")
@click.option("--grep", "pattern", type=Pattern(), metavar="PATTERN", help="Lines that match a regular expression.")
@click.option(
    "--level",
    type=click.Choice(["debug", "info", "warning", "stderr", "error", "critical"]),
    help="Of this level or above it.",
)
@TOKEN
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each line.")
def command(
    target: str | None,
    follow: bool,
    last: int,
    rank: int | None,
    since_unix_s: float,
    pattern: re.Pattern[str] | None,
    level: str | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """What a run has logged, the last lines of all its ranks together.

    Give the folder of a run, a folder of runs [runs]: the one that is running, else the newest; the folder of a job of
    `phalanx run`, or its driver's URL.
    """
    from phalanx.telemetry.run_log_lines import Wanted

    found = find_target(target)
    wanted = Wanted(rank, since_unix_s, pattern, (level or "").upper())
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if found.kind in ("job", "driver"):
            from phalanx.cli.job_logs import print_job_logs

            if level:
                raise UserError("lines of a job have no level", cure="leave it out", field="--level")
            print_job_logs(found, token_file, wanted, last, follow=follow, as_json=as_json)
            return
        _print_run(found, wanted, last, follow=follow, as_json=as_json)


def _print_run(found: Target, wanted: Any, last: int, *, follow: bool, as_json: bool) -> None:
    from rich.console import Console

    from phalanx.core.files import first_refused
    from phalanx.telemetry.run_log import FOLDER
    from phalanx.telemetry.run_log_lines import Follower, last_lines, log_files

    folder = _chosen(found)
    if (refused := first_refused(folder / FOLDER)) is not None:
        raise not_permitted(refused)
    console = None if as_json else Console(emoji=False, soft_wrap=True, highlight=False)
    is_alone = not wanted.rank and all(not file.host for file in log_files(folder))
    if not log_files(folder) and not _lives(folder):
        raise _no_logs(folder)
    if not follow:
        _print(last_lines(folder, last, wanted), console, is_alone)
        return
    follower = Follower(folder, last, wanted)
    try:
        while True:
            lives = _lives(folder)  # before reading: what a run says last is written by then
            lines = follower.poll()
            _print(lines, console, is_alone)
            if not lives:
                _print(follower.poll(), console, is_alone)
                return
            if not lines:
                time.sleep(_POLL_S)
    finally:
        follower.close()


def _no_logs(folder: Path) -> UserError:
    """Why a run has no log files, as far as its other files tell."""
    from phalanx.telemetry.run_access import is_there
    from phalanx.telemetry.run_list import read_kept

    if "imported" in read_kept(folder) or is_there(folder / "telemetry" / "imported.json"):
        return UserError("was imported, and has no log files", cure="look where it was trained", value=str(folder))
    if not is_there(folder / "config.json") and not is_there(folder / "metrics.jsonl"):
        problem = "is of a loop of its own, which records spans; what it prints is not kept here"
        cure = f"look at the output of its program; phalanx trace summary {folder} says what its steps went on"
        return UserError(problem, cure=cure, value=str(folder))
    problem = "has no log files: it was trained by an older version, or with logging.file_bytes = 0"
    return UserError(problem, cure="train it on, and it has some", value=str(folder))


def _chosen(found: Target) -> Path:
    """The run that is meant: of a folder of runs the one that is running, else the one that was written last."""
    from phalanx.telemetry.living_ranks import LIVING
    from phalanx.telemetry.run_list import list_runs

    if found.kind == "run":
        return found.folder
    rows = list_runs(found.folder)
    if not rows:
        raise UserError("no run lies there", cure="give a run folder, or a folder of runs", value=str(found.folder))
    running = [row for row in rows if row.state in LIVING]
    chosen = (running or rows)[0]
    if len(rows) > 1:
        which = "the only one that is running" if len(running) == 1 else "the newest that is running"
        click.echo(f"run in {chosen.folder} ({which if running else 'the newest; none is running'})", err=True)
    return Path(chosen.folder)


def _lives(folder: Path) -> bool:
    from phalanx.telemetry.run_list import is_locked
    from phalanx.telemetry.run_presence import presences

    return is_locked(folder) or any(presence.life() in ("lives", "paused") for presence in presences(folder))


def _print(lines: Iterable[Any], console: Any, is_alone: bool) -> None:
    """Each rank in its colour, nothing that a line holds moves the terminal; console None: as JSON."""
    from rich.text import Text

    from phalanx.run.logs.log_lines import strip_ansi

    for line in lines:
        if console is None:
            click.echo(json.dumps(dataclasses.asdict(line), ensure_ascii=False))
            continue
        clock = time.strftime("%m-%d %H:%M:%S", time.localtime(line.unix_s)) if line.unix_s else "--:--:--"
        text = Text(f"{clock} ", style="dim")
        if not is_alone:
            text.append(f"[rank {line.rank}] ", style=_COLOURS[line.rank % len(_COLOURS)])
        style = _LEVEL_STYLES.get(line.level, "default")
        mark = "" if line.level in ("INFO", "") else f"{line.level}: "
        console.print(text.append(f"{mark}{strip_ansi(line.text)}", style=style))
