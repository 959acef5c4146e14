"""The real command with a plain DDP script that knows nothing of it: what is killed, and how the job goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support.recovery.job import Job

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, path, step = int(sys.argv[1]), "state.pt", 0
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(50, 50))
optimizer = torch.optim.AdamW(model.parameters())
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < steps:
    step += 1
    batch = torch.randn(8, 50, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
    with open(f"pids-{rank}", "a") as file:
        print(os.getpid(), step, file=file)
    time.sleep(0.05)
dist.destroy_process_group()
"""

CRASHES = """
import os, time
import torch
from phalanx.checkpoint import Checkpointer

model = torch.nn.Linear(50, 50)
optimizer = torch.optim.AdamW(model.parameters())
with open("lives", "a+") as file:
    file.seek(0)
    life = len(file.read())
    file.write("x")
left = 10 - life if life < 6 else 5
with Checkpointer("checkpoints", model=model, optimizer=optimizer, every_steps=1) as checkpoints:
    step = checkpoints.restore()
    while left:
        step, left = step + 1, left - 1
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()
        checkpoints.step(step)
        print("step", step, flush=True)
        time.sleep(0.3)
    if life < 6:
        os.kill(os.getpid(), 9)
"""

RAISES = """
import torch.distributed as dist

dist.init_process_group("gloo")
raise ValueError("the data is wrong")
"""

STEPS = 100
ONE_HOST = ("--hosts", "1", "--workers-per-host", "2", "--set", "run.policy.joining_check=passive")
HOSTS = ("--hosts", "2", "--workers-per-host", "1", "--spares", "1")


class Training:
    """A job of the script above."""

    def __init__(self, folder: Path, steps: int, *options: str) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        self.folder = folder
        self.job = Job(folder, [*options, "--", "train.py", str(steps)])

    def pids(self, rank: int) -> list[int]:
        """Processes that have been this rank, in order."""
        path = self.folder / f"pids-{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return list(dict.fromkeys(int(line.split()[0]) for line in lines))

    def steps(self, rank: int) -> int:
        """How many steps this rank has made, those that were made again too."""
        path = self.folder / f"pids-{rank}"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def more_steps(self, rank: int) -> Callable[[], bool]:
        """Whether it has made ten more than now."""
        before = self.steps(rank)
        return lambda: self.steps(rank) >= before + 10

    def state(self) -> dict[str, bytes]:
        """The last that the script has saved, bit for bit."""
        found = torch.load(self.folder / "state.pt")
        moments = {f"{n}.{name}": value for n, of in found["optimizer"]["state"].items() for name, value in of.items()}
        return {name: value.numpy().tobytes() for name, value in {**found["model"], **moments}.items()}


def ends(job: Job, command_status: int, within_s: float = 300.0) -> None:
    """See that the last command ends with this status, and that nothing of the job is left then."""
    status = job.commands[-1].wait(within_s)
    assert status == command_status, job.output
    assert job.processes() == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    """The last state of a run whose ranks nobody disturbs; but its driver is killed, which must not matter.

    Its ranks are new Pythons, those that others are compared with start warm.
    """
    training = Training(tmp_path_factory.mktemp("job") / "undisturbed", STEPS, *ONE_HOST, "--start", "fresh")
    with training.job as job:
        job.wait_for(lambda: training.steps(0) >= 10 and job.events("running"))
        ranks = [*training.pids(0), *training.pids(1)]
        first = job.driver_pid()
        os.kill(first, signal.SIGKILL)
        psutil.wait_procs([one for one in [_process(first)] if one], timeout=120)
        if job.commands[-1].poll() is not None or first == job.commands[-1].pid:
            job.commands[-1].wait(120)
            job.start()
        job.wait_for(lambda: job.driver_pid() != first)
        ends(job, 0)
        assert [*training.pids(0), *training.pids(1)] == ranks
        assert {event.attempt for event in job.events()} <= {0, 1}
        yield training.state()


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


@pytest.mark.slow
def test_a_killed_driver_does_not_disturb_training(undisturbed: dict[str, bytes]) -> None:
    assert len(undisturbed) == 8


@pytest.mark.slow
def test_a_killed_rank_and_a_killed_host_change_nothing_of_the_result(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    training = Training(tmp_path / "disturbed", STEPS, *HOSTS)
    with training.job as job:
        job.wait_for(lambda: training.steps(1) >= 10 and job.events("running"))
        os.kill(training.pids(1)[-1], signal.SIGKILL)
        job.wait_for(lambda: len(training.pids(1)) == 2 and len(job.events("running")) == 2)
        job.wait_for(training.more_steps(1))
        hosts = {event.fields["host"] for event in job.events("started")}
        lost = max(hosts)  # that of rank 1; which of the three are there first nobody knows
        os.kill(job.executor_pid(lost), signal.SIGKILL)
        job.wait_for(lambda: len(job.events("running")) == 3)
        ends(job, 0)
        placements = {event.fields["host"] for event in job.events("started") if event.attempt == 3}
        assert placements == {"host-1", "host-2", "host-3"} - {lost}
    assert training.state() == undisturbed


@pytest.mark.slow
def test_ctrl_c_ends_the_job_and_leaves_nothing(tmp_path: Path) -> None:
    training = Training(tmp_path / "stopped", 10**6, *ONE_HOST)
    with training.job as job:
        job.wait_for(lambda: training.steps(0) >= 5)
        os.kill(job.commands[-1].pid, signal.SIGINT)
        ends(job, 5)
        assert job.events("stop-asked")


@pytest.mark.campaign
@pytest.mark.slow
def test_what_all_ranks_raise_ends_the_job_at_once(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(RAISES)
    with Job(tmp_path, [*ONE_HOST, "--", "wrong.py"]) as job:
        ends(job, 1)
        assert "ValueError: the data is wrong" in job.output
        log = job.run_folder / "logs" / "rank-0"
        assert 'raise ValueError("the data is wrong")' in "".join(path.read_text() for path in log.iterdir())
        assert {event.attempt for event in job.events("started")} == {1}


@pytest.mark.campaign
@pytest.mark.slow
def test_a_script_that_crashes_every_few_seconds_goes_on_as_long_as_its_checkpoints_get_newer(tmp_path: Path) -> None:
    """It numbers no steps and no life is longer than the one before; only what it restores tells how far it is."""
    (tmp_path / "crashes.py").write_text(CRASHES)
    with Job(tmp_path, ["--hosts", "1", "--workers-per-host", "1", "--", "crashes.py"]) as job:
        ends(job, 0)
        steps = [event.fields["step"] for event in job.events("restored")]
        assert len(steps) == 7 and steps == sorted(set(steps)) and steps[0] == 0, steps
        assert not job.events("evict") and "no progress" not in job.output


@pytest.mark.slow
def test_a_script_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with Job(tmp_path, [*ONE_HOST, "--", "nothing.py"]) as job:
        ends(job, 2)
        assert "nothing.py" in job.output
        assert not (job.run_folder / "executors").exists()  # nothing had to be started to find that out
