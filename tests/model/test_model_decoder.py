from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_builders import VARIANTS, build, tiny, tokens
from model_reference import reference_logits
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.model.decoder import Decoder
from phalanx.model.forward_context import DropoutState
from phalanx.model.logical_parameters import LogicalParameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_reference(variant: str) -> None:
    config = tiny(variant)
    model, ids = build(config), tokens(config)
    expected = reference_logits(model.config, LogicalParameters(model), ids)
    torch.testing.assert_close(model.logits(model(ids)), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_reference(variant: str) -> None:
    config = tiny(variant)
    model, ids = build(config), tokens(config)
    targets, weights = tokens(config, seed=1), torch.rand(ids.shape)
    logical = LogicalParameters(model)
    copies = {name: p.detach().clone().requires_grad_() for name, p in logical.items()}
    logits = reference_logits(model.config, copies, ids)
    lse = logits.logsumexp(-1)
    loss = (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()).sum()
    z = config.z_loss * (lse.square() * weights).sum()
    (loss + z).backward()
    got_loss, got_z = model.loss(model(ids), targets, weights)
    (got_loss + got_z).backward()
    logical.bind_gradients()
    torch.testing.assert_close(got_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_z, z, rtol=1e-5, atol=1e-5)
    for name, copy in copies.items():
        torch.testing.assert_close(
            logical[name].grad, copy.grad, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_later_token_never_changes_an_earlier_output(variant: str) -> None:
    config = tiny(variant)
    model, ids = build(config), tokens(config)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab_size
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


@settings(max_examples=15, deadline=None)
@given(window=st.integers(1, 6), length=st.integers(1, 24), changed=st.integers(0, 23))
def test_a_window_layer_sees_exactly_its_window(window: int, length: int, changed: int) -> None:
    config = tiny("windows", attention=("window",), window=window, layers=1)
    model, ids = build(config), tokens(config, batch=1, length=length)
    changed %= length
    other = ids.clone()
    other[0, changed] = (other[0, changed] + 1) % config.vocab_size
    moved = (model(ids) - model(other)).abs().amax(-1)[0] > 1e-6
    expected = torch.tensor([0 <= i - changed < window for i in range(length)])
    assert torch.equal(moved, expected)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "windows", "merged"])
def test_documents_do_not_see_each_other(variant: str) -> None:
    config = tiny(variant)
    model, ids = build(config), tokens(config, batch=1)
    documents = torch.tensor([[3] * 7 + [8] * 9], dtype=torch.int32)
    got = model(ids, documents_BS=documents)
    positions = torch.arange(7, 16)[None]
    alone = model(ids[:, 7:], positions_BS=positions)
    torch.testing.assert_close(got[:, 7:], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[:, :7], model(ids[:, :7]), rtol=1e-4, atol=1e-5)
    expected = reference_logits(model.config, LogicalParameters(model), ids, documents)
    torch.testing.assert_close(model.logits(got), expected, rtol=2e-5, atol=2e-5)


def test_explicit_positions_are_the_default_ones() -> None:
    for variant in ("llama", "gpt2"):
        config = tiny(variant)
        model, ids = build(config), tokens(config)
        positions = torch.arange(16).expand(2, 16)
        torch.testing.assert_close(model(ids), model(ids, positions_BS=positions), rtol=0, atol=0)


def test_merging_changes_storage_and_nothing_else() -> None:
    ids = tokens(tiny("merged"))
    hidden = []
    for merged in (True, False):
        model = build(tiny("merged", merged_projections=merged))
        hidden.append(model(ids))
    torch.testing.assert_close(*hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("residual", ["float32", "compute"])
def test_bf16_is_close_to_fp32(variant: str, residual: str) -> None:
    config = tiny(variant, residual=residual)
    ids = tokens(config)
    exact, low = build(config), build(config, compute_dtype=torch.bfloat16)
    hidden = low(ids)
    assert hidden.dtype == torch.bfloat16
    expected, got = exact.logits(exact(ids)), low.logits(hidden)
    assert got.dtype == torch.float32
    got, expected = got[..., : config.vocab_size], expected[..., : config.vocab_size]
    assert (got - expected).norm() < 0.06 * expected.norm()
    loss, expected_loss = sum(low.loss(hidden, ids)), sum(exact.loss(exact(ids), ids))
    assert abs(loss - expected_loss) < 0.05 * expected_loss
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in low.parameters())


@pytest.mark.parametrize("variant", ["llama", "merged", "parallel"])
def test_dropout_is_a_function_of_its_state(variant: str) -> None:
    config = tiny(variant, dropout=0.3)
    model, ids = build(config), tokens(config, batch=3)
    index = torch.tensor([5, 6, 7])
    first = model(ids, dropout=DropoutState(1, 2, index))
    assert torch.equal(first, model(ids, dropout=DropoutState(1, 2, index)))
    assert not torch.equal(first, model(ids))
    for other in (DropoutState(2, 2, index), DropoutState(1, 3, index), DropoutState(1, 2, index + 1)):
        assert not torch.equal(first, model(ids, dropout=other))
    alone = model(ids[1:2], dropout=DropoutState(1, 2, index[1:2]))
    torch.testing.assert_close(first[1:2], alone, rtol=1e-5, atol=1e-5)


def test_attention_dropout_replays_under_the_math_back_end() -> None:
    config = tiny("llama", attention_dropout=0.5, attention_backend="math")
    model, ids = build(config), tokens(config)
    index = torch.tensor([0, 1])
    first = model(ids, dropout=DropoutState(1, 2, index))
    assert torch.equal(first, model(ids, dropout=DropoutState(1, 2, index)))
    assert not torch.equal(first, model(ids, dropout=DropoutState(1, 3, index)))


def test_too_long_a_sequence_is_refused() -> None:
    for variant in ("llama", "gpt2"):
        config = tiny(variant)
        with pytest.raises(UserError, match=r"model\.max_sequence = 24"):
            build(config)(tokens(config, length=25))


def test_a_meta_model_allocates_nothing() -> None:
    model = Decoder(tiny(hidden=4096, heads=32, layers=80, mlp_hidden=50000, vocab_size=200_000), device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) > 5e10


@pytest.mark.parametrize("variant", ["llama", "gpt2", "merged_biased", "capped"])
def test_held_casts_change_no_bit_and_follow_the_weights(variant: str) -> None:
    """Also after an update, once the model is told of it; memory of what is made from them is the same."""
    config = tiny(variant)
    ids = tokens(config)

    def gradients(model: Decoder) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        sum(model.loss(model(ids), ids)).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain, held = (build(config, compute_dtype=torch.bfloat16) for _ in range(2))
    held.hold_casts()
    assert list(held.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        for mine, theirs in zip(gradients(held), gradients(plain), strict=True):
            assert mine.dtype == torch.float32 and torch.equal(mine, theirs)
        with torch.no_grad():
            for parameter in (*plain.parameters(), *held.parameters()):
                parameter.mul_(1.5)
        held.weights_changed()
