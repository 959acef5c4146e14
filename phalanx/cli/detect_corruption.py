"""`phalanx detect corruption`: which rank of a run holds, or computes, other bits than its peers. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.options import AS_JSON


@click.command("corruption", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--evict-after",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Starts of the run in which a host is named until its eviction is advised; before, a check.",
)
@AS_JSON
@click.pass_context
def command(ctx: click.Context, run: Path, evict_after: int, as_json: bool) -> None:
    """Which rank of RUN was silently corrupted, by the digests that its ranks have compared while it trained.

    A strict majority of copies names the rank; two that differ are reported, and nobody is blamed.
    """
    from phalanx.cli.verdict_output import write_verdict
    from phalanx.detect.corruption.copy_judge import CorruptionPolicy, judge_run

    ctx.exit(write_verdict(judge_run(run, CorruptionPolicy(evict_after=evict_after)), as_json=as_json))
