"""`phalanx detect stragglers`: which machine is slow, which stage is too heavy, whether batches are uneven."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON, StepRange

if TYPE_CHECKING:
    from phalanx.detect.stragglers.straggler_judge import StragglerPolicy
    from phalanx.detect.stragglers.straggler_watch import StragglerChange

_MOST_COLUMNS = 8
"""That are printed of a heat map: those of the slowest workers. JSON has all."""

_EXAMPLES = """\b
Examples:
  phalanx detect stragglers runs/big
  phalanx detect stragglers runs/big --steps 1000:1100 --workers
  phalanx detect stragglers runs/big --follow
  phalanx detect stragglers runs/big --json
"""


@click.command(epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run")
@click.option(
    "--steps", type=StepRange(), default=(None, None), metavar="A:B", help="Only these [the newest that have spans]."
)
@click.option(
    "--excess", type=click.FloatRange(0.006, 10), default=0.05, metavar="X",
    help="How much longer a slow rank computes [0.05].",
)  # fmt: skip
@click.option("--workers", is_flag=True, help="Also the slowdown by stage and column.")
@click.option("--follow", "-f", is_flag=True, help="Go on beside the run; say when the verdict changes.")
@click.option(
    "--every", "every_s", type=click.FloatRange(0.1, 3600), default=5.0, metavar="S", help="Seconds between looks [5]."
)
@AS_JSON
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    steps: tuple[int | None, int | None],
    excess: float,
    workers: bool,
    follow: bool,
    every_s: float,
    as_json: bool,
) -> None:
    """Tell a slow machine from an unbalanced stage and from uneven sequence lengths, and what each costs.

    RUN is the folder of a run whose ranks wrote spans, also while it goes on, or its URL (s3://bucket/run).
    Steps are replayed with other times: with a worker's passes as its peers', with all stages alike. Only a slow
    machine is one to take out.
    """
    from phalanx.cli.verdict_output import write_verdict
    from phalanx.detect.stragglers.straggler_judge import StragglerPolicy
    from phalanx.detect.stragglers.straggler_run import judge_run

    policy = StragglerPolicy(excess=excess)
    if follow:
        with suppress(KeyboardInterrupt):
            _follow(Path(run), policy, every_s, as_json=as_json)
        return
    verdict = judge_run(run, policy, first=steps[0], last=steps[1])
    status = write_verdict(verdict, as_json=as_json)
    if not as_json and verdict.tables:
        _show(verdict.tables, workers=workers)
    ctx.exit(status)


def _follow(run: Path, policy: StragglerPolicy, every_s: float, *, as_json: bool) -> None:
    from phalanx.detect.stragglers.straggler_watch import follow_run
    from phalanx.telemetry.run_status import run_status

    def is_over() -> bool:
        return not run_status(run).lives

    for change in follow_run(run, policy, every_s=every_s, is_over=is_over):
        click.echo(json.dumps(_as_json(change), ensure_ascii=False) if as_json else change.sentence)


def _as_json(change: StragglerChange) -> dict[str, Any]:
    """A line; without tables, which each change would repeat."""
    found = change.verdict.as_json()
    keys = [(one["what"], one["sentence"]) for one in found["detections"]]
    new = [(one.what, one.sentence) for one in change.found]
    return {
        "step": change.step,
        "sentence": change.sentence,
        "found": [one for key, one in zip(keys, found["detections"], strict=True) if key in new],
        "gone": [one.sentence for one in change.gone],
        "detections": found["detections"],
    }


def _show(tables: Any, *, workers: bool) -> None:
    from phalanx.cli.tables import make_console, make_table

    console = make_console()
    (what_if,) = tables["what_if"]
    mw, ms = ("n/a" if math.isnan(what_if[name]) else f"{what_if[name]:.3f}" for name in ("mw", "ms"))
    console.print(
        f"\na step takes {what_if['recorded_s']:.4g} s, {what_if['best_s']:.4g} s without what is lost;"
        f" slowdown S {what_if['slowdown']:.3f}, M_W {mw}, M_S {ms}",
        highlight=False,
    )
    table = make_table("what is lost of a step", "s", "share", right=(1, 2))
    for row in tables["lost"]:
        table.add_row(row["cause"], f"{row['lost_s']:.4g}", f"{round(row['share'], 3) + 0.0:.1%}")  # + 0.0: no -0.0%
    console.print(table)
    if workers:
        hottest = sorted(tables["workers"], key=lambda row: -row["slowdown"])
        columns = sorted(list(dict.fromkeys(row["column"] for row in hottest))[:_MOST_COLUMNS])
        grid = make_table("slowdown S", *(f"column {one}" for one in columns), right=tuple(range(1, len(columns) + 1)))
        for stage in sorted({row["stage"] for row in tables["workers"]}):
            own = {row["column"]: row["slowdown"] for row in tables["workers"] if row["stage"] == stage}
            grid.add_row(f"stage {stage}", *(f"{own[one]:.3f}" if one in own else "" for one in columns))
        console.print(grid)
