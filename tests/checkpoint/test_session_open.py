"""Sessions with a real keeper: from opening to what lies on the disk."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_start import end_keeper, prepare_keeper
from phalanx.checkpoint.session.background_session import Session
from phalanx.checkpoint.session.open_session import open_session
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError

PATIENCE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    address = tmp_path / "keeper"
    monkeypatch.setenv("PHALANX_KEEPER", str(address))
    yield tmp_path / "checkpoints"
    end_keeper(address)


def begin(folder: Path, lines: list[str], **settings: Any) -> Session:
    config = CheckpointConfig(**({"every_steps": 2, "final_timeout_s": PATIENCE_S} | settings))
    return open_session(str(folder), config, report=lines.append)


def state(value: float = 0.0) -> dict[str, Tensor]:
    return {
        "model.w": torch.full((300, 1000), value),
        "optim.w.exp_avg": torch.full((300, 1000), -value),
        "rng": torch.zeros(3, dtype=torch.uint8),
    }


ROLES = {"model.w": "trained", "optim.w.exp_avg": "optimizer"}


def watch(session: Session, tensors: dict[str, Tensor]) -> None:
    session.watch(tensors, None, ROLES)  # type: ignore[arg-type]
    await_(lambda: session.link.ask(lambda keeper: not keeper.busy, False))


def step(session: Session, tensors: dict[str, Tensor], number: int, **options: Any) -> None:
    session.ask(number)
    session.fence()
    tensors["model.w"].fill_(number)
    tensors["optim.w.exp_avg"].fill_(-number)
    session.after_step(number, lambda: {"step": number}, **options)


def await_(condition: Any) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_from_steps_to_the_disk_and_back(folder: Path) -> None:
    lines: list[str] = []
    config = CheckpointConfig(every_steps=2)
    prepare_keeper(str(folder), ttl_s=config.keeper_ttl_s).join()
    session = begin(folder, lines)
    tensors = state()
    assert session.restore(tensors) is None
    watch(session, tensors)
    for number in range(1, 4):
        step(session, tensors, number)
    step(session, tensors, 4)
    step(session, tensors, 5, ending=True)
    events = session.events()
    assert events[-1].step == 5 and events[-1].name
    assert all(event.problem == "" for event in events)
    session.finish(clean=True)
    latest = read_latest(open_store(folder))
    assert latest is not None and (latest.step, latest.attempt) == (5, 1)
    assert lines == []

    again = begin(folder, lines)
    assert again.attempt == 2
    fresh = state()
    restored = again.restore(fresh)
    assert restored is not None
    assert (restored.step, restored.state) == (5, {"step": 5})
    assert all(torch.equal(fresh[name], tensors[name]) for name in tensors)
    again.finish(clean=True)


def test_a_killed_rank_finds_what_was_in_memory(folder: Path) -> None:
    lines: list[str] = []
    session = begin(folder, lines, every_steps=0, memory_every_steps=1)
    tensors = state()
    watch(session, tensors)
    step(session, tensors, 1)
    await_(lambda: session.events())
    session.finish(clean=False)  # as far as the keeper can see, the process is gone

    again = begin(folder, lines)
    fresh = state()
    restored = again.restore(fresh)
    assert restored is not None
    assert (restored.step, restored.source, restored.attempt) == (1, "memory", 1)
    assert torch.equal(fresh["model.w"], tensors["model.w"])
    watch(again, fresh)
    step(again, fresh, 2)
    step(again, fresh, 3, ending=True)
    again.finish(clean=True)


def test_training_goes_on_when_the_keeper_is_killed(folder: Path) -> None:
    lines: list[str] = []
    session = begin(folder, lines, every_steps=1)
    tensors = state()
    watch(session, tensors)
    step(session, tensors, 1)
    keeper = session.link.keeper
    assert isinstance(keeper, KeeperClient)
    os.kill(keeper.pid, signal.SIGKILL)
    number = 1
    until_s = time.monotonic() + PATIENCE_S
    while not any("again" in line for line in lines):
        assert time.monotonic() < until_s
        number += 1
        step(session, tensors, number)
    await_(lambda: session.link.ask(lambda keeper: not keeper.busy, False))
    step(session, tensors, number + 1)
    step(session, tensors, number + 2, ending=True)
    assert len([line for line in lines if "is lost" in line]) == 1
    events = session.events()
    assert events[-1].step == number + 2 and events[-1].name
    session.finish(clean=True)
    latest = read_latest(open_store(folder))
    assert latest is not None and latest.step == number + 2


def test_an_attempt_that_has_been_overtaken_stops(folder: Path) -> None:
    lines: list[str] = []
    session = begin(folder, lines, every_steps=1)
    tensors = state()
    watch(session, tensors)
    step(session, tensors, 1)
    later = begin(folder, lines)
    watch(later, tensors)
    with pytest.raises(UserError, match="a later attempt of this run has begun"):
        for number in range(2, 100):
            step(session, tensors, number)
            time.sleep(0.01)
    step(later, tensors, 2, ending=True)
    later.finish(clean=True)
    session.finish(clean=False)


def test_storage_that_cannot_be_written(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="checkpoints cannot be written there"):
        begin(tmp_path / "file", [])


def test_an_address_that_is_not_safe(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("PHALANX_KEEPER", str(tmp_path / "open" / "keeper"))
    with pytest.raises(UserError, match="folder for the keeper's socket"):
        begin(folder, [])
    monkeypatch.setenv("PHALANX_KEEPER", str(tmp_path / "keeper"))
