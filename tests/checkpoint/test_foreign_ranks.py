"""Foreign loops killed and resumed: on several ranks, in the same layout and another, from memory and storage."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_forks import Forks, a_keeper_of_its_own

from phalanx.checkpoint.storage.folder import candidates

BLOCKING = ["mode=blocking", "keep_last=9"]


class Loops:
    """Runs `foreign_loop`, as torchrun would start it."""

    def __init__(self, forks: Forks, environment: dict[str, str]) -> None:
        self._forks, self._environment = forks, environment

    def run(self, ranks: int, folder: Path, mode: str, steps: int, *settings: str, kill_at: int = 0) -> list[Any]:
        """What each rank has to tell at its end; None where it was killed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        about = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **self._environment}
        environments = [{**about, "RANK": str(rank)} for rank in range(ranks)]
        ended = self._forks.run("foreign_loop:train", [str(folder), mode, steps, kill_at, *settings], environments)
        expected = -9 if kill_at else 0
        assert [status for status, _ in ended] == [expected] * ranks, "\n".join(str(told) for _, told in ended)
        assert kill_at or [told["threads_left"] for _, told in ended] == [0] * ranks
        return [told for _, told in ended]


@pytest.fixture
def loops(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loops]:
    with a_keeper_of_its_own(tmp_path_factory.mktemp("k"), forks) as environment:
        yield Loops(forks, environment)


def same_from(expected: list[Any], resumed: list[Any], start: int) -> None:
    for before, after in zip(expected, resumed, strict=True):
        assert after["start"] == start
        assert after["losses"] == {step: loss for step, loss in before["losses"].items() if int(step) > start}
        assert (after["weights"], after["drawn"]) == (before["weights"], before["drawn"])


@pytest.mark.campaign(but=("fsdp",))
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
    if mode == "ddp":
        assert alone["moments"] == whole[0]["moments"] | whole[1]["moments"]
        assert 0 < len(whole[0]["moments"]) < len(alone["moments"])


@pytest.mark.campaign(but=("1-ddp",))
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
