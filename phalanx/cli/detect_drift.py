"""`phalanx detect drift`: steps that become longer, and which part of them grew."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phalanx.cli.options import AS_JSON


@click.command("drift")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--growth",
    type=click.FloatRange(0.001, 10),
    default=0.01,
    show_default=True,
    metavar="X",
    help="Growth of a step that counts, as a share.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    metavar="N",
    help="First steps of a start to leave out.",
)
@AS_JSON
def command(run: Path, growth: float, warm_up: int, as_json: bool) -> None:
    """Find since when the steps of RUN take longer, and which part of them grew.

    RUN is the folder of a run with metrics.jsonl, spans or both. Jumps and slow creeps are told apart; evaluations,
    checkpoints, restarts and the first steps are no drift.
    """
    from phalanx.cli.verdict_output import write_verdict
    from phalanx.detect.drift.change_points import ChangePolicy
    from phalanx.detect.drift.drift_judge import DriftPolicy, judge_run

    policy = DriftPolicy(change=ChangePolicy(least_growth=growth), warm_up_steps=warm_up)
    sys.exit(write_verdict(judge_run(run, policy), as_json=as_json))
