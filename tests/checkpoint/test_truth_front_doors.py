"""The newest checkpoint is harmed, and through whichever door a run comes back, it comes back: to the one before, or to
the same where nothing is restored from what was harmed. All 100 flips of each: `benchmarks/checkpoint_foreign.py`."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from keeper_forks import fork_keeper
from keeper_processes import GUARD_S
from support.doors import DOORS, STEPS, Door, Loop, a_keeper_at, expected_step, flip, made, newest_files
from support.odd_files import ODD_FILES

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.format.checkpoint_files import examine
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
        fork_keeper(root / "k", ttl_s=GUARD_S, environ=os.environ)
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


@pytest.mark.campaign(
    but=(
        "Trainer-swapped",
        "phalanx train-deleted",
        "restore_checkpoint-truncated",
        "blank_weights-empty",
        "Checkpointer.restore-swapped",
    )
)
@pytest.mark.slow
@pytest.mark.parametrize("how", HARMS)
def test_any_file_of_the_newest_is_gone_cut_or_anothers(door: tuple[Door, Path], tmp_path: Path, how: str) -> None:
    for number in range(len(newest_files(door[1] / door[0].checkpoints))):

        def harm(path: Path, number: int = number) -> str:
            file = newest_files(path)[number]
            HARMS[how](file)
            return file.name

        name = newest_files(door[1] / door[0].checkpoints)[number].name
        if (how == "swapped" and name == ".metadata") or (how in ("swapped", "deleted") and name == "evaluation.json"):
            continue  # the same in both; and the other one was not evaluated, which is no damage
        require(door, tmp_path / "harmed", harm)


def _other_bits(file: Path) -> None:
    content = bytearray(file.read_bytes())
    for place in range(0, len(content), 512):
        content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("how", "why"), [(_other_bits, "bytes"), (Path.unlink, "is missing")])
def test_where_none_is_good_nothing_begins_and_nothing_is_deleted(
    door: tuple[Door, Path], tmp_path: Path, how: Callable[[Path], None], why: str
) -> None:
    """A run that began at step 0 there would delete what a person may still mend."""
    checkpoints = tmp_path / "harmed" / door[0].checkpoints

    def names() -> list[str]:
        return sorted(str(path.relative_to(checkpoints)) for path in checkpoints.glob("step-*/*"))

    shutil.copytree(door[1], tmp_path / "harmed")
    for step in STEPS:
        how(checkpoints / f"step-{step:08d}" / "__0_0.distcp")
    before = names()
    with pytest.raises(UserError) as refused:
        door[0].resume(tmp_path / "harmed", lambda _: None)
    for step in STEPS:
        assert f"checkpoint step-{step:08d} is damaged (__0_0.distcp" in str(refused.value)
    assert str(refused.value).count(why) >= 2 and "bring back" in refused.value.cure
    assert names() == before


def test_a_pointer_without_any_checkpoint_is_no_fresh_folder(door: tuple[Door, Path], tmp_path: Path) -> None:
    shutil.copytree(door[1], tmp_path / "harmed")
    for step in STEPS:
        shutil.rmtree(tmp_path / "harmed" / door[0].checkpoints / f"step-{step:08d}")
    with pytest.raises(UserError, match=f"step-{STEPS[1]:08d}, the latest, is gone") as refused:
        door[0].resume(tmp_path / "harmed", lambda _: None)
    assert "latest-*.json" in refused.value.cure


@pytest.mark.campaign(
    but=(
        "Trainer-FIFO",
        "phalanx train-dangling link",
        "restore_checkpoint-directory",
        "blank_weights-FIFO",
        "Checkpointer.restore-dangling link",
    )
)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["dangling link", "directory", "FIFO"])
def test_whatever_lies_where_the_next_entry_of_the_pointer_goes(
    door: tuple[Door, Path], tmp_path: Path, kind: str
) -> None:
    make, words = ODD_FILES[kind]

    def harm(path: Path) -> str:
        newest = max(path.glob("latest-*.json"))
        odd = newest.with_name(f"latest-{int(newest.stem.partition('-')[2]) + 1:08d}.json")
        make(odd)
        return odd.name

    file, step, said = door[0].harmed(door[1], tmp_path / "harmed", harm)
    assert step == STEPS[1]
    assert any(file in line and words in line for line in said), said


def _go_on(folder: Path, keeper: Path, until: int, told: list[str], **settings: Any) -> None:
    """A loop of somebody else's, checkpointed every other step; `keeper` knows nothing of it, as after a reboot."""
    loop = Loop(0)
    given = {**loop.given, "every_steps": 2, "keep_last": 3, "report": told.append, **settings}
    with a_keeper_at(keeper):
        fork_keeper(keeper, ttl_s=GUARD_S, environ=os.environ)
        with Checkpointer(folder, **given) as checkpoints:
            for step in range(checkpoints.restore() + 1, until + 1):
                loop.train(step)
                checkpoints.step(step)


MODES = pytest.mark.parametrize("settings", [{"mode": "blocking"}, {"wait": True}], ids=["blocking", "background"])


@pytest.mark.campaign(but=("FIFO-background", "dangling link-blocking", "file-blocking"))
@MODES
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["file", "dangling link", "link to itself", "FIFO", "socket"])
def test_whatever_bears_the_name_of_a_checkpoint_is_moved_out_of_its_way(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    folder, told = tmp_path / "c", list[str]()
    _go_on(folder, tmp_path / "k1", 6, told, **settings)
    newest = folder / "step-00000006"
    shutil.rmtree(newest)
    make, words = (lambda path: path.write_text("mine"), "a file") if kind == "file" else ODD_FILES[kind]
    make(newest)
    was = newest.lstat()
    _go_on(folder, tmp_path / "k2", 6, told, **settings)
    assert [path.name for path in sorted(folder.glob("step-*"))] == [f"step-{step:08d}" for step in (2, 4, 6)]
    assert examine(newest).step == 6
    [aside] = folder.glob("odd-step-00000006-*")
    assert os.path.samestat(aside.lstat(), was), "what a person may need is gone"
    assert any("step-00000006" in line and words in line and "moved aside" in line for line in told), told
