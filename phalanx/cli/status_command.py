"""`phalanx status`: how a run is, from another terminal; of `phalanx run` too."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from phalanx.cli.options import AS_JSON
from phalanx.cli.targets import TARGET, TOKEN, find_target
from phalanx.core.errors import UserError

EXIT_STATUSES: Mapping[str, int] = {"failed": 1, "died": 3, "stalled": 4, "paused": 4, "stopped": 5, "unknown": 6}
"""Of states that are not well; all others are 0. 2 is bad input."""

_EPILOG = """\
Exit statuses: 0 it goes on, or all was done; 1 an error ended it; 2 bad input; 3 it died without a word, or the driver
of a job is dead; 4 it is stalled or paused; 5 it was stopped before its last step; 6 that cannot be told from here.
Of a folder of several runs: 0."""

COLOURS: Mapping[str, str] = {
    "running": "green", "evaluating": "green", "saving": "green", "ending": "green", "finished": "green",
    "starting": "cyan", "stopped": "yellow", "paused": "yellow", "unknown": "yellow",
    "stalled": "bold red", "failed": "bold red", "died": "bold red",
}  # fmt: skip
_OTHERS = 10


@click.command(epilog=_EPILOG)
@TARGET
@click.option("-w", "--watch", is_flag=True, help="Look again and again, until it has ended.")
@click.option(
    "--every", "every_s", type=click.FloatRange(0.1, 3600), default=2.0, metavar="SECONDS", help="How often [2]."
)
@click.option(
    "--stalled-after",
    "stalled_after_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="A run without a step for so long is stalled [ten usual steps, a minute at least].",
)
@click.option("--ranks", "all_ranks", is_flag=True, help="Show every rank, not only those in trouble.")
@TOKEN
@AS_JSON
def command(
    target: str | None,
    watch: bool,
    every_s: float,
    stalled_after_s: float | None,
    all_ranks: bool,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """How a run is: what it does, how far it is, when it will be done, its last checkpoint.

    Give the folder of a run, a folder of runs [runs], the folder of a job of `phalanx run`, or its driver's URL.
    """
    found = find_target(target)

    def look() -> tuple[Any, int, bool]:
        if found.kind in ("job", "driver"):
            from phalanx.cli.run_watch import look_at_job

            return look_at_job(found, token_file, as_json)
        return _look(found.folder, as_json, stalled_after_s, all_ranks)

    sys.exit(_again(look, watch, every_s))


def _again(look: Callable[[], tuple[Any, int, bool]], watch: bool, every_s: float) -> int:
    """Print what a look finds, once or until it has ended; its exit status.

    Args:
        look: gives what is to be printed (a text as it is), the exit status, and whether it goes on.
    """
    from rich.live import Live

    from phalanx.cli.tables import make_console

    console = make_console()
    if not watch:
        shown, status, _ = look()
        _print(console, shown)
        return status
    if not console.is_terminal:
        before = None
        while True:
            shown, status, goes_on = look()
            with console.capture() as captured:
                _print(console, shown)
            if (text := captured.get()) != before:
                click.echo(text, nl=False)
                before = text
            if not goes_on:
                return status
            time.sleep(every_s)
    status = 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                shown, status, goes_on = look()
                live.update(shown, refresh=True)
                if not goes_on:
                    return status
                time.sleep(every_s)
    except KeyboardInterrupt:
        return status


def _print(console: Any, shown: Any) -> None:
    is_text = isinstance(shown, str)
    console.print(shown, markup=not is_text, highlight=False, soft_wrap=is_text)


def _look(folder: Path, as_json: bool, stalled_after_s: float | None, all_ranks: bool) -> tuple[Any, int, bool]:
    """The run in `folder`, or the runs below it."""
    from phalanx.telemetry.run_access import REFUSED
    from phalanx.telemetry.run_list import run_folders
    from phalanx.telemetry.run_status import run_status

    closed: list[Path] = []
    paths = list(run_folders(folder, closed=closed))
    found = [run_status(path, stalled_after_s=stalled_after_s, below=folder) for path in paths]
    if len(found) == 1 and (as_json or not closed):
        (one,) = found
        shown = json.dumps(one.to_json()) if as_json else _one(one, all_ranks)
        return shown, EXIT_STATUSES.get(one.state, 0), one.lives
    found.sort(key=lambda run: (not run.lives, math.inf if run.figures_age_s is None else run.figures_age_s))
    if as_json:
        return json.dumps({"runs": [run.to_json() for run in found]}), 0, any(run.lives for run in found)
    refused = [f"{path} {REFUSED}" for path in closed]
    if not found and not closed:
        return f"no run in {folder}", 0, False
    return _table(found, [*_jobs(folder), *refused]), 0, any(run.lives for run in found)


def _jobs(folder: Path) -> list[str]:
    """A line for each job in `folder`."""
    from phalanx.run.job_folder import life, read_card

    lines = []
    for path in sorted(folder.glob("*/job.json")):
        try:
            card = read_card(path.parent)
        except UserError as error:
            lines.append(f"job in {path.parent}: {error.problem}")
            continue
        if card is not None:
            how = f"its driver {_DRIVERS[life(card)]}"
            how = how if card.status is None else f"ended with status {card.status}"
            lines.append(f"job {card.job}: {how}: phalanx status {path.parent}")
    return lines


_DRIVERS = {"lives": "lives", "dead": "is dead", "elsewhere": "is on another host"}


def _table(found: list[Any], others: list[str]) -> Any:
    """Those that live, and the newest of the others; below it other lines."""
    from rich.console import Group
    from rich.text import Text

    from phalanx.cli.tables import MOST_NAME, age, make_table, one_line
    from phalanx.core.units import duration

    columns = ("run", "state", "step", "loss", "tokens/s", "MFU", "left", "checkpoint", "why")
    table = make_table(*columns, right=(2, 3, 4, 5, 6))
    living = sum(run.lives for run in found)
    shown = found[: living + _OTHERS]
    for run in shown:
        saved = "" if run.checkpoint_step is None else f"step {run.checkpoint_step}"
        if run.checkpoint_age_s is not None:
            saved += f", {age(run.checkpoint_age_s)}"
        table.add_row(
            Text(one_line(run.name, MOST_NAME)),
            Text(run.state, style=COLOURS.get(run.state, "")),
            _steps(run),
            "" if run.loss is None else f"{run.loss:.4f}",
            "" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}",
            "" if run.mfu is None else f"{run.mfu:.1%}",
            "" if run.left_s is None else duration(run.left_s),
            saved,
            Text(one_line(run.why.partition("; ")[0])),
        )
    left = len(found) - len(shown)
    lines = [*([f"and {left} more: phalanx runs"] if left else []), *others]
    return Group(table, *(Text(one_line(line), style="dim") for line in lines))


def _one(run: Any, all_ranks: bool) -> Any:
    """A run in some lines."""
    from rich.console import Group
    from rich.text import Text

    from phalanx.cli.tables import MOST_NAME, age, one_line
    from phalanx.core.units import duration

    head = Text()
    head.append(f"{one_line(run.name, MOST_NAME)}  ", style="bold")
    head.append(run.state, style=COLOURS.get(run.state, ""))
    if run.step is not None:
        share = f", {run.step / run.total_steps:.1%}" if run.total_steps else ""
        head.append(f"  step {_steps(run)}{share}")
    if run.left_s is not None:
        head.append(f", left {duration(run.left_s)}")
    lines: list[Any] = [head]
    if run.why:
        lines.append(Text(one_line(run.why), style=COLOURS.get(run.state, "")))
    figures = [
        "" if run.loss is None else f"loss {run.loss:.4f}",
        "" if run.validation_loss is None else f"held-out {run.validation_loss:.4f}",
        "" if run.tokens_per_s is None else f"tokens/s {run.tokens_per_s:,.0f}",
        "" if run.mfu is None else f"MFU {run.mfu:.1%}",
        "" if run.step_s is None else f"a step takes {duration(run.step_s)}",
        "" if run.figures_age_s is None else f"written {age(run.figures_age_s)}",
    ]
    if any(figures):
        lines.append(Text(", ".join(filter(None, figures))))
    if run.checkpoint_step is not None:
        ago = "" if run.checkpoint_age_s is None else f", {age(run.checkpoint_age_s)}"
        lost = f", {run.step - run.checkpoint_step} steps back" if run.step is not None else ""
        lines.append(Text(f"checkpoint of step {run.checkpoint_step}{ago}{lost}"))
    elif run.lives:
        lines.append(Text("no checkpoint yet"))
    if run.start is not None and run.ranks:
        several = f"{run.world_size} ranks, " if (run.world_size or 1) > 1 else ""
        where = one_line(", ".join(dict.fromkeys(rank.host for rank in run.ranks[:1000])))
        begun = age(time.time() - run.began_unix_s)
        told = f"start {run.start}, {several}on {where}, begun {begun}, pid {run.ranks[0].pid}"
        lines.append(Text(told, style="dim"))
    if run.behind:
        lines.append(Text(f"behind the others: rank {', '.join(map(str, run.behind[:16]))}", style="yellow"))
    if (ranks := _ranks(run, all_ranks)) is not None:
        lines += [Text(""), ranks]
    return Group(*lines)


def _ranks(run: Any, all_ranks: bool) -> Any:
    """A table of ranks: all, or those that are behind, gone or paused; None: there are none."""
    from rich.text import Text

    from phalanx.cli.tables import make_table, one_line
    from phalanx.core.units import duration

    shown = [r for r in run.ranks if all_ranks or r.rank in run.behind or r.life in ("gone", "paused")]
    if not shown or (len(run.ranks) == 1 and not all_ranks):
        return None
    table = make_table("rank", "host", "pid", "life", "does", "step", "last step", right=(0, 2, 5))
    for rank in shown[:64]:
        ago = "" if rank.step_age_s is None else f"{duration(rank.step_age_s)} ago"
        step = "" if rank.step is None else str(rank.step)
        table.add_row(
            str(rank.rank), Text(one_line(rank.host)), str(rank.pid), rank.life, Text(one_line(rank.phase)), step, ago
        )
    return table


def _steps(run: Any) -> str:
    return "" if run.step is None else f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)
