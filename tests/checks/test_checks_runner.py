"""The runner: whatever a check does, the others go on and the command comes back."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

import checks_helpers as bad
import pytest
from checks_helpers import check, empty_host, fine

from phalanx.checks.check_host import LEVELS, CheckResult, Host, host_from_settings, recall, remember
from phalanx.checks.runner import CHECKS, choose, named, run_checks, waves
from phalanx.core.errors import UserError
from phalanx.run.messages import CheckOutcome


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Checks of the helpers can be found by other processes."""
    path = os.pathsep.join(filter(None, [str(Path(bad.__file__).parent), os.environ.get("PYTHONPATH")]))
    return empty_host(tmp_path, environment={"PYTHONPATH": path})


def test_a_check_that_raises_fails_and_the_others_go_on(host: Host) -> None:
    seen: list[str] = []
    found = run_checks([check("a", bad.crash), check("b", fine)], host, lambda result: seen.append(result.name))
    assert [(result.name, result.outcome) for result in found] == [("a", "fail"), ("b", "pass")]
    assert "RuntimeError: boom" in found[0].reason
    assert sorted(seen) == ["a", "b"]


def test_a_check_that_hangs_in_a_thread_fails_at_its_limit(host: Host) -> None:
    found = run_checks([check("a", bad.hang, limit_s=0.2), check("b", fine, limit_s=60.0)], host)
    assert [(result.name, result.outcome) for result in found] == [("a", "fail"), ("b", "pass")]
    assert found[0].reason == "no answer within 0.2 s"
    assert "dmesg" in found[0].action


def test_a_late_answer_changes_nothing(host: Host) -> None:
    freed = threading.Event()

    def late(host: Host) -> CheckResult:
        freed.wait(60)
        return fine(host)

    def second(host: Host) -> CheckResult:
        freed.set()
        return fine(host)

    slow = check("slow", late, limit_s=0.2, uses=frozenset({"cpu"}))
    found = run_checks([slow, check("next", second, limit_s=60.0, uses=frozenset({"cpu"}))], host)
    assert [result.outcome for result in found] == ["fail", "pass"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (bad.crash, "the check ended with status 1: RuntimeError: boom"),
        (bad.die, "the check was killed by SIGSEGV"),
        (bad.leave, "the check ended with status 7"),
    ],
)
def test_a_process_that_crashes_is_told_of(host: Host, function: object, reason: str) -> None:
    [result] = run_checks([check("a", function, isolated=True, limit_s=60.0)], host)
    assert result.outcome == "fail"
    assert reason in result.reason


def test_what_a_check_prints_is_not_its_answer(host: Host) -> None:
    [result] = run_checks([check("a", bad.noisy, isolated=True, limit_s=60.0)], host)
    assert result == CheckResult("a", "pass", value=1.5, unit="things")


def test_a_process_that_hangs_is_killed_with_its_children(host: Host, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    there = replace(host, environment={**host.environment, "PIPE": str(tmp_path / "pipe")})
    try:
        [result] = run_checks([check("a", bad.hang_with_child, isolated=True, limit_s=8.0)], there)
        assert result.reason.startswith("no answer within 8 s")
        if not _read(pipe):
            pytest.skip("this machine was too busy to start a process within 8 s")
        assert _read(pipe) == b"", "the end comes when the last writer is gone"
    finally:
        os.close(pipe)


def _read(pipe: int) -> bytes:
    assert select.select([pipe], [], [], 60)[0], "somebody still holds the pipe"
    return os.read(pipe, 1)


def test_checks_that_disturb_each_other_wait() -> None:
    reader, other = check("reader", fine), check("other", fine)
    cpu, disk = (check(name, fine, uses=frozenset({name})) for name in ("cpu", "disk"))
    both = check("both", fine, uses=frozenset({"cpu", "memory"}))
    planned = [[each.name for each in wave] for wave in waves([cpu, reader, both, disk, other])]
    assert planned == [["reader", "other"], ["cpu", "disk"], ["both"]]
    assert waves([]) == []


def test_sets_contain_the_smaller_ones_and_names_are_found() -> None:
    names = [{each.name for each in choose(CHECKS, level)} for level in LEVELS]
    assert names[0] < names[1] < names[2] == {each.name for each in CHECKS}
    assert len(names[2]) == len(CHECKS)
    assert [each.name for each in named(["timeouts", "cores"])] == ["cores", "timeouts"]
    with pytest.raises(UserError, match="'cpu': there is no such check; one of cores"):
        named(["cpu"])


def test_isolated_checks_are_such_that_another_process_finds_them() -> None:
    for each in CHECKS:
        assert getattr(sys.modules[each.run.__module__], each.run.__qualname__) is each.run
        if each.level == "passive":
            assert not each.isolated, f"{each.name}: to start a process is too slow for the passive set"
            assert not each.uses, f"{each.name}: passive checks read only"


def test_every_check_skips_or_passes_on_an_empty_host(host: Host) -> None:
    """Nothing there: no check may call that a fault, but for what every host has."""
    results = run_checks([each for each in CHECKS if not each.isolated], host)
    failed = {result.name for result in results if result.outcome == "fail"}
    assert failed == {"space"}  # df gives no answer, either
    for result in results:
        assert result.outcome != "skip" or result.reason


def test_results_are_what_the_driver_is_told() -> None:
    assert [each.name for each in fields(CheckResult)] == list(CheckOutcome.__struct_fields__)


def test_a_host_is_described_to_another_process(host: Host) -> None:
    given = replace(host, folder="s3://a/b", peers=("h:1",), expected={"gemm": 1.0}, own_pids=frozenset({3}))
    assert host_from_settings(given.settings()).settings() == given.settings()


def test_the_passive_set_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = """
import os, sys
from phalanx.checks.check_host import this_host
from phalanx.checks.runner import CHECKS
from phalanx.checks.runner import choose, run_checks
results = run_checks(choose(CHECKS, "passive"), this_host(os.environ))
assert len(results) > 15
print(sorted({"torch", "numpy", "fsspec", "pynvml"} & set(sys.modules)))
"""
    there = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=there
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_quick_set_loads_no_torch(tmp_path: Path) -> None:
    code = """
import os, sys
from phalanx.checks.check_host import this_host
from phalanx.checks.runner import CHECKS
from phalanx.checks.runner import choose, run_guarded
host = this_host(os.environ, folder=sys.argv[1])
results = [run_guarded(check, host) for check in choose(CHECKS, "quick")]
assert {"gemm", "gemm-repeat", "storage", "loopback"} <= {each.name for each in results if each.value is not None}
print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    there = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=there)
    assert done.stdout.strip() == "False"
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".phalanx-check")]


def test_memory_is_replaced_at_once_and_may_be_lost(tmp_path: Path) -> None:
    assert recall(tmp_path / "new", "a") == {}
    remember(tmp_path / "new", "a", {"x": 1})
    assert recall(tmp_path / "new", "a") == {"x": 1}
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file", "a", {"x": 1})  # no folder: forgotten
    (tmp_path / "new" / "a.json").write_text("[1]")
    assert recall(tmp_path / "new", "a") == {}
