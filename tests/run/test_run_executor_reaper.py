"""What a rank has started is gone when its attempt has ended, whatever it did; keepers live. With real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.checkpoint.keeper.keeper_start import end_keeper, is_listening
from phalanx.core.errors import UserError
from phalanx.ipc.processes import descendants, processes, read_process
from phalanx.run.executor import reaper
from phalanx.run.executor.control_groups import ByGroup, GroupHome, homes
from phalanx.run.executor.system_calls import describe
from phalanx.telemetry import Trace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are held together on Linux only")

HOST = Path(__file__).with_name("run_executor_host.py")
GUARD_S = 120.0


@pytest.fixture(params=reaper.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Each that this machine allows."""
    try:
        reaper.choose_containment(lambda _: None, name=f"try-{os.getpid()}", ways=[request.param]).close()
    except UserError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a FIFO that ranks hold, and a short path, for a socket; its name is that of the job."""
    folder = tmp_path_factory.mktemp("h")
    os.mkfifo(folder / "fifo")
    yield folder
    end_keeper(folder / "k")


def start(way: str, scenario: str, folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(HOST), way, scenario, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PHALANX_KEEPER": str(folder / "k")},
        start_new_session=True,
    )


def run(way: str, scenario: str, folder: Path) -> dict:
    process = start(way, scenario, folder)
    output, errors = process.communicate(timeout=GUARD_S)
    assert process.returncode == 7, errors
    assert f"processes are held by {way}" in errors
    return dict(json.loads(output))


def all_gone(descriptor: int) -> bool:
    """Whether what the ranks have started has ended; waits for it."""
    while select.select([descriptor], [], [], 60)[0]:
        if not os.read(descriptor, 100):
            return True
    return False


def test_an_attempt_ends_with_all_that_its_ranks_have_started_and_the_template_forks_the_next(
    way: str, folder: Path
) -> None:
    found = run(way, "attempts", folder)
    assert found == {
        "gone": [True, True],
        "stuck": [],
        "left": [],
        "template lives": True,
        "template killed": True,
    }


@pytest.mark.campaign(but=("subreaper",))
def test_a_keeper_that_a_rank_has_started_outlives_all_and_helpers_of_the_executor_are_left_alone(
    way: str, folder: Path
) -> None:
    assert run(way, "keeper", folder) == {"gone": True, "helper lives": True, "template": -signal.SIGKILL}
    assert is_listening(folder / "k")


@pytest.mark.campaign(but=("cgroup",))
def test_what_writes_the_spans_of_a_killed_rank_is_spared_and_ends_by_itself(way: str, folder: Path) -> None:
    assert run(way, "writer", folder) == {"gone": True, "left": [], "template": -signal.SIGKILL}
    steps = Trace.open(folder / "run").sql("select step, count(*) n from spans where kind = 'step' group by step")
    assert steps.to_pylist() == [{"step": 1, "n": 1}]
    assert list((folder / "run" / "telemetry" / "spans").rglob("*.parquet"))  # all of it was brought to its end


@pytest.mark.campaign(but=("cgroup",))
def test_what_only_looks_like_a_keeper_is_ended(way: str, folder: Path) -> None:
    if way == "pid-namespace":
        pytest.skip("the keeper's address is taken: the guard has started one outside")
    assert run(way, "false_keepers", folder) == {"gone": True, "left": []}


def test_what_an_executor_leaves_behind_is_ended_with_it(way: str, folder: Path) -> None:
    descriptor = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    run(way, "leave", folder)
    assert all_gone(descriptor)
    os.close(descriptor)


def test_what_runs_when_the_executor_is_killed_is_ended_too(way: str, folder: Path) -> None:
    descriptor = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    guard = start(way, "wait_with_helper", folder)
    assert guard.stdout is not None
    assert guard.stdout.readline()
    (executor,) = [process.pid for process in processes().values() if process.parent == guard.pid]
    os.kill(executor, signal.SIGKILL)
    guard.communicate(timeout=GUARD_S)
    assert guard.returncode == 128 + signal.SIGKILL
    assert all_gone(descriptor)
    os.close(descriptor)


@pytest.mark.campaign(but=("pid-namespace",))
def test_signals_that_mean_stop_reach_the_executor_through_its_guard(way: str, folder: Path) -> None:
    guard = start(way, "wait", folder)
    assert guard.stdout is not None
    assert guard.stdout.readline()
    guard.send_signal(signal.SIGTERM)
    output, _ = guard.communicate(timeout=GUARD_S)
    assert guard.returncode == 11
    assert "asked to stop" in output


def test_what_is_left_when_guard_and_executor_are_killed_is_ended_by_the_next_executor(folder: Path) -> None:
    if not _makes_groups():
        pytest.skip("no control group can be made here")
    descriptor = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    guard = start("cgroup", "wait", folder)
    assert guard.stdout is not None
    assert guard.stdout.readline()
    (executor,) = [process.pid for process in processes().values() if process.parent == guard.pid]
    os.kill(guard.pid, signal.SIGKILL)  # the executor dies with it
    executor_is_gone(executor)
    way = reaper.choose_containment(lambda _: None, name=folder.name, ways=["cgroup"])
    assert all_gone(descriptor)
    guard.communicate(timeout=GUARD_S)
    way.close()
    os.close(descriptor)


def executor_is_gone(pid: int) -> None:
    """Wait for it: what it holds is free then."""
    until_s = time.monotonic() + 60
    while (process := read_process(pid)) is not None and process.is_alive:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def _makes_groups() -> bool:
    try:
        reaper.choose_containment(lambda _: None, name=f"try-{os.getpid()}", ways=["cgroup"]).close()
    except UserError:
        return False
    return True


@pytest.mark.parametrize("version", [1, 2])
def test_each_version_of_control_groups_kills_what_detaches_itself(version: int, tmp_path: Path) -> None:
    found = [home for home in homes() if home.version == version]
    if not found:
        pytest.skip(f"no hierarchy of version {version} is mounted")
    try:
        group = ByGroup(found[0], f"{tmp_path.name}-{os.getpid()}")
    except OSError as error:
        pytest.skip(f"no group can be made: {error}")
    program = "import os, time\nif os.fork() == 0: os.setsid(); print(os.getpid(), flush=True)\ntime.sleep(100)"
    process = subprocess.Popen([sys.executable, "-S", "-c", f"input()\n{program}"], stdin=-1, stdout=-1, text=True)
    ends = reaper.Reaper(group, os.environ)
    ends.contain(process.pid)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    grandchild = int(process.stdout.readline())
    assert ends.left() == {grandchild}
    killed = ends.end_all(60)
    assert set(killed.pids) == {process.pid, grandchild} and killed.stuck == []
    assert process.wait() == -signal.SIGKILL
    group.close()
    process.stdin.close()
    process.stdout.close()
    assert not group.folder.exists()


def test_two_executors_of_one_name_do_not_share_a_group() -> None:
    if not _makes_groups():
        pytest.skip("no control group can be made here")
    groups = [ByGroup(homes()[0], f"same-{os.getpid()}") for _ in range(2)]
    assert groups[0].folder != groups[1].folder
    for group in groups:
        group.close()


def test_a_way_that_does_not_work_is_said_and_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(wanted: str, name: str) -> object:
        if wanted != "subreaper":
            raise OSError(f"no {wanted} for you")
        return reaper.BySubreaper()

    monkeypatch.setattr(reaper, "_open", refuse)
    lines: list[str] = []
    assert reaper.choose_containment(lines.append, name="x").name == "subreaper"
    assert lines == [
        "processes are held by subreaper (cgroup: no cgroup for you; pid-namespace: no pid-namespace for you)"
    ]
    with pytest.raises(UserError, match=r"none of the ways .* allow 'subreaper'"):
        reaper.choose_containment(lines.append, name="x", ways=["cgroup"])
    with pytest.raises(UserError, match="choose from cgroup, pid-namespace, subreaper"):
        reaper.choose_containment(lines.append, name="x", ways=["prayer"])


def test_a_group_that_cannot_be_written_to_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        ByGroup(GroupHome(2, tmp_path), "x")  # no control groups here: there is no such file to freeze them with
    assert [path.name for path in tmp_path.iterdir()] in ([], ["phalanx-x"])


def test_processes_that_do_not_go_are_named_when_the_time_is_over() -> None:
    class InVain(reaper.BySubreaper):
        def _stop(self, own: object, stopped: object) -> set[int]:
            return {os.getpid()}

        def kill_rest(self, safe: object) -> bool:
            return True  # so it says

    killed = reaper.Reaper(InVain(), {}).end_all(0.2)
    assert killed.pids == killed.stuck == [os.getpid()]
    assert killed.words[0].startswith(f"{os.getpid()} (")


def test_devices_are_waited_for_and_what_they_hold_is_told() -> None:
    class Held(reaper.BySubreaper):
        def __init__(self) -> None:
            self.victims = {process.pid}

        def _stop(self, own: object, stopped: object) -> set[int]:
            victims, self.victims = self.victims, set()
            return victims

    process = subprocess.Popen(["sleep", "100"])
    asked: list[set[int]] = []

    def release(pids: object, within_s: float) -> list[str]:
        asked.append(set(pids))  # type: ignore[call-overload]
        assert 0 < within_s <= 60
        return ["GPU 0 holds 1 GB"]

    ends = reaper.Reaper(Held(), {}, release)
    ends.contain(process.pid)
    killed = ends.end_all(60)
    assert asked == [{process.pid}]
    assert killed.held == ["GPU 0 holds 1 GB"]
    assert process.wait() == -signal.SIGKILL


def test_a_root_that_has_gone_is_forgotten_for_its_number_may_be_given_out_again() -> None:
    ends = reaper.Reaper(reaper.BySubreaper(), {})
    process = subprocess.Popen(["sleep", "100"])
    ends.contain(process.pid)
    assert ends._known_roots() == {process.pid}
    ends._roots[process.pid] -= 1  # as if it had begun at another time
    assert ends._known_roots() == set()
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError, match="is gone"):
        ends.contain(process.pid)


def test_descendants_are_found_at_any_depth() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=-1, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        found = descendants(processes(), {os.getpid()})
        assert {child.pid, grandchild} <= found and os.getpid() not in found
        until_s = time.monotonic() + GUARD_S  # its number is told before it has become sleep, and sleeps
        while f"{grandchild} (sleep), state S" not in describe(grandchild):
            assert time.monotonic() < until_s, describe(grandchild)
            time.sleep(0.01)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.communicate()
    assert describe(2**22 + 1) == f"{2**22 + 1} (gone)"
