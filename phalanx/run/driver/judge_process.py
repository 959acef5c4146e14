"""Judges of `phalanx detect` for a driver, in a process of their own that gives way to everything else on its host.

    echo '{"kind": "run", …}' | python -m phalanx.run.driver.judge_process PARENT

writes what each judge has found as a line of JSON, as it comes. Whatever becomes of it, the driver goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from phalanx.core.errors import UserError
from phalanx.detect.detection import Detection, JudgeVerdict
from phalanx.detect.judges import NICE, judge_all
from phalanx.ipc.processes import die_with_parent, give_way, name_process
from phalanx.run.driver.job_hosts import OF_SPANS, Placement, as_job_names, ranks_by_machine
from phalanx.run.driver.machine_watch import MachineSource, watch_machines
from phalanx.run.driver.verdicts import bounded

if TYPE_CHECKING:
    from phalanx.detect.incident_history import HostIncident


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What judges are asked.

    Attributes:
        kind: ``run``: the judges with these `names`, on the run in `folder`; ``logs``: why the attempt ended, by the
            logs of its ranks in `folder`; ``offenders``: which hosts fail again and again, by histories in `places`;
            ``machines``: what the metrics of `source` say of the job's hosts from now on, without end.
        placement: of the attempt that is asked about, for ``run`` and ``machines``.
        hosts: how many there are at least, for ``offenders``.
    """

    kind: Literal["run", "logs", "offenders", "machines"]
    folder: str = ""
    names: tuple[str, ...] = ()
    placement: Placement = Placement()
    attempt: int = 0
    places: tuple[str, ...] = ()
    hosts: int = 0
    now_unix_s: float = 0.0
    rules: tuple[str, ...] = ()
    source: MachineSource = MachineSource()


class Said(msgspec.Struct, frozen=True):
    """What one judge has found."""

    judge: str
    detections: tuple[Detection, ...]
    abstains: tuple[str, ...] = ()


def answers(question: Question) -> Iterator[JudgeVerdict]:
    """Verdicts, as they come.

    Raises:
        UserError: what is to be judged is not there.
    """
    match question.kind:
        case "run":
            yield from judged_run(Path(question.folder), question.names, question.placement)
        case "logs":
            from phalanx.detect.logs.run_logs import judge_places

            files = logs_of(Path(question.folder), question.attempt)
            yield judge_places(files, rules=[Path(rule) for rule in question.rules])
        case "offenders":
            from phalanx.detect.offenders import FleetHistory, judge_offenders

            incidents = read_where_possible([Path(place) for place in question.places])
            hosts = max(question.hosts, len({one.host for one in incidents}))
            yield judge_offenders(FleetHistory(incidents, hosts, now_unix_s=question.now_unix_s))
        case "machines":
            yield from watch_machines(question.source, question.placement.since_unix_s)


def judged_run(run: Path, names: Sequence[str], placement: Placement) -> Iterator[JudgeVerdict]:
    """Verdicts on a run, with hosts as the job names them; none by spans that are not of the present attempt."""
    machines = ranks_by_machine(run, placement.since_unix_s)
    asked = [name for name in names if machines or name not in OF_SPANS]
    for verdict in judge_all(run, asked) if asked else ():
        found = tuple(as_job_names(one, verdict.judge, placement, machines) for one in verdict.detections)
        yield replace(verdict, detections=found)


def logs_of(folder: Path, attempt: int) -> list[Path]:
    """Log files of the ranks of one attempt, those of several hosts in folders of their own."""
    name = f"attempt-{attempt:04d}.*.log"
    return sorted([*folder.glob(f"rank-*/{name}"), *folder.glob(f"*/rank-*/{name}")])


def read_where_possible(places: Sequence[Path]) -> tuple[HostIncident, ...]:
    """Incidents of all of these; of a folder without a history, those of the jobs in it."""
    from phalanx.detect.incident_history import read_histories

    found: set[HostIncident] = set()
    for place in places:
        with suppress(UserError):
            found.update(read_histories([place]))
            continue
        for job in sorted(place.glob("*/job.json")) if place.is_dir() else ():
            with suppress(UserError):  # one that cannot be read does not hide the others
                found.update(read_histories([job.parent]))
    return tuple(sorted(found, key=lambda one: (one.unix_s, one.host, one.kind)))


def main() -> None:
    """Answer the question on stdin: a job of thousands of hosts has more to say than a command line holds."""
    die_with_parent(int(sys.argv[1]))
    name_process("phalanx judges")
    os.nice(NICE)
    give_way(NICE)
    try:
        for verdict in answers(msgspec.json.decode(sys.stdin.buffer.read(), type=Question)):
            said = Said(verdict.judge, tuple(map(bounded, verdict.detections)), verdict.abstains)
            print(msgspec.json.encode(said).decode(), flush=True)
    except UserError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
