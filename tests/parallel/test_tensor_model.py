"""A decoder spread over a tensor-parallel group computes what the whole one does: loss and every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import model_builders
import pytest
import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor

from phalanx.core.layout import Layout, Shard
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder, DecoderPart
from phalanx.model.forward_context import DropoutState
from phalanx.model.logical_parameters import LogicalParameters, initialise
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.feasible import local_config, tensor_shards
from phalanx.parallel.group import Group
from phalanx.parallel.stage import local_context
from phalanx.parallel.tensor.tensor_parallel import spread_tensor

VARIANTS: dict[str, dict[str, Any]] = model_builders.VARIANTS | {
    "qwen": model_builders.VARIANTS["qwen"] | {"kv_heads": 2},  # a single key/value head cannot be split
    "parallel_biased": {"block": "parallel", "bias": "all", "norm": "layer"},
    "dropping": {"dropout": 0.2, "attention_dropout": 0.1, "attention_backend": "math", "kv_heads": 2},
    "dropping_parallel": {"block": "parallel", "dropout": 0.2},
}


def tiny(variant: str = "llama", **changes: Any) -> ModelConfig:
    base = {"vocab_size": 61, "vocab_multiple": 8, "layers": 2, "hidden": 32, "heads": 4, "max_sequence": 24}
    return ModelConfig(**{**base, **VARIANTS[variant], **changes})


def whole_model(config: ModelConfig, **how: Any) -> Decoder:
    """Weights larger than in training, so that every part matters; biases and norms too."""
    model = Decoder(config.model_copy(update={"init_std": 0.2}), **how)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@dataclass(frozen=True)
class Batch:
    tokens_BS: Tensor
    targets_BS: Tensor
    weights_BS: Tensor
    documents_BS: Tensor
    dropout: DropoutState | None

    @staticmethod
    def make(config: ModelConfig, batch: int = 2, length: int = 16) -> Batch:
        generator = torch.Generator().manual_seed(1)
        tokens, targets = torch.randint(config.vocab_size, (2, batch, length), generator=generator)
        documents = torch.arange(length).ge(length // 3).long().expand(batch, -1)
        dropping = config.dropout or config.attention_dropout
        dropout = DropoutState(7, 3, torch.arange(5, 5 + batch)) if dropping else None
        return Batch(tokens, targets, torch.rand(batch, length, generator=generator), documents, dropout)


def run_whole(model: Decoder, batch: Batch) -> tuple[list[float], dict[str, Tensor]]:
    hidden = model(batch.tokens_BS, documents_BS=batch.documents_BS, dropout=batch.dropout)
    sums = model.loss(hidden, batch.targets_BS, batch.weights_BS)
    sum(sums).backward()  # type: ignore[union-attr]
    return [s.item() for s in sums], gradients(model)


def gradients(part: DecoderPart) -> dict[str, Tensor]:
    logical = LogicalParameters(part)
    logical.bind_gradients()
    return {name: p.grad.clone() for name, p in logical.items() if p.grad is not None}


def cut(tensor: Tensor, shard: Shard) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))]


def local_part(model: Decoder, config: ModelConfig, group: Group, **how: Any) -> DecoderPart:
    """This rank's part of the whole model, spread."""
    compute = how.pop("compute_dtype", None)
    part = DecoderPart(local_config(config, group.size), compute_dtype=compute)
    shards = tensor_shards(config, group.size, group.index)
    weights = {name: cut(p.detach(), shards[name]) for name, p in LogicalParameters(model).items()}
    LogicalParameters(part).load(weights)
    spread_tensor(part, group, config, **how)
    return part


def run_part(part: DecoderPart, group: Group, batch: Batch) -> list[Tensor]:
    """Loss and z-loss sums, after one forward pass."""
    context = part.context(batch.tokens_BS, documents_BS=batch.documents_BS, dropout=batch.dropout)
    context = local_context(context, group)
    x = part.blocks(part.embed(batch.tokens_BS, context), context)
    assert part.norm is not None and x.shape[0] == batch.tokens_BS.numel() // group.size
    return list(part.sums(part.norm(x), batch.targets_BS.flatten(), batch.weights_BS.flatten()))


