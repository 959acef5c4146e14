"""What is learnt of ranks that hang, hold the GIL, are stopped or gone, or do not answer. With real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.settled import until_at_rest, until_in_loop

from phalanx.detect.hangs.python_stacks import main_stack
from phalanx.detect.hangs.stack_dumps import Stacks, format_py_spy, py_spy_program, stacks_of
from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.ipc.processes import Process, dump_signal, read_process
from phalanx.run.executor.flight_recorder import FlightSource, Subject, gather
from phalanx.run.executor.host_monitor import FindingReader
from phalanx.run.judge.line_watch import KERNEL_RANK
from phalanx.run.messages import Accelerator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")

LIMIT_S = 30.0  # generous: nothing here takes that long but what hangs, and that has a limit of its own

NO_PY_SPY = Path("/no/such/py-spy")

SLEEPS = "def wait_for_peer():\n  print('ready', flush=True)\n  time.sleep(100)\nwait_for_peer()"
HOLDS_GIL = """
sleep = ctypes.PyDLL(None).sleep  # a signal ends it, and what is looked up each time is seen instead
def hold():
  print('ready', flush=True)
  while True: sleep(100)
hold()"""
SPINS = "def spin():\n  print('ready', flush=True)\n  while True: pass\nspin()"


class Ranks:
    def __init__(self) -> None:
        self._processes: list[subprocess.Popen] = []

    def start(self, program: str) -> subprocess.Popen:
        """A Python that is where it is to be: in its loop, or where it waits; it says so a moment before."""
        process = subprocess.Popen([sys.executable, "-c", f"import ctypes, time\n{program}"], stdout=-1, text=True)
        self._processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (until_in_loop if program.endswith(SPINS) else until_at_rest)(process.pid)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def may_look() -> None:
    """py-spy may look at a process of ours here."""
    program = py_spy_program()
    if program is None:
        pytest.skip("py-spy is not installed")
    ranks = Ranks()
    found = stacks_of(ranks.start(SLEEPS).pid, time.monotonic() + LIMIT_S, program=program)
    ranks.close()
    if not found.text:
        pytest.skip(f"py-spy may not look at processes here: {found.problem}")


def registered(path: Path, program: str) -> str:
    setup = "from pathlib import Path\nfrom phalanx.ipc.processes import register\n"
    return f"{setup}register(Path({str(path)!r}))\n{program}"


def test_ranks_that_hang_in_different_ways_are_told_apart(ranks: Ranks, may_look: None) -> None:
    sleeping, holding, stopped, spinning = (ranks.start(one) for one in (SLEEPS, HOLDS_GIL, SLEEPS, SPINS))
    other = subprocess.Popen(["sleep", "100"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    os.kill(stopped.pid, signal.SIGSTOP)
    for pid, state in ((stopped.pid, "T"), (other.pid, "S")):
        until_at_rest(pid, state)
    all_pids = [process.pid for process in (sleeping, holding, stopped, spinning, other, gone)]
    evidence = gather(
        [Subject(rank, pid, progress=lambda: ("backward", 7)) for rank, pid in enumerate(all_pids)],
        attempt=3,
        within_s=LIMIT_S,
        kernel_lines=lambda: ["NVRM: Xid"],
        accelerators=lambda: [Accelerator("GPU", 1)],
    )
    assert evidence.attempt == 3 and evidence.kernel_lines == ["NVRM: Xid"] and evidence.accelerators[0].name == "GPU"
    assert evidence.seconds < LIMIT_S
    by_rank = {one.rank: one for one in evidence.ranks}
    assert [one.is_silent for one in evidence.ranks] == [False, False, False, False, False, True]
    for rank, name in ((0, "wait_for_peer"), (1, "hold"), (2, "wait_for_peer"), (3, "spin")):
        assert main_stack(by_rank[rank].stacks)[0].name == name  # by the judge's own reader
        assert (by_rank[rank].phase, by_rank[rank].step) == ("backward", 7)
    assert "+gil" in by_rank[1].stacks and "+gil" not in by_rank[0].stacks
    assert [by_rank[rank].state for rank in (0, 1, 2, 4, 5)] == ["S", "S", "T", "S", ""]
    assert by_rank[3].cpu_s > 0
    assert by_rank[4].stacks == "" and "py-spy" in by_rank[4].note  # no Python: nothing that tells against it
    assert "the process is gone" in by_rank[5].note
    other.kill()
    other.wait()


@pytest.mark.parametrize(("states", "expected"), [("tttSS", "S"), ("StS", "S"), ("R", "R"), ("t" * 10_000, "t")])
def test_whom_only_py_spy_halts_is_not_halted(
    states: str, expected: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State and stacks are asked for at the same time, and py-spy halts a process while it reads its stacks."""
    process = read_process(ranks.start(SLEEPS).pid)
    assert process is not None
    seen = iter(states)
    monkeypatch.setattr(
        "phalanx.run.executor.flight_recorder.read_process", lambda *_: replace(process, state=next(seen, expected))
    )
    gathered = gather([Subject(0, process.pid)], attempt=1, within_s=1.0, program=NO_PY_SPY)
    assert gathered.ranks[0].state == expected


