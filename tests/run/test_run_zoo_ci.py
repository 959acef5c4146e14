"""A share of the zoo with the real command: healthy scripts are left alone, hangs are found; three minutes in all.

The others, and hours of them, are run by ``benchmarks/run_zoo.py``; see docs/benchmarks/run_zoo.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from run_zoo import Campaign, read_options
from support.zoo.cases import HANGS, HEALTHY, Hang, Healthy, own
from support.zoo.signs import Signs
from support.zoo.turns import Result, forget_pages, read_results

from phalanx.run.journal import Entry

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "run_zoo.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# What pauses does so for longer than five seconds, in which many a step would be made; else scripts are short.
SHORT = {
    "rank0-validates": ("rank0_validates.py", "60", "--every", "25", "--seconds", "6"),
    "sleep": ("pauses.py", "220", "sleep", "--every", "100", "--seconds", "12"),
    "svd": ("pauses.py", "120", "svd", "--every", "80", "--seconds", "8"),
    "silent": ("silent.py", "--minutes", "0.3", "--seconds", "8"),
}
OTHERS = {
    "nanogpt": ("--max_iters=60", "--eval_interval=30", "--eval_iters=40"),
}
"""Arguments after those of the case: the last one counts."""
CI_HANGS = ("stopped", "killed", "deadlock")
AT_ONCE = 3


def healthy(name: str) -> Healthy:
    case = next(case for case in HEALTHY if case.name == name)
    return replace(case, command=SHORT.get(name) or (*case.command, *OTHERS[name]))


FAILS = Healthy("fails", ("silent.py", "--no-such-option"), own("silent.py"), steps=False)
HEALTHY_HERE = [healthy(name) for name in (*SHORT, *OTHERS)]
HANGS_HERE = [case for case in HANGS if case.name in CI_HANGS]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Those that are asked for, side by side: so each runs on a busy machine, and none waits for another's hang."""
    folder = tmp_path_factory.mktemp("zoo")
    options = read_options(["--at-once", str(AT_ONCE), "--folder", str(folder / "results")])
    items = [item for item in request.session.items if item.path == Path(__file__)]
    wanted = {params["case"].name for item in items if "case" in (params := item_params(item))}
    wanted |= {FAILS.name for item in items if item.name.startswith("test_a_script_that_fails")}
    every = [*HANGS_HERE, *(case for case in HEALTHY_HERE if not case.missing()), FAILS]
    cases = [case for case in every if case.name in wanted]
    try:
        campaign = Campaign(options, folder, [])
        campaign.run_each(sorted(cases, key=lambda case: case.name != "deadlock"))  # the longest one first
        return {result.case: result for result in campaign.results}
    finally:
        forget_pages(folder)
        for pid in named(str(folder)):
            os.kill(pid, signal.SIGKILL)


def item_params(item: pytest.Item) -> dict[str, Healthy | Hang]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY_HERE, ids=lambda case: case.name)
def test_a_healthy_script_is_left_alone(case: Healthy, results: dict[str, Result]) -> None:
    if why := case.missing():
        pytest.skip(why)
    result = results[case.name]
    assert result.problems == []
    assert (result.outcome, result.alarms, result.attempts, result.status) == ("right", [], 1, 0)
    if case.name in SHORT and case.steps:
        assert result.pause_s > 5, "the pause was not seen, so nothing was tried"


@pytest.mark.campaign(but=("killed",))
@pytest.mark.slow
@pytest.mark.parametrize("case", HANGS_HERE, ids=lambda case: case.name)
def test_a_hang_is_found_and_the_guilty_rank_named(case: Hang, results: dict[str, Result]) -> None:
    result = results[case.name]
    assert result.problems == []
    assert result.outcome == "right" and result.named == list(case.guilty)
    assert result.verdict_s is not None and 0 <= result.verdict_s < case.within_s


@pytest.mark.campaign
@pytest.mark.slow
def test_a_script_that_fails_by_itself_is_not_taken_for_a_false_alarm(results: dict[str, Result]) -> None:
    assert results["fails"].outcome == "broken"


