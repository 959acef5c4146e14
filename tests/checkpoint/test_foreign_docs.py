"""The example in docs/checkpoint_foreign.md, as printed: killed, run again, and no different for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint_foreign.md"
STEPS = "50"
HANG_S = 120


@pytest.fixture
def script(tmp_path: Path) -> Path:
    [example] = re.findall(r"## A complete example.*?```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(example)
    return path


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    keeper = tmp_path_factory.mktemp("k") / "s"
    yield {**os.environ, "PHALANX_KEEPER": str(keeper), "OMP_NUM_THREADS": "1"}
    for one in psutil.process_iter(["cmdline"]):
        if str(keeper) in " ".join(one.info["cmdline"] or []):
            one.kill()


def run(script: Path, environment: dict[str, str], folder: str, stop: signal.Signals | None = None) -> list[str]:
    """The lines printed; with `stop`, the process gets this signal after step 31."""
    command = [sys.executable, str(script), str(script.parent / folder), STEPS]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if stop is not None and line.startswith("step 31 "):
                process.send_signal(stop)
        assert process.wait(timeout=HANG_S) == (-9 if stop == signal.SIGKILL else 0)
    return lines


@pytest.mark.slow
def test_the_example_goes_on_where_it_was_killed_or_stopped(script: Path, environment: dict[str, str]) -> None:
    whole = run(script, environment, "whole")
    assert whole[0] == "start 0"
    assert len(whole) == 51
    for stop in (signal.SIGKILL, signal.SIGUSR2):
        first = run(script, environment, stop.name, stop)
        again = run(script, environment, stop.name)
        start = int(again[0].removeprefix("start "))
        done = len(first) - 1
        assert start == done if stop == signal.SIGUSR2 else 0 < start <= done
        assert first == whole[: done + 1]
        assert again[1:] == whole[start + 1 :]
