"""Who is updated by what, and what is said about patterns that fit nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.optim.build import build_optimizer
from phalanx.optim.config import OptimConfig
from phalanx.optim.groups import Settings, assign

from .helpers import SHAPES, parameters

DIMENSIONS = {name: len(shape) for name, shape in SHAPES.items()}


def config(**settings: Any) -> OptimConfig:
    return validate(OptimConfig, settings)


def test_vectors_and_embeddings_are_not_decayed_unless_asked() -> None:
    decays = {n: s.weight_decay for n, s in assign(config(weight_decay=0.3), DIMENSIONS).items()}
    free = {"embedding", "norm", "layers.0.attention.norm"}
    assert decays == {n: 0.0 if n in free else 0.3 for n in SHAPES}
    all_decayed = assign(config(weight_decay=0.3, decay_vectors=True, decay_embeddings=True), DIMENSIONS)
    assert {s.weight_decay for s in all_decayed.values()} == {0.3}


def test_muon_takes_the_matrices_of_the_blocks_only() -> None:
    settings = assign(config(name="muon", lr=0.02, muon={"adamw_lr": 0.003}), DIMENSIONS)
    muon = {n for n, s in settings.items() if s.kind == "muon"}
    assert muon == {"layers.0.attention.q", "layers.0.mlp.up", "layers.0.mlp.down"}
    assert {s.lr for n, s in settings.items() if n in muon} == {0.02}
    assert {(s.kind, s.lr) for n, s in settings.items() if n not in muon} == {("adamw", 0.003)}


def test_muons_rate_is_adamws_too_unless_given() -> None:
    assert {s.lr for s in assign(config(name="muon", lr=0.007), DIMENSIONS).values()} == {0.007}


def test_later_groups_win_and_override_only_what_they_give() -> None:
    groups = [
        {"pattern": "layers.*", "lr_scale": 0.5},
        {"pattern": "re:.*mlp\\.(up|down)", "optimizer": "came", "weight_decay": 0.7},
        {"pattern": "*.norm", "lr": 0.25, "weight_decay": 0.01},
    ]
    settings = assign(config(name="adamw", lr=0.1, groups=groups), DIMENSIONS)
    assert settings["layers.0.attention.q"] == Settings("adamw", 0.05, 0.1)
    assert settings["layers.0.mlp.up"] == Settings("came", 5e-4, 0.7)
    assert settings["layers.0.attention.norm"] == Settings("adamw", 0.25, 0.01)
    assert settings["norm"] == Settings("adamw", 0.1, 0.0)


def test_a_pattern_that_fits_nothing_names_near_ones() -> None:
    with pytest.raises(UserError, match=r"optim.groups.1.pattern = 'layer.0.mlp.up'.*layers.0.mlp.up"):
        assign(config(groups=[{"pattern": "*"}, {"pattern": "layer.0.mlp.up"}]), DIMENSIONS)


def test_muon_is_not_given_vectors() -> None:
    with pytest.raises(UserError, match="is no matrix"):
        assign(config(groups=[{"pattern": "*norm", "optimizer": "muon"}]), DIMENSIONS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": [{"pattern": "*", "lr": 0.1, "lr_scale": 2.0}]}, "lr = 0.1 and lr_scale = 2.0"),
        ({"groups": [{"pattern": "re:("}]}, "no regular expression"),
        ({"groups": [{"pattern": ""}]}, "is empty"),
        ({"betas": [0.9, 1.0]}, "not all in"),
        ({"name": "adam"}, "adamw"),
        ({"bad_step": {"history": 8, "min_history": 9}}, "min_history = 9 is more than history = 8"),
        ({"batch_warmup": {"start": 4}}, "start = 4 and increment = 0"),
        ({"batch_warmup": {"start": 4, "increment": 4}}, "set exactly one"),
        ({"schedule": {"kind": "wsd", "decay_fraction": 1.0}}, "decay_fraction = 1.0"),
        ({"leraning_rate": 1}, "no such setting"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**settings)


def test_rates_follow_the_factor_and_are_named() -> None:
    optimizer = build_optimizer(config(lr=0.1, groups=[{"pattern": "head", "lr_scale": 0.5}]), parameters())
    assert optimizer.lrs() == {"adamw@0.1": 0.1, "adamw@0.05": 0.05}
    assert optimizer.set_lr(0.5) == 0.05
    assert optimizer.lrs() == {"adamw@0.1": 0.05, "adamw@0.05": 0.025}
    muon = build_optimizer(config(name="muon", lr=0.1, muon={"adamw_lr": 0.01}), parameters())
    assert muon.lrs() == {"muon": 0.1, "adamw": 0.01}


def test_a_rate_of_zero_moves_nothing() -> None:
    named = parameters()
    before = {n: p.detach().clone() for n, p in named.items()}
    optimizer = build_optimizer(config(name="lamb", groups=[{"pattern": "*", "lr_scale": 0.0}]), named)
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(before[n], p) for n, p in named.items())


def test_nothing_to_train_is_refused_and_frozen_parameters_are_left_out() -> None:
    frozen = {n: torch.nn.Parameter(p.detach(), requires_grad=n == "norm") for n, p in parameters().items()}
    assert {n.split(".")[0] for n in build_optimizer(config(), frozen).state_tensors()} == {"norm"}
    with pytest.raises(UserError, match="no parameter to train"):
        build_optimizer(config(), {"norm": torch.nn.Parameter(torch.zeros(2), requires_grad=False)})
