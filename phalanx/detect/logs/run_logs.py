"""The judge of logs over a run or a job's folder, for commands, pages and reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.logs.log_digest import read_job
from phalanx.detect.logs.log_judge import JUDGE, LogPolicy, judge_logs
from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.detect.logs.log_sources import find_log_files


def judge_places(
    places: Sequence[Path],
    policy: LogPolicy | None = None,
    *,
    rules: Sequence[Path] = (),
    healthy: Iterable[Path] = (),
) -> JudgeVerdict:
    """The verdict of logs in these folders and files, which are of one job.

    Args:
        rules: files of rules that come before ours, such as learnt ones.
        healthy: logs of jobs that ended well.

    Raises:
        UserError: a place is not there, a file cannot be read, or a rule is refused.
    """
    matcher = Matcher(load_rules(rules, of_failed_jobs=True))
    if not find_log_files(places):
        reason = "there are no log files; give the folder of a run, of torchrun's --log-dir, or the files themselves"
        return JudgeVerdict(JUDGE, abstains=(reason,))
    return judge_logs(read_job(places, matcher, healthy=healthy), policy)


def judge_run(run: Path, policy: LogPolicy | None = None) -> JudgeVerdict:
    """The verdict of the logs of a run of `phalanx train`, or of a job of `phalanx run`, by its folder.

    Raises:
        UserError: it is not there, or a file cannot be read.
    """
    return judge_places([run], policy)
