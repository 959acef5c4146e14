"""A case from its manifest to its score, which is kept; and the undisturbed training that it is held against."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from phalanx.core.files import write_json
from phalanx.faults.campaign import SLOW_STEPS
from phalanx.faults.case_manifest import Manifest
from phalanx.faults.referee import Result, Results, Score, judge
from support.campaign.control import SCRIPT, Run, work_folder
from support.campaign.settings import QUIET

KEPT = ("driver.txt", "losses.txt")


def run_case(
    case: Manifest, folder: Path, *, guard_s: float, keep: bool = False, more: list[str] | None = None
) -> Score:
    """Run a case, keep its result in `folder`, and what explains it beside; its score.

    Raises:
        RuntimeError: the undisturbed training did not come to its end.
    """
    truth = undisturbed(case, folder, guard_s)
    with work_folder(keep) as work:
        run = Run(case, work / "job", guard_s, more or [])
        facts = run.facts_of_it()
        explain(run, folder / "explained" / case.id)
        score = judge(case, facts, truth)
    Results(folder).keep(Result(score, sorted(facts, key=lambda fact: fact.at_s)))
    return score


def explain(run: Run, folder: Path) -> None:
    """Keep what a person needs to see why it went as it did."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "story.txt").write_text("\n".join(run.story.log) + "\n")
    for path in [run.places.folder / name for name in KEPT]:
        if path.exists():
            shutil.copyfile(path, folder / path.name)
    for path in (run.places.run / "executors").glob("*.err"):
        shutil.copyfile(path, folder / path.name)
    logs = run.places.run / "logs"
    if logs.exists():
        shutil.copytree(logs, folder / "logs", dirs_exist_ok=True)


def undisturbed(case: Manifest, folder: Path, guard_s: float) -> Mapping[int, str]:
    """The loss of every step when nothing goes wrong; run once for each number of ranks and kept in `folder`.

    All ranks are on one host, which imports once for all of them: what they compute does not depend on where they are.
    """
    alone = {"hosts": 1, "workers_per_host": case.cluster.ranks, "spares": 0, "may_shrink": False}
    cluster = case.cluster.model_copy(update=alone)
    quiet = Manifest(id=QUIET, seed=0, cluster=cluster, steps=max(case.steps, SLOW_STEPS))
    what = f"{quiet.model_dump_json()} {SCRIPT.read_text()}"
    path = folder / f"undisturbed-{hashlib.sha256(what.encode()).hexdigest()[:12]}.json"
    if not path.exists():
        with work_folder() as work:
            run = Run(quiet, work / "job", guard_s, [])
            facts = run.facts_of_it()
            explain(run, folder / "explained" / "quiet")
        losses = {fact.step: fact.loss for fact in facts if fact.what == "loss"}
        if sorted(losses) != list(range(1, quiet.steps + 1)) or any(fact.what == "detected" for fact in facts):
            raise RuntimeError(f"the undisturbed training did not run well: {len(losses)} of {quiet.steps} losses")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, losses)
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}
