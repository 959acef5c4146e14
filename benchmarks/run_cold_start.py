"""Seconds from the command until all ranks have done their first optimizer step, when everything starts cold.

Nothing of an earlier run lives: `phalanx run` for the first time (its cache is empty), again (with what the first has
left in its cache), and torchrun, in turn, of unmodified scripts with gloo ranks: DDP, and one that imports Hugging
Face's Trainer too. `--no-bytecode` hides what Python has compiled, as where packages were installed without and
cannot be written to. Files stay in the page cache. Example:

    python benchmarks/run_cold_start.py --rounds 3 --ranks 2 4
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from support.harness import median_and_range
from support.leaving import nothing_left
from support.starts import SCRIPTS, conclude, have_stepped, parser_of, read_arguments, stepped_at_s

CASES = ("torchrun", "first start", "cold restart")

_MARK = "COLD_START"
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Start:
    """One.

    Attributes:
        step_s: from the command until the last rank had done its first step.
        cpu_s: that all processes had taken by then: what remains of it on a machine that is busy with other work.
    """

    script: str
    ranks: int
    case: str
    step_s: float
    cpu_s: float


@dataclass
class Bench:
    """Where it runs.

    Attributes:
        folder: of the scripts, in which they are run.
        environ: of all commands.
    """

    folder: Path
    environ: dict[str, str]

    def measure(self, script: str, ranks: int, case: str) -> Start:
        """Start everything, and end it once what it learns has been kept."""
        for left in (*self.folder.glob("stepped-*"), self.folder / "enough"):
            left.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        if case == "first start":
            shutil.rmtree(self.cache, ignore_errors=True)
        begin_s = time.monotonic()
        with (self.folder / "said").open("wb") as said:
            command = [sys.executable, "-m", *self.words(ranks, case), script]
            process = subprocess.Popen(command, cwd=self.folder, env=self.environ, stdout=said, stderr=said)
            try:
                stepped_at_s = self._stepped_at_s(process, ranks)
                return Start(script, ranks, case, stepped_at_s - begin_s, self._cpu_s())
            finally:
                if case == "first start" and script != "ddp.py":  # which has nothing to learn
                    self._wait(process, lambda: bool(list(self.cache.rglob("*.json"))))
                (self.folder / "enough").touch()
                process.wait(_LIMIT_S)

    @property
    def cache(self) -> Path:
        return Path(self.environ["PHALANX_WARM_CACHE"])

    @staticmethod
    def words(ranks: int, case: str) -> list[str]:
        if case == "torchrun":
            return ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return ["phalanx.cli.main", "run", "--folder", "run", "--start", "warm", "--workers-per-host", str(ranks), "--"]

    def _stepped_at_s(self, process: subprocess.Popen[bytes], ranks: int) -> float:
        self._wait(process, lambda: have_stepped(self.folder, ranks))
        return stepped_at_s(self.folder, ranks)

    def _cpu_s(self) -> float:
        """Of all processes that inherit this benchmark's mark."""
        found = 0.0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == str(self.folder):
                    found += sum(process.cpu_times()[:2])
        return found

    def _wait(self, process: subprocess.Popen[bytes], is_there: object) -> None:
        assert callable(is_there)
        until_s = time.monotonic() + _LIMIT_S
        while not is_there():
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit((self.folder / "said").read_text())
            time.sleep(0.02)


def report(starts: list[Start]) -> str:
    """A table in Markdown."""
    lines = [
        "| script | ranks | | s to the first step, median (range) | against torchrun | CPU s | against torchrun |",
        "|---|--:|---|---|--:|--:|--:|",
    ]
    for script, ranks in dict.fromkeys((start.script, start.ranks) for start in starts):
        of = {case: [s for s in starts if (s.script, s.ranks, s.case) == (script, ranks, case)] for case in CASES}
        step_s = {case: statistics.median(one.step_s for one in of[case]) for case in CASES}
        cpu_s = {case: statistics.median(one.cpu_s for one in of[case]) for case in CASES}
        for case in CASES:
            each = median_and_range([one.step_s for one in of[case]])
            wall, cpu = (times["torchrun"] / times[case] for times in (step_s, cpu_s))
            lines.append(f"| {script} | {ranks} | {case} | {each} | {wall:.2f} x | {cpu_s[case]:.1f} | {cpu:.2f} x |")
    return "\n".join(lines)


def environment(folder: Path, *, bytecode: bool) -> dict[str, str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PHALANX_WARM_CACHE": str(folder / "warm"), _MARK: str(folder)}
    if not bytecode:
        environ |= {"PYTHONPYCACHEPREFIX": str(folder / "nothing"), "PYTHONDONTWRITEBYTECODE": "1"}
    else:  # as where it is installed: what is here may not have been compiled yet
        environ |= {"PYTHONDONTWRITEBYTECODE": ""}
    return environ


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--no-bytecode", action="store_true")
    arguments = read_arguments(parser)
    scripts, ranks = arguments.scripts, [2] if arguments.quick else arguments.ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(folder, environment(folder, bytecode=not arguments.no_bytecode))
        for script in scripts:
            (folder / script).write_text(SCRIPTS[script])
        if not arguments.no_bytecode:
            bench.measure(scripts[-1], 1, "first start")  # compiles what is not yet, brings files into memory
        starts = []
        for _ in range(arguments.rounds):
            for script in scripts:
                for count in ranks:
                    for case in CASES:
                        starts.append(bench.measure(script, count, case))
                        print(starts[-1], f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    conclude(arguments, starts, report(starts))


if __name__ == "__main__":
    with nothing_left():
        main()
