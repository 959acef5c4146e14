"""Workers as real processes, in folders whose names say nothing of what is tested."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_helpers import Commands

from phalanx.faults.campaign import agenda_of
from phalanx.faults.case_manifest import Cluster, Incident, Lasts, Manifest, Place, When
from phalanx.faults.fault_schedule import KINDS, Clock, Memory, Record, write_agenda
from phalanx.faults.inject import HOST, VARIABLE

GUARD_S = 180.0

PLAIN_LOOP = """\
import threading
import time


def beat():
    while True:
        with open("beats", "a") as file:
            file.write(".")
        time.sleep(0.001)


def write_checkpoint(inside):
    print("saving", flush=True)
    inside()
    print("saved", flush=True)


def train(tick, inside, steps=6):
    threading.Thread(target=beat, daemon=True).start()
    for step in range(1, steps + 1):
        sum(range(20_000))
        print(f"step {step}", flush=True)
        tick(step)
        if step % 2 == 0:
            write_checkpoint(inside)
    print("done", flush=True)
"""

TORCH_LOOP = """\
import torch


def train(tick, inside, steps=6):
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bits = model.weight.detach().flatten().view(torch.int32).tolist()
        print(f"step {step} {loss.item().hex()} {bits}", flush=True)
        if step % 2 == 0:
            torch.save(model.state_dict(), "weights.pt")
            print("saved", flush=True)
    print("done", flush=True)
"""

# Stands for the launcher: what comes before the script.
RUNNER = """\
import faulthandler, os, signal
faulthandler.enable()
faulthandler.register(signal.SIGUSR1)
{before}
from phalanx.faults.inject import install_from_environment
made = install_from_environment({arguments})
from loop import train
nothing = lambda *_: None
train(made.advance if made else nothing, made.in_checkpoint if made else nothing)
"""


@dataclass
class Job:
    """A folder with a script, and the agenda of its ranks."""

    folder: Path
    loop: str = PLAIN_LOOP
    clock: Clock = "calls"
    before: str = ""
    arguments: str = ""
    manifest: Manifest = field(default_factory=lambda: Manifest(id="none", seed=1))

    @property
    def records(self) -> list[Record]:
        return list(Memory(self.folder / "notes.json").records())

    def prepare(self, *incidents: Incident) -> Job:
        self.manifest = Manifest(id="one", seed=1, cluster=Cluster(), steps=60, incidents=incidents)
        write_agenda(agenda_of(self.manifest, self.clock), self.folder / "notes.json")
        (self.folder / "loop.py").write_text(self.loop)
        (self.folder / "start.py").write_text(RUNNER.format(before=self.before, arguments=self.arguments))
        return self

    def start(self, rank: int = 0, attempt: int = 1, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "start.py"],
            cwd=self.folder,
            env=plain_environment() | self.variables(rank, attempt) | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def variables(self, rank: int, attempt: int) -> dict[str, str]:
        own = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt - 1), HOST: f"node-{rank // 2}"}
        return own | {VARIABLE: str(self.folder / "notes.json")}

    def run_forked(self, commands: Commands) -> tuple[int, str, str]:
        """The same from a process that has imported torch, which takes a tenth of the time."""
        status = commands.call(_forked, str(self.folder), self.variables(0, 1))
        return status, *((self.folder / name).read_text() for name in ("out", "err"))

    def run(self, rank: int = 0, attempt: int = 1, **environ: str) -> tuple[int, str, str]:
        process = self.start(rank, attempt, **environ)
        out, err = process.communicate(timeout=GUARD_S)
        return process.returncode, out, err


def _forked(folder: str, variables: Mapping[str, str]) -> None:
    """What a forked process does: it becomes the worker."""
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.update(variables)
    sys.path.insert(0, folder)
    runpy.run_path("start.py")


def plain_environment() -> Mapping[str, str]:
    """Without what pytest and our own launcher add, which are not the worker's."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PHALANX", "RANK", "TORCHELASTIC"))}


@contextmanager
def job_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="job-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def incident(kind: str, *numbers: int, **given: Any) -> Incident:
    """On rank 0 after step 3, unless told otherwise."""
    lasts = given.pop("lasts", {})
    retrigger = given.pop("retrigger", "once")
    when = given.pop("when", {"step": 3})
    return Incident(
        kind=kind,
        place=Place(what="ranks", numbers=numbers or (0,)),
        when=When(**when),
        lasts=Lasts(**lasts),
        retrigger=retrigger,
        safety=KINDS[kind].safety,
        settings=given,
    )


def until(holds: Callable[[], Any], what: str) -> Any:
    """Wait until it holds; fails after `GUARD_S`."""
    end_s = time.monotonic() + GUARD_S
    while not (value := holds()):
        assert time.monotonic() < end_s, f"not within {GUARD_S:.0f} s: {what}"
        time.sleep(0.01)
    return value


def state_of(pid: int) -> str:
    """As in /proc: R, S, D, T, Z; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def running(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """It is gone afterwards."""
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=GUARD_S)
