"""Activations on the host between the passes: the same gradients, and what is where when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from model_builders import VARIANTS, build, tiny, tokens
from torch import Tensor

from phalanx.model.decoder import Decoder
from phalanx.model.forward_context import DropoutState
from phalanx.model.offload import Lanes, Offload
from phalanx.model.recompute import Recompute

MODES: tuple[Recompute, ...] = ("none", "selective", "mlp", "full")


def gradients(model: Decoder, ids: Tensor, dropout: DropoutState | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    sum(model.loss(model(ids, dropout=dropout), ids)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits(variant: str, mode: Recompute, dtype: torch.dtype) -> None:
    config = tiny(variant, dropout=0.2)
    model, ids = build(config, compute_dtype=dtype), tokens(config)
    dropout = DropoutState(3, 4, torch.tensor([0, 1]))
    model.set_recompute(mode)
    expected = gradients(model, ids, dropout)
    for share in (0.5, 1.0):
        model.offload = Offload(share, Lanes(), least_bytes=64)
        for _ in range(2):  # the second time in memory that was used before
            got = gradients(model, ids, dropout)
            assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert model.offload.host_bytes


class Recorded(Lanes):
    """Streams as a list of what was asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._stream, self._events = "compute", 0

    @contextmanager
    def _in(self, stream: str) -> Iterator[None]:
        self._stream = stream
        yield
        self._stream = "compute"

    def out(self) -> Any:
        return self._in("out")

    def back(self) -> Any:
        return self._in("back")

    def record(self) -> Any:
        self._events += 1
        self.log.append(f"{self._stream} {self._events}")
        return self._events

    def wait(self, event: Any) -> None:
        self.log.append(f"{self._stream} waits {event}")

    def compute_waits(self, event: Any) -> None:
        self.log.append(f"compute waits {event}")


def test_copies_are_made_once_and_waited_for_before_memory_is_used_again() -> None:
    """Full recompute keeps one tensor a layer, so there is one copy out and one back for each."""
    config = tiny("llama", layers=4)
    model, ids = build(config), tokens(config)
    lanes = Recorded()
    model.set_recompute("full")
    model.offload = Offload(0.75, lanes, least_bytes=64)
    gradients(model, ids)
    assert lanes.log == [
        "out 1", "out 2", "compute waits 1", "out 3", "compute waits 2",  # a layer's memory goes two layers later
        "compute waits 3",  # the forward pass is over
        "back waits 3", "back 4", "back waits 2", "back 5", "compute waits 4",  # the last one, and the one before it
        "back waits 1", "back 6", "compute waits 5", "compute waits 6",
    ]  # fmt: skip
    held = model.offload.host_bytes
    lanes.log.clear()
    gradients(model, ids)
    assert model.offload.host_bytes == held == 3 * ids.numel() * config.hidden * 4
    assert lanes.log[:2] == ["out waits 4", "out 7"]  # a copy into memory waits for the last one out of it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama", "gpt2", "merged"])
def test_weights_and_their_casts_stay(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where activations have the shapes of weights, too."""
    config = tiny(variant, mlp_hidden=32)
    model, ids = build(config, compute_dtype=dtype), tokens(config, batch=2, length=16)  # 32 tokens, 32 wide
    gone: list[Tensor] = []
    take = Offload.take

    def noted(self: Offload, num_bytes: int) -> Any:
        host, event = take(self, num_bytes)
        gone.append(host)
        return host, event

    monkeypatch.setattr(Offload, "take", noted)
    model.offload = Offload(1.0, Lanes(), least_bytes=64)
    hidden = model(ids)
    weights = [p.detach().to(kind) for p in model.parameters() for kind in (dtype, torch.float32)]
    sizes = {w.numel() * w.element_size(): w for w in weights if w.dim() == 2}
    assert gone
    for host in gone:
        weight = sizes.get(host.numel())
        if weight is not None:
            candidates = [w for w in weights if w.numel() * w.element_size() == host.numel()]
            assert not any(torch.equal(host, w.contiguous().view(-1).view(torch.uint8)) for w in candidates)
    hidden.sum().backward()


def test_a_graph_without_a_backward_pass_gives_its_memory_back() -> None:
    config = tiny("llama")
    model, ids = build(config), tokens(config)
    model.offload = Offload(1.0, Lanes(), least_bytes=64)
    for _ in range(3):
        model(ids)
    held = model.offload.host_bytes
    model(ids)
    assert model.offload.host_bytes == held


def test_small_tensors_stay() -> None:
    config = tiny("llama")
    model, ids = build(config), tokens(config)
    model.offload = Offload(1.0, Lanes())
    gradients(model, ids)
    assert model.offload.host_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_leave_what_they_save(mode: Recompute) -> None:
    config = tiny("llama", layers=2)
    model, ids = build(config), tokens(config)
    expected = gradients(model, ids)
    torch.compiler.reset()
    model.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    model.set_recompute(mode)
    model.offload = offload = Offload(1.0, Lanes(), least_bytes=64)
    got = gradients(model, ids)
    assert offload.host_bytes
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)
