"""Whole jobs under Slurm: a plain DDP script on a real slurmctld and four slurmd, with faults."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from slurm_cluster import Cluster, missing_programs

GUARD_S = 240.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()), reason=f"Slurm is not installed here: {', '.join(missing_programs())} missing"
    ),
]

SCRIPT = """\
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
here = Path(__file__).parent
attempt = os.environ["PHALANX_RUN_ATTEMPT"]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(50, 50))
optimizer = torch.optim.AdamW(model.parameters())
saved, step = here / "state.pt", 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    step = state["step"]
first, last = step, torch.zeros(2)
while not last[0] and not last[1]:
    model(torch.randn(8, 50)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if rank == 0:
        torch.save({"model": model.state_dict(), "step": step}, here / "state.tmp")
        os.replace(here / "state.tmp", saved)
    if step == first + 2:
        mark = here / f"{attempt}.{rank}.tmp"
        mark.write_text(f"{os.getpid()} {os.environ['SLURMD_NODENAME']} {first}")
        mark.rename(mark.with_suffix(""))
    last = torch.tensor([float((here / "finish").exists()), float(bool(asked))])
    dist.all_reduce(last)
    time.sleep(0.05)
if last[1]:
    (here / f"asked.{rank}").write_text(str(step))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4) as started:
        yield started


