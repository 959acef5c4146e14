"""The example in docs/checkpoint_foreign.md, as printed: killed, run again, and no different for it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign_forks import Forks, a_keeper_of_its_own

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint_foreign.md"
STEPS = "50"


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
    """The lines printed; with `stop`, the process gets this signal after step 31."""
    printed = script.with_name("printed")
    printed.unlink(missing_ok=True)
    os.mkfifo(printed)
    arguments = [str(script), str(printed), str(script.parent / folder), STEPS]
    [pid] = forks.start("foreign_forks:script", arguments, [environment])
    lines = []
    with printed.open() as stream:
        for line in stream:
            lines.append(line.strip())
            if stop is not None and line.startswith("step 31 "):
                os.kill(pid, stop)
    [(status, told)] = forks.ended()
    assert status == (-9 if stop == signal.SIGKILL else 0), told
    return lines


@pytest.mark.slow
def test_the_example_goes_on_where_it_was_killed_or_stopped(
    forks: Forks, script: Path, environment: dict[str, str]
) -> None:
    whole = run(forks, script, environment, "whole")
    assert whole[0] == "start 0"
    assert len(whole) == 51
    for stop in (signal.SIGKILL, signal.SIGUSR2):
        first = run(forks, script, environment, stop.name, stop)
        again = run(forks, script, environment, stop.name)
        start = int(again[0].removeprefix("start "))
        done = len(first) - 1
        assert start == done if stop == signal.SIGUSR2 else 0 < start <= done
        assert first == whole[: done + 1]
        assert again[1:] == whole[start + 1 :]