def test_a_rank_that_was_looked_at_goes_on(ranks: Ranks, may_look: None, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    program = f"print('ready', flush=True)\nprint(open({str(go)!r}).read() + ' read', flush=True)"
    process = ranks.start(program)
    for _ in range(3):
        gather([Subject(0, process.pid)], attempt=1, within_s=LIMIT_S)
    go.write_text("all")
    assert process.stdout is not None and process.stdout.readline() == "all read\n"


@pytest.mark.parametrize("program", [SLEEPS, HOLDS_GIL, SPINS], ids=["sleeps", "holds the GIL", "spins"])
def test_without_py_spy_a_rank_writes_its_stacks_itself(ranks: Ranks, tmp_path: Path, program: str) -> None:
    dump = tmp_path / "stacks"
    process = ranks.start(registered(dump, program))
    texts = []
    for _ in range(2):  # each time what is new
        found = stacks_of(process.pid, time.monotonic() + LIMIT_S, program=NO_PY_SPY, dump=dump)
        assert not found.is_silent, found
        texts.append(found.text)
    for text in texts:
        assert main_stack(text)[0].name in ("wait_for_peer", "hold", "spin") and text.count("most recent call") == 1
    assert process.poll() is None


def test_a_rank_that_does_not_wait_for_the_signal_is_not_sent_it(ranks: Ranks, tmp_path: Path) -> None:
    process = ranks.start(SLEEPS)
    dump = tmp_path / "stacks"
    dump.touch()
    found = stacks_of(process.pid, time.monotonic() + LIMIT_S, program=NO_PY_SPY, dump=dump)
    assert found.text == "" and not found.is_silent and "does not write its stacks itself" in found.problem
    state = read_process(process.pid)
    assert state is not None and state.is_alive
    assert signal.SIGRTMIN <= dump_signal() <= signal.SIGRTMAX


def test_a_stopped_rank_that_cannot_write_is_silent(ranks: Ranks, tmp_path: Path) -> None:
    dump = tmp_path / "stacks"
    process = ranks.start(registered(dump, SLEEPS))
    os.kill(process.pid, signal.SIGSTOP)
    until_at_rest(process.pid, "T")
    found = stacks_of(process.pid, time.monotonic() + 0.3, program=NO_PY_SPY, dump=dump)
    assert found.is_silent and found.text == ""


def test_the_state_of_a_rank_is_read_before_it_is_woken_for_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    process, is_asked = read_process(os.getpid()), threading.Event()
    assert process is not None

    def look(*_: object) -> Process:
        is_asked.wait(0.1)  # so that a question that does not wait comes first
        return replace(process, state="R" if is_asked.is_set() else "S")

    def ask(*_: object, **__: object) -> Stacks:
        is_asked.set()
        return Stacks("its stacks")

    monkeypatch.setattr("phalanx.run.executor.flight_recorder.read_process", look)
    monkeypatch.setattr("phalanx.run.executor.flight_recorder.stacks_of", ask)
    monkeypatch.setattr("phalanx.run.executor.flight_recorder._STATE_S", LIMIT_S)
    (found,) = gather([Subject(0, process.pid)], attempt=1, within_s=LIMIT_S, program=NO_PY_SPY).ranks
    assert (found.state, found.stacks) == ("S", "its stacks")


def test_stacks_are_complete_only_with_a_frame_at_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gets no core for a second after the head of a thread, goes on to write."""
    (tmp_path / "73").mkdir()
    (tmp_path / "73" / "stat").write_text("73 (python) S 1 2 3 0 -1 4 0 0 0 0 70 30 0 0 20 0 5 0 900 0 0")
    (tmp_path / "73" / "status").write_text(f"SigCgt:\t{1 << dump_signal() - 1:016x}\n")
    dump, now_s = tmp_path / "dump", [0.0]
    dump.touch()
    head, frame = "Current thread 0x7f (most recent call first):\n", '  File "train.py", line 3 in backward\n'
    pieces = {0.1: f"{head}{frame}\n{head}", 1.1: frame}

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        with dump.open("a") as file:
            file.writelines(pieces.pop(at_s) for at_s in sorted(pieces) if at_s <= now_s[0])

    monkeypatch.setattr("phalanx.detect.hangs.stack_dumps.send", lambda *_: None)
    monkeypatch.setattr(
        "phalanx.detect.hangs.stack_dumps.time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    )
    found = stacks_of(73, LIMIT_S, program=None, dump=dump, proc=tmp_path)
    assert found.text == f"{head}{frame}\n{head}{frame}".strip() and now_s[0] < LIMIT_S


def test_everything_may_hang_and_the_limit_is_kept(tmp_path: Path) -> None:
    """As a process that the kernel holds: reading of it never ends; nor do the driver of devices and the rest."""
    for pid in ("71", "72"):
        (tmp_path / pid).mkdir()
        os.mkfifo(tmp_path / pid / "stat")
    (tmp_path / "73").mkdir()
    fields = "D 1 2 3 0 -1 4 0 0 0 0 70 30 0 0 20 0 5 0 900 0 0"
    (tmp_path / "73" / "stat").write_text(f"73 (python) {fields}")
    (tmp_path / "73" / "wchan").write_text("nfs_wait_bit_killable")
    hanging = tmp_path / "py-spy"
    hanging.write_text("#!/bin/sh\nexec sleep 100\n")
    hanging.chmod(0o755)
    never = threading.Event()

    def ask() -> list:
        never.wait()
        return []

    started: list[subprocess.Popen] = []

    def start(make: object) -> subprocess.Popen:
        started.append(make())  # type: ignore[operator]
        return started[-1]

    begin_s = time.monotonic()
    gathered = gather(
        [
            Subject(0, 71, progress=lambda: ("", len(ask()))),
            Subject(1, 72, flight=FlightSource(tmp_path / "none", tmp_path / "no pipe")),
            Subject(2, 73),
        ],
        attempt=1,
        within_s=1.0,
        kernel_lines=ask,
        accelerators=ask,
        program=hanging,
        proc=tmp_path,
        start=start,
    )
    took_s = time.monotonic() - begin_s
    never.set()
    assert took_s < 60 and gathered.seconds == pytest.approx(took_s, abs=5)
    assert all(one.is_silent and not one.stacks for one in gathered.ranks)
    assert gathered.ranks[2].state == "D" and gathered.ranks[2].cpu_s > 0
    assert (
        "waits in nfs_wait_bit_killable" in gathered.ranks[2].note and "did not answer within" in gathered.ranks[2].note
    )
    assert "/proc did not answer" in gathered.ranks[0].note
    assert [process.wait(60) for process in started] == [-signal.SIGKILL]
    for pid in ("71", "72"):  # lets the threads that still wait go
        os.close(os.open(tmp_path / pid / "stat", os.O_RDWR))


def test_what_is_gathered_is_bounded_however_much_there_is() -> None:
    gathered = gather([], attempt=1, within_s=LIMIT_S, kernel_lines=lambda: [str(number) for number in range(1000)])
    assert gathered.kernel_lines == [str(number) for number in range(800, 1000)]


def test_a_fault_of_ours_does_not_tell_against_a_rank(ranks: Ranks) -> None:
    def start(make: object) -> subprocess.Popen:
        raise RuntimeError("no more threads")

    process = ranks.start(SLEEPS)
    gathered = gather([Subject(0, process.pid)], attempt=1, within_s=LIMIT_S, start=start, program=Path("/bin/true"))
    assert not gathered.ranks[0].is_silent and "no more threads" in gathered.ranks[0].note


def test_a_main_thread_has_its_name() -> None:
    frame = {"name": "f", "filename": "/a/b.py", "line": 3}
    thread = {"os_thread_id": 5, "thread_id": 99, "thread_name": None, "active": True, "owns_gil": True}
    other = {"os_thread_id": 6, "thread_id": 98, "thread_name": 'a "b"', "active": False, "owns_gil": False}
    text = format_py_spy([thread | {"frames": [frame]}, other | {"frames": []}], 5)
    assert text == 'Thread 5 (active+gil): "MainThread"\n    f (/a/b.py:3)\nThread 6 (idle): "a \\"b\\""'
    assert json.loads(text.partition(": ")[2].partition("\n")[0]) == "MainThread"
    with pytest.raises(TypeError):
        format_py_spy([None], 5)


def test_a_process_that_is_gone_is_silent() -> None:
    assert stacks_of(2**22 + 1, time.monotonic() + 1, program=None) == Stacks(
        problem="the process is gone", is_silent=True
    )


def test_what_the_kernel_said_before_the_attempt_is_no_evidence_of_it() -> None:
    now = [1000.0]
    reader = FindingReader(Matcher(load_rules()), clock=lambda: now[0])
    line = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    assert reader.findings(KERNEL_RANK, [line]) and not reader.findings(KERNEL_RANK, [line])
    assert reader.since_s() == 400.0, "no attempt has begun"
    now[0] += 5.0
    reader.begin_attempt()
    now[0] += 5.0
    assert reader.since_s() == 1005.0
    assert reader.findings(KERNEL_RANK, [line]), "it says so again in this attempt"
    now[0] += 5000.0
    assert reader.since_s() == now[0] - 600.0