@pytest.mark.campaign
@pytest.mark.slow
def test_a_campaign_that_is_killed_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    results, words = tmp_path / "results", ["--only", "single", "--minutes", "0.05", "--at-once", "1"]
    command = [sys.executable, str(SCRIPT), *words, "--folder", str(results), "--resume"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    campaign = subprocess.Popen(command, env=environ, start_new_session=True)
    ranks: list[int] = []
    while not ranks and campaign.poll() is None:
        time.sleep(0.2)
        ranks = [pid for pid in named(str(tmp_path)) if is_rank(pid)]
    campaign.kill()
    assert campaign.wait() == -signal.SIGKILL, "it was over before a rank was seen"
    until_s = time.monotonic() + 60
    while (left := named(str(tmp_path)) or list(tmp_path.glob("work-*"))) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert left == []
    assert subprocess.run(command, env=environ, check=False, timeout=300).returncode == 0
    assert [result.case for result in read_results(results)] == ["single"]


def named(folder: str) -> list[int]:
    """Processes that were started with this folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if folder.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("phalanx rank")
    return False


# What is read out of a journal


def entries(*said: tuple[str, float, dict[str, object]]) -> list[Entry]:
    """Events, and actions where the name says so, such as ``action:stop``."""
    found = []
    for number, (name, unix_s, fields) in enumerate(said, 1):
        kind, _, word = ("event:" + name if ":" not in name else name).partition(":")
        text = json.dumps({kind: word, **fields})
        found.append(Entry(kind, int(str(fields.get("attempt", 1))), text, unix_s, number, 1))  # type: ignore[arg-type]
    return found


def test_a_healthy_life_has_no_sign() -> None:
    signs = Signs()
    life = [("job-begun", 0.0, {}), ("host-joined", 1.0, {"host": "a"}), ("action:start", 2.0, {"attempt": 1})]
    life += [("started", 3.0, {"host": "a"}), ("running", 4.0, {"step": 1}), ("advanced", 9.0, {"step": 50})]
    life += [
        ("workers-returned", 10.0, {}),
        ("action:finish", 10.0, {"status": 0, "reason": "every rank has returned"}),
    ]
    signs.take(entries(*life, ("host-gone", 11.0, {"host": "a", "why": "it was ended"})))
    assert (signs.causes(), signs.alarms, signs.notes) == ([], [], [])
    assert (signs.began_s, signs.ended_s, signs.steps, signs.attempts, signs.status) == (3.0, 10.0, 50, 1, 0)


def test_an_alarm_counts_once_with_all_that_follows_from_it() -> None:
    signs = Signs()
    first = [("no-progress", 5.0, {"age_s": 3.0}), ("action:open-incident", 5.0, {"number": 1})]
    first += [("suspects-named", 7.0, {"ranks": [1]}), ("action:stop", 7.0, {"hosts": ["a"]})]
    signs.take(entries(*first, ("action:evict", 8.0, {"host": "a"}), ("action:start", 9.0, {"attempt": 2})))
    assert [sign.name for sign in signs.causes()] == ["no-progress", "evict"]
    assert (signs.named(), signs.blamed_hosts(), signs.attempts) == ((1,), ["a"], 2)
    assert signs.verdict() is not None and signs.verdict(2) is None


def test_what_nobody_knows_yet_is_an_alarm_and_lines_of_logs_are_none() -> None:
    signs = Signs()
    lines = [("noticed", 1.0, {"rule": "loss-not-finite"}), ("action:alert", 1.0, {"level": "warning"})]
    signs.take(entries(*lines, ("thought-about", 2.0, {}), ("action:alert", 2.0, {"level": "warning"})))
    assert [sign.name for sign in signs.causes()] == ["thought-about", "alert"]
    assert len(signs.notes) == 2


def test_what_a_person_ends_is_no_alarm() -> None:
    signs = Signs()
    signs.take(entries(("stop-asked", 5.0, {}), ("action:stop", 5.0, {}), ("worker-failed", 6.0, {"rank": 0})))
    signs.take(entries(("action:finish", 7.0, {"status": 5, "reason": "a person"})))
    assert (signs.causes(), signs.ended_s, signs.status) == ([], 5.0, 5)


def test_a_result_is_kept_and_read_again(tmp_path: Path) -> None:
    told = ["+3.0 s no-progress"]
    result = Result("sleep", "healthy", "wrong", told, "abc", 1.5, 60.0, 100, 20.0, 2, told, 0, 4, load=1.0)
    result.keep(tmp_path)
    assert read_results(tmp_path) == [result]
