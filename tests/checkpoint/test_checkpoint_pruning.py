from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.open_checkpoint import newest

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.session.blocking_session import save
from phalanx.checkpoint.storage import retention as pruning
from phalanx.checkpoint.storage.folder import candidates
from phalanx.checkpoint.storage.retention import Stocked, prune, unkept
from phalanx.core.fault_points import Points


def steps(folder: Path) -> list[int]:
    return [candidate.step for candidate in candidates(folder)]


def fill(folder: Path, *which: int) -> None:
    for step in which:
        save(folder, step, {"step": torch.tensor(step)})


def break_tensors(folder: Path, step: int) -> None:
    path = folder / f"step-{step:08d}" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)


def tear(folder: Path, step: int) -> None:
    (folder / f"step-{step:08d}" / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expected"),
    [(1, 0, [6]), (2, 0, [6, 5]), (9, 0, [6, 5, 4, 3, 2, 1]), (1, 2, [6, 4, 2]), (2, 3, [6, 5, 3]), (1, 5, [6, 5])],
)
def test_which_are_kept(tmp_path: Path, keep_last: int, keep_every: int, expected: list[int]) -> None:
    fill(tmp_path, 1, 2, 3, 4, 5, 6)
    deleted = prune(tmp_path, CheckpointConfig(keep_last=keep_last, keep_every=keep_every))
    assert steps(tmp_path) == expected
    assert [path.name for path in deleted] == [f"step-{s:08d}" for s in range(1, 7) if s not in expected]
    assert len(list(tmp_path.iterdir())) == len(expected)


def test_the_newest_whole_one_is_spared_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3, 4, 5)
    break_tensors(tmp_path, 5)
    tear(tmp_path, 4)
    prune(tmp_path, CheckpointConfig(keep_last=1))
    assert steps(tmp_path) == [5, 4, 3]
    found = newest(tmp_path, lambda _: None)
    assert found is not None
    assert found.step == 3


def test_damaged_ones_do_not_count_as_kept_and_go_when_old(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3, 4)
    tear(tmp_path, 3)
    prune(tmp_path, CheckpointConfig(keep_last=2))
    assert steps(tmp_path) == [4, 2]


def test_nothing_is_deleted_where_none_is_whole(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        break_tensors(tmp_path, step)
    assert prune(tmp_path, CheckpointConfig(keep_last=1)) == []
    assert steps(tmp_path) == [3, 2, 1]


def test_an_empty_or_absent_folder(tmp_path: Path) -> None:
    assert prune(tmp_path, CheckpointConfig()) == []
    assert prune(tmp_path / "absent", CheckpointConfig()) == []


def test_bytes_are_read_only_where_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    examine = pruning.examine

    def counted(path: Path, *, checksums: bool, **options: Any) -> object:
        if checksums:
            hashed.append(path.name)
        return examine(path, checksums=checksums, **options)

    monkeypatch.setattr(pruning, "examine", counted)
    fill(tmp_path, 1, 2, 3)
    prune(tmp_path, CheckpointConfig(keep_last=3))
    prune(tmp_path, CheckpointConfig(keep_last=2), good_step=3)
    assert hashed == []
    assert steps(tmp_path) == [3, 2]
    prune(tmp_path, CheckpointConfig(keep_last=1))
    assert hashed == ["step-00000003"]
    assert steps(tmp_path) == [3]


def test_killed_while_deleting_nothing_half_deleted_bears_a_name(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    kill = Points({"checkpoint.deleting": lambda **_: os.kill(os.getpid(), signal.SIGKILL)})
    pid = os.fork()
    if pid == 0:
        prune(tmp_path, CheckpointConfig(keep_last=1), points=kill)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert steps(tmp_path) == [2]
    assert any(path.name.startswith(".deleting-") for path in tmp_path.iterdir())
    found = newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@given(
    st.sets(st.integers(0, 60), min_size=1, max_size=15),
    st.sets(st.integers(0, 60)),
    st.integers(1, 6),
    st.integers(0, 9),
    st.data(),
)
def test_the_choice(all_steps: set[int], broken: set[int], last: int, every: int, data: st.DataObject) -> None:
    sound = all_steps - broken
    if not sound:
        return
    good = data.draw(st.sampled_from(sorted(sound)))
    found = [Stocked(str(step), step, step in sound) for step in sorted(all_steps, reverse=True)]
    doomed = {c.step for c in unkept(found, str(good), CheckpointConfig(keep_last=last, keep_every=every))}
    left = all_steps - doomed
    assert good in left
    assert all(step in left for step in all_steps if step > good)
    usable = sorted((s for s in sound if s <= good), reverse=True)
    assert set(usable[:last]) <= left
    if every:
        assert all(step in left for step in sound if step % every == 0)
    kept_for_a_reason = {s for s in all_steps if s > good} | set(usable[:last])
    assert all(every and s % every == 0 for s in left - kept_for_a_reason)


def test_due() -> None:
    assert [s for s in range(1, 10) if CheckpointConfig(every_steps=4).due(s)] == [4, 8]
    assert not any(CheckpointConfig(every_steps=0).due(s) for s in range(10))
