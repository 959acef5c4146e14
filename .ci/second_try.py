"""Runs the tests that have failed once more, alone, in one process; its argument: how many runs of pytest there were.

A test that passes this time is flaky: its name is printed, and up to three of them do not fail the run. One that fails
twice does, and so does anything that is no test's failure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

MOST_FLAKY = 3
MOST_TRIED = 20  # more than that is no chance, and trying them could take longer than CI may


class _Outcomes:
    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)


def _written(key: str) -> Any:
    path = Path(".pytest_cache/v") / key
    return json.loads(path.read_text()) if path.exists() else None


def main(runs: int) -> int:
    """The exit status of the whole run."""
    before = set(_written("cache/lastfailed") or ())
    ended = _written("phalanx/exit_statuses") or []
    if len(ended) != runs or not {*ended} <= {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        print(f"no second try: of {runs} runs not all came to their end (exit statuses {ended})", flush=True)
        return 1
    if not 0 < len(before) <= MOST_TRIED:
        print(f"no second try: {len(before)} tests failed, and 1 to {MOST_TRIED} are tried again", flush=True)
        return 1
    print(f"second try, alone, of {len(before)} tests that failed", flush=True)
    outcomes = _Outcomes()
    ended = pytest.main(["--last-failed", "--last-failed-no-failures=none"], plugins=[outcomes])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(f"the second try did not come to its end (exit status {int(ended)})")
        return 1
    flaky = sorted(before & outcomes.passed - outcomes.failed)
    twice = sorted(before - set(flaky))
    for name in twice:
        print(f"failed twice: {name}")
    for name in flaky:
        print(f"flaky: {name}")
    if len(flaky) > MOST_FLAKY:
        print(f"{len(flaky)} flaky tests, {MOST_FLAKY} at most may be")
    return 1 if twice or len(flaky) > MOST_FLAKY else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
