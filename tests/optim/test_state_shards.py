"""Parts of optimizer state fit the tensors that the optimizers make, and cover each of them once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from phalanx.core.layout import Shard
from phalanx.optim.build import build_optimizer
from phalanx.optim.config import OptimConfig
from phalanx.optim.groups import state_shard, state_shards

WHOLE = {"layers.0.mlp.up": (12, 8), "norm": (8,)}


def parts(shape: tuple[int, ...], borders: tuple[int, ...]) -> list[Shard]:
    runs = itertools.pairwise(borders)
    return [Shard.whole(shape).rows(start, end - start, ("shard",)) for start, end in runs]


@pytest.mark.parametrize("kind", ["adamw", "lamb", "came", "muon"])
def test_the_tensors_of_a_part_have_the_shapes_of_their_shards_and_cover_the_whole(kind: Any) -> None:
    cuts = {"layers.0.mlp.up": (0, 0, 5, 12), "norm": (0, 3, 8, 8)}  # the first and the last part are empty
    covered: dict[str, torch.Tensor] = {}
    config = OptimConfig(name=kind)
    for rank in range(3):
        shards = {name: parts(shape, cuts[name])[rank] for name, shape in WHOLE.items()}
        parameters = {name: torch.nn.Parameter(torch.zeros(s.sizes)) for name, s in shards.items()}
        state = build_optimizer(config, parameters).state_tensors()
        for name, shard in state_shards(state, shards).items():
            assert tuple(state[name].shape) == shard.sizes, name
            count = covered.setdefault(name, torch.zeros(shard.shape))
            if shard.owner:
                block = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))
                count[block] += 1
    whole = build_optimizer(config, {n: torch.nn.Parameter(torch.zeros(s)) for n, s in WHOLE.items()}).state_tensors()
    assert covered.keys() == whole.keys()
    for name, count in covered.items():
        assert count.shape == whole[name].shape and torch.equal(count, torch.ones_like(count)), name


def test_a_copy_owns_nothing() -> None:
    copy = Shard.whole((4, 2), owner=False)
    assert not any(state_shard(key, copy).owner for key in ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "step"))


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="'slow' is not known"):
        state_shard("slow", Shard.whole((4, 2)))
    with pytest.raises(ValueError, match="no run of rows"):
        state_shard("exp_avg", Shard((4, 2), (0, 1), (4, 1)))
