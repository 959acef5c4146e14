"""Foreign loops killed and resumed: on several ranks, in the same layout and another, from memory and storage."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.checkpoint.restore import candidates

LOOP = Path(__file__).parent / "foreign_loop.py"
BLOCKING = ["mode=blocking", "keep_last=9"]


class Loops:
    """Runs `foreign_loop`."""

    def __init__(self, process: subprocess.Popen[str], environment: dict[str, str]) -> None:
        self._process, self._environment = process, environment

    def run(self, ranks: int, folder: Path, mode: str, steps: int, *settings: str, kill_at: int = 0) -> list[Any]:
        """What each rank has to tell at its end; None where it was killed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [str(folder), mode, steps, kill_at, *settings]
        job = {"ranks": ranks, "port": port, "environment": self._environment, "arguments": arguments}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        ended = json.loads(self._process.stdout.readline())
        expected = -9 if kill_at else 0
        assert [status for status, _ in ended] == [expected] * ranks, "\n".join(str(told) for _, told in ended)
        return [told for _, told in ended]


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, str(LOOP)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def loops(process: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loops]:
    socket_path = tmp_path_factory.mktemp("k") / "s"
    yield Loops(process, {"PHALANX_KEEPER": str(socket_path)})
    for one in psutil.process_iter(["cmdline"]):
        if str(socket_path) in " ".join(one.info["cmdline"] or []):
            one.kill()


def same_from(expected: list[Any], resumed: list[Any], start: int) -> None:
    for before, after in zip(expected, resumed, strict=True):
        assert after["start"] == start
        assert after["losses"] == {step: loss for step, loss in before["losses"].items() if int(step) > start}
        assert (after["weights"], after["drawn"]) == (before["weights"], before["drawn"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_killed_and_resumed_in_the_same_layout_and_in_another(loops: Loops, tmp_path: Path, mode: str) -> None:
    whole = loops.run(2, tmp_path / "whole", mode, 7, "every_steps=3", *BLOCKING)
    loops.run(2, tmp_path / "killed", mode, 7, "every_steps=3", *BLOCKING, kill_at=5)
    again = loops.run(2, tmp_path / "killed", mode, 7, "every_steps=3", *BLOCKING)
    same_from(whole, again, 3)
    assert whole[0]["drawn"] + 1 == whole[1]["drawn"]
    assert [c.step for c in candidates(tmp_path / "killed")] == [7, 6, 3]
    [alone] = loops.run(1, tmp_path / "killed", mode, 7, "every_steps=3", *BLOCKING)
    assert (alone["start"], alone["weights"], alone["drawn"]) == (7, whole[0]["weights"], whole[0]["drawn"])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode"), [(1, "ddp"), (2, "fsdp")])
def test_killed_beside_a_snapshot_and_resumed_from_memory(loops: Loops, tmp_path: Path, ranks: int, mode: str) -> None:
    settings = ["every_steps=1000", "memory_every_steps=1"]
    whole = loops.run(ranks, tmp_path / "whole", mode, 60, *settings)
    assert [c.step for c in candidates(tmp_path / "whole")] == [60]
    loops.run(ranks, tmp_path / "killed", mode, 60, *settings, kill_at=50)
    assert candidates(tmp_path / "killed") == []
    again = loops.run(ranks, tmp_path / "killed", mode, 60, *settings)
    assert 0 < again[0]["start"] < 50
    same_from(whole, again, again[0]["start"])
