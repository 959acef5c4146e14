"""Optimizers of a rank that holds a part of the model: rows of some matrices, none of others, other names elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.optim.build import build_optimizer
from phalanx.optim.config import OptimConfig

from .helpers import SHAPES, give_gradients, parameters

HERE = ("layers.0.attention.q", "layers.0.mlp.up", "norm")


def config(**settings: Any) -> OptimConfig:
    return OptimConfig.model_validate({"lr": 0.01} | settings)


def stage() -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in parameters().items() if name in HERE}


def complete(sums: list[Tensor], _parameters: Sequence[Tensor], _dim: int | None) -> list[Tensor]:
    """A reduction over ranks of which no other holds anything: not the local one, which would pack nothing."""
    return list(sums)


@pytest.mark.parametrize("kind", ["adamw", "lamb", "came"])
def test_a_rank_without_rows_steps_with_the_others(kind: Any) -> None:
    whole = stage()
    empty = {"embedding": torch.nn.Parameter(torch.empty(0, 8)), "head": torch.nn.Parameter(torch.empty(0, 8))}
    alone = {name: torch.nn.Parameter(p.detach().clone()) for name, p in whole.items()}
    for named in (whole | empty, alone):
        optimizer = build_optimizer(config(name=kind), named, reduction=complete)
        for step in range(2):
            give_gradients(alone if named is alone else whole, step)
            for p in empty.values():
                p.grad = torch.empty_like(p)
            optimizer.step()
    for name, p in alone.items():
        assert torch.equal(p, whole[name])
    assert all(torch.isfinite(p).all() for p in whole.values())


def test_the_norm_of_other_ranks_clips_here() -> None:
    seen: list[list[Tensor]] = []

    def norm(held: Iterable[Tensor]) -> Tensor:
        seen.append(list(held))
        return torch.tensor(8.0)

    named = stage()
    optimizer = build_optimizer(config(clip_norm=2.0), named, gradient_norm=norm)
    give_gradients(named, 0)
    total, scale = optimizer.clip()
    assert float(total) == 8.0 and scale is not None and float(scale) == pytest.approx(4.0, rel=1e-6)
    assert [id(p) for p in seen[0]] == [id(p) for p in named.values()]


def test_lambs_own_clipping_takes_the_norm_of_all_ranks() -> None:
    """Gradients of a quarter of the size, and no clipping, make the same step."""
    named, quarter = stage(), stage()
    settings = {"name": "lamb", "lamb": {"max_grad_norm": 2.0, "bias_correction": False}, "eps": 1e-6}
    clipping = build_optimizer(config(**settings), named, gradient_norm=lambda _: torch.tensor(8.0))
    plain = build_optimizer(config(**settings | {"lamb": {"bias_correction": False}}), quarter)
    give_gradients(named, 0)
    give_gradients(quarter, 0, scale=0.25)
    clipping.step()
    plain.step()
    for name, p in quarter.items():
        torch.testing.assert_close(named[name], p)


def test_groups_may_be_of_parameters_that_are_elsewhere() -> None:
    groups = {"groups": [{"pattern": "head", "lr": 0.5}, {"pattern": "norm", "lr": 0.25}]}
    with pytest.raises(UserError, match="fits no parameter"):
        build_optimizer(config(**groups), stage())
    optimizer = build_optimizer(config(**groups), stage(), whole_shapes=SHAPES)
    assert set(optimizer.lrs().values()) == {0.01, 0.25}


def test_muon_is_refused_where_matrices_are_split() -> None:
    named = stage()
    build_optimizer(config(name="muon"), named, whole_shapes=SHAPES)
    named["layers.0.mlp.up"] = torch.nn.Parameter(torch.zeros(5, 8))
    with pytest.raises(UserError, match=r"optim\.name = 'muon': works on whole matrices.*layers\.0\.mlp\.up.*parallel"):
        build_optimizer(config(name="muon"), named, whole_shapes=SHAPES)
