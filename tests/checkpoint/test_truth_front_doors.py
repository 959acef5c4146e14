"""The newest checkpoint is harmed, and through whichever door a run comes back, it comes back: to the one before, or to
the same where nothing is restored from what was harmed. All 100 flips of each: `benchmarks/checkpoint_foreign.py`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.doors import DOORS, STEPS, Door, a_keeper_at, expected_step, flip, made, newest_files

from phalanx.core.errors import UserError

HARMS: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "deleted": Path.unlink,
    "swapped": lambda path: (
        path.write_bytes(
            (path.parents[1] / f"step-{STEPS[0]:08d}" / path.name).read_bytes()
            if path.parent.name.startswith("step")
            else path.with_name("latest-00000002.json").read_bytes()
        )
        and None
    ),
}


@pytest.fixture(scope="module", params=list(DOORS))
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Door, Path]]:
    """A door, and what it has made; there is a keeper of its own while it is tried."""
    if request.param == "Trainer":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    root = tmp_path_factory.mktemp("door")
    with a_keeper_at(root / "k"):
        yield DOORS[request.param], made(DOORS[request.param], root / "pristine", root / "k")


def require(door: tuple[Door, Path], folder: Path, harm: Callable[[Path], str]) -> None:
    file, step, said = door[0].harmed(door[1], folder, harm)
    assert step == expected_step(file), (file, said)
    # A new attempt writes the pointer anew before anything is restored; that step 8 is not in it any more is said.
    told = f"step-{STEPS[1]:08d}" if file.startswith("latest-") else file
    assert any(told in line for line in said), (file, said)


def test_one_flipped_bit_in_any_file_of_the_newest(door: tuple[Door, Path], tmp_path: Path) -> None:
    chance = random.Random(0)
    for number in range(len(newest_files(door[1] / door[0].checkpoints))):
        require(door, tmp_path / "harmed", lambda path, number=number: flip(path, chance, number))  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("how", HARMS)
def test_any_file_of_the_newest_is_gone_cut_or_anothers(door: tuple[Door, Path], tmp_path: Path, how: str) -> None:
    for number in range(len(newest_files(door[1] / door[0].checkpoints))):

        def harm(path: Path, number: int = number) -> str:
            file = newest_files(path)[number]
            HARMS[how](file)
            return file.name

        if how == "swapped" and newest_files(door[1] / door[0].checkpoints)[number].name == ".metadata":
            continue  # the same in both
        require(door, tmp_path / "harmed", harm)


def test_where_none_is_good_nothing_is_said_to_be(door: tuple[Door, Path], tmp_path: Path) -> None:
    """Neither endless tries nor wrong bits: it begins anew, or ends with an error that says what is damaged."""

    def harm(path: Path) -> str:
        for step in STEPS:
            file = path / f"step-{step:08d}" / "__0_0.distcp"
            content = bytearray(file.read_bytes())
            for place in range(0, len(content), 512):
                content[place] ^= 1
            file.write_bytes(content)
        return "__0_0.distcp"

    if door[0].name in ("Checkpointer.restore", "restore_checkpoint"):  # the model is somebody else's to make anew
        with pytest.raises(UserError, match=r"no good state is left.*step-00000004 is damaged \(__0_0.distcp: bytes"):
            door[0].harmed(door[1], tmp_path / "harmed", harm)
    else:
        file, step, said = door[0].harmed(door[1], tmp_path / "harmed", harm)
        assert step == 0 and sum(file in line for line in said) == 2, said
