"""Workers that stand still, disturb, or compute wrongly: each in a real process."""

from __future__ import annotations

import importlib
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults_helpers import TORCH_LOOP, Job, incident, job_folder, running, state_of, until
from support.settled import until_at_rest
from train_helpers import Commands

from phalanx.faults.fault_schedule import Begun, Order, is_due, still_lasts
from phalanx.faults.worker_faults import LINES, RefusedError, Surroundings, slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

FOREVER = {"unit": "forever"}
BRIEFLY = {"unit": "seconds", "amount": 0.2}


@pytest.fixture
def folder() -> Iterator[Path]:
    with job_folder() as path:
        yield path


def stack_of(process: Any, folder: Path) -> str:
    """What faulthandler writes on SIGUSR1: its C code needs no lock of the interpreter."""
    process.send_signal(signal.SIGUSR1)
    return until(lambda: text if "Current thread" in (text := (folder / "err").read_text()) else "", "a stack")


@pytest.mark.parametrize("kind", ["sleep", "busy-loop", "deadlock"])
def test_a_worker_stands_still_for_ever(kind: str, folder: Path) -> None:
    before = "import sys\nos.dup2(os.open('err', os.O_CREAT | os.O_WRONLY), 2)"
    job = Job(folder, before=before).prepare(incident(kind, lasts=FOREVER))
    with running(job.start()) as process:
        until(lambda: job.records, "the record")
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(5)][-1] == "step 3\n"
        stack = stack_of(process, folder)
        assert "loop.py" in stack
        assert process.poll() is None
        if kind == "deadlock":  # the thread that beats every millisecond does so no more
            until_at_rest(process.pid)
            first = (folder / "beats").stat().st_size
            time.sleep(0.3)
            assert (folder / "beats").stat().st_size == first
        else:
            first = (folder / "beats").stat().st_size
            until(lambda: (folder / "beats").stat().st_size > first, "another thread's turn")


def test_a_worker_is_stopped_for_ever(folder: Path) -> None:
    job = Job(folder).prepare(incident("pause", lasts=FOREVER))
    with running(job.start()) as process:
        until(lambda: state_of(process.pid) == "T", "state T")


@pytest.mark.parametrize("kind", ["sleep", "busy-loop", "deadlock", "pause", "evaluation", "long-checkpoint"])
def test_a_worker_goes_on_after_a_while(kind: str, folder: Path) -> None:
    job = Job(folder).prepare(incident(kind, lasts=BRIEFLY))
    begin_s = time.monotonic()
    code, out, err = job.run()
    assert (code, out.splitlines()[-1], err) == (0, "done", "")
    assert time.monotonic() - begin_s >= 0.2
    assert job.records[0].refused == ""


@pytest.mark.parametrize("kind", ["sleep", "busy-loop", "pause", "evaluation", "long-checkpoint", "cpu-hog"])
def test_what_counts_no_steps_says_so(kind: str, folder: Path) -> None:
    job = Job(folder).prepare(incident(kind, lasts={"unit": "steps", "amount": 2}))
    assert job.run()[0] == 0
    assert "seconds" in job.records[0].refused


def test_innocent_lines_for_two_steps(folder: Path) -> None:
    code, out, err = Job(folder).prepare(incident("log-lines", lasts={"unit": "steps", "amount": 2})).run()
    shown = [line for line in (out + err).splitlines() if not line.startswith(("step", "sav", "done"))]
    assert code == 0
    assert len(shown) + sum(": " in line for line in out.splitlines()) == 4
    assert all(any(word in line.lower() for word in ("nan", "error", "kill")) for line in LINES)


def test_hogs_compute_and_end_by_themselves(folder: Path) -> None:
    job = Job(folder).prepare(incident("cpu-hog", lasts={"unit": "seconds", "amount": 0.5}, processes=2))
    code, out, _ = job.run()  # the hogs hold its pipes: they have ended when this returns
    assert (code, out.splitlines()[-1]) == (0, "done")


def steps_of(out: str) -> dict[int, tuple[str, list[int]]]:
    """Loss and bits of the weights by step."""
    found = {}
    for line in out.splitlines():
        if line.startswith("step"):
            _, step, loss, bits = line.split(" ", 3)
            found[int(step)] = loss, [int(word) for word in bits.strip("[]").split(",")]
    return found


def test_numbers_go_wrong_in_torch(folder: Path, commands: Commands) -> None:
    plain = Job(folder, TORCH_LOOP, "optimizer").prepare()
    truth = steps_of(plain.run_forked(commands)[1])
    assert len(truth) == 6
    job = Job(folder, TORCH_LOOP, "optimizer").prepare(
        incident("corruption", bit=22, element=5, when={"step": 2}), incident("nan", lasts=FOREVER, when={"step": 4})
    )
    code, out, err = job.run_forked(commands)
    found = steps_of(out)
    assert (code, err) == (0, "")
    assert [record.refused for record in job.records] == ["", ""]
    assert found[1] == truth[1]
    flipped = [a ^ b for a, b in zip(found[2][1], truth[2][1], strict=True)]
    assert [(i, bits) for i, bits in enumerate(flipped) if bits] == [(5, 1 << 22)]
    assert [found[step][0] for step in (5, 6)] == ["nan", "nan"]
    assert "nan" not in (found[3][0], found[4][0])
    assert struct.unpack("f", struct.pack("i", found[4][1][0]))[0] != 0


