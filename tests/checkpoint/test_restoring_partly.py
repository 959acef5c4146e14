"""Restoring part of a state, or into other names, shapes and dtypes: all fits or nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from restoring_helpers import FakeKeeper, Host, save_durable, some_tensors, take
from thread_ranks import ThreadPeers, run_ranks
from torch import Tensor

from phalanx.checkpoint.restoring.compatibility import Differences
from phalanx.checkpoint.restoring.restore import Opened, Restored, restore
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.core.errors import UserError
from phalanx.core.layout import Layout


@pytest.fixture(params=["memory", "durable"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    host = Host("a")
    if request.param == "memory":
        take(some_tensors(seed=1), Layout(), 1, [host])
        return {"keeper": FakeKeeper(host), "store": None, "report": pytest.fail}
    save_durable(tmp_path, some_tensors(seed=1), Layout(), 1)
    return {"keeper": None, "store": LocalStore(tmp_path), "report": pytest.fail}


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}


def take_back(targets: dict[str, Tensor], source: dict[str, Any], **options: Any) -> Restored:
    restored = restore(targets, **source, **options)
    assert restored is not None
    return restored


def test_weights_only(source: dict[str, Any]) -> None:
    targets, saved = zeros(), some_tensors(seed=1)
    restored = take_back(targets, source, select=lambda name: name.startswith("model."))
    assert restored.differences == Differences()
    for name, tensor in targets.items():
        assert torch.equal(tensor, saved[name] if name.startswith("model.") else torch.zeros_like(tensor))
    everything = take_back(zeros(), source)
    assert sum(restored.bytes_by_kind.values()) < sum(everything.bytes_by_kind.values())


def test_what_is_on_one_side_only(source: dict[str, Any]) -> None:
    targets = zeros() | {"model.new": torch.ones(2), "model.newer": torch.ones(3)}
    del targets["optim.step"], targets["model.norm"]
    with pytest.raises(UserError, match=r"2 missing in it: model\.new, model\.newer; 2 only in it: model\.norm, optim"):
        restore(targets, **source)
    assert not any(tensor.any() for name, tensor in targets.items() if "new" not in name)
    differences = take_back(targets, source, strict=False).differences
    assert differences.missing == ("model.new", "model.newer") and torch.equal(targets["model.new"], torch.ones(2))
    assert differences.unexpected == ("model.norm", "optim.step")
    assert differences.lines() == [
        "2 not in the checkpoint, left as they were:",
        "  model.new (1): model.new",
        "  model.newer (1): model.newer",
        "2 only in the checkpoint:",
        "  model.norm (1): model.norm",
        "  optim.step (1): optim.step",
    ]


def test_names_are_grouped_by_how_they_begin() -> None:
    names = [f"layers.{layer}.{part}" for layer in range(20) for part in "abcde"]
    lines = Differences(missing=tuple(names)).lines()
    assert lines[:2] == [
        "100 not in the checkpoint, left as they were:",
        "  layers.0 (5): layers.0.a, layers.0.b, layers.0.c and 2 more",
    ]
    assert len(lines) == 14 and lines[-1] == "  and 8 groups more"


def test_other_shapes_and_dtypes(source: dict[str, Any]) -> None:
    targets = zeros() | {"model.rows": torch.zeros(3, 24)}
    with pytest.raises(UserError, match=r"model\.rows has shape \(3, 24\) here and \(64, 24\) there"):
        restore(targets, **source)
    targets = zeros() | {"model.rows": torch.zeros(64, 24, dtype=torch.float64)}
    with pytest.raises(UserError, match=r"model\.rows has dtype float64 here and float32 there"):
        restore(targets, **source)
    assert not any(tensor.any() for tensor in targets.values())
    take_back(targets, source, cast=True)
    assert torch.equal(targets["model.rows"], some_tensors(seed=1)["model.rows"].double())


def test_if_one_rank_does_not_fit_nothing_is_changed_on_any(source: dict[str, Any]) -> None:
    targets = [zeros(), zeros() | {"model.norm": torch.zeros(36).bfloat16()}]
    keeper, store = source["keeper"], source["store"]

    def body(peers: ThreadPeers) -> Any:
        return restore(targets[peers.rank], keeper=keeper, store=store, report=print, peers=cast(Any, peers))

    for result in run_ranks(2, body):
        assert isinstance(result, UserError) and "rank 1: model.norm has shape (36,) here" in str(result)
    assert not any(tensor.any() for group in targets for tensor in group.values())


def test_a_state_that_is_not_accepted_changes_nothing(source: dict[str, Any]) -> None:
    targets = zeros()

    def accept(opened: Opened) -> None:
        assert opened.state == {"step": 1}
        raise UserError("is of another run", cure="give another folder")

    with pytest.raises(UserError, match="is of another run"):
        restore(targets, **source, accept=accept)
    assert not any(tensor.any() for tensor in targets.values())


def test_targets_in_any_order_of_memory(source: dict[str, Any]) -> None:
    targets = zeros()
    targets["model.rows"] = torch.zeros(24, 64).T
    targets["optim.flat"] = torch.zeros(2000).double()[::2]
    take_back(targets, source)
    for name, tensor in some_tensors(seed=1).items():
        assert torch.equal(targets[name], tensor), name


def test_nothing_to_restore(tmp_path: Path) -> None:
    assert restore(zeros(), keeper=None, store=None, report=pytest.fail) is None
    assert restore(zeros(), keeper=None, store=LocalStore(tmp_path / "none"), report=pytest.fail) is None
    keeper = cast(Any, FakeKeeper(Host("a")))
    assert restore(zeros(), keeper=keeper, store=LocalStore(tmp_path), report=pytest.fail) is None
