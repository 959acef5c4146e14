"""Jobs that a scheduler, an eviction or a signal ended: said so, with the reason, and nobody is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.logs.run_logs import judge_places

PREEMPTED = "slurmstepd: error: *** JOB 55 ON gpu01 CANCELLED AT 2026-11-25T10:00:20 DUE TO PREEMPTION ***"
TIME_LIMIT = "slurmstepd: error: *** STEP 55.0 ON gpu01 CANCELLED AT 2026-11-25T10:00:20 DUE TO TIME LIMIT ***"
CANCELLED = "slurmstepd: error: *** JOB 55 ON gpu01 CANCELLED AT 2026-11-25T10:00:20 ***"
CLOSING = "W1125 10:00:21.000000 42 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 43 closing signal SIGTERM"  # noqa: E501
RESET = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:43261"
FAULT = "RuntimeError: CUDA error: an illegal memory access was encountered"


def job(folder: Path, *said: tuple[int, int, str], scheduler: str = "", ended: str = "") -> JudgeVerdict:
    """Two hosts of two ranks that make 20 steps; then (rank, second, line)."""
    for rank in range(4):
        lines = [f"2026-11-25 10:00:{step:02d},000 step: {step} loss: 2.0" for step in range(20)]
        lines += [f"2026-11-25 10:00:{at:02d},000 {text}" for whose, at, text in said if whose == rank]
        lines += [f"2026-11-25 10:00:22,000 {ended}"] if ended else []
        (folder / f"gpu{rank // 2 + 1:02d}_rank{rank}.log").write_text("\n".join(lines) + "\n")
    if scheduler:
        (folder / "slurm-55.out").write_text(f"{scheduler}\n")
    return judge_places([folder])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (PREEMPTED, "took the machines for another job"),
        (TIME_LIMIT, "the time that the scheduler gave the job was over"),
        ("=>> PBS: job killed: walltime 3604 exceeded limit 3600", "the time"),
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.", "the time"),
        ("Warning  Evicted  3m  kubelet  The node was low on resource: ephemeral-storage.", "Kubernetes evicted"),
        ("Pod was terminated in response to imminent node shutdown.", "spot machine"),
        (CANCELLED, "cancelled it"),
        ("TERM_OWNER: job killed by owner.", "cancelled it"),
    ],
)
def test_the_reason_of_the_scheduler_is_told_and_victims_are_not_causes(tmp_path: Path, line: str, why: str) -> None:
    verdict = job(tmp_path, (1, 21, CLOSING), (3, 21, RESET), scheduler=line)
    (found,) = verdict.detections
    assert found.what == "ended from outside"
    assert found.who == ()
    assert found.advice == "none"
    assert verdict.blamed_hosts == ()
    assert verdict.sentence.startswith("The job was ended from outside: ")
    assert why in verdict.sentence
    assert line.split()[-2] in found.why[0]


def test_a_failure_before_it_is_the_cause(tmp_path: Path) -> None:
    at = "2026-11-25 10:00:50,000 "
    verdict = job(tmp_path, (2, 20, FAULT), (0, 21, RESET), scheduler=at + PREEMPTED)
    assert verdict.detections[0].what == "CUDA error"
    assert verdict.blamed_hosts == ("gpu02",)


def test_a_bare_cancellation_follows_from_a_failure_whenever_it_stands(tmp_path: Path) -> None:
    verdict = job(tmp_path, (2, 20, FAULT), scheduler=CANCELLED)
    assert verdict.detections[0].what == "CUDA error"


def test_who_cancels_a_job_that_hangs_is_not_its_cause(tmp_path: Path) -> None:
    hang = (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15, OpType=ALLREDUCE) ran for 600060 ms"
    )
    verdict = job(tmp_path, *((rank, 30, hang) for rank in (0, 1, 2)), scheduler="2026-11-25 10:00:59,000 " + CANCELLED)
    assert verdict.detections[0].what == "NCCL timeout"


@pytest.mark.parametrize("line", ["INFO ended: stopped by SIGTERM", "INFO received SIGTERM, saving a checkpoint"])
def test_a_signal_alone_is_told(tmp_path: Path, line: str) -> None:
    (found,) = job(tmp_path, ended=line).detections
    assert (found.what, found.who, found.advice) == ("ended from outside", (), "none")
    assert "SIGTERM" in found.sentence


def test_a_job_that_was_requeued_and_goes_on_has_nothing_wrong(tmp_path: Path) -> None:
    lines = [f"2026-11-25 10:{step // 60:02d}:{step % 60:02d},000 step: {step} loss: 2.0" for step in range(120)]
    (tmp_path / "job.out").write_text("\n".join([*lines[:30], PREEMPTED, *lines[30:]]) + "\n")
    assert judge_places([tmp_path]).detections == ()