def assembled(config: ModelConfig, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients of the logical parameters from those of all ranks: split ones put together, the others added."""
    out = {}
    for name, shard in tensor_shards(config, len(ranks), 0).items():
        held = [rank[name] for rank in ranks]
        out[name] = torch.cat(held) if shard.axes else torch.stack(held).sum(0)
    return out


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative to each tensor's norm; of a key's bias, which the softmax hardly sees, to that of the query's bias."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name] - value).norm() / expected[name.replace("k_bias", "q_bias")].norm()
        assert error < tolerance, f"{name}: {error:.1e}"


def check(config: ModelConfig, size: int, tolerance: float = 1e-5, recompute: str = "none", **how: Any) -> None:
    whole = whole_model(config, compute_dtype=how.get("compute_dtype"))
    batch = Batch.make(config)

    def body(groups: ThreadGroups) -> tuple[list[float], dict[str, Tensor]]:
        group = groups.group("tensor")
        part = local_part(whole, config, group, **how)
        part.set_recompute(recompute)
        sums = run_part(part, group, batch)
        (sums[0] + sums[1]).backward()
        return [s.item() for s in sums], gradients(part)

    ranks = run_ranks(Layout(tensor=size), body)
    losses, expected = run_whole(whole, batch)
    assert all(rank[0] == ranks[0][0] for rank in ranks)
    assert ranks[0][0] == pytest.approx(losses, rel=tolerance)
    assert_close(assembled(config, [rank[1] for rank in ranks]), expected, tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_have_the_loss_and_gradients_of_one(variant: str) -> None:
    check(tiny(variant), 2)


@pytest.mark.parametrize(
    "variant", ["gpt2", "parallel_biased", "merged_biased", "capped", "dropping", "dropping_parallel"]
)
def test_four_ranks_have_the_loss_and_gradients_of_one(variant: str) -> None:
    check(tiny(variant, kv_heads=4, vocab_multiple=64), 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_in_a_pipeline_have_the_same_loss_and_gradients(variant: str) -> None:
    check(tiny(variant), 2, overlap="chunked", chunks=3)


@pytest.mark.parametrize("variant", ["gpt2", "parallel_biased", "merged"])
def test_chunks_of_four_ranks_too(variant: str) -> None:
    check(tiny(variant, kv_heads=4, vocab_multiple=64), 4, overlap="chunked", chunks=16)


@pytest.mark.parametrize("recompute", ["selective", "mlp", "full"])
@pytest.mark.parametrize("variant", ["llama", "parallel_biased", "merged", "dropping"])
def test_recomputed_blocks_communicate_in_step(variant: str, recompute: str) -> None:
    check(tiny(variant), 2, recompute=recompute)
    check(tiny(variant), 2, recompute=recompute, overlap="chunked", chunks=2)


def test_half_precision_is_close() -> None:
    check(tiny("llama"), 2, tolerance=3e-2, compute_dtype=torch.bfloat16)
    check(tiny("parallel"), 2, tolerance=3e-2, compute_dtype=torch.bfloat16, overlap="chunked", chunks=2)


def test_a_rank_may_hold_nothing_but_padding() -> None:
    check(tiny("capped", vocab_size=20, vocab_multiple=64, kv_heads=4), 4)


@pytest.mark.parametrize("variant", ["llama", "parallel", "merged_biased"])
@pytest.mark.parametrize(("size", "overlap"), [(1, "none"), (2, "none"), (2, "chunked")])
def test_weight_gradients_can_be_put_off(variant: str, size: int, overlap: str) -> None:
    config = tiny(variant)
    whole, batch = whole_model(config), Batch.make(config)

    def body(groups: ThreadGroups) -> dict[str, Tensor]:
        group = groups.group("tensor")
        queue = WeightQueue()
        part = local_part(whole, config, group, queue=queue, overlap=overlap)
        loss = run_part(part, group, batch)[0]
        queue.begin(3)
        loss.backward()
        queue.end()
        put_off = {name for name, p in part.named_parameters() if p.grad is None}
        assert put_off == {n for n, p in part.named_parameters() if n.startswith("layers") and p.dim() == 2}
        calls = dict(group.traffic.calls)
        queue.run(3)
        assert queue.waiting == 0 and group.traffic.calls == calls
        return gradients(part)

    ranks = run_ranks(Layout(tensor=size), body)
    assert_close(assembled(config, ranks), run_whole(whole, batch)[1], 1e-5)


def test_logits_are_whole_on_every_rank() -> None:
    config = tiny("capped")
    whole = whole_model(config)
    hidden = torch.randn(8, config.hidden, generator=torch.Generator().manual_seed(2))

    def body(groups: ThreadGroups) -> Tensor:
        group = groups.group("tensor")
        part = local_part(whole, config, group)
        assert part.head is not None
        with torch.no_grad():
            return part.head.logits(hidden.view(2, 4, -1)[group.index])

    for logits in run_ranks(Layout(tensor=2), body):
        torch.testing.assert_close(logits, whole.logits(hidden))


def test_positions_may_be_given() -> None:
    config = tiny("gpt2")
    whole, batch = whole_model(config), Batch.make(config)
    positions = torch.arange(16).flip(0).expand(2, -1)

    def body(groups: ThreadGroups) -> Tensor:
        group = groups.group("tensor")
        part = local_part(whole, config, group)
        context = local_context(part.context(batch.tokens_BS, positions_BS=positions), group)
        return part.embed(batch.tokens_BS, context, positions_BS=positions)

    rows = torch.cat(run_ranks(Layout(tensor=2), body))
    expected = whole.embed(batch.tokens_BS, whole.context(batch.tokens_BS), positions_BS=positions)
    torch.testing.assert_close(rows, expected)
