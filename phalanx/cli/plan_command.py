"""`phalanx plan`: what a run will cost, and the best way to spread it. Its help imports nothing but click."""

from __future__ import annotations

import inspect
import os
import socket
from pathlib import Path
from typing import Any

import click

from phalanx.cli.options import AS_JSON, HTML, LazyGroup, write_examples
from phalanx.core.errors import UserError

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "calibrate": (f"{__name__}:calibrate_command", "Measure this machine, and write a file that --cluster takes."),
    "validate": (f"{__name__}:validate_command", "Predict every published measurement, and print the errors."),
}

_PREDICT = ""  # the subcommand of a command line that names none

_EXAMPLES = """\
phalanx plan configs/plan/gpt-175b.toml --cluster megascale --devices 12288
phalanx plan configs/plan/gpt-175b.toml --cluster megascale --devices 1024 parallel.tensor=8 parallel.pipeline=8
phalanx plan configs/plan/gpt-175b.toml --cluster megascale --devices 1024 --search --html report.html
phalanx plan ./calibrate --cluster this.toml      a config that is called as a subcommand"""

_MORE = "Exit status: 0 it fits, 1 it does not fit into the memory of a device, 2 bad input. See docs/plan.md."


class _Plan(LazyGroup):
    """A group whose first word may also be a config: then a prediction is made."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            args = ["--help"]
        if args[0] not in self.lazy and args[0] not in ("-h", "--help"):
            args = [_PREDICT, *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _predict if cmd_name == _PREDICT else super().get_command(ctx, cmd_name)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "CONFIG --cluster NAME|FILE [OPTIONS] [KEY=VALUE]…")
        formatter.write_usage(ctx.command_path, "COMMAND …", prefix="       ")
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            formatter.write_paragraph()
            formatter.write_text(paragraph)
        _predict.format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
        write_examples(formatter, _EXAMPLES)
        formatter.write_paragraph()
        formatter.write_text(_MORE)


@click.group(cls=_Plan, lazy=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Predict the step time, its parts and the memory of the run that CONFIG describes, or search the best layout.

    KEY=VALUE pairs change single settings of CONFIG. Every number says whether it was measured, is derived or assumed.
    """


def _help(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        assert ctx.parent is not None
        click.echo(ctx.parent.get_help())
        ctx.exit()


@click.command(_PREDICT, add_help_option=False)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--cluster", metavar="NAME|FILE", help="Cluster: one that comes with Phalanx, or a .toml file.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="Devices, where CONFIG gives no number.")
@click.option("--software", metavar="NAME", help="Program that trains, such as megatron-core; else Phalanx.")
@click.option("--efficiency", type=float, metavar="X", help="Predicted over measured seconds of steps of yours.")
@click.option("--search", is_flag=True, help="Search the best layouts instead; those of CONFIG are not looked at.")
@click.option("--where", multiple=True, metavar="WORD", help="Of them only such as tensor=8 or 'pipeline<=16'; again.")
@click.option("--top", type=click.IntRange(1, 1000), default=10, metavar="N", help="Layouts that a search shows [10].")
@click.option("--sources", is_flag=True, help="All parts, however small, and what each rests on.")
@AS_JSON
@HTML
@click.option("-h", "--help", is_flag=True, is_eager=True, expose_value=False, callback=_help, help="This text.")
def _predict(search: bool, where: tuple[str, ...], top: int, sources: bool, **given: Any) -> None:
    # Not before: these import pydantic, rich and NumPy.
    if search:
        from phalanx.cli.plan_predict import search_command

        search_command(where=where, top=top, **given)
    else:
        from phalanx.cli.plan_predict import predict_command

        if where:
            cure = "add --search, or set parallel.… on the command line"
            raise UserError("is about a search", cure=cure, field="--where", value=where[0])
        predict_command(sources=sources, **given)


@click.command("calibrate")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="[HOST.toml]")
@click.option("--ranks", type=click.IntRange(min=1), multiple=True, metavar="N", help="Processes; may be repeated.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="What to measure [auto].")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), multiple=True, help="Of products; else what is fast.")
@click.option("--quick", is_flag=True, help="Few small sizes: whether it works; figures mean little.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def calibrate_command(
    output: Path | None,
    ranks: tuple[int, ...],
    device: str,
    precision: tuple[str, ...],
    quick: bool,
    as_json: bool,
) -> None:
    """Measure this machine's kernels and collectives, and write a file that --cluster takes.

    They are measured as training runs them: by one process on all cores, and by one for each core (up to 16), all at
    once; --ranks says otherwise. On a host with GPUs, by one process for each. It takes a minute or two; let nothing
    else run meanwhile.
    """
    from phalanx.cli.calibration import Request, calibrate, show  # not before: help comes without it

    request = Request(output or Path(f"{socket.gethostname()}.toml"), ranks, device, precision, quick)
    show(calibrate(request, os.environ, silent=as_json), as_json)


@click.command("validate")
@click.option(
    "--tables", type=click.Path(path_type=Path), metavar="FILE|DIR", help="Steps of yours (CSV); or tables as ours."
)
@click.option("--cluster", metavar="NAME|FILE", help="Of rows of FILE that name none.")
@click.option("--software", metavar="NAME", help="Of rows of FILE that name none; else Phalanx.")
@click.option("--rows", "all_rows", is_flag=True, help="All rows of long tables, not the worst alone.")
@click.option("--no-spread", is_flag=True, help="Leave out what other choices of what is unpublished come to.")
@AS_JSON
@HTML
def validate_command(
    tables: Path | None,
    cluster: str | None,
    software: str | None,
    all_rows: bool,
    no_spread: bool,
    as_json: bool,
    html: Path | None,
) -> None:
    """Predict every published step time, and print the error of each row, their mean and maximum.

    Beside them stands the null model: two numbers fitted to all other rows of a table. What a publication leaves open
    was assumed once, before the first comparison; what other choices would come to is printed too. Below stand the
    tables that were left out when the planner's residual was learnt, with the interval that predictions carry.

    --tables FILE predicts steps of your own, and says the --efficiency to give; docs/plan_validate.md has its columns.
    """
    from phalanx.cli.validation import validate, validate_own  # not before: help comes without it

    if tables is not None and not tables.is_dir():
        validate_own(tables, cluster, software, as_json=as_json, html=html)
        return
    validate(tables, all_rows=all_rows, with_spread=not no_spread, as_json=as_json, html=html)
