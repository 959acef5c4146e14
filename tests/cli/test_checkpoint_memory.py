"""`phalanx checkpoint ls` of a run whose newest steps lie in the memory of this host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import call, call_json
from torch import nn

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.format.shard_plan import Record
from phalanx.checkpoint.keeper.keeper_start import address_for, end_keeper
from phalanx.cli.checkpoint_list_and_prune import kept
from phalanx.core.errors import UserError

GUARD_S = 120.0
STEP_S = 0.003


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose process ended in the middle; its snapshots are in memory only."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PHALANX_KEEPER", raising=False)
    run = tmp_path / "run"
    address = address_for(str(run / "checkpoints"), {"XDG_RUNTIME_DIR": str(tmp_path)})
    train(run / "checkpoints")
    yield run
    end_keeper(address)


def train(folder: Path) -> None:
    model = nn.Linear(5, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpointer(folder, model=model, optimizer=optimizer, every_steps=10**6, memory_every_steps=1)
    end_s, step = time.monotonic() + GUARD_S, 0
    while not checkpoints._session.events():
        assert time.monotonic() < end_s
        step += 1
        model(torch.rand(3, 5)).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_S)  # leaves a core to the keeper that is being started
        checkpoints.step(step)
    checkpoints.close(failed=True)


def test_what_is_only_in_memory_is_named(run: Path) -> None:
    rows = call_json("ls", run)
    assert rows
    assert [row["step"] for row in rows] == [row["step"] for row in call_json("ls", run / "checkpoints")]
    for row in rows:
        assert (row["name"], row["status"], row["attempt"], row["problem"]) == ("in memory", "memory", 1, "")
        assert row["size_bytes"] >= 3 * 4 * 30
    assert [row["step"] for row in rows] == sorted((row["step"] for row in rows), reverse=True)
    assert f"in memory  {rows[0]['step']:>5}" in call("ls", run).output


def test_without_it_there_is_nothing(run: Path, tmp_path: Path) -> None:
    end_keeper(address_for(str(run / "checkpoints"), {"XDG_RUNTIME_DIR": str(tmp_path)}))
    with pytest.raises(UserError, match=r"there is no (checkpoint here|such folder)"):
        call("ls", run)


def record(step: int, rank: int, **given: Any) -> Record:
    return Record(
        **{"step": step, "attempt": 1, "set_id": "a", "rank": rank, "shards": 2}
        | {"plan_sha256": str(rank), "data_bytes": 10 + rank, "sums": (), "unix_ns": 10**18}
        | given
    )


def test_snapshots_are_put_together_from_their_shards() -> None:
    records = [record(5, 0), record(5, 1), record(5, 1), record(6, 1), record(4, 0, attempt=2)]
    found = kept(records)
    assert [(k.attempt, k.step, k.shards, k.of, k.size_bytes, k.is_whole) for k in found] == [
        (2, 4, 1, 2, 10, False),
        (1, 6, 1, 2, 11, False),
        (1, 5, 2, 2, 21, True),
    ]
    assert found[0].taken.timestamp() == 1e9


@pytest.mark.parametrize("bad", [{"sick": ("weight",)}, {"changed": False}])
def test_what_is_stale_or_sick_is_nothing_to_go_on_from(bad: dict[str, Any]) -> None:
    [snapshot] = kept([record(5, 0, **bad), record(5, 1)])
    assert (snapshot.shards, snapshot.is_whole) == (2, False)
