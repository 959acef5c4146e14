"""`phalanx detect diverge`: the first step at which two runs differ, and in which tensor."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.options import AS_JSON

if TYPE_CHECKING:
    from phalanx.cli.checkpoint_paths import Place
    from phalanx.detect.drift.run_pair import CheckpointDifference


@click.command("diverge")
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    metavar="X",
    help="Relative difference that counts as equal; 0: to the last bit.",
)
@click.option("--no-checkpoints", is_flag=True, help="Do not read checkpoints, which may be large.")
@AS_JSON
def command(run_a: Path, run_b: Path, tolerance: float, no_checkpoints: bool, as_json: bool) -> None:
    """Find the first step at which RUN_A and RUN_B differ, and in which tensor.

    Compared are figures of steps (metrics.jsonl), norms of layers, digests of states, samples, settings, and
    checkpoints that both have, tensor by tensor up to the first that differs. Exit status 0: equal; 1: they differ.
    """
    from phalanx.cli.verdict_output import write_verdict
    from phalanx.detect.drift.diverge_judge import DivergePolicy, judge
    from phalanx.detect.drift.run_pair import read_pair

    left, right = ({}, {}) if no_checkpoints else (_checkpoints(run_a), _checkpoints(run_b))
    shared = sorted(left.keys() & right.keys())
    pair = read_pair(run_a, run_b, shared, lambda step: _compare(step, left[step], right[step]))
    sys.exit(write_verdict(judge(pair, DivergePolicy(tolerance=tolerance)), as_json=as_json))


def _checkpoints(run: Path) -> dict[int, Place]:
    """Those of a run, by step; empty: it has none."""
    from phalanx.checkpoint.storage import checkpoint_store
    from phalanx.cli.checkpoint_paths import places
    from phalanx.core.errors import UserError

    try:
        found = places(str(run))
    except UserError:
        return {}
    parsed = [(checkpoint_store.parse(place.name), place) for place in reversed(found)]
    return {one.step: place for one, place in parsed if one is not None}


def _compare(step: int, left: Place, right: Place) -> CheckpointDifference:
    from phalanx.cli.checkpoint_diff import compare_contents
    from phalanx.cli.checkpoint_show import contents_of
    from phalanx.detect.drift.run_pair import CheckpointDifference, TensorDifference

    found = compare_contents(contents_of(left), contents_of(right))
    differing = [
        TensorDifference(
            name,
            figures["differing"],
            figures["elements"],
            figures["max_abs"],
            math.nan if figures["relative"] is None else figures["relative"],
        )
        for name, figures in found.changed.items()
    ]
    differing += [TensorDifference(name, 0, 0, math.nan, math.nan) for name in found.reshaped]
    return CheckpointDifference(step, found.equal, tuple(differing), (*found.only_a, *found.only_b))
