import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.kernels.loss import linear_cross_entropy


def inputs(T, D, V, dtype=torch.float32):
    generator = torch.Generator().manual_seed(T * 31 + V)
    x = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, generator=generator) * 0.3).requires_grad_()
    return x, weight, torch.randint(V, (T,), generator=generator), torch.rand(T, generator=generator)


def plain(x, weight, targets, weights, softcap, z_loss):
    logits = F.linear(x, weight)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
    return loss, z_loss * (logits.logsumexp(-1) ** 2 * weights).sum()


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(1, 50),
    V=st.integers(2, 40),
    softcap=st.sampled_from([0.0, 2.0, 30.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    chunk=st.sampled_from([None, 1, 7, 64]),
)
def test_values_and_gradients_equal_plain_torch(T, V, softcap, z_loss, chunk):
    x, weight, targets, weights = inputs(T, 12, V)
    weights[0] = 0.0
    expected = plain(x, weight, targets, weights, softcap, z_loss)
    got = linear_cross_entropy(x, weight, targets, weights, softcap=softcap, z_loss=z_loss, chunk=chunk)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    wanted = torch.autograd.grad(sum(expected) * 0.37, (x, weight))
    for a, b in zip(torch.autograd.grad(sum(got) * 0.37, (x, weight)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(1, 50),
    words=st.integers(1, 40),
    padding=st.integers(1, 30),
    softcap=st.sampled_from([0.0, 2.0, 30.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    chunk=st.sampled_from([None, 1, 7, 64]),
)
def test_padding_rows_have_no_part(T, words, padding, softcap, z_loss, chunk):
    """Loss, z-loss and gradients are those of the weight without the rows of padding, however large those rows are."""
    x, weight, targets, weights = inputs(T, 12, words + padding)
    targets %= words
    with torch.no_grad():
        weight[words:] *= 100.0
    expected = plain(x, weight[:words], targets, weights, softcap, z_loss)
    how = {"softcap": softcap, "z_loss": z_loss, "vocabulary": words, "chunk": chunk}
    got = linear_cross_entropy(x, weight, targets, weights, **how)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    wanted_x, wanted_w = torch.autograd.grad(sum(expected), (x, weight))
    got_x, got_w = torch.autograd.grad(sum(got), (x, weight))
    torch.testing.assert_close(got_x, wanted_x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_w, wanted_w, rtol=1e-4, atol=1e-5)
    assert not got_w[words:].any()


def test_bf16_padding_rows_have_no_part():
    x, weight, targets, weights = inputs(40, 16, 64, torch.bfloat16)
    targets %= 50
    for chunk in (None, 8):
        how = {"softcap": 5.0, "z_loss": 1e-2, "chunk": chunk}
        got = linear_cross_entropy(x, weight, targets, weights, vocabulary=50, **how)
        expected = linear_cross_entropy(x, weight[:50], targets, weights, **how)
        torch.testing.assert_close(got, expected)
        pairs = zip(*(torch.autograd.grad(sum(pair), (x, weight)) for pair in (got, expected)), strict=True)
        for ours, wanted in pairs:
            torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("vocabulary", [0, -1, 12])
def test_more_words_than_rows_are_refused(vocabulary):
    x, weight, targets, _ = inputs(10, 8, 11)
    with pytest.raises(UserError, match=f"vocabulary = {vocabulary}"):
        linear_cross_entropy(x, weight, targets, vocabulary=vocabulary)


def test_weights_default_to_one():
    x, weight, targets, _ = inputs(20, 8, 11)
    loss, z = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(loss, F.cross_entropy(x @ weight.t(), targets, reduction="sum"))
    assert z.item() == 0.0


def test_bf16_accumulates_the_weight_gradient_in_fp32():
    """With many chunks the weight's gradient stays as close to fp64 as one product of the same bf16 inputs."""
    x, weight, targets, weights = inputs(512, 32, 50, torch.bfloat16)
    loss, _ = linear_cross_entropy(x, weight, targets, weights, chunk=4)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert dx.dtype == torch.bfloat16 and dw.dtype == torch.float32 and loss.dtype == torch.float32
    wide = (x.detach().double().requires_grad_(), weight.detach().bfloat16().double().requires_grad_())
    truth = plain(*wide, targets, weights.double(), 0.0, 0.0)[0]
    assert abs(loss.item() / truth.item() - 1) < 2e-3
    want_x, want_w = torch.autograd.grad(truth, wide)
    assert (dx.double() - want_x).norm() / want_x.norm() < 6e-3
    assert (dw.double() - want_w).norm() / want_w.norm() < 6e-3


def test_evaluation_makes_no_gradients():
    x, weight, targets, weights = inputs(30, 8, 11)
    with torch.no_grad():
        loss, _ = linear_cross_entropy(x, weight, targets, weights, chunk=7)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(x, weight, targets, weights, 0.0, 0.0)[0])


@pytest.mark.parametrize("chunk", [None, 7])
def test_only_what_needs_a_gradient_gets_one(chunk):
    x, weight, targets, weights = inputs(30, 8, 11)
    want_x, want_w = torch.autograd.grad(plain(x, weight, targets, weights, 0.0, 0.0)[0], (x, weight))
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight.detach(), targets, weights, chunk=chunk)[0], x)
    (dw,) = torch.autograd.grad(linear_cross_entropy(x.detach(), weight, targets, weights, chunk=chunk)[0], weight)
    torch.testing.assert_close(dx, want_x)
    torch.testing.assert_close(dw, want_w)


def test_second_derivatives_are_refused():
    x, weight, targets, weights = inputs(10, 8, 11)
    with pytest.raises(UserError, match="no second derivatives"):
        torch.autograd.grad(linear_cross_entropy(x, weight, targets, weights, chunk=8)[0], x, create_graph=True)


def test_half_an_objective_is_refused():
    x, weight, targets, weights = inputs(10, 8, 11)
    loss, _ = linear_cross_entropy(x, weight, targets, weights, z_loss=0.1, chunk=8)
    with pytest.raises(UserError, match="share one gradient"):
        loss.backward()


def test_unequal_factors_are_refused():
    x, weight, targets, weights = inputs(10, 8, 11)
    loss, z = linear_cross_entropy(x, weight, targets, weights, z_loss=0.1, chunk=8)
    with pytest.raises(UserError, match="share one gradient"):
        (loss + 2 * z).backward()


def test_shapes_that_do_not_fit_are_refused():
    x, weight, targets, _ = inputs(10, 8, 11)
    with pytest.raises(UserError, match="do not fit"):
        linear_cross_entropy(x, weight[:, :7], targets)
    with pytest.raises(UserError, match="do not fit"):
        linear_cross_entropy(x, weight, targets[:5])


def test_no_tokens_cost_nothing():
    x, weight, _, _ = inputs(1, 8, 11)
    loss, _ = linear_cross_entropy(x[:0], weight, torch.empty(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0 and weight.grad.abs().sum() == 0.0


def test_logits_are_never_whole():
    """The largest tensor made is a chunk's logits, not all tokens' (4096 x 1000)."""
    x, weight, targets, weights = inputs(4096, 8, 1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        linear_cross_entropy(x, weight, targets, weights, chunk=256)[0].backward()
    assert largest == 256 * 1000
