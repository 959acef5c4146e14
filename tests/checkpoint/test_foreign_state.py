"""State of foreign training loops as names and JSON and back, and what is refused."""

from __future__ import annotations

import json
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.open_checkpoint import newest
from torch import Tensor, nn

from phalanx.checkpoint.foreign import named_state
from phalanx.checkpoint.foreign.checkpointer import Checkpointer, Updates, restore_checkpoint, save_checkpoint
from phalanx.checkpoint.foreign.training_state import TrainingState, generator_tensors, set_generators
from phalanx.core.errors import UserError

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(nested)
def test_plain_trees_come_back_as_they_were(tree: Any) -> None:
    text = json.dumps(named_state.flatten(tree, "x", {}))
    again = named_state.rebuild(json.loads(text), "x", lambda _: torch.empty(0))
    assert again == tree
    assert repr(again) == repr(tree)


def test_tensors_arrays_and_special_dicts() -> None:
    tree = {
        "t": torch.arange(3.0),
        "a": np.arange(4, dtype=np.uint32).reshape(2, 2),
        "s": np.float32(0.1),
        "c": Counter({3: 2}),
        "o": OrderedDict(b=1),
        7: [torch.tensor(5), (True, None)],
        "$": "mine",
        "size": torch.Size([2]),
    }
    tensors: dict[str, Tensor] = {}
    text = json.dumps(named_state.flatten(tree, "x", tensors))
    assert sorted(tensors) == ["x.7.0", "x.a", "x.t"] == sorted(named_state.paths(json.loads(text), "x"))
    again = named_state.rebuild(json.loads(text), "x", tensors.__getitem__)
    assert torch.equal(again["t"], tree["t"])
    assert again["a"].dtype == np.uint32
    assert np.array_equal(again["a"], tree["a"])
    assert (type(again["s"]), again["s"]) == (np.float32, np.float32(0.1))
    assert isinstance(again["c"], Counter)
    assert again[7][1] == (True, None)
    assert (again["$"], again["size"], dict(again["o"])) == ("mine", (2,), {"b": 1})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2, 3}]}, r"extra\.x\.a\.1: is a builtins\.set, which .* without pickling; make it of tensors"),
        ({"a": object()}, r"extra\.x\.a: is a builtins\.object"),
        (np.array(["text"]), r"extra\.x: is a numpy\.ndarray"),
        ({"a": {frozenset(): 1}}, r"extra\.x\.a: has a key that is a frozenset"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"extra\.x\.a\.b: two tensors would have this name"),
        (b"bytes", r"extra\.x: is a builtins\.bytes"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        save_checkpoint(tmp_path, 1, extra={"x": value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "model: is a int, not a torch.nn.modules.module.Module; give a Module"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer: is a Linear, not a torch.optim.optimizer.Optimizer"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])}, "in no model given here; give the model too"),
        ({"extra": {"a": 1}, "every_step": 3}, "every_step: there is no such setting; did you mean every_steps"),
        ({"extra": {"a": 1}, "budget_bytes": "lots"}, "budget_bytes: 'lots' is no size"),
    ],
)
def test_wrong_use_is_refused_with_the_cure(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Checkpointer(tmp_path, **given)


def test_nothing_to_save_is_refused_when_it_is_needed(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    for use in (checkpoints.restore, lambda: checkpoints.step(1), lambda: restore_checkpoint(tmp_path)):
        with pytest.raises(UserError, match="nothing to save was given; give model="):
            use()
    checkpoints.close()


def test_steps_count_up_and_end_with_close(tmp_path: Path) -> None:
    given = {"extra": {"a": 1}, "mode": "blocking", "every_steps": 1}
    with Checkpointer(tmp_path, **given) as checkpoints:
        assert not any(checkpoints.step(step) for step in (1, 3, 3))
        for step, message in ((2, "step = 2: comes after step 3.*; count on from"), (3.0, "step = 3.0: is no whole")):
            with pytest.raises(UserError, match=message):
                checkpoints.step(step)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(UserError, match=r"the Checkpointer is closed.*; make a new one"):
            checkpoints.step(4)
        checkpoints.close()
    with Checkpointer(tmp_path, **given) as checkpoints:
        assert checkpoints.restore() == 3
        with pytest.raises(UserError, match="step = 1: comes after step 3"):
            checkpoints.step(1)
        checkpoints.step(int(np.int64(4)))
    assert restore_checkpoint(tmp_path, extra={"a": 0}) == 4


def squares(parameters: list[nn.Parameter], scale: float) -> Callable[[], Tensor]:
    """A closure with its optimum at zero."""

    def closure() -> Tensor:
        loss = scale * sum(parameter.square().sum() for parameter in parameters)
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        return loss

    return closure


def sgd(rate: float | Tensor = 0.1) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


@pytest.mark.parametrize(
    ("make", "scale", "moves"),
    [
        (sgd(), 1.0, True),
        (sgd(torch.tensor(0.1)), 1.0, True),
        (sgd(0.0), 1.0, False),
        (sgd(), 0.0, False),
        (sgd(1e-12), 1.0, False),  # below the precision of the parameters
        (lambda parameters: torch.optim.AdamW(parameters), 1.0, True),
        (lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.0), 0.0, False),
        (torch.optim.LBFGS, 1.0, True),
        (torch.optim.LBFGS, 0.0, False),
        (lambda parameters: torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe"), 1.0, True),
    ],
)
def test_what_moves_parameters_is_told_from_what_does_not(make: Any, scale: float, moves: bool) -> None:
    called: list[int] = []
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((), (300, 200), (0,), (2, 3, 4))]
    optimizer = make(parameters)
    updates = Updates([optimizer], lambda: called.append(1))
    assert not updates.stepped()
    for _ in range(2):
        optimizer.step(squares(parameters, scale))
        assert updates.stepped() == moves
        assert not updates.stepped()
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(1.0)  # which undoes it
    assert len(called) == 2
    for step in range(20):  # one that moves after many that did not
        optimizer.step(squares(parameters, scale if step == 15 else 0.0))
    assert updates.stepped() == moves
    updates.close()
    optimizer.step(squares(parameters, scale))
    assert not updates.stepped() and len(called) == 22


def test_generators_go_on_where_they_were() -> None:
    def draw() -> list[float]:
        return [
            float(torch.rand(())),
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.standard_normal(),
        ]

    for _ in range(3):  # with and without the second of a pair of normal numbers waiting
        kept = {name: tensor.clone() for name, tensor in generator_tensors().items()}
        expected = draw()
        draw()
        set_generators(kept)
        assert draw() == expected


class Net(nn.Module):
    """Tied weights, a frozen layer, a buffer, dropout."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.body(self.embed(tokens))))
        return self.head(nn.functional.dropout(hidden, 0.2))


OPTIMIZERS = {
    "adamw": lambda net: torch.optim.AdamW(groups(net), lr=1e-2, betas=(0.8, 0.9)),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2),
    "momentum": lambda net: torch.optim.SGD(groups(net), lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda net: torch.optim.Adafactor(groups(net), lr=1e-2),
}


def groups(net: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in net.parameters() if p.requires_grad]
    return [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.3}]


class Loop:
    """A training loop whose losses depend on everything that has to be saved."""

    def __init__(self, folder: Path, optimizer: str, seed: int, *, compiled: bool = False, **settings: Any) -> None:
        self.net = Net(seed)
        self.optimizer = OPTIMIZERS[optimizer](self.net)
        milestones = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5], 0.5)
        self.ema = Net(seed + 1)
        self.seen = torch.zeros(2, dtype=torch.int64)
        extra = {"schedule": milestones, "ema": self.ema, "seen": self.seen, "best": 100.0 + seed}
        model = torch.compile(self.net, backend="eager") if compiled else self.net
        self.schedule = milestones
        self.checkpoints = Checkpointer(folder, model=model, optimizer=self.optimizer, extra=extra, **settings)

    def run(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            tokens = torch.randint(0, 11, (8,))
            loss = nn.functional.cross_entropy(self.net(tokens), tokens.flip(0)) * (1 + random.random())
            self.optimizer.zero_grad()
            loss.backward()
            self.checkpoints.before_update()
            self.optimizer.step()
            self.schedule.step()
            self.seen += 1
            self.checkpoints.extra["best"] = min(self.checkpoints.extra["best"], loss.item() * np.random.rand())
            with torch.no_grad():
                self.ema.body.weight.lerp_(self.net.body.weight, 0.1)
            self.checkpoints.step(step)
            losses += [loss.item(), self.checkpoints.extra["best"], float(self.ema.body.weight.sum())]
        return losses


@pytest.mark.parametrize(("optimizer", "compiled"), [("adamw", True), *((name, False) for name in OPTIMIZERS)])
def test_a_resumed_loop_is_the_same_bit_for_bit(tmp_path: Path, optimizer: str, compiled: bool) -> None:
    first = Loop(tmp_path, optimizer, 0, mode="blocking", every_steps=4, compiled=compiled)
    assert first.checkpoints.restore() == 0
    expected = first.run(1, 8)
    first.checkpoints.close(failed=True)
    for name in ("step-00000008",):
        (tmp_path / name / "manifest.json").unlink()  # the newest is damaged: the one before is used
    said: list[str] = []
    second = Loop(tmp_path, optimizer, 9, mode="blocking", every_steps=100, report=said.append, compiled=not compiled)
    assert second.checkpoints.restore() == 4
    assert "step-00000008 is damaged" in said[0]
    assert second.run(5, 8) == expected[12:]
    second.checkpoints.close()
    assert second.checkpoints.restore() == 8


@pytest.mark.parametrize("settings", [{"wait": True}, {"mode": "blocking"}], ids=["background", "blocking"])
def test_an_end_leaves_a_last_step_that_is_durable_as_it_is(folder: Path, settings: dict[str, Any]) -> None:
    """It waits for no word of the keeper that was heard before, and knows none of the figures of the step."""
    for last in (2, 4):
        net = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(net.parameters())
        given = {"model": net, "optimizer": optimizer, "every_steps": 2, "final_timeout_s": 30.0, **settings}
        with Checkpointer(folder, **given) as checkpoints:
            for step in range(checkpoints.restore() + 1, last + 1):
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                checkpoints.step(step, metrics={"validation_loss": float(step)})
            before = (folder / f"step-{last:08d}").stat().st_ino
        checkpoint = newest(folder, pytest.fail)
        assert checkpoint is not None and checkpoint.step == last
        assert checkpoint.manifest.metrics == {"validation_loss": float(last)}
        assert checkpoint.path.stat().st_ino == before


def modes(folder: Path) -> dict[str, str]:
    """Of the folder and all that lies in it."""
    return {str(path.relative_to(folder.parent)): f"{path.stat().st_mode & 0o777:o}" for path in folder.rglob("*")} | {
        folder.name: f"{folder.stat().st_mode & 0o777:o}"
    }


@pytest.mark.parametrize("settings", [{"wait": True}, {"mode": "blocking"}], ids=["background", "blocking"])
def test_what_is_durable_follows_the_umask_and_the_keeper_is_private(
    folder_without_keeper: Path, settings: dict[str, Any]
) -> None:
    """The umask of the process that trains, though the keeper was started by one with another."""
    folder, before = folder_without_keeper, os.umask(0o022)
    try:
        for step, umask in enumerate((0o022, 0o002, 0o077), 1):
            os.umask(umask)
            known = set(modes(folder)) if folder.exists() else set()
            given = {"extra": {"position": step}, "every_steps": 1, "report": print, **settings}
            checkpoints = Checkpointer(folder, **given)
            checkpoints.step(step)
            checkpoints.close(failed=True)  # so that the keeper stays
            fresh = {path: mode for path, mode in modes(folder).items() if path not in known}
            assert any(path.endswith("manifest.json") for path in fresh), fresh
            for path, mode in fresh.items():
                whole = 0o777 if (folder.parent / path).is_dir() else 0o666
                assert mode == f"{whole & ~umask:o}", (path, mode)
    finally:
        os.umask(before)
    private = [path for path in folder.parent.iterdir() if path.name.startswith("keeper")]
    assert bool(private) == ("mode" not in settings)
    assert {f"{path.stat().st_mode & 0o777:o}" for path in private} <= {"600"}


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    net = Net(0)
    save_checkpoint(tmp_path, 3, model=net)
    found = newest(tmp_path, print)
    assert found is not None
    assert "model.embed.weight" in found.manifest.tensors
    assert "model.head.weight" not in found.manifest.tensors
    again = Net(1)
    assert restore_checkpoint(tmp_path, model=again) == 3
    assert torch.equal(again.head.weight, net.embed.weight)


def test_fp32_state_of_bf16_parameters_keeps_its_digits(tmp_path: Path) -> None:
    net = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    exact = torch.rand(3, 3)
    optimizer.state[net.weight]["momentum_buffer"] = exact
    save_checkpoint(tmp_path, 1, model=net, optimizer=optimizer)
    other = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    restore_checkpoint(tmp_path, model=net, optimizer=other)
    assert torch.equal(other.state[net.weight]["momentum_buffer"], exact)
    assert other.param_groups[0]["lr"] == 1.0


def test_weights_only_and_what_does_not_fit(tmp_path: Path) -> None:
    net = nn.Linear(3, 4)
    save_checkpoint(tmp_path, 5, model=net, optimizer=torch.optim.SGD(net.parameters()), extra={"a": 1})
    other = nn.Linear(3, 4)
    assert restore_checkpoint(tmp_path, model=other) == 5
    assert torch.equal(other.weight, net.weight)
    with pytest.raises(UserError, match=r"extra\.b: is not in the checkpoint; restore only what is there \(extra\.a"):
        restore_checkpoint(tmp_path, model=other, extra={"b": 1})
    for wrong in (nn.Linear(4, 4), nn.Linear(3, 4).double()):
        with pytest.raises(
            UserError, match=r"weight has (shape|dtype) .*; build the model and the extras as they were"
        ):
            restore_checkpoint(tmp_path, model=wrong)
    with pytest.raises(UserError, match=r"1 missing in the checkpoint: model\.0\.weight.* only in the checkpoint"):
        restore_checkpoint(tmp_path, model=nn.Sequential(nn.Linear(3, 4, bias=False)))
    said: list[str] = []
    extra = {"a": 0, "b": 7}
    restore_checkpoint(
        tmp_path, model=nn.ModuleDict({"x": nn.Linear(1, 1)}), extra=extra, strict=False, report=said.append
    )
    assert extra == {"a": 1, "b": 7}
    assert said == [
        "1 objects not in the checkpoint, left as they were: extra.b",
        "2 tensors not in the checkpoint, left as they were: model.x.weight, model.x.bias",
    ]


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
        both = torch.optim.SGD([p for m in models.values() for p in m.parameters()], momentum=0.5)
        for parameter in both.param_groups[0]["params"]:
            parameter.grad = torch.rand_like(parameter)
        both.step()
        return {"model": models, "optimizer": {"both": both}}

    one, two = make(), make()
    save_checkpoint(tmp_path, 1, **one)
    restore_checkpoint(tmp_path, **two)
    assert torch.equal(one["model"]["d"].bias, two["model"]["d"].bias)
    state = [things["optimizer"]["both"].state[things["model"]["d"].bias]["momentum_buffer"] for things in (one, two)]
    assert torch.equal(*state)


def test_a_checkpoint_of_something_else_is_no_checkpoint_of_ours(tmp_path: Path) -> None:
    from phalanx.checkpoint.session.blocking_session import save as plain_save

    plain_save(tmp_path, 4, {"w": torch.ones(2)}, {"other": 1})
    with pytest.raises(UserError, match="step 4 was not written by this interface; resume it with what wrote it"):
        restore_checkpoint(tmp_path, extra={"w": torch.ones(2)})


def test_a_parameter_that_is_updated_late_is_saved_from_then_on(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(2, 2)
        return net, torch.optim.Adam(net.parameters())

    net, optimizer = make()
    with Checkpointer(tmp_path, model=net, optimizer=optimizer, mode="blocking", every_steps=1) as checkpoints:
        for step, parameter in enumerate((net.weight, net.bias), start=1):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            checkpoints.step(step)
    other, again = make()
    assert restore_checkpoint(tmp_path, model=other, optimizer=again) == 2
    assert [int(again.state[p]["step"]) for p in (other.weight, other.bias)] == [2, 1]


def test_extras_that_change_their_shapes_are_followed(tmp_path: Path) -> None:
    extra = {"seen": torch.zeros(2)}
    checkpoints = Checkpointer(tmp_path, extra=extra, mode="blocking", every_steps=1)
    checkpoints.step(1)
    extra["seen"] = torch.zeros(3)
    checkpoints.step(2)
    checkpoints.close()
    assert restore_checkpoint(tmp_path, extra={"seen": torch.ones(3)}) == 2
    with pytest.raises(UserError, match=r"extra\.seen: has shape \(2,\) here and \(3,\) there; build"):
        restore_checkpoint(tmp_path, extra={"seen": torch.ones(2)})


def test_state_that_ranks_have_by_themselves_has_a_fixed_room(tmp_path: Path) -> None:
    """Rank 1's JSON travels as bytes of a length that all snapshots share, until it grows out of it."""
    extra: dict[str, Any] = {"seen": [1]}
    training = TrainingState(None, None, extra, rank=1, world_size=2)
    training.reserve(lambda needed: needed)
    before = training.collect()
    extra["seen"] = list(range(100))
    after = training.collect()
    assert before.table == after.table
    text = after.tensors["rank.1.json"].numpy().tobytes()
    assert json.loads(text)["objects"]["extra.seen"] == extra["seen"]
    extra["seen"] = list(range(10_000))
    assert training.collect().table != before.table  # so that the ranks agree anew
    training.reserve(lambda needed: needed)
    assert json.loads(training.collect().tensors["rank.1.json"].numpy().tobytes())["objects"]["extra.seen"][-1] == 9999


class Holding(nn.Module):
    """With one tensor more, in a part of it."""

    def __init__(self, tensor: Tensor, name: str = "held") -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(2, 2), nn.Module()
        self.part.register_buffer(name, tensor)


EYE = torch.eye(4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Holding(EYE.to_sparse()), r"model\.part\.held: is a sparse tensor \(torch.sparse_coo\).*; keep plain"),
        (lambda: Holding(EYE.to_sparse_csr()), r"model\.part\.held: is a sparse tensor \(torch.sparse_csr\)"),
        (lambda: Holding(quantized()), r"model\.part\.held: is a quantized tensor.*; keep plain tensors"),
        (lambda: Holding(torch.nested.as_nested_tensor([EYE])), r"model\.part\.held: is a nested tensor"),
        (lambda: nn.Linear(2, 2, device="meta"), r"model\.weight: is on the meta device.*; give the model memory"),
        (lambda: Holding(EYE, "a\udc80"), r"model\.part\.a\\udc80: has half a character.*; rename it"),
    ],
    ids=["sparse", "csr", "quantized", "nested", "meta", "surrogate"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_that_cannot_be_kept_is_refused_when_the_checkpointer_is_made(
    tmp_path: Path, model: Callable[[], nn.Module], message: str
) -> None:
    for use in (
        Checkpointer,
        restore_checkpoint,
        lambda *_, model: Checkpointer(tmp_path, mode="blocking").add(model=model),
    ):
        with pytest.raises(UserError, match=message):
            use(tmp_path, model=model())
    with pytest.raises(UserError, match=message.replace("model", "extra.net", 1)):
        Checkpointer(tmp_path, extra={"net": model()})


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def test_expanded_tensors_are_written_through_their_memory(tmp_path: Path) -> None:
    """Of a model, of a module among the extras, and one by itself; with what is not a number."""
    values = torch.tensor([[0.5], [torch.nan], [-2.0]])

    def made(memory: Tensor) -> dict[str, Any]:
        held = [memory.clone().expand(3, 5) for _ in range(3)]
        return {"model": Holding(held[0]), "extra": {"net": Holding(held[1]), "alone": held[2]}}

    def held(made: dict[str, Any]) -> list[Tensor]:
        return [made["model"].part.held, made["extra"]["net"].part.held, made["extra"]["alone"]]

    save_checkpoint(tmp_path, 1, **made(values))
    again = made(torch.zeros(3, 1))
    assert restore_checkpoint(tmp_path, **again) == 1
    for tensor in held(again):
        assert tensor.stride() == (1, 0)
        assert torch.equal(tensor.nan_to_num(7.0), values.expand(3, 5).nan_to_num(7.0))
    save_checkpoint(tmp_path, 2, model=Holding(torch.rand(3, 5)))
    with pytest.raises(UserError, match=r"model\.part\.held: is expanded here.* different values .*contiguous"):
        restore_checkpoint(tmp_path, model=again["model"])


@pytest.mark.parametrize("settings", [{"mode": "blocking"}, {"wait": True}], ids=["files", "memory"])
def test_conjugated_and_negated_views_are_restored(folder: Path, settings: dict[str, Any]) -> None:
    def made(values: Tensor) -> dict[str, Any]:
        return {"model": Holding(values.clone().conj()), "extra": {"net": Holding(values.clone().conj().imag)}}

    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    checkpoints = Checkpointer(folder, every_steps=1, **made(values), **settings)
    checkpoints.step(1)
    checkpoints.close(failed=True)  # so that the keeper stays
    again = made(torch.zeros(2, dtype=torch.complex64))
    assert again["model"].part.held.is_conj() and again["extra"]["net"].part.held.is_neg()
    checkpoints = Checkpointer(folder, **again, **settings)
    assert checkpoints.restore() == 1
    checkpoints.close(failed=True)
    assert again["model"].part.held.tolist() == [1 - 2j, 3 + 4j]
    assert again["extra"]["net"].part.held.tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("model", [nn.ReLU, lambda: nn.Sequential(nn.Dropout(0.5))], ids=["bare", "nested"])
def test_a_model_without_parameters_is_saved_with_the_rest(tmp_path: Path, model: Callable[[], nn.Module]) -> None:
    save_checkpoint(tmp_path, 4, model=model(), extra={"a": 1, "net": model()})
    extra = {"a": 0, "net": model()}
    assert restore_checkpoint(tmp_path, model=model(), extra=extra) == 4
    assert extra["a"] == 1
