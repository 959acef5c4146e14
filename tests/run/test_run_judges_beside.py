"""Judges of `phalanx detect` beside a job: asked in another process, heard by the driver, of no harm when they fail."""

from __future__ import annotations

import asyncio
import csv
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from phalanx.detect.corruption.digest_file import UnlikeCopies, append_digests
from phalanx.detect.detection import Culprit, Detection, named
from phalanx.detect.incident_history import DAY_S, HostIncident, read_histories
from phalanx.detect.judges import JUDGES
from phalanx.run.config import RunConfig
from phalanx.run.decide.actions import USER_CODE, Finish, KeepDetection, OpenIncident
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Host, Recovery, State, initial
from phalanx.run.driver import run_judges
from phalanx.run.driver.judge_process import Question, answers
from phalanx.run.driver.run_judges import RunJudges
from phalanx.run.incidents.detections_file import DetectionsFile

GUARD_S = 280.0  # on a machine with much else to do: these processes give way to all others
JOB = Job("j", hosts=3, workers_per_host=1)
TRACEBACK = """step 1 loss 3.1
Traceback (most recent call last):
  File "/job/train.py", line 10, in <module>
    batch = table[key]
KeyError: 'tokens'
"""


@dataclass
class HeardBy:
    """What a driver is to these judges."""

    state: State
    kept: list[tuple[str, Detection, int]] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    attempt: Any = None

    def keep(self, judge: str, found: Detection, incident: int = 0) -> None:
        self.kept.append((judge, found, incident))
        self.came.set()


def running_state(**changes: Any) -> State:
    placement = ("a", "b", "c")
    hosts = {name: Host("", "active", place=place) for place, name in enumerate(placement)}
    return replace(initial(Policy(), JOB), phase="running", attempt=1, placement=placement, hosts=hosts, **changes)


def config(folder: Path, **judges: Any) -> RunConfig:
    settings = {"script": "train.py", "folder": str(folder), "judges": {"limit_s": GUARD_S} | judges}
    return RunConfig.model_validate(settings)


async def heard(judges: RunJudges, driver: HeardBy) -> list[tuple[str, Detection, int]]:
    """What comes of watching, up to the first that is found."""
    watching = asyncio.create_task(judges.watch())
    try:
        await asyncio.wait_for(driver.came.wait(), GUARD_S)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    return driver.kept


def write_logs(folder: Path, attempt: int, last: str, rank: int = 1) -> None:
    for number in range(3):
        path = folder / f"rank-{number}" / f"attempt-{attempt:04d}.0001.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("step 1 loss 3.1\n" if number != rank else last)


def test_the_logs_of_the_attempt_that_failed_say_why_and_whose_host(tmp_path: Path) -> None:
    write_logs(tmp_path / "logs", 1, TRACEBACK)
    write_logs(tmp_path / "logs", 2, "step 1 loss 3.0\n")  # it goes on already

    async def story() -> HeardBy:
        recovery = Recovery("failure", 5.0, "rank 1 on b: exit status 1")
        driver = HeardBy(running_state(recovery=recovery))
        judges = RunJudges(config(tmp_path / "job"), driver, tmp_path / "job", tmp_path / "logs")  # type: ignore[arg-type]
        judges.heard(OpenIncident(4, 1, "executor of b", "rank 1 on b: exit status 1"))
        driver.state = replace(driver.state, placement=("c", "d", "a"), attempt=2)
        await heard(judges, driver)
        return driver

    ((judge, found, incident),) = asyncio.run(story()).kept
    assert (judge, incident) == ("logs", 4) and "KeyError" in found.sentence
    assert named(found, "hosts") in ((), ("b",))


