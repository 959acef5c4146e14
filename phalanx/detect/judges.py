"""Every judge of runs by its name, and all of them on one run: `phalanx detect all`, the dashboard's page Findings.

    for verdict in judge_all(Path("runs/base")):
        print(verdict.judge, verdict.sentence)

A judge that cannot say anything, or that fails, is one verdict that abstains: the others are asked all the same. As a
program (``python -m phalanx.detect.judges RUN``) it writes a line of JSON for each, as it comes, and gives way to
everything else on the host.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from phalanx.core.errors import UserError, not_permitted
from phalanx.detect.detection import JudgeVerdict
from phalanx.telemetry.run_access import is_closed, is_folder

NICE = 10


@dataclass(frozen=True)
class Judge:
    """A judge of runs.

    Attributes:
        name: as in ``phalanx detect NAME``.
        asks: the question that it answers.
        module: where its ``judge_run(run, policy=None)`` is; imported when it is asked.
    """

    name: str
    asks: str
    module: str


JUDGES = (
    Judge("hang", "Which rank holds up a job that stands still?", "phalanx.detect.hangs.span_hangs"),
    Judge("corruption", "Do ranks that should be equal differ?", "phalanx.detect.corruption.copy_judge"),
    Judge("loss", "Did the loss spike or diverge, and in which batch?", "phalanx.detect.drift.loss_judge"),
    Judge("stragglers", "Who makes steps longer than they need be?", "phalanx.detect.stragglers.straggler_run"),
    Judge("drift", "Do steps grow longer, and which part of them?", "phalanx.detect.drift.drift_judge"),
    Judge("machines", "Which machine's metrics are unlike the others'?", "phalanx.detect.minder.machine_judge"),
    Judge("logs", "Which line came first, and what failed?", "phalanx.detect.logs.run_logs"),
)
"""All of them, the most urgent question first."""


def judge_all(run: Path, names: Sequence[str] = ()) -> Iterator[JudgeVerdict]:
    """Each judge's verdict on a run, as it comes.

    Args:
        run: its folder.
        names: only these; empty: all.

    Raises:
        UserError: there is no such judge, or no such folder.
    """
    known = {judge.name: judge for judge in JUDGES}
    for name in names:
        if name not in known:
            raise UserError("is no judge", cure=f"give one of {', '.join(known)}", value=name)
    if is_closed(run):
        raise not_permitted(run)
    if not is_folder(run):
        raise UserError("is no run", cure="give the folder of a run; `phalanx runs` lists them", value=str(run))
    return (asked(judge, run) for judge in known.values() if not names or judge.name in names)


def asked(judge: Judge, run: Path) -> JudgeVerdict:
    """The verdict of one judge; where it cannot judge, it abstains, and says why."""
    try:
        verdict: JudgeVerdict = import_module(judge.module).judge_run(run)
        return verdict
    except UserError as error:
        return JudgeVerdict(judge.name, abstains=(f"{error.problem}; {error.cure}",))
    except PermissionError as error:
        refused = not_permitted(error.filename or run)
        return JudgeVerdict(judge.name, abstains=(f"{refused.problem}; {refused.cure}",))
    except Exception as error:  # the others are to be heard all the same
        line = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return JudgeVerdict(
            judge.name, abstains=(f"the judge failed ({line}); `phalanx detect {judge.name}` says where",)
        )


def main() -> None:
    """Write a line of JSON for each judge of the run that is named."""
    os.nice(NICE)
    for verdict in judge_all(Path(sys.argv[1])):
        print(json.dumps(verdict.as_json()), flush=True)


if __name__ == "__main__":
    main()
