"""The example in docs/checkpoint_foreign.md, as printed: killed, run again, and no different for it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from foreign_forks import Forks, a_keeper_of_its_own

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint_foreign.md"
STEPS = "50"
PATIENCE_S = 5.0  # a step; 19 of them are left for it


@pytest.fixture
def script(tmp_path: Path) -> Path:
    [example] = re.findall(r"## A complete example.*?```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(example)
    return path


@pytest.fixture
def environment(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with a_keeper_of_its_own(tmp_path_factory.mktemp("k"), forks) as environment:
        yield environment


def run(
    forks: Forks, script: Path, environment: dict[str, str], folder: str, stop: signal.Signals | None = None
) -> list[str]:
    """The lines printed; with `stop`, the process gets this signal after step 31, or after a later one.

    No step begins before the line of the last one is read. So many steps take a moment, and at first the keeper of a
    busy machine is not there for longer than that: to be killed, the process goes on until something has been kept.
    """
    printed, answers = script.with_name("printed"), script.with_name("answers")
    for pipe in (printed, answers):
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
    arguments = [str(script), str(printed), str(answers), str(script.parent / folder), STEPS]
    [pid] = forks.start("foreign_forks:script", arguments, [environment])
    lines, killed = [], stop == signal.SIGKILL
    with printed.open() as stream, answers.open("wb", buffering=0) as go_on:
        for line in stream:
            lines.append(line.strip())
            is_late = line.startswith("step ") and int(line.split()[1]) >= 31
            if stop is not None and is_late and (stop != signal.SIGKILL or is_kept(script.parent / folder)):
                os.kill(pid, stop)
                stop = None
            with suppress(BrokenPipeError):  # it was killed
                go_on.write(b"\n")
    [(status, told)] = forks.ended()
    assert status == (-9 if killed else 0), told
    return lines


def is_kept(folder: Path) -> bool:
    """Whether a checkpoint is whole, now or soon: what makes it does not wait for the process that trains."""
    until_s = time.monotonic() + PATIENCE_S
    while not any(folder.glob("step-*")):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.campaign(but=("SIGUSR2",))
@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGUSR2], ids=["SIGKILL", "SIGUSR2"])
def test_the_example_goes_on_where_it_was_killed_or_stopped(
    forks: Forks, script: Path, environment: dict[str, str], stop: signal.Signals
) -> None:
    whole = run(forks, script, environment, "whole")
    assert whole[0] == "start 0"
    assert len(whole) == 51
    first = run(forks, script, environment, stop.name, stop)
    again = run(forks, script, environment, stop.name)
    start = int(again[0].removeprefix("start "))
    done = len(first) - 1
    assert start == done if stop == signal.SIGUSR2 else 0 < start <= done
    assert first == whole[: done + 1]
    assert again[1:] == whole[start + 1 :]
