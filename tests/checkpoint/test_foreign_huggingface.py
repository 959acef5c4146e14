"""`transformers.Trainer` killed and resumed with our callback trains on as if nothing had happened."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_forks import Forks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from phalanx.checkpoint import save_checkpoint

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def trained(forks: Forks, folder: Path, kind: str, kill_at: int = 0) -> Any:
    arguments = [str(folder), kill_at, kind, "mode=blocking", "every_steps=4"]
    [(status, told)] = forks.run("foreign_trainer:train", arguments, [{}])
    assert status == (-9 if kill_at > 0 else 0), told
    return told


@pytest.fixture(scope="module")
def through(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What nobody disturbs."""

    @cache
    def undisturbed(kind: str) -> Any:
        return trained(forks, tmp_path_factory.mktemp("through"), kind)

    return undisturbed


@pytest.mark.campaign(but=("mid-epoch",))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kill_at", "start"),
    [("gpt2", 9, 8), ("gpt2", 15, 12), ("plain", 9, 8), ("plain", -11, 8)],
    ids=["mid-epoch", "epoch border", "plain module", "an error, and again in the same process"],
)
def test_killed_and_resumed_losses_are_the_same(
    forks: Forks, tmp_path: Path, through: Callable[[str], Any], kind: str, kill_at: int, start: int
) -> None:
    # An epoch is 22 samples, which are 6 steps of 4: step 8 is in the middle of one, step 12 at an end.
    resumed = trained(forks, tmp_path, kind, kill_at)
    if kill_at > 0:
        resumed = trained(forks, tmp_path, kind)
    assert resumed["left"] == []
    undisturbed = through(kind)
    assert (undisturbed["start"], resumed["start"]) == (0, start)
    assert len(undisturbed["history"]) == 16
    assert resumed["history"] == undisturbed["history"]
    assert resumed["weights"] == undisturbed["weights"]


@pytest.mark.slow
def test_the_order_of_batches_is_drawn_again_where_no_seed_gives_it(forks: Forks, tmp_path: Path) -> None:
    """In the first and the second epoch, and at a border at which the Trainer evaluates."""
    [(status, told)] = forks.run("foreign_trainer:unseeded", [str(tmp_path)], [{}])
    assert status == 0, told
    undisturbed, *resumed = told
    assert len(undisturbed) == 16 and len(resumed) == 4
    for losses in resumed:
        assert losses == undisturbed


@pytest.mark.parametrize(("epochs", "skipped"), [(1, 0), (2, 0), (0, 5), (1, 5), (2, 7)])
def test_samplers_with_generators_draw_the_order_that_they_drew(epochs: int, skipped: int) -> None:
    from phalanx.checkpoint.foreign.huggingface_callback import BatchOrder

    def loader(seed: int) -> DataLoader[int]:
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(range(10), num_samples=13, generator=generator)
        return DataLoader(range(10), batch_sampler=BatchSampler(sampler, 2, drop_last=False))

    def batches(order: BatchOrder, loader: DataLoader[int]) -> Iterator[list[int]]:
        order.begin(loader)
        yield from (batch.tolist() for batch in loader)

    order, first = BatchOrder(), loader(1)
    for _ in range(epochs):
        list(batches(order, first))
    running = batches(order, first)
    list(islice(running, skipped))  # of 0, the next epoch has not begun
    again, second = BatchOrder(), loader(2)
    again.load_state_dict(order.state_dict())
    rest = list(running)
    again.resume(second, is_whole=not skipped)
    assert list(batches(again, second))[skipped:] == rest


def test_nothing_is_left_of_a_training_that_never_began(tmp_path: Path) -> None:
    from phalanx.checkpoint.foreign.huggingface_callback import PhalanxCheckpointCallback

    save_checkpoint(tmp_path, 3, extra={"trainer_state": {"global_step": 3}})
    callback = PhalanxCheckpointCallback(tmp_path, mode="blocking")
    folders = [Path(callback.resume() or "") for _ in range(2)]
    assert [folder.exists() for folder in folders] == [False, True]
    del callback
    gc.collect()
    assert not folders[1].exists()
