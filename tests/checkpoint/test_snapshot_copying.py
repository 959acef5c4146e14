"""Tensors of every kind in the memory of a slot, at once and beside what goes on."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from checkpoint_helpers import make_tensors
from torch import Tensor

from phalanx.checkpoint.format.shard_plan import ALIGN_BYTES, Piece, Role, ShardPlan
from phalanx.checkpoint.keeper_contract import Slot
from phalanx.checkpoint.snapshot_copy import Copier


def plan_of(tensors: dict[str, Tensor], role: Role = "trained") -> ShardPlan:
    pieces, start = [], 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        zeros = (0,) * len(shape)
        pieces.append(Piece(name, dtype, shape, zeros, shape, role, start, tensor.nbytes))
        start += math.ceil(tensor.nbytes / ALIGN_BYTES) * ALIGN_BYTES
    return ShardPlan(0, 1, tuple(pieces))


def slot_for(plan: ShardPlan, number: int = 0) -> Slot:
    return Slot(number, memoryview(bytearray(plan.data_bytes)))


def content(plan: ShardPlan, slot: Slot) -> dict[str, bytes]:
    return {p.name: bytes(slot.memory[p.start_bytes : p.start_bytes + p.length_bytes]) for p in plan.pieces}


def elements(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def large(count: int = 4, device: str = "cpu") -> dict[str, Tensor]:
    """More than what is too little to be copied later, one of them not contiguous."""
    tensors = {f"model.{i}": torch.randn(300, 400, device=device) for i in range(count)}
    return tensors | {"model.turned": torch.randn(300, 500, device=device).T}


@pytest.mark.parametrize("overlap", [False, True, None])
def test_every_kind_of_tensor(overlap: bool | None) -> None:
    tensors = make_tensors() | large()
    plan = plan_of(tensors)
    slot = slot_for(plan)
    took: list[float] = []
    copying = Copier(plan, tensors, overlap).begin(slot, took.append)
    copying.fence()
    assert copying.finished
    assert took == [copying.seconds]
    assert content(plan, slot) == {name: elements(tensor) for name, tensor in tensors.items()}


def test_sources_may_change_after_the_fence() -> None:
    tensors = large()
    before = {name: elements(tensor) for name, tensor in tensors.items()}
    plan = plan_of(tensors)
    slot = slot_for(plan)
    copier = Copier(plan, tensors, overlap=True)
    for _ in range(5):
        copying = copier.begin(slot, lambda _: None)
        copying.fence()
        assert content(plan, slot) == before
        for tensor in tensors.values():
            tensor.add_(1.0)
        before = {name: elements(tensor) for name, tensor in tensors.items()}


def test_what_may_change_before_the_fence_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = large() | {"rng": torch.arange(5), "model.small": torch.randn(7)}
    plan = plan_of(tensors)
    slot = slot_for(plan)
    go = threading.Event()
    real = threading.Thread.run

    def held_back(thread: threading.Thread) -> None:
        go.wait(60)
        real(thread)

    monkeypatch.setattr(threading.Thread, "run", held_back)
    copying = Copier(plan, tensors, overlap=True).begin(slot, lambda _: None)
    assert not copying.finished
    now = content(plan, slot)
    assert now["rng"] == elements(tensors["rng"]) and now["model.small"] == elements(tensors["model.small"])
    assert not any(now["model.0"])  # only a fence has to be passed for it
    go.set()
    copying.wait()
    assert content(plan, slot) == {name: elements(tensor) for name, tensor in tensors.items()}


def test_little_is_copied_at_once_whatever_is_asked_for() -> None:
    tensors = make_tensors()
    plan = plan_of(tensors)
    assert Copier(plan, tensors, overlap=True).begin(slot_for(plan), lambda _: None).finished


def test_new_tensors_and_new_memory() -> None:
    tensors = make_tensors()
    plan = plan_of(tensors)
    copier = Copier(plan, tensors)
    for seed in (1, 2, 3):
        slot = slot_for(plan, seed % 2)
        copier.begin(slot, lambda _: None, make_tensors(seed)).wait()
        assert content(plan, slot) == {name: elements(tensor) for name, tensor in make_tensors(seed).items()}


def test_memory_is_let_go() -> None:
    memory = bytearray(4096)
    tensors = {"x": torch.ones(8)}
    copier = Copier(plan_of(tensors), tensors)
    copier.begin(Slot(0, memoryview(memory)), lambda _: None).wait()
    copier.close()
    memory.clear()  # BufferError while anything refers to it


def test_other_tensors_than_planned() -> None:
    tensors = make_tensors()
    plan = plan_of(tensors)
    with pytest.raises(ValueError, match=r"rng\.cpu is in the plan"):
        Copier(plan, {name: tensor for name, tensor in tensors.items() if name != "rng.cpu"})
    with pytest.raises(ValueError, match=r"model\.norm is torch\.float32 of shape \(5,\)"):
        Copier(plan, tensors | {"model.norm": torch.ones(5)})


def test_a_failure_is_raised_at_the_fence_and_not_done() -> None:
    tensors = large()
    plan = plan_of(tensors)

    def fail(_: float) -> None:
        raise OSError("gone")

    copying = Copier(plan, tensors, overlap=True).begin(slot_for(plan), fail)
    with pytest.raises(RuntimeError, match="could not be copied"):
        copying.fence()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: copies beside training from it")
def test_on_a_device() -> None:
    tensors = make_tensors() | large(device="cuda") | {"model.norm2": torch.ones(9, device="cuda").bfloat16()}
    plan = plan_of(tensors)
    copier = Copier(plan, tensors)
    for _ in range(4):  # the first ones into memory that is not pinned yet
        slot = slot_for(plan)
        slots = [slot, slot]
        for again in slots:
            before = {name: elements(tensor) for name, tensor in tensors.items()}
            copying = copier.begin(again, lambda _: None)
            tensors["model.norm2"].add_(1)  # small: cloned
            copying.fence()
            for name, tensor in tensors.items():
                if name.startswith("model.") and tensor.is_cuda:
                    tensor.add_(1)
            copying.wait()
            assert content(plan, again) == before
        copier.close()
