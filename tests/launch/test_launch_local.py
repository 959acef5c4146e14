"""Ranks as real processes: what they are given, how they end, and what is told of it. No torch in most, for speed."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.layout import Layout
from phalanx.launch.cores import local_shares
from phalanx.launch.local_ranks import launch_local
from phalanx.launch.rank_failures import Failure

GUARD_S = 240.0

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def launch(count: int, target: str, *arguments: Any, **options: Any) -> tuple[int, str]:
    """Exit status, and what the launcher wrote."""
    report = io.StringIO()
    return launch_local(count, f"launch_targets:{target}", arguments, report=report, **options), report.getvalue()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(pid: int) -> None:
    """Wait until a process is gone, which a signal has been sent to; fails after a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert wait([descriptor], 60), f"{pid} is still there"
    os.close(descriptor)


@pytest.fixture(params=[True, False], ids=["fork", "exec"])
def fork(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_ranks_are_given_what_is_theirs(tmp_path: Path, fork: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("sys.argv", ["some command"])
    assert launch(3, "describe_self", str(tmp_path), fork=fork, attempt=4) == (0, "")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, share in zip(ranks, local_shares(3), strict=True):
        assert rank["environment_agrees"]
        assert rank["affinity"] == sorted(share.cpus or os.sched_getaffinity(0))
        assert rank["threads"] == str(share.threads)
        assert rank["openblas"] == os.environ.get("OPENBLAS_NUM_THREADS")
        assert rank["attempt"] == 4
        assert rank["argv"] == ["some command"]
        assert rank["phases"] == ["template", "fork" if fork else "exec", "setup"]
        assert rank["group"] == rank["parent"] == ranks[0]["parent"] != os.getpid()
    assert ranks[0]["listening"] == 1
    assert (ranks[0]["listen_fd"] is not None, ranks[1]["listen_fd"], ranks[2]["listen_fd"]) == (True, None, None)
    assert len({rank["random"] for rank in ranks}) == 3
    assert len({rank["imported_in"] for rank in ranks}) == (1 if fork else 3)
    # The three standard ones, the pipe for its last word, rank 0's listening socket, and the one that lists the folder.
    assert [len(rank["descriptors"]) for rank in ranks] == [6, 5, 5]


def test_threads_may_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launch(1, "describe_self", str(tmp_path))
    assert json.loads((tmp_path / "0.json").read_text())["threads"] == "3"
    launch(1, "describe_self", str(tmp_path), threads=2, bind=False)
    found = json.loads((tmp_path / "0.json").read_text())
    assert (found["threads"], found["affinity"]) == ("2", sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("endings", "status", "told"),
    [
        ({0: ("returns", None), 1: ("returns", 0)}, 0, ""),
        ({0: ("returns", 3), 1: ("returns", 3)}, 3, ""),
        ({0: ("exits", 4), 1: ("returns", 4)}, 4, ""),
        (
            {0: ("returns", 0), 1: ("exits", 5)},
            5,
            "not all ranks returned the same exit status: rank 0: 0, rank 1: 5\n",
        ),
    ],
)
def test_the_exit_status_is_that_of_the_ranks(endings: dict[int, Any], status: int, told: str) -> None:
    assert launch(2, "end", endings) == (status, told)


def test_a_rank_that_raises_ends_all_that_would_wait_for_ever(tmp_path: Path, fork: bool) -> None:
    layout = Layout(replicate=2, tensor=2)
    endings = {2: ("raises", "a wrong number")}
    status, report = launch(4, "end_leaving_time", str(tmp_path), endings, layout=layout, fork=fork)
    elapsed_s = time.monotonic() - float((tmp_path / "time").read_text())
    assert status == 1
    assert elapsed_s < 30  # 1 s where nothing else runs
    assert not any(is_alive(int(file.read_text())) for file in tmp_path.glob("pid-*"))
    lines = report.splitlines()
    assert lines[1].startswith("rank 2 of 4 on ")
    assert lines[1].endswith("(layout dp2·tp2: replicate 1, tensor 0): ValueError: a wrong number")
    assert lines[3] == "Traceback (most recent call last):"
    assert "launch_targets.py" in lines[4]
    assert lines[-1] == "ValueError: a wrong number"


def test_what_followed_is_one_line_above_what_explains_it(tmp_path: Path) -> None:
    endings = {0: ("reset", "by peer"), 1: ("raises", "the one that explains it")}
    status, report = launch(2, "end_in_turn", str(tmp_path), endings, settle_s=GUARD_S)
    assert status == 1
    assert report.startswith("  rank 0 then: ConnectionResetError: by peer\n")
    assert report.endswith("ValueError: the one that explains it\n")


def test_ranks_that_returned_before_the_others_lost_them_are_named(tmp_path: Path) -> None:
    status, report = launch(3, "end_in_turn", str(tmp_path), {0: ("returns", 4), 1: ("reset", "by peer")})
    assert status == 4
    assert report.startswith("some ranks had returned before the others lost them, with exit status: rank 0: 4\n")
    assert report.endswith("ConnectionResetError: by peer\n")


def test_a_user_error_is_one_line_with_its_cure() -> None:
    status, report = launch(3, "end", {1: ("refuses", "is too large")})
    assert status == 2
    assert report.startswith("error: model.layers = 7: is too large; choose another [rank 1 of 3 on ")
    assert len(report.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_that_is_killed_is_named_with_the_signal(number: signal.Signals) -> None:
    status, report = launch(2, "end", {1: ("killed", int(number))})
    assert status == 128 + number
    assert f"rank 1 of 2 on {os.uname().nodename}: killed by {number.name}" in report
    if number == signal.SIGSEGV:
        assert report.splitlines()[-1] != "=" * 20
        assert "in kill_self" in report.rpartition("====")[2]  # where it was, from its last lines


def test_who_starts_ranks_hears_of_the_one_for_which_the_others_are_ended(tmp_path: Path) -> None:
    heard: list[Failure] = []
    endings = {0: ("reset", "by peer"), 1: ("killed", int(signal.SIGKILL))}
    launch(2, "end_in_turn", str(tmp_path), endings, on_failure=heard.append, settle_s=GUARD_S)
    assert (heard[-1].rank, heard[-1].kind, heard[-1].summary) == (1, "signal", "killed by SIGKILL")
    heard.clear()
    assert launch(2, "end", {0: ("returns", 0), 1: ("returns", 0)}, on_failure=heard.append)[0] == 0 and heard == []


def test_a_rank_that_leaves_without_a_word_is_named_with_its_last_lines() -> None:
    status, report = launch(2, "end", {1: ("leaves", 6)})
    assert status == 6
    assert ": left with exit status 6 and no word" in report
    assert report.endswith("last words\n")


def test_rank_0_keeps_the_terminal_and_the_others_lines_are_marked(capfd: pytest.CaptureFixture[str]) -> None:
    status, report = launch(2, "say", "here is")
    assert status == 0
    assert sorted(report.splitlines()) == ["[rank 1] error 1", "[rank 1] here is 1", "[rank 1] no end of line"]
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("here is 0\nno end of line", "error 0\n")


def test_other_ranks_may_write_into_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    for _ in range(2):
        assert launch(3, "say", "here is", log_folder=folder) == (0, "")
    assert [path.name for path in sorted(folder.iterdir())] == ["rank-1.log", "rank-2.log"]
    assert (folder / "rank-2.log").read_text() == 2 * "here is 2\nerror 2\nno end of line"
    assert "here is 0" in capfd.readouterr().out
    _, report = launch(2, "end", {1: ("leaves", 6)}, log_folder=folder)
    assert report.endswith("last words\n")


def test_a_template_with_a_thread_is_not_forked_and_that_is_said(tmp_path: Path) -> None:
    report = io.StringIO()
    assert launch_local(2, "threaded_targets:note_phases", (str(tmp_path),), report=report) == 0
    assert "the ranks are not forked, each imports for itself: the imports started 1 thread(s)" in report.getvalue()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["template exec setup"] * 2


@pytest.mark.parametrize(("killed", "status", "told"), [(-1, 3, ""), (1, 137, "killed by SIGKILL")])
def test_other_systems_than_linux_are_served_too(killed: int, status: int, told: str) -> None:
    report = io.StringIO()
    assert launch_local(2, "elsewhere_targets:end", (killed,), report=report) == status
    assert "forking after imports is not safe on elsewhere" in report.getvalue()
    assert told in report.getvalue()


def test_elsewhere_a_thread_watches_for_the_parent(tmp_path: Path) -> None:
    child = "import elsewhere_targets, os, signal, sys; from phalanx.ipc.processes import die_with_parent as die\n"
    child += "die(os.getppid()); print('here', flush=True); signal.pause()"
    parent = "import os, subprocess, sys\n"
    parent += f"made = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
    parent += "made.stdout.readline(); print(made.pid, flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", parent], cwd=Path(__file__).parent, capture_output=True, check=True)
    await_end(int(done.stdout))


def test_what_cannot_be_imported_is_said_before_any_rank_starts() -> None:
    status, report = launch(2, "describe_self", preload=["no_such_module"])
    assert status == 1
    assert "the ranks were not started: ModuleNotFoundError: No module named 'no_such_module'" in report


def test_what_ranks_leave_behind_ends_with_them(tmp_path: Path) -> None:
    assert launch(2, "leave_a_child", str(tmp_path)) == (0, "")
    for rank in range(2):
        await_end(int((tmp_path / f"child-{rank}").read_text()))


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_report_that_nobody_reads_ends_the_ranks(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError):
        launch_local(2, "launch_targets:say_and_wait", (str(tmp_path),), report=ClosedPipe())
    for file in tmp_path.glob("pid-*"):
        await_end(int(file.read_text()))
    assert (tmp_path / "pid-1").exists()


@pytest.mark.parametrize(("count", "target"), [(0, "a:b"), (2, "no function")])
def test_calls_that_make_no_sense(count: int, target: str) -> None:
    with pytest.raises(ValueError, match="needs at least one rank and a target"):
        launch_local(count, target)


def test_no_descriptor_and_no_signal_handler_is_left() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)]
    gc.collect()  # what tests before this one have dropped closes its files now, not in the middle
    before = len(list(Path("/proc/self/fd").iterdir()))
    launch(3, "end", {0: ("raises", "x")})
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)] == handlers
