"""A supervisor with drivers that die, end, and hear signals; all of them real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.run.supervise import Supervisor

GUARD_S = 120.0

SUPERVISE = """
import sys
from pathlib import Path
from phalanx.run.supervise import Supervisor
folder = Path(sys.argv[1])
begun = lambda pid: (folder / f"begun-{pid}").exists()
sys.exit(Supervisor([sys.executable, "-S", str(folder / "driver.py"), str(folder)], begun, print, pause_s=0.05).run())
"""

DRIVER = """
import os, signal, sys, time
folder = sys.argv[1]
heard = []
def hear(number, frame):
    heard.append(number)
    open(f"{folder}/heard-{number}-{len(heard)}", "w").close()
signal.signal(signal.SIGTERM, hear)
signal.signal(signal.SIGINT, hear)
open(f"{folder}/is-there", "w").close()
while not os.path.exists(f"{folder}/may-begin"):
    time.sleep(0.01)
open(f"{folder}/begun-{os.getpid()}", "w").close()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
until_s = time.monotonic() + 100
while not os.path.exists(f"{folder}/enough") and time.monotonic() < until_s:
    time.sleep(0.01)
sys.exit(STATUS)
"""


def counting(folder: Path, *ends: str) -> list[str]:
    """A driver that ends otherwise each time."""
    cases = " ".join(f"{number}) {end};;" for number, end in enumerate(ends))
    return ["/bin/sh", "-c", f'n=$(ls "{folder}" | wc -l); : > "{folder}/$n"; case $n in {cases} esac']


@pytest.mark.parametrize("status", [0, 1, 2, 5])
def test_a_driver_that_ends_by_itself_is_not_started_again(tmp_path: Path, status: int) -> None:
    said: list[str] = []
    assert Supervisor(counting(tmp_path, f"exit {status}"), lambda pid: True, said.append).run() == status
    assert len(list(tmp_path.iterdir())) == 1 and not said


def test_a_driver_that_dies_or_has_to_end_is_started_again_until_it_ends(tmp_path: Path) -> None:
    said: list[str] = []
    ends = ["kill -KILL $$", "exit 75", "kill -SEGV $$", "exit 4"]
    supervisor = Supervisor(counting(tmp_path, *ends), lambda pid: True, said.append, pause_s=0.01)
    assert supervisor.run() == 4
    assert len(list(tmp_path.iterdir())) == 4
    assert ["SIGKILL" in said[0], "had to end" in said[1], "SIGSEGV" in said[2]] == [True] * 3
    assert "0.01 s" in said[0] and "0.02 s" in said[1] and "0.04 s" in said[2]


def test_a_driver_that_never_begins_is_given_up(tmp_path: Path) -> None:
    ends = ["kill -KILL $$"] * 9
    supervisor = Supervisor(counting(tmp_path, *ends), lambda pid: False, lambda text: None, pause_s=0.001)
    assert supervisor.run() == 128 + signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 5


def test_bad_input_is_no_end_of_a_job_that_had_begun_with_it(tmp_path: Path) -> None:
    """Such as a back end that cannot be asked just now."""
    said: list[str] = []
    begun = iter([True, False, False, True])
    ends = ["kill -KILL $$", "exit 2", "exit 2", "exit 0"]
    supervisor = Supervisor(counting(tmp_path, *ends), lambda pid: next(begun), said.append, pause_s=0.001)
    assert supervisor.run() == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_a_driver_that_never_begins_again_is_given_up_late_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    begun = iter([True])
    supervisor = Supervisor(
        counting(tmp_path, *["exit 75"] * 30), lambda pid: next(begun, False), said.append, 0.001, most_pause_s=0.002
    )
    assert supervisor.run() == 75
    assert len(list(tmp_path.iterdir())) == 21 and "given up" in said[-1]


def test_a_machine_without_room_for_a_driver_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, said, tries = os.posix_spawn, list[str](), list[int]()

    def full(*words: object, **options: object) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return spawn(*words, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "posix_spawn", full)
    supervisor = Supervisor(counting(tmp_path, "exit 5"), lambda pid: True, said.append, most_pause_s=0.01)
    assert supervisor.run() == 5
    assert "cannot be started" in said[0]


def test_an_end_whose_signal_another_thread_takes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, may_end = os.posix_spawn, threading.Event()

    def ended(*words: object, **options: object) -> int:
        pid = spawn(*words, **options)  # type: ignore[arg-type]
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        until(lambda: signal.SIGCHLD not in signal.sigpending())
        return pid

    other = threading.Thread(target=may_end.wait)
    other.start()
    monkeypatch.setattr(os, "posix_spawn", ended)
    try:
        assert Supervisor(counting(tmp_path, "exit 5"), lambda pid: True, lambda text: None).run() == 5
    finally:
        may_end.set()
        other.join()


def test_a_signal_that_another_thread_takes_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "may-begin").touch()
    (tmp_path / "driver.py").write_text(DRIVER.replace("STATUS", "5"))

    def take() -> None:
        until(lambda: list(tmp_path.glob("begun-*")))
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        until(lambda: heard(tmp_path))
        (tmp_path / "enough").touch()

    other = threading.Thread(target=take)
    other.start()
    command = [sys.executable, "-S", str(tmp_path / "driver.py"), str(tmp_path)]
    assert Supervisor(command, lambda pid: True, lambda text: None).run() == 5
    other.join()
    assert heard(tmp_path) == ["heard-15-1"]


def test_what_was_set_for_signals_is_set_again(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)

    def settings() -> list[object]:
        pipe = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(pipe)
        return [pipe, signal.pthread_sigmask(signal.SIG_BLOCK, []), *map(signal.getsignal, numbers)]

    before = settings()
    assert Supervisor(counting(tmp_path, "exit 5"), lambda pid: True, lambda text: None).run() == 5
    assert settings() == before


def until(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def supervised(folder: Path, status: int = 5) -> subprocess.Popen[bytes]:
    (folder / "driver.py").write_text(DRIVER.replace("STATUS", str(status)))
    words = [sys.executable, "-c", SUPERVISE, str(folder)]
    return subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)


def heard(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("heard-*"))


def test_a_signal_for_the_whole_group_is_heard_once_and_a_second_one_too(tmp_path: Path) -> None:
    (tmp_path / "may-begin").touch()
    process = supervised(tmp_path)
    until(lambda: list(tmp_path.glob("begun-*")))
    os.killpg(process.pid, signal.SIGINT)
    until(lambda: heard(tmp_path) == ["heard-2-1"])
    os.killpg(process.pid, signal.SIGHUP)  # the terminal is closed
    until(lambda: heard(tmp_path) == ["heard-15-2", "heard-2-1"])
    (tmp_path / "enough").touch()
    assert process.wait(GUARD_S) == 5
    assert len(heard(tmp_path)) == 2


def test_a_signal_that_comes_too_early_waits_for_the_driver(tmp_path: Path) -> None:
    process = supervised(tmp_path)
    until((tmp_path / "is-there").exists)
    os.kill(process.pid, signal.SIGTERM)
    (tmp_path / "may-begin").touch()
    until(lambda: heard(tmp_path) == ["heard-15-1"])
    (tmp_path / "enough").touch()
    assert process.wait(GUARD_S) == 5


def test_a_signal_that_comes_as_the_driver_dies_is_heard_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "may-begin").touch()
    process = supervised(tmp_path)
    until(lambda: list(tmp_path.glob("begun-*")))
    os.kill(process.pid, signal.SIGSTOP)  # so that it hears of both at once
    (first,) = tmp_path.glob("begun-*")
    os.kill(int(first.name.removeprefix("begun-")), signal.SIGKILL)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: heard(tmp_path) == ["heard-15-1"])
    (tmp_path / "enough").touch()
    assert process.wait(GUARD_S) == 5


def test_asked_twice_before_the_driver_has_begun_it_is_killed(tmp_path: Path) -> None:
    process = supervised(tmp_path)
    until((tmp_path / "is-there").exists)
    os.kill(process.pid, signal.SIGINT)
    # The kernel keeps one of each: another kind surely is a second one.
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(GUARD_S) == 128 + signal.SIGKILL


def test_one_that_has_to_end_after_a_signal_is_left_to_who_sent_it(tmp_path: Path) -> None:
    (tmp_path / "may-begin").touch()
    process = supervised(tmp_path, status=75)
    until(lambda: list(tmp_path.glob("begun-*")))
    os.kill(process.pid, signal.SIGTERM)
    until(lambda: heard(tmp_path))
    (tmp_path / "enough").touch()
    assert process.wait(GUARD_S) == 75
    assert len(list(tmp_path.glob("begun-*"))) == 1


def test_under_nohup_a_closed_terminal_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "may-begin").touch()
    (tmp_path / "driver.py").write_text(DRIVER.replace("STATUS", "0"))
    words = ["nohup", sys.executable, "-c", SUPERVISE, str(tmp_path)]
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: list(tmp_path.glob("begun-*")))
    os.killpg(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGINT)
    until(lambda: heard(tmp_path))
    assert heard(tmp_path) == ["heard-2-1"]
    (tmp_path / "enough").touch()
    assert process.wait(GUARD_S) == 0
