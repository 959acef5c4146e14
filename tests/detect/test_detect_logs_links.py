"""Whom a dead link and a killed process point to: kernels of hosts beside what ranks and launchers say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from phalanx.detect.detection import Detection
from phalanx.detect.logs.log_digest import read_job
from phalanx.detect.logs.log_judge import judge_logs
from phalanx.detect.logs.log_rules import Matcher, load_rules

AT = 1_795_600_800.0
NO_ANSWER = (
    "gpu00:1234:1300 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.0.3<47001> with "
    "status=12 opcode=0 len=0 vendor err 129 (Send) hca mlx5_0"
)
GONE = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
LINK_DOWN = (
    "[999.1] mlx5_core 0000:1a:00.0: Port module event: module 0, Cable error, Bus stuck (I2C or data shorted)",
    "[999.2] mlx5_core 0000:1a:00.0 ens5f0: Link down",
)
OOM_KILL = (
    "[12.2] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,task={task},pid={pid},uid=1001",
    "[12.3] Out of memory: Killed process {pid} ({task}) total-vm:412kB, anon-rss:201kB, UID:1001 oom_score_adj:0",
)
TORCHRUN = (
    "W1125 10:05:12.123000 4121 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 4131 closing "
    "signal SIGTERM",
    "E1125 10:05:12.540000 4121 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) "
    "local_rank: 1 (pid: 4132) of binary: /opt/venv/bin/python",
    "Traceback (most recent call last):",
    '  File "/opt/venv/bin/torchrun", line 8, in <module>',
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "train.py FAILED",
    "Root Cause (first observed failure):",
    "[0]:",
    "  host      : node-17.cluster.local",
    "  rank      : 9 (local_rank: 1)",
    "  exitcode  : -9 (pid: 4132)",
    "  traceback : Signal 9 (SIGKILL) received by PID 4132",
)


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(load_rules(of_failed_jobs=True))


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


def write_kernel(folder: Path, host: str, at_s: float, lines: Sequence[str]) -> None:
    path = folder / f"{host}.kern.log"
    head = f"{datetime.fromtimestamp(at_s, UTC).strftime('%b %d %H:%M:%S')} {host} kernel: "
    path.write_text("".join(f"{head}{line}\n" for line in lines))
    os.utime(path, (AT, AT))


def write_ranks(folder: Path, said: Mapping[int, tuple[float, str]]) -> None:
    for rank in range(4):
        lines = [f"{stamp(AT + n)} [rank{rank}]: step {n} loss 3.1" for n in range(20)]
        if rank in said:
            at_s, text = said[rank]
            lines.append(f"{stamp(AT + at_s)} [rank{rank}]: {text}")
        (folder / f"gpu0{rank}.log").write_text("".join(f"{line}\n" for line in lines))


def write_torchrun(folder: Path) -> None:
    steps = [f"2026-11-25 10:04:{n:02d} step {n} loss 3.1" for n in range(40)]
    (folder / "node-17.log").write_text("".join(f"{line}\n" for line in (*steps, *TORCHRUN)))


def only(folder: Path, matcher: Matcher) -> Detection:
    (found,) = judge_logs(read_job([folder], matcher)).detections
    return found


UNANSWERED = {0: (26.0, NO_ANSWER), 1: (28.0, GONE), 2: (28.0, GONE)}


def test_the_end_whose_link_is_down_and_not_who_waited_for_it(tmp_path: Path, matcher: Matcher) -> None:
    write_ranks(tmp_path, UNANSWERED)
    write_kernel(tmp_path, "gpu03", AT + 19, LINK_DOWN)
    found = only(tmp_path, matcher)
    assert (found.what, [who.name for who in found.who]) == ("network error", ["gpu03"])
    assert "Link down" in found.sentence and any("gpu00" in why for why in found.why)


def test_a_link_of_the_end_that_complains_is_its_own(tmp_path: Path, matcher: Matcher) -> None:
    write_ranks(tmp_path, UNANSWERED)
    write_kernel(tmp_path, "gpu00", AT + 19, LINK_DOWN)
    assert [who.name for who in only(tmp_path, matcher).who] == ["gpu00"]


def test_without_a_kernel_both_ends_may_be_and_the_silent_one_comes_first(tmp_path: Path, matcher: Matcher) -> None:
    write_ranks(tmp_path, UNANSWERED)
    found = only(tmp_path, matcher)
    assert [who.name for who in found.who] == ["gpu03", "gpu00"] and found.confidence <= 0.6
    assert found.who[0].ranks == (3,) and "gpu03 or gpu00" in found.sentence
    write_ranks(tmp_path, UNANSWERED | {3: (28.0, GONE)})  # nobody is silent
    found = only(tmp_path, matcher)
    assert [who.name for who in found.who] == ["gpu00"] and found.confidence <= 0.6
    assert any("either end" in why for why in found.why)


def test_a_rank_that_the_kernel_killed_by_the_id_of_its_process(tmp_path: Path, matcher: Matcher) -> None:
    write_torchrun(tmp_path)
    at_s = datetime(2026, 11, 25, 10, 5, 11, tzinfo=UTC).timestamp()
    lines = [line.format(task="python", pid=4132) for line in OOM_KILL]
    write_kernel(tmp_path, "node-17", at_s, ["[12.1] node_exporter invoked oom-killer: gfp_mask=0xcc0", *lines])
    found = only(tmp_path, matcher)
    assert (found.what, found.who[0].name, found.who[0].ranks) == ("out of memory", "node-17", (9,))
    assert found.confidence > 0.9 and "4132" in found.sentence and any("which was rank 9" in why for why in found.why)


def test_a_killed_process_that_is_none_of_the_job_explains_nothing(tmp_path: Path, matcher: Matcher) -> None:
    write_torchrun(tmp_path)
    at_s = datetime(2026, 11, 25, 10, 5, 11, tzinfo=UTC).timestamp()
    write_kernel(tmp_path, "node-16", at_s, [line.format(task="copy", pid=4132) for line in OOM_KILL])
    found = only(tmp_path, matcher)
    assert (found.what, found.who[0].name, found.who[0].ranks) == ("out of memory", "node-17", (9,))
    assert "exitcode: -9" in found.sentence and found.confidence < 0.9  # as a bare "Killed"


def test_a_rank_that_the_launcher_found_killed(tmp_path: Path, matcher: Matcher) -> None:
    for rank in range(2):
        steps = [
            f"{stamp(AT + n)[:-4].replace(' ', 'T')}Z INFO [rank {rank} start 1] step {n} loss 3" for n in range(9)
        ]
        end = "ERROR [rank 1 start 1] ended: killed by SIGKILL; the launcher ends the other ranks"
        said = [*steps, f"2026-11-25T10:10:00Z {end}"] if rank else steps
        (tmp_path / f"rank-{rank}.h{rank}.log").write_text("".join(f"{line}\n" for line in said))
    found = only(tmp_path, matcher)
    assert (found.what, found.who[0].ranks, found.blamed_hosts) == ("out of memory", (1,), ())


def test_a_scheduler_names_the_host_whose_task_was_killed(tmp_path: Path, matcher: Matcher) -> None:
    lines = (
        "iter 1: loss 3.1",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=124.0. Some of the step tasks have been OOM Killed.",
        "srun: error: gpu05: task 3: Out Of Memory",
        "slurmstepd: error: *** STEP 124.0 ON gpu04 CANCELLED AT 2026-11-25T10:00:20 ***",
    )
    (tmp_path / "slurm-124.out").write_text("".join(f"{line}\n" for line in lines))
    found = only(tmp_path, matcher)
    assert (found.what, found.who[0].name) == ("out of memory", "gpu05") and not found.blamed_hosts


def test_whom_counts_of_others_leave_out(tmp_path: Path, matcher: Matcher) -> None:
    write_ranks(tmp_path, dict.fromkeys(range(4), (28.0, GONE)))
    assert any("3 other writers only notice that" in why for why in only(tmp_path, matcher).why)
    write_ranks(tmp_path, dict.fromkeys(range(2), (28.0, GONE)))
    assert any("1 other writer only notices that" in why for why in only(tmp_path, matcher).why)


def test_what_a_process_said_comes_before_that_its_launcher_found_it_killed(tmp_path: Path, matcher: Matcher) -> None:
    write_torchrun(tmp_path)
    said = [
        "Traceback (most recent call last):",
        '  File "train.py", line 3',
        "Failed: 'X' object has no attribute 'shape'",
    ]
    text = (tmp_path / "node-17.log").read_text()
    (tmp_path / "node-17.log").write_text(text.replace(TORCHRUN[0], "\n".join((*said, TORCHRUN[0]))))
    assert only(tmp_path, matcher).what == "attribute error"