def test_logs_are_read_when_all_ranks_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to fail may be a follower; who caused it may still be writing."""

    async def story() -> tuple[list[str], str]:
        driver = HeardBy(replace(running_state(), phase="diagnosing"))
        judges = RunJudges(config(tmp_path), driver, tmp_path, tmp_path)  # type: ignore[arg-type]
        asked = asyncio.get_running_loop().create_future()
        phases = iter(("diagnosing", "stopping", "stopping", "checking"))

        async def poll(_: float) -> None:
            driver.state = replace(driver.state, phase=next(phases))

        async def ask(question: Question) -> list[Any]:
            asked.set_result(driver.state.phase)
            return []

        monkeypatch.setattr(run_judges, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": poll}))
        monkeypatch.setattr(judges, "_ask", ask)
        judges.heard(OpenIncident(1, 1, "executor of b", "rank 1"))
        reading = asyncio.create_task(judges._watch_logs())
        phase = await asyncio.wait_for(asked, GUARD_S)
        reading.cancel()
        return list(phases), phase

    assert asyncio.run(story()) == ([], "checking")


def test_a_job_that_has_failed_waits_for_the_logs_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(limit_s: float) -> float:
        driver = HeardBy(running_state())
        judges = RunJudges(config(tmp_path), driver, tmp_path, tmp_path)  # type: ignore[arg-type]
        monkeypatch.setattr(run_judges, "_LAST_WORD_S", {USER_CODE: limit_s})
        judges.heard(OpenIncident(1, 1, "executor of b", "rank 1"))
        began_s = time.monotonic()
        await judges.last_word(Finish(0, "done"))
        assert time.monotonic() - began_s < 5
        await judges.last_word(Finish(USER_CODE, "all ranks have ended so"))  # nobody reads them
        return time.monotonic() - began_s

    assert asyncio.run(story(0.2)) >= 0.2


def test_what_the_run_records_is_looked_at_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(run_judges.OF_A_RUN) == {judge.name for judge in JUDGES} - {"hang", "logs"}
    monkeypatch.setattr(run_judges, "OF_A_RUN", ("corruption",))  # the others take their time
    hosts = {rank: "abc"[rank] for rank in range(3)}
    same = dict.fromkeys(range(3), "program")
    copies = UnlikeCopies(100, 0, 1.5, "weight", "embedding", {0: "x", 1: "x", 2: "y"}, hosts, same, 50)
    (tmp_path / "config.json").write_text("{}")
    append_digests(tmp_path, [copies])

    async def story() -> HeardBy:
        driver = HeardBy(running_state())
        judges = RunJudges(config(tmp_path / "job", every_s=0.1), driver, tmp_path, tmp_path)  # type: ignore[arg-type]
        await heard(judges, driver)
        return driver

    judge, found, incident = asyncio.run(story()).kept[0]
    assert (judge, incident) == ("corruption", 0) and found.blamed_hosts == ("c",)


def test_a_repeat_offender_is_named_when_it_joins(tmp_path: Path) -> None:
    table = tmp_path / "history.csv"
    now_s = time.time()
    rows = [("b", now_s - day * DAY_S, "Xid 79") for day in range(1, 60, 4)]
    rows += [(f"other{n}", now_s - (20 + 3 * n) * DAY_S, "link down") for n in range(20)]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("host", "unix_s", "kind"), *rows])

    async def story() -> HeardBy:
        everyone = running_state()
        without = {name: host for name, host in everyone.hosts.items() if name != "b"}
        driver = HeardBy(replace(everyone, hosts=without))
        settings = config(tmp_path / "job", history=[str(table)])
        judges = RunJudges(settings, driver, tmp_path, tmp_path)  # type: ignore[arg-type]
        watching = asyncio.create_task(judges.watch())
        while not judges._offenders:
            await asyncio.sleep(0.01)
        assert driver.kept == []
        driver.state = everyone
        await asyncio.wait_for(driver.came.wait(), GUARD_S)
        watching.cancel()
        await asyncio.wait([watching])
        return driver

    ((judge, found, _),) = asyncio.run(asyncio.wait_for(story(), GUARD_S)).kept
    assert judge == "offenders" and found.what == "repeat offender" and found.blamed_hosts == ("b",)
    assert found.advice == "exclude"


@pytest.mark.parametrize(
    "then",
    ["import time; time.sleep(600)", "import sys; print('no JSON'); sys.exit(3)", "raise SystemExit('no memory')"],
)
def test_judges_that_hang_or_fail_are_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, then: str
) -> None:
    (tmp_path / "a_judge_that_fails.py").write_text(then)
    monkeypatch.setattr(run_judges.judge_process, "__name__", "a_judge_that_fails")
    monkeypatch.syspath_prepend(tmp_path)

    async def story() -> list[tuple[str, Detection]]:
        judges = RunJudges(config(tmp_path, limit_s=1.0), HeardBy(running_state()), tmp_path, tmp_path)  # type: ignore[arg-type]
        return await judges._ask(Question(kind="run", folder=str(tmp_path)))

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(asyncio.wait_for(story(), GUARD_S)) == []
    (said,) = [record.getMessage() for record in caplog.records if record.name == run_judges.__name__]
    assert said.startswith("judges (run)")


def test_none_is_asked_where_nobody_wants_it(tmp_path: Path) -> None:
    async def story() -> None:
        judges = RunJudges(config(tmp_path, every_s=0), HeardBy(running_state()), tmp_path, tmp_path)  # type: ignore[arg-type]
        judges.heard(OpenIncident(1, 1, "executor of b", "rank 1"))
        await asyncio.wait_for(judges.watch(), GUARD_S)
        await asyncio.wait_for(judges.last_word(Finish(USER_CODE, "so")), GUARD_S)

    asyncio.run(story())


def test_the_history_of_a_host_holds_what_judges_found_of_it(tmp_path: Path) -> None:
    job = tmp_path / "night"
    job.mkdir()
    (job / "job.json").write_text(json.dumps({"job": "night"}))
    blamed = Detection("slow host", "b is slow", (Culprit("host", "b", (), ("b",)),), advice="check")
    kept = DetectionsFile(job)
    for number, (judge, found, incident) in enumerate(
        [("stragglers", blamed, 0), ("offenders", blamed, 0), ("hang", blamed, 3), ("drift", Detection("x", "y"), 0)], 1
    ):
        kept.add(KeepDetection(number, 50.0 + number, 1, judge, found, incident), lambda text: text)
    assert read_histories([tmp_path]) == [HostIncident("b", 51.0, blamed.what, "night")]
    (verdict,) = answers(Question(kind="offenders", places=(str(tmp_path),), now_unix_s=100.0))
    assert verdict.judge == "offenders" and not verdict.detections
