"""The watcher of a run: how it hears of the run's end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.telemetry.alerts import run_watcher
from phalanx.telemetry.alerts.alert_config import AlertsConfig
from phalanx.telemetry.alerts.alert_rules import EndSeen
from phalanx.telemetry.alerts.observed_run import WatchedRun
from phalanx.telemetry.alerts.run_watcher import Watcher


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


class EndsWhenLookedAt(Watcher):
    """Watches a run whose process ends between the look at its pipe and the look at its process."""

    def __init__(self, folder: Path, last_word: bytes, pipe: int) -> None:
        super().__init__(WatchedRun("run", str(folder), os.getpid(), -1), AlertsConfig(), 0)
        self._last_word, self._pipe = last_word, pipe

    def end_without_word(self) -> EndSeen | None:
        os.write(self._pipe, self._last_word)
        return super().end_without_word()


def test_what_a_run_said_just_before_its_end_is_heard(tmp_path: Path, pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    word = json.dumps({"kind": "finished", "why": "all was done"}).encode() + b"\n"
    watcher = EndsWhenLookedAt(tmp_path, word, theirs)
    end = run_watcher._heard(run_watcher._Orders(ours), watcher, 0.0)
    assert end == EndSeen("finished", "all was done")


def test_a_run_that_said_nothing_before_its_end_is_gone_without_a_word(tmp_path: Path, pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    watcher = EndsWhenLookedAt(tmp_path, b'{"kind": "fin', theirs)  # it was killed while it wrote
    end = run_watcher._heard(run_watcher._Orders(ours), watcher, 0.0)
    assert end is not None and end.kind == "failed" and "without a word" in end.why