class Job:
    """A job of the script above in a folder of its own, started by the real command."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str, **environ: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        self.cluster, self.folder, self.said = cluster, folder, folder / "said"
        self.environ = {**cluster.environ, **environ}
        settings = ("run.backend=slurm", "run.backend_options.poll_s=0.5", "run.policy.joining_check=passive")
        words = [word for setting in settings for word in ("--set", setting)]
        with self.said.open("wb") as said:
            command = [sys.executable, "-m", "phalanx.cli.main", "run", *words, *options, "--", "train.py"]
            self.process = subprocess.Popen(command, cwd=folder, env=self.environ, stdout=said, stderr=said)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.cluster.run("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name, check=False)
        self.cluster.until(lambda: not self.cluster.run("squeue", "-h"))

    def until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + GUARD_S
        while not condition():
            assert time.monotonic() < end_s and self.process.poll() is None, self.story()
            time.sleep(0.1)

    def trains(self, attempt: int, *ranks: int) -> list[tuple[int, str, int]]:
        """Wait until ranks train in this attempt: process, node, and the step that they began with."""
        paths = [self.folder / f"{attempt}.{rank}" for rank in ranks]
        self.until(lambda: all(path.exists() for path in paths))
        words = [path.read_text().split() for path in paths]
        return [(int(pid), node, int(step)) for pid, node, step in words]

    def finish(self) -> int:
        (self.folder / "finish").touch()
        try:
            return self.process.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story()) from None

    def command(self, *words: str) -> str:
        command = [sys.executable, "-m", "phalanx.cli.main", "run", *words, "--folder", "runs/train"]
        done = subprocess.run(command, cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def story(self) -> str:
        texts = [self.said, *sorted((self.folder / "runs").glob("*/executors/*.err"))]
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in texts) + self.cluster.logs()


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words or process.info["cwd"] == str(folder):
            found.append(words)
    return found


def until_none_is_left(job: Job) -> None:
    end_s = time.monotonic() + GUARD_S
    while found := processes_of(job.folder):
        assert time.monotonic() < end_s, found
        time.sleep(0.2)


def test_a_submitted_job_goes_on_after_a_killed_rank_and_ends_with_its_script(cluster: Cluster, tmp_path: Path) -> None:
    with Job(cluster, tmp_path, "--hosts", "1") as job:
        ((pid, node, _),) = job.trains(1, 0)
        os.kill(pid, signal.SIGKILL)
        ((_, again, step),) = job.trains(2, 0)
        assert again == node and step >= 2, "it goes on in place, from its checkpoint"
        assert job.finish() == 0, job.story()
        assert "has ended with status 0" in job.said.read_text()
        until_none_is_left(job)


@pytest.mark.campaign
def test_a_submitted_job_survives_a_rank_and_a_node(cluster: Cluster, tmp_path: Path) -> None:
    with Job(cluster, tmp_path, "--hosts", "2", "--spares", "1") as job:
        (_, first, _), (pid, lost, _) = job.trains(1, 0, 1)  # whichever were there first; that of rank 1 is not n1
        (spare,) = {"n1", "n2", "n3"} - {first, lost}
        os.kill(pid, signal.SIGKILL)
        (_, again, step), (_, other, _) = job.trains(2, 0, 1)
        assert (again, other) == (first, lost) and step >= 2, "it goes on in place, from its checkpoint"
        cluster.kill_node(lost)
        (_, again, later), (_, other, _) = job.trains(3, 0, 1)
        assert (again, other) == (first, spare) and later >= step, "the spare has taken the ranks of the lost node"
        assert job.finish() == 0, job.story()
        assert "has ended with status 0" in job.said.read_text()
        until_none_is_left(job)
    cluster.start_node(lost)
    cluster.until(lambda: set(cluster.states().values()) == {"idle"})


@pytest.mark.campaign
def test_a_job_whose_time_is_short_saves_is_queued_again_and_goes_on_without_the_evicted_node(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = ("--set", "run.backend_options.time=30", "--set", "run.backend_options.stop_before_s=121")
    with Job(cluster, tmp_path, "--hosts", "2", "--spares", "1", *options) as job:
        _, (_, bad, _) = job.trains(1, 0, 1)
        job.command("evict", bad)
        assert {node for _, node, _ in job.trains(2, 0, 1)} == {"n1", "n2", "n3"} - {bad}
        number, minutes = cluster.run("squeue", "-h", "-o", "%i %M").split()
        limit = int(minutes.split(":")[0]) + 2
        cluster.run("scontrol", "update", f"JobId={number}", f"TimeLimit={limit}")
        job.until(lambda: cluster.run("squeue", "-h", "-o", "%T|%x").strip() == f"PENDING|{bad}")
        at_end = {(tmp_path / f"asked.{rank}").read_text() for rank in (0, 1)}
        assert len(at_end) == 1, "both ranks have ended after the same step, and have saved it"
        cluster.run(
            "scontrol", "update", f"JobId={number}", "TimeLimit=30", "StartTime=now"
        )  # else it rests for two minutes
        (_, first, step), (_, second, _) = job.trains(3, 0, 1)
        assert {str(step)} == at_end and bad not in (first, second)
        assert job.finish() == 0, job.story()
        said = job.said.read_text()
        assert f"it is queued again, without {bad}" in said and "requeued 1 times" in said
        until_none_is_left(job)


@pytest.mark.campaign
def test_two_jobs_in_one_allocation_do_not_disturb_each_other(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("salloc", "--no-shell", "--no-kill", "-N2", "--time=30", "--job-name=both")
    inside = {
        "SLURM_JOB_ID": cluster.run("squeue", "-h", "-o", "%i").strip(),
        "SLURM_JOB_NODELIST": cluster.run("squeue", "-h", "-o", "%N").strip(),
    }
    with (
        Job(cluster, tmp_path / "a", "--hosts", "2", **inside) as one,
        Job(cluster, tmp_path / "b", "--hosts", "2", **inside) as other,
    ):
        ((pid, *_),) = one.trains(1, 1)
        other.trains(1, 0, 1)
        os.kill(pid, signal.SIGKILL)
        one.trains(2, 0, 1)
        assert one.finish() == 0, one.story()
        steps = cluster.run("squeue", "-h", "-s", "-o", "%j").split()
        assert sum(step.startswith("phalanx:train:") for step in steps) == 2, "those of the other job"
        assert other.finish() == 0, other.story()
        assert not (tmp_path / "b" / "2.0").exists()
        until_none_is_left(one)
        until_none_is_left(other)
