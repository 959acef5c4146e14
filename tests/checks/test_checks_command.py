"""`phalanx check` as a person or a script calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from phalanx.checks.runner import CHECKS
from phalanx.cli import check_command as command_module
from phalanx.cli.check_command import command
from phalanx.core.errors import UserError


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_one_check_as_json() -> None:
    result = _call("--only", "timeouts", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["passed"] is True
    [found] = answer["results"]
    assert (found["name"], found["outcome"]) == ("timeouts", "pass")
    assert set(found) >= {"reason", "value", "unit", "threshold", "threshold_source", "action"}


def test_a_failure_is_status_1_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "14")
    monkeypatch.setenv("COLUMNS", "200")
    result = _call("--only", "timeouts", "--only", "swap")
    assert result.exit_code == 1
    assert "NCCL gives a link up after 0.537 s" in result.output
    assert "timeouts: set NCCL_IB_TIMEOUT=20 and NCCL_IB_RETRY_CNT=7" in result.output
    assert "1 passed, 1 failed, 0 skipped" in result.output


def test_a_threshold_of_ones_own() -> None:
    assert _call("--only", "cores", "--expect", "cores=1").exit_code == 0
    assert _call("--only", "cores", "--expect", "cores=1e9").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "cpu"], "'cpu': there is no such check; one of cores, "),
        (["--expect", "cores=many"], "--expect = 'cores=many': a threshold is a number; write --expect NAME=NUMBER"),
        (["--expect", "nothing=1"], "'nothing': there is no such check"),
        (["--peer", "host"], "--peer = 'host': a peer is a host and a port; write --peer HOST:PORT"),
    ],
)
def test_bad_input(arguments: list[str], told: str) -> None:
    result = _call(*arguments)
    assert isinstance(result.exception, UserError)  # which the entry point turns into one line and status 2
    assert told in str(result.exception)


def test_the_sets_are_listed_without_running_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("nothing is to be run")

    monkeypatch.setattr(command_module, "run_checks", refuse)
    listed = json.loads(_call("--full", "--list", "--json").stdout)
    assert [each["name"] for each in listed] == [each.name for each in CHECKS]
    quick = {each["name"] for each in json.loads(_call("--list", "--json").stdout)}
    assert "gemm" in quick
    assert "gpu-gemm" not in quick
    monkeypatch.setenv("COLUMNS", "200")
    assert "timeouts of NCCL and torch are in order" in _call("--passive", "--list").output


def test_the_entry_point_knows_it_and_stays_light() -> None:
    code = """
import sys
from phalanx.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
print(sorted(name for name in sys.modules if name.startswith("phalanx.checks") or name == "torch"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "  check " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_bad_input_is_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "check", "--only", "cpu"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: 'cpu': there is no such check")
    assert len(done.stderr.splitlines()) == 1
