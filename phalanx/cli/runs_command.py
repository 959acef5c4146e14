"""`phalanx runs`: all runs of a folder in one table, two compared, what people noted of them. Needs no torch."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON
from phalanx.cli.status_command import COLOURS
from phalanx.core.errors import UserError
from phalanx.telemetry.run_access import is_there
from phalanx.telemetry.run_list import SORTS, Sort, diff_runs, keep_note, keep_tags, list_runs, read_run, sort_place

if TYPE_CHECKING:
    from phalanx.telemetry.run_list import RunRow

_EXAMPLES = """\b
Examples:
  phalanx runs
  phalanx runs experiments --sort validation_loss --tag good
  phalanx runs s3://bucket/runs
  phalanx runs diff runs/before runs/after
  phalanx runs note runs/wide "width 512, otherwise as base" --name wide
  phalanx runs tag runs/wide +good -todo
  phalanx runs import theirs.csv runs/theirs
"""

_FIGURES = {
    "step": "step",
    "tokens": "tokens",
    "loss": "loss",
    "validation_loss": "held-out",
    "tokens_per_s": "tokens/s",
}
_JOB = "job.json"


class _Runs(click.Group):
    """`phalanx runs FOLDER` means `phalanx runs ls FOLDER`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``ls`` before what names no subcommand."""
        if not args or args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["ls", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Runs, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """All runs of a folder in one table; two compared; names, notes and tags; other people's runs.

    Without a subcommand: ls.
    """


@command.command("ls")
@click.argument("folder", metavar="[FOLDER | STORAGE_URL]", default="runs")
@click.option("--sort", type=click.Choice(SORTS), default="written", help="What comes first [newest].")
@click.option("--tag", default="", metavar="TAG", help="Only runs that have it.")
@AS_JSON
def ls_command(folder: str, sort: Any, tag: str, as_json: bool) -> None:
    """List the runs in FOLDER [runs] and below: state, step, last figures, why they ended.

    Also while they train: only the end of each metrics.jsonl is read. A run is running where a process holds its lock,
    which other hosts see as far as the file system tells them.
    """
    if "://" in folder:
        rows = _stored_rows(folder, tag, sort)
    else:
        rows = list_runs(Path(folder), tag=tag, sort=sort, also=_JOB, read=_read)
    if as_json:
        click.echo(json.dumps({"runs": [row.to_json() for row in rows]}, indent=1))
        return
    from phalanx.cli.tables import make_console

    console = make_console()
    if not rows:
        told = f"no run in {folder}" + (f" has the tag {tag}" if tag else "")
        console.print(told, markup=False, highlight=False)
        return
    _show(console, rows)


def _stored_rows(url: str, tag: str, sort: Sort) -> list[RunRow]:
    """Of runs in object storage, whose small files are fetched for as long as it takes."""
    from phalanx.dashboard.data_source import DataSource
    from phalanx.dashboard.stored_runs import StoredRuns

    with tempfile.TemporaryDirectory(prefix="phalanx-runs-") as folder:
        store = StoredRuns(url, Path(folder).resolve() / url.rstrip("/").rpartition("/")[2], rows_only=True)
        store.fetch()
        rows = [row for row in DataSource.of_store(store).rows() if not tag or tag in row.tags]
    return sorted(rows, key=lambda row: sort_place(row, sort))


@command.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@AS_JSON
def diff(run_a: Path, run_b: Path, as_json: bool) -> None:
    """Compare the settings of two runs, and their last figures."""
    found = diff_runs(run_a, run_b)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    from rich.markup import escape

    from phalanx.cli.tables import MOST_NAME, make_console, make_table, one_line

    console = make_console()
    a, b = found["a"], found["b"]
    for one in (a, b):
        one["name"] = one_line(one["name"], MOST_NAME)
    if found["settings"]:
        table = make_table("setting", escape(a["name"]), "", escape(b["name"]))
        for row in found["settings"]:
            table.add_row(escape(row["key"]), _value(row["a"]), "->", _value(row["b"]))
        console.print(table, highlight=False)
    else:
        console.print("all settings are the same")
    figures = make_table("last figures", escape(a["name"]), escape(b["name"]), "change", right=(1, 2, 3))
    for name, shown in _FIGURES.items():
        change = f"{b[name] / a[name] - 1:+.2%}" if a[name] and b[name] is not None else ""
        pair = (None if x[name] is None else round(x[name]) if name == "tokens_per_s" else x[name] for x in (a, b))
        figures.add_row(shown, *map(_number, pair), change)
    figures.add_row("state", a["state"], b["state"], "")
    console.print()
    console.print(figures, highlight=False)


@command.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("text", required=False)
@click.option("--name", help='What to call it in tables; "" takes it back.')
def note(run: Path, text: str | None, name: str | None) -> None:
    """Keep a note of RUN in its run.json; "" takes it away. Without one, print what is kept."""
    kept = keep_note(run, text, name)
    for key, value in kept.items():
        click.echo(f"{key}: {', '.join(value) if isinstance(value, list) else value}")


@command.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("tags", nargs=-1, required=True, metavar="+TAG|-TAG…", type=click.UNPROCESSED)
def tag(run: Path, tags: Sequence[str]) -> None:
    """Give RUN tags (+good) and take others away (-old); print those it has now."""
    for word in tags:
        if word[:1] not in ("+", "-"):
            raise UserError("says neither + nor -", cure=f"write +{word} to add it, -{word} to remove it", value=word)
    add, remove = ([word[1:] for word in tags if word[0] == sign] for sign in "+-")
    click.echo(f"tags: {', '.join(keep_tags(run, add, remove)) or 'none'}")


@command.command("import")
@click.argument("sources", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--format", "format_", type=click.Choice(["csv", "tensorboard", "wandb"]), help="Of the files [by their names]."
)
def import_(sources: Sequence[Path], folder: Path, format_: Any) -> None:
    """Make a run folder FOLDER of somebody else's run, for tables and curves.

    SOURCES are CSV files with a column step, TensorBoard's event files or folders of them, or a folder
    wandb/offline-run-… of W&B; all of one run. Cells of a table that are no numbers are left out, and named.
    """
    from phalanx.cli.tables import printable
    from phalanx.telemetry.run_imports import import_run

    chosen, steps, names = import_run(sources, folder, format_, lambda line: click.echo(printable(line), err=True))
    click.echo(f"{chosen}: {steps} steps of {', '.join(names)}: {folder}")


def _read(path: Path, below: Path) -> RunRow:
    """A run, or a job of `phalanx run`, which may hold a script of somebody else's and nothing besides."""
    if not is_there(path / _JOB):
        return read_run(path, below)
    from phalanx.run.job_rows import read_job

    return read_job(path, below)