def test_the_steps_of_a_restored_optimizer_count_on(folder: Path, commands: Commands) -> None:
    restored = TORCH_LOOP.replace(
        "    for step", "    optimizer.load_state_dict(restored(model, optimizer))\n    for step"
    ).replace(
        "def train",
        "def restored(model, optimizer):\n"
        "    for p in model.parameters():\n"
        "        optimizer.state[p] = dict(step=torch.tensor(40.0), exp_avg=p * 0, exp_avg_sq=p * 0)\n"
        "    return optimizer.state_dict()\n\n\ndef train",
    )
    job = Job(folder, restored, "optimizer").prepare(incident("exit", when={"step": 42}))
    code, out, err = job.run_forked(commands)
    assert (code, len(steps_of(out)), err) == (1, 1, "")
    assert job.records[0].step == 42


def test_of_several_optimizers_one_counts_until_it_is_used_no_longer(folder: Path, commands: Commands) -> None:
    loop = TORCH_LOOP.replace(
        "    for step",
        "    for other in [torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2)]:\n"
        "        for _ in range(20):\n            other.step()\n            print('other', flush=True)\n    for step",
    ).replace("AdamW", "SGD")
    # 20 of the first; of the second the 17th takes over; 4 until its end; of the third again the 17th would
    job = Job(folder, loop, "optimizer").prepare(incident("exit", when={"step": 22}))
    code, out, err = job.run_forked(commands)
    assert (code, err) == (1, "")
    assert out.splitlines() == ["other"] * 37


def test_torch_may_be_imported_later_by_the_script(folder: Path) -> None:
    before = "from phalanx.launch.fresh_rank import when_imported"
    loop = "import sys\nassert 'torch' not in sys.modules\n" + TORCH_LOOP
    job = Job(folder, loop, "optimizer", before, "when_imported=when_imported").prepare(incident("exit", status=4))
    code, out, err = job.run()
    assert (code, list(steps_of(out)), err) == (4, [1, 2], "")


def test_inside_torch_save_and_slow_in_forward(folder: Path, commands: Commands) -> None:
    job = Job(folder, TORCH_LOOP, "optimizer").prepare(
        incident("slow", lasts=FOREVER, factor=3.0, when={"step": 1}),
        incident("exception", when={"step": 3, "phase": "checkpoint"}),
    )
    code, out, err = job.run_forked(commands)
    assert (code, list(steps_of(out))) == (1, [1, 2, 3, 4])
    assert out.splitlines()[-1].startswith("step 4")
    assert "in save" in err
    assert [record.step for record in job.records] == [1, 4]


class Clock:
    """Stands for `time`."""

    def __init__(self) -> None:
        self.cpu_s = self.slept_s = 0.0

    def thread_time(self) -> float:
        return self.cpu_s

    def monotonic(self) -> float:
        return self.cpu_s + self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


def order(**given: Any) -> Order:
    fields: dict[str, Any] = {
        "number": 0,
        "kind": "slow",
        "ranks": [0],
        "step": 3,
        "phase": "step",
        "attempt": 1,
        "delay_s": 0.0,
        "unit": "calls",
        "amount": 1.0,
        "retrigger": "once",
    }
    return Order(**fields | given)


def test_a_slow_rank_sleeps_in_proportion_to_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, step = Clock(), [10]
    slow_module = importlib.import_module("phalanx.faults.worker_faults")  # the package has a function of this name
    monkeypatch.setattr(slow_module, "time", clock)
    monkeypatch.setattr(slow_module, "on_forward", lambda pay: False)
    around = Surroundings(0, 1, lambda: step[0])
    slow(order(unit="steps", amount=3, settings={"factor": 1.5}), around)()
    for _ in range(6):
        clock.cpu_s += 2.0
        step[0] += 1
        for act in around.each_step:
            act()
    assert clock.slept_s == 2 * 1.0  # after the steps 11 and 12; three steps from 10


def test_a_slow_rank_is_slower() -> None:
    with pytest.raises(RefusedError, match="more than 1"):
        slow(order(settings={"factor": 1.0}), Surroundings(0, 1, lambda: 0))


TABLE = [
    (order(kind="exit"), 2, None, False),
    (order(kind="exit"), 3, None, True),
    (order(kind="exit"), 4, None, False),
    (order(kind="exit"), 4, Begun(3, 0.0), False),
    (order(kind="exit", phase="checkpoint"), 3, None, False),
    (order(kind="slow", retrigger="host"), 9, None, True),
    (order(kind="nan", unit="forever"), 9, None, True),
    (order(kind="nan", unit="steps", amount=4), 6, None, True),
    (order(kind="nan", unit="steps", amount=4), 7, None, False),
    (order(kind="nan", unit="steps", amount=4), 6, Begun(3, 0.0), True),
    (order(kind="nan", unit="steps", amount=4), 7, Begun(3, 0.0), False),
    (order(kind="nan", unit="seconds", amount=5), 99, Begun(3, 96.0), True),
    (order(kind="nan", unit="seconds", amount=5), 99, Begun(3, 95.0), False),
]


@pytest.mark.parametrize(("one", "step", "begun", "due"), TABLE)
def test_when_an_order_is_due(one: Order, step: int, begun: Begun | None, due: bool) -> None:
    assert is_due(one, step, begun, 100.0) is due


def test_for_ever_has_no_end() -> None:
    assert still_lasts(order(unit="forever"), 10**9, Begun(0, 0.0), 1e9)
