"""What a submitted job runs on its first node: ``python -m phalanx.run.backends.slurm.batch_script FOLDER``.

It keeps the driver alive, and when the job has ended for want of time or nodes, has Slurm put it into the queue again,
without the nodes that were evicted. The journal is in the run folder, so the next driver goes on from it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.run.backends.slurm import commands
from phalanx.run.backends.slurm.commands import SlurmOptions, read_options
from phalanx.run.backends.slurm.slurm_backend import Notes
from phalanx.run.config import load_job
from phalanx.run.job_folder import read_card
from phalanx.run.supervise import Supervisor

JOB_FILE = "job.toml"
FOLDER = "slurm"  # in the run folder

REQUEUED = (3, 6)
"""Statuses of jobs that may go on with another allocation: no hosts, time is short."""

_END_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of the run folder that the first argument names."""
    folder = Path((sys.argv[1:] if argv is None else argv)[0])
    path = folder / FOLDER / JOB_FILE
    options = read_options(load_job(path).value.run)
    count = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    _say(f"job {os.environ['SLURM_JOB_ID']} on {os.environ['SLURM_JOB_NODELIST']}, requeued {count} times")
    command = [sys.executable, "-m", "phalanx.cli.main", "run", ":drive", "--job", str(path)]
    status = Supervisor(command, lambda pid: _has_begun(folder, pid), _say).run()
    _say(f"the driver has ended with status {status}")
    if status in REQUEUED and options.requeue:
        _requeue_if_due(folder, options, os.environ["SLURM_JOB_ID"], count)
    return status


def _has_begun(folder: Path, pid: int) -> bool:
    try:
        card = read_card(folder)
    except UserError:
        return False
    return card is not None and card.pid == pid


def _requeue_if_due(folder: Path, options: SlurmOptions, job: str, count: int) -> None:
    """Have Slurm queue the job again, and wait to be ended; return where it does not."""
    if count >= options.max_requeues:
        _say(f"it is not queued again: it was {count} times (run.backend_options.max_requeues)")
        return
    if _squeue(job, "%T") != "RUNNING":
        _say("it is not queued again by this script: Slurm is ending it")
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which comes now; programs that are started inherit it
    without = sorted(Notes.read(folder / "executors" / "slurm.json").evicted)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        _say(f"Slurm does not queue it again ({done.stderr.strip()}): submit it again, it goes on where it was")
        return
    _say(f"it is queued again{', without ' + ','.join(without) if without else ''}")
    if without:  # can be changed only while it waits
        before = _squeue(job, "%x")  # nodes that its submitter has excluded, as Slurm writes them
        excluded = [*([before] if before not in ("", "(null)") else []), *without]
        update = ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(excluded)}"]
        done = subprocess.run(update, capture_output=True, text=True, check=False)
        if done.returncode:
            _say(f"Slurm may give it nodes that were evicted, which it will not use: {done.stderr.strip()}")
    time.sleep(_END_S)


def _squeue(job: str, what: str) -> str:
    command = ["squeue", "-h", "-j", job, "-o", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=commands.COMMAND_S, check=False)
    return done.stdout.strip()


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} slurm: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
