"""Outputs of commands in docs/detect_drift.md, written by running them on runs whose troubles are known.

python benchmarks/detect_drift_page.py             # run every command again and write what it prints
python benchmarks/detect_drift_page.py --check     # change nothing, fail where the page is of older code
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from tempfile import TemporaryDirectory

from doc_outputs import ROOT, written
from support.drifting_runs import Drift, DriftingRun
from support.loss_curves import HealthyCurve, with_trouble, write_curve

from phalanx.telemetry.layer_norms import append_norms

PAGE = ROOT / "docs" / "detect_drift.md"
_LAYERS = ("embedding", "layers.0", "layers.1", "norm")


def make_runs(folder: Path) -> None:
    """The runs that the page speaks of."""
    DriftingRun(drift=Drift("skew", 0.12, "creep", 120), evaluate_every=50, checkpoint_every=40).write(folder / "night")
    DriftingRun(drift=Drift("forward", 0.1, "jump", 260, (5,)), restart_at=90).write(folder / "day")
    curve = HealthyCurve(seed=4, bump=0.3).curve()
    curve = with_trouble(with_trouble(curve, "bad update", 412, 0.9), "divergence", 860, 2.0)
    write_curve(curve, folder / "hot")
    for name, layout, factor in (("before", 1, 1.0), ("after", 2, 1 + 1e-7)):
        run = write_curve(HealthyCurve(steps=60, warm_up=10).curve(), folder / name)
        (run / "config.json").write_text(
            json.dumps({"data": {"sequence_length": 512}, "parallel": {"tensor": layout}, "train": {"steps": 60}})
        )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for line in lines[31:]:
            line["loss"] *= factor
            line["grad_norm"] *= factor
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step in range(10, 61, 10):
            later = factor if step > 30 else 1.0
            norms = {layer: 2.0 + place for place, layer in enumerate(_LAYERS)}
            touched = {layer: value * (later if layer == "layers.1" else 1.0) for layer, value in norms.items()}
            append_norms(run, step, {"weight": touched, "gradient": norms, "activation": norms})


def page_now() -> str:
    """The page with every block as its command prints it now."""
    with TemporaryDirectory() as folder:
        make_runs(Path(folder) / "runs")
        return written(PAGE.read_text(), Path(folder))


def main() -> None:
    """Write or check the page."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", "--quick", action="store_true", help="change nothing, fail where it is old")
    check = parser.parse_args().check
    now = page_now()
    is_stale = now != PAGE.read_text()
    if is_stale and not check:
        PAGE.write_text(now)
    print(f"{'of older code' if check else 'written'}: {PAGE.name if is_stale else 'none'}")
    sys.exit(check and is_stale)


if __name__ == "__main__":
    main()