def _show(console: Any, rows: Sequence[RunRow]) -> None:
    from rich.markup import escape

    from phalanx.cli.tables import MOST_NAME, age, make_table, one_line
    from phalanx.core.units import duration

    table = make_table(
        "run", "state", "step", "tokens", "loss", "held-out", "tokens/s", "written", "tags", "why, and notes",
        right=(2, 3, 4, 5, 6, 7), whole=(1, 2, 7),
    )  # fmt: skip
    now = time.time()
    for row in rows:
        colour = COLOURS.get(row.state)
        state = f"[{colour}]{row.state}[/]" if colour else row.state
        step = "" if row.step is None else f"{row.step}/{row.total_steps}" if row.total_steps else str(row.step)
        figures = (_count(row.tokens), _number(row.loss), _number(row.validation_loss), _count(row.tokens_per_s))
        pace = f"{duration(row.step_s)} a step" if row.step_s is not None and row.tokens_per_s is None else ""
        words = "; ".join(filter(None, (pace, row.why, row.note)))
        table.add_row(
            escape(one_line(row.name, MOST_NAME)),
            state,
            step,
            *figures,
            age(now - row.written),
            escape(one_line(" ".join(row.tags))),
            escape(one_line(words)),
        )
    console.print(table, highlight=False)


def _count(value: float | None) -> str:
    from phalanx.core.units import count

    return "" if value is None else count(value) if math.isfinite(value) else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _value(value: Any) -> str:
    from rich.markup import escape

    return "" if value is None else escape(json.dumps(value, ensure_ascii=False))
