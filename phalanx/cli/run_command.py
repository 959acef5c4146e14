"""`phalanx run`: keep any torchrun-style script running, and look after what runs."""

from __future__ import annotations

import os

import click

from phalanx.cli.options import LazyGroup, write_examples
from phalanx.launch.bytecode import keep_bytecode

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "status": ("phalanx.cli.run_watch:status", "How a job is: hosts, attempt, steps, incidents."),
    "attach": ("phalanx.cli.run_watch:attach", "Watch a job as if it had been started here; Ctrl-C leaves it alone."),
    "logs": ("phalanx.cli.job_logs:logs", "What ranks have written; -f goes on as they write."),
    "incidents": ("phalanx.cli.run_watch:incidents", "What went wrong and what was done; with a number, its page."),
    "stop": ("phalanx.cli.run_orders:stop", "End a job; asked again, at once."),
    "drain": ("phalanx.cli.run_orders:drain", "Let a host leave as soon as another can take its place."),
    "evict": ("phalanx.cli.run_orders:evict", "Let a host leave at once, and not come back."),
    "clean": ("phalanx.cli.run_orders:clean", "Take away what killed processes have left on this host."),
    "return": ("phalanx.cli.run_orders:give_back", "Let an evicted host come back, or a draining one stay."),
}

DRIVE = ":drive"
SUPERVISE = ":supervise"
_HIDDEN = {
    "": ("phalanx.cli.run_start:start", ""),
    DRIVE: ("phalanx.cli.run_start:drive_here", ""),
    SUPERVISE: ("phalanx.cli.run_start:supervise_here", ""),
}

_USAGE = "[OPTIONS] [--] SCRIPT [ARGUMENTS]…"

_EXAMPLES = """\
phalanx run --workers-per-host 8 -- train.py --lr 3e-4
phalanx run --hosts 4 --spares 1 --workers-per-host 2 -- train.py
phalanx run --detach --job job.toml
phalanx run --nnodes 2:4 --nproc-per-node 8 -m package.train    as torchrun has it
phalanx run status                                              of the job under runs/ that lives
phalanx run -- status                                           a script that is called so"""

_WHAT = """Run SCRIPT on several hosts, and keep it running: what dies, hangs or slows is found and replaced. Any script
that runs under torchrun does."""

_MORE = """Commands find the job by --folder, else the newest under runs/ whose driver lives. Exit statuses: 0 done, 1
the script failed, 2 bad input, 3 not enough hosts, 4 no progress, 5 stopped by a person, 6 its time was short. See
docs/run.md."""

OPTIONS = (
    ("--hosts N", "hosts that take part [1]"),
    ("--spares N", "hosts kept ready beside those [0]"),
    ("--workers-per-host N", "ranks on each: a number, gpu, cpu or auto [1]"),
    (
        "--start fresh|warm",
        "ranks are new Pythons, or forks of one with all imports [fresh; training: warm]",
    ),
    ("--folder PATH", "run folder: journal, logs, incidents [runs/NAME]"),
    ("--job FILE", "job file, TOML; its settings are in docs/run_config.md"),
    ("--set KEY=VALUE", "one setting of it, such as run.policy.max_restarts=3"),
    ("--show RANKS", "whose lines are shown: 0, all or none [0; none with -d]"),
    ("-d, --detach", "run in the background; a closed terminal or lost SSH session does not matter"),
    ("--fresh", "begin a new job, although the one in the folder has not ended"),
    ("--no-supervisor", "leave it to somebody else, such as systemd, to restart the driver"),
)


class _Run(LazyGroup):
    """A group whose first word may also be an option, or a script: then a job is started."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take words that are not a subcommand for those of a job."""
        if not args:
            args = ["--help"]
        if args[0] not in self.lazy and args[0] not in _HIDDEN and args[0] not in ("-h", "--help"):
            args = ["", *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of those that are listed, or of those that are not."""
        if cmd_name in _HIDDEN:
            keep_bytecode(os.environ)  # a cold start waits for what these import
            return LazyGroup(lazy=_HIDDEN).get_command(ctx, cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Starting a job first, then looking after it."""
        formatter.write_usage(ctx.command_path, _USAGE)
        formatter.write_usage(ctx.command_path, "COMMAND …", prefix="       ")
        formatter.write_paragraph()
        formatter.write_text(_WHAT)
        with formatter.section("Options before the script"):
            formatter.write_dl([*OPTIONS, ("torchrun's flags", "are understood too: --nnodes, --nproc-per-node, -m …")])
        self.format_commands(ctx, formatter)
        write_examples(formatter, _EXAMPLES)
        formatter.write_paragraph()
        formatter.write_text(_MORE)


@click.group(cls=_Run, lazy=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Keep any distributed script running, and look after what runs."""
