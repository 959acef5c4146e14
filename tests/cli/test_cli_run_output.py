"""What the ranks of a job print is on the terminal when `phalanx run` ends: all of it, in order, however it ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUARD_S = 180.0

COUNT = 5_000

SCRIPT = f"""
import os, sys
rank, how = int(os.environ["RANK"]), sys.argv[1]
print("x" * 3000)
for number in range({COUNT}):
    print("line", number)
sys.stdout.write("no end of line")
sys.stdout.flush()
if rank == 0 and how == "kill":
    os.kill(os.getpid(), 9)
if rank == 0 and how == "raise":
    print()
    raise RuntimeError("it is broken")
if rank == 0 and how == "exit":
    sys.exit(3)
"""

EXPECTED = ["x" * 3000, *(f"line {number}" for number in range(COUNT)), "no end of line"]
KNOWN = set(EXPECTED)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx.cli.main", "run", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GUARD_S,
        check=False,
    )


@pytest.mark.campaign(but=("raise-1",))
@pytest.mark.parametrize(("how", "status"), [("return", 0), ("kill", 4), ("raise", 1), ("exit", 1)])
def test_all_that_ranks_print_is_shown_before_the_end(tmp_path: Path, how: str, status: int) -> None:
    (tmp_path / "prints.py").write_text(SCRIPT)
    once = ["--set", "run.policy.max_restarts_without_step=1", "--set", "run.policy.backoff_s=0"]
    unmeasured = ["--set", 'run.checks.skip=["gemm", "gemm-repeat", "memory-bandwidth", "loopback", "disk"]']
    done = run(tmp_path, *once, *unmeasured, "--show", "all", "--workers-per-host", "2", "--", "prints.py", how)
    lines = done.stdout.splitlines()
    assert done.returncode == status, done.stdout[-3000:]
    attempts = len(list((tmp_path / "runs" / "prints" / "logs" / "rank-0").glob("attempt-*.0001.log")))
    for rank in (0, 1) if how == "return" else (0,):  # else rank 1 is ended while it writes
        found = [match[1] for line in lines if (match := re.fullmatch(rf"\[rank {rank}\] (.*)", line))]
        assert found[-1] == ("RuntimeError: it is broken" if how == "raise" else EXPECTED[-1])
        assert [line for line in found if line in KNOWN] == EXPECTED * attempts
    last = max(place for place, line in enumerate(lines) if line.startswith("[rank "))
    assert re.match(r"(done|ended with status)", lines[last + 1 :][-1 if how == "return" else -3])


@pytest.mark.campaign
@pytest.mark.parametrize(("ranks", "shown"), [("2", "0"), ("1", "none")])
def test_bad_input_of_a_training_is_bad_input_of_its_job_and_told_once(tmp_path: Path, ranks: str, shown: str) -> None:
    config = Path(__file__).parents[2] / "configs" / "python-stdlib.toml"
    words = ["--show", shown, "--workers-per-host", ranks, "--folder", f"of {ranks}"]
    done = run(tmp_path, *words, "-m", "phalanx", "train", str(config), "model.heads=3")
    assert done.returncode == 2, done.stdout
    assert "attempt 2" not in done.stdout and "no other host would change" not in done.stdout
    *_, ending, incident, logs = done.stdout.splitlines()
    assert ending.startswith("ended with status 2") and "bad input: returned exit status 2: error: " in ending
    assert "heads = 3" in ending and ending.count("heads = 3") == 1
    assert incident.startswith("incident: ") and logs.startswith("logs: ")
    own = [line for line in done.stdout.splitlines() if re.match(r"(\[rank 0\] )?error: .*heads = 3", line)]
    assert len(own) == 1  # as the rank wrote it, or as it is quoted where its lines are not shown
