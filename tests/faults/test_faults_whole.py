"""All of it at once: a case, two ranks that train together with gloo, the simplest supervisor, and the referee."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults_helpers import Job, incident, job_folder, running, until

from phalanx.faults.case_manifest import Cluster, Expected, Manifest, Response
from phalanx.faults.referee import Fact, facts_of, judge

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"), pytest.mark.slow]

STEPS = 12

# The tick of the helpers is not used: the steps of the optimizer count.
LOOP = """\
import os
import time
import torch
import torch.distributed as dist


def train(*_):
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet-{attempt}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if os.path.exists("latest.pt"):
        saved = torch.load("latest.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    for step in range(done + 1, 13):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        print(time.monotonic(), step, total.item().hex(), flush=True)
        if step % 3 == 0:
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, "writing.pt")
                os.replace("writing.pt", "latest.pt")
            dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    with job_folder() as one, job_folder() as other:
        yield one, other


@dataclass
class Supervisor:
    """Restarts both ranks when one of them ends badly; whoever does not speak of a connection is to blame."""

    job: Job
    facts: list[Fact] = field(default_factory=list)

    def run(self, attempts: int) -> None:
        for attempt in range(1, attempts + 1):
            if self.run_once(attempt):
                self.note("ended", step=STEPS)
                return

    def run_once(self, attempt: int) -> bool:
        with ExitStack() as stack:
            ranks = [stack.enter_context(running(self.job.start(rank, attempt))) for rank in (0, 1)]
            until(lambda: any(p.poll() for p in ranks) or all(p.poll() == 0 for p in ranks), "the end of a rank")
            if any(process.poll() for process in ranks):
                self.note("detected")
                # Whoever lost its peer may be gone before the one that is to blame has ended.
                until(lambda: all(p.poll() is not None for p in ranks), "the end of the other rank")
            own = [rank for rank, process in enumerate(ranks) if process.poll()]
            self.end(ranks)
            errors = [process.communicate() for process in ranks]
        self.facts += [fact for line in errors[0][0].splitlines() for fact in facts_of_line(line, attempt)]
        if not own:
            return True
        guilty = [rank for rank in own if not any(word in errors[rank][1].lower() for word in ("connect", "gloo"))]
        self.note("blamed", ranks=guilty)
        self.note("acted", action="restart")
        return False

    def end(self, ranks: list[subprocess.Popen[str]]) -> None:
        for process in ranks:
            if process.poll() is None:
                process.kill()

    def note(self, what: str, **fields: object) -> None:
        self.facts.append(Fact(time.monotonic(), what, **fields))  # type: ignore[arg-type]


def facts_of_line(line: str, attempt: int) -> list[Fact]:
    at_s, step, loss = line.split()
    same = {"attempt": attempt, "step": int(step)}
    return [Fact(float(at_s), "progress", **same), Fact(float(at_s), "loss", **same, loss=loss)]


@pytest.mark.campaign
def test_a_case_from_its_manifest_to_its_score(folders: tuple[Path, Path]) -> None:
    quiet = Supervisor(Job(folders[0], LOOP, "optimizer").prepare())
    quiet.run(1)
    truth = {fact.step: fact.loss for fact in quiet.facts if fact.what == "loss"}
    assert list(truth) == list(range(1, STEPS + 1))

    faults = (
        incident("signal", 1, when={"step": 5}),
        incident("exception", 0, when={"step": 7, "phase": "checkpoint", "attempt": 2}),
    )
    manifest = Manifest(
        id="whole",
        seed=1,
        cluster=Cluster(hosts=1, workers_per_host=2, spares=0),
        steps=STEPS,
        incidents=faults,
        expected=Expected(responses=(Response(action="restart"),) * 2, blame_ranks=(0, 1)),
    )
    job = Job(folders[1], LOOP, "optimizer").prepare(*faults)
    supervisor = Supervisor(job)
    supervisor.run(4)
    assert [(record.rank, record.attempt, record.step) for record in job.records] == [(1, 1, 5), (0, 2, 9)]
    score = judge(manifest, [*supervisor.facts, *facts_of(job.records)], truth)
    assert score.problems == []
    assert (score.outcome, score.losses_equal, score.false_alarms) == ("right", True, 0)
    assert score.lost_steps == 1 + 3  # step 4 after the checkpoint of step 3, and 7 to 9 after that of step 6
    assert score.detect_s is not None
    assert score.localise_s is not None
    assert score.resume_s is not None
